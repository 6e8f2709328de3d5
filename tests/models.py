"""Small ONNX models for tests, built on the spot: every function writes a file (or folder) and returns its
path.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

# Every datatype that ONNX Runtime's CPU provider can carry through Identity, with ONNX's name for it.
IDENTITY_TYPES: dict[str, int] = {
    "BOOL": TensorProto.BOOL,
    "UINT8": TensorProto.UINT8,
    "UINT16": TensorProto.UINT16,
    "UINT32": TensorProto.UINT32,
    "UINT64": TensorProto.UINT64,
    "INT8": TensorProto.INT8,
    "INT16": TensorProto.INT16,
    "INT32": TensorProto.INT32,
    "INT64": TensorProto.INT64,
    "FP16": TensorProto.FLOAT16,
    "FP32": TensorProto.FLOAT,
    "FP64": TensorProto.DOUBLE,
    "BF16": TensorProto.BFLOAT16,
    "BYTES": TensorProto.STRING,
    "FP8E4M3FN": TensorProto.FLOAT8E4M3FN,
    "FP8E4M3FNUZ": TensorProto.FLOAT8E4M3FNUZ,
    "FP8E5M2": TensorProto.FLOAT8E5M2,
    "FP8E5M2FNUZ": TensorProto.FLOAT8E5M2FNUZ,
}
# What affine() multiplies by and adds, so that a test can compute the answer itself: probs = x @ WEIGHTS +
# BIAS.
WEIGHTS = np.array([[0.5, -1.0], [0.25, 2.0], [-0.75, 0.125]], dtype=np.float32)
BIAS = np.array([0.1, -0.2], dtype=np.float32)


def affine(path: Path, *, scale: float = 1.0) -> Path:
    """``x`` FP32 [-1, 3] → ``probs`` FP32 [-1, 2]: ``scale * (x @ WEIGHTS + BIAS)``. ``scale`` tells versions
    apart.
    """
    nodes = [
        helper.make_node("MatMul", ["x", "weights"], ["product"]),
        helper.make_node("Add", ["product", "bias"], ["probs"]),
    ]
    constants = {"weights": WEIGHTS * np.float32(scale), "bias": BIAS * np.float32(scale)}
    return save(
        path,
        nodes,
        inputs=[("x", TensorProto.FLOAT, ["batch", 3])],
        outputs=[("probs", TensorProto.FLOAT, ["batch", 2])],
        constants=constants,
    )


def identity(path: Path, datatype: str, shape: Sequence[int | str | None] | None = ("n",)) -> Path:
    """``x`` → ``y`` unchanged. ``shape``: an int is fixed, a name or ``None`` free; ``None`` as a whole frees
    the rank.
    """
    kind = IDENTITY_TYPES[datatype]
    node = helper.make_node("Identity", ["x"], ["y"])
    opset = 19 if datatype.startswith("FP8") else 18
    return save(path, [node], inputs=[("x", kind, shape)], outputs=[("y", kind, shape)], opset=opset)


def add(path: Path) -> Path:
    """``a`` and ``b`` FP32, of any one length → ``sum`` and ``difference``: two inputs, two outputs."""
    nodes = [
        helper.make_node("Add", ["a", "b"], ["sum"]),
        helper.make_node("Sub", ["a", "b"], ["difference"]),
    ]
    spec = (TensorProto.FLOAT, ["n"])
    return save(
        path, nodes, inputs=[("a", *spec), ("b", *spec)], outputs=[("sum", *spec), ("difference", *spec)]
    )


def external(path: Path) -> Path:
    """Like ``affine``, with its weights in a file of its own beside the model: ``weights.bin``."""
    affine(path)
    model = onnx.load(path)
    onnx.save(
        model,
        path,
        save_as_external_data=True,
        all_tensors_to_one_file=True,
        location="weights.bin",
        size_threshold=0,
    )
    return path


def repository(root: Path, **models: dict[str, float]) -> Path:
    """``models/{id}/{version}/model.onnx`` of affine models: ``repository(root, m={"1": 1.0, "2": 2.0})``."""
    for name, versions in models.items():
        for version, scale in versions.items():
            affine(root / name / version / "model.onnx", scale=scale)
    return root


def save(
    path: Path,
    nodes: Sequence[onnx.NodeProto],
    *,
    inputs: Sequence[tuple[str, int, Sequence[int | str | None] | None]],
    outputs: Sequence[tuple[str, int, Sequence[int | str | None] | None]],
    constants: dict[str, np.ndarray] | None = None,
    opset: int = 18,
) -> Path:
    """Write a graph to ``path``, whose folders are made."""
    graph = helper.make_graph(
        list(nodes),
        "test",
        [helper.make_tensor_value_info(*spec) for spec in inputs],
        [helper.make_tensor_value_info(*spec) for spec in outputs],
        [numpy_helper.from_array(array, name) for name, array in (constants or {}).items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    onnx.save(model, path)
    return path
