"""The cases' models for ``mcp-server``, as ONNX files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from onnx import TensorProto, helper

from tests import models


def write(folder: Path) -> Path:
    """Lay down every model that ONNX can express; returns ``folder``."""
    for datatype in models.IDENTITY_TYPES:
        models.identity(folder / f"identity_{datatype.lower()}.onnx", datatype, None)
    models.identity(folder / "spare.onnx", "FP32", ("n",))
    models.add(folder / "add.onnx")
    _fail(folder / "fail.onnx")
    _slow(folder / "slow.onnx")
    return folder


def _fail(path: Path) -> None:
    """Reads beyond the end of ``x``."""
    node = helper.make_node("Gather", ["x", "far"], ["y"])
    spec = (TensorProto.FLOAT, ["n"])
    constants = {"far": np.array([1_000_000], np.int64)}
    models.save(path, [node], inputs=[("x", *spec)], outputs=[("y", *spec)], constants=constants)


def _slow(path: Path) -> None:
    """``x`` → ``y`` after computing for some seconds: sines of a million numbers, again and again."""
    info = helper.make_tensor_value_info
    body = helper.make_graph(
        [
            helper.make_node("Identity", ["go_on"], ["still"]),
            helper.make_node("Sin", ["before"], ["after"]),
        ],
        "body",
        [
            info("turn", TensorProto.INT64, []),
            info("go_on", TensorProto.BOOL, []),
            info("before", TensorProto.FLOAT, [None]),
        ],
        [info("still", TensorProto.BOOL, []), info("after", TensorProto.FLOAT, [None])],
    )
    nodes = [
        helper.make_node("ConstantOfShape", ["million"], ["zeros"]),
        helper.make_node("Loop", ["turns", "", "zeros"], ["last"], body=body),
        helper.make_node("ReduceSum", ["last"], ["zero"], keepdims=0),
        helper.make_node("Add", ["x", "zero"], ["y"]),
    ]
    spec = (TensorProto.FLOAT, ["n"])
    constants = {"million": np.array([1_000_000], np.int64), "turns": np.array(500, np.int64)}
    models.save(path, nodes, inputs=[("x", *spec)], outputs=[("y", *spec)], constants=constants)
