"""One ONNX model: what it says of itself, exact answers, and errors that say what does not fit."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from mcp_client.edge.model import OnnxModel, file_digest
from mcp_client.errors import (
    ConfigurationError,
    EdgeError,
    IntegrityError,
    InvalidInputError,
    MissingExtraError,
)
from mcp_client.result import Answer
from mcp_client.tensors import TensorSpec, dtype_of
from tests import models

X = np.array([[1.0, 2.0, 3.0]], dtype=np.float32)


def some(datatype: str, shape: tuple[int, ...]) -> np.ndarray:
    """An array of a datatype with values that tell elements apart."""
    count = int(np.prod(shape))
    if datatype == "BYTES":
        array = np.empty(count, dtype=object)
        array[:] = [f"é{n}\0".encode() for n in range(count)]
        return array.reshape(shape)
    return (
        (np.arange(count) % 2 if datatype == "BOOL" else np.arange(count))
        .astype(dtype_of(datatype))
        .reshape(shape)
    )


@pytest.mark.parametrize("datatype", models.IDENTITY_TYPES)
def test_every_datatype_comes_back_with_exact_dtype_shape_and_values(tmp_path: Path, datatype: str) -> None:
    model = OnnxModel(models.identity(tmp_path / "m.onnx", datatype, None))
    assert model.metadata.inputs == (TensorSpec("x", datatype, None),)
    for shape in ((), (0,), (0, 3), (1,), (2, 3)):
        x = some(datatype, shape)
        y = model.run({"x": x})["y"]
        assert (y.dtype, y.shape) == (x.dtype, shape)
        assert y.tobytes() == x.tobytes() if datatype != "BYTES" else y.tolist() == x.tolist()


@pytest.mark.parametrize(
    ("shape", "said"), [((), ()), (None, None), ((2,), (2,)), (("batch", 3, None), (-1, 3, -1))], ids=str
)
def test_metadata_tells_a_scalar_from_a_free_rank(
    tmp_path: Path, shape: tuple[int | str | None, ...] | None, said: tuple[int, ...] | None
) -> None:
    model = OnnxModel(models.identity(tmp_path / "m.onnx", "FP32", shape), name="m", version="7")
    assert model.metadata.inputs == (TensorSpec("x", "FP32", said),)
    assert model.metadata.outputs == (TensorSpec("y", "FP32", said),)
    assert (model.metadata.name, model.metadata.version) == ("m", "7")
    assert model.metadata.digest == file_digest(tmp_path / "m.onnx")


def test_outputs_come_in_the_order_asked_for(tmp_path: Path) -> None:
    model = OnnxModel(models.add(tmp_path / "m.onnx"))
    a, b = np.float32([3, 4]), np.float32([1, 1])
    assert list(model.run({"a": a, "b": b}, ["difference", "sum"])) == ["difference", "sum"]
    assert model.run({"b": b, "a": a}, ["difference"])["difference"].tolist() == [2, 3]


def test_outputs_are_read_only_and_not_copied_again_by_an_answer(tmp_path: Path) -> None:
    for datatype in ("FP32", "BF16", "BYTES"):
        model = OnnxModel(models.identity(tmp_path / f"{datatype}.onnx", datatype, None))
        y = model.run({"x": some(datatype, (2, 2))})["y"]
        with pytest.raises(ValueError, match="read-only"):
            y[0, 0] = y[1, 1]
        assert Answer.of({"y": y}).outputs["y"] is y


def test_outputs_outlive_inputs_later_calls_and_the_model(tmp_path: Path) -> None:
    reshape = helper.make_node("Reshape", ["x", "shape"], ["y"])  # an operator that could alias its input
    path = models.save(
        tmp_path / "m.onnx",
        [reshape],
        inputs=[("x", TensorProto.FLOAT, ["n"])],
        outputs=[("y", TensorProto.FLOAT, [1, "n"]), ("w", TensorProto.FLOAT, [2])],
        constants={"shape": np.array([1, -1]), "w": np.float32([5, 6])},
    )
    model = OnnxModel(path)
    x = np.ones(4096, np.float32)
    first = model.run({"x": x})
    x[:] = 7
    for _ in range(10):
        model.run({"x": x})
    del model
    gc.collect()
    assert first["y"].sum() == 4096
    assert first["w"].tolist() == [5, 6]


def test_inputs_that_are_not_contiguous_are_read_right(tmp_path: Path) -> None:
    model = OnnxModel(models.identity(tmp_path / "m.onnx", "FP32", None))
    square = np.arange(16, dtype=np.float32).reshape(4, 4)
    for x in (square[::2, ::-1], np.asfortranarray(square), square.T, np.broadcast_to(np.float32(3), (2, 2))):
        assert np.array_equal(model.run({"x": x})["y"], x)
    bfloat16 = OnnxModel(models.identity(tmp_path / "b.onnx", "BF16", None))
    y = bfloat16.run({"x": square.astype(dtype_of("BF16"))[::2, ::-1]})["y"]
    assert np.array_equal(y.astype(np.float32), square[::2, ::-1])


def test_external_data_is_found_beside_the_model(tmp_path: Path) -> None:
    model = OnnxModel(models.external(tmp_path / "m" / "model.onnx"))
    assert np.allclose(model.run({"x": X})["probs"], X @ models.WEIGHTS + models.BIAS)


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        ({}, "takes inputs 'x'; got none"),
        ({"y": X}, "takes inputs 'x'; got 'y'"),
        ({"x": X, "y": X}, "takes inputs 'x'; got 'x', 'y'"),
        ({"x": X.astype(np.float64)}, "came as float64"),
        ({"x": X.astype(">f4")}, "came as >f4"),
        ({"x": X[0]}, r"came with shape \[3\]"),
        ({"x": X[:, :2]}, r"came with shape \[1, 2\]"),
        ({"x": np.array([[b"a", b"b", b"c"]], dtype=object)}, "came as object"),
    ],
)
def test_inputs_that_do_not_fit_are_told_by_name(
    affine_model: Path, inputs: dict[str, np.ndarray], words: str
) -> None:
    with pytest.raises(InvalidInputError, match=words):
        OnnxModel(affine_model).run(inputs)


def test_an_unknown_output_is_told(affine_model: Path) -> None:
    with pytest.raises(InvalidInputError, match="has outputs 'probs'; asked for 'logits'"):
        OnnxModel(affine_model).run({"x": X}, ["logits"])


def test_bytes_that_are_no_text_are_an_error_not_another_text(tmp_path: Path) -> None:
    model = OnnxModel(models.identity(tmp_path / "m.onnx", "BYTES"))
    with pytest.raises(InvalidInputError, match="element 1: ONNX Runtime takes only UTF-8"):
        model.run({"x": np.array([b"ok", b"\xff"], dtype=object)})


def test_text_that_a_model_has_wrong_inside_is_an_edge_error(tmp_path: Path) -> None:
    wrong = helper.make_tensor("w", TensorProto.STRING, [1], [b"\xff\xfe"])
    path = models.save(
        tmp_path / "m.onnx",
        [helper.make_node("Constant", [], ["w"], value=wrong)],
        inputs=[],
        outputs=[("w", TensorProto.STRING, [1])],
    )
    with pytest.raises(EdgeError, match="can't decode byte"):
        OnnxModel(path).run({})


def test_a_failure_inside_the_model_is_an_edge_error(tmp_path: Path) -> None:
    path = models.save(
        tmp_path / "m.onnx",
        [helper.make_node("Reshape", ["x", "shape"], ["y"])],
        inputs=[("x", TensorProto.FLOAT, ["n"]), ("shape", TensorProto.INT64, [1])],
        outputs=[("y", TensorProto.FLOAT, None)],
    )
    with pytest.raises(EdgeError, match=r"model 'm' failed: .*reshape") as caught:
        OnnxModel(path).run({"x": np.zeros(3, np.float32), "shape": np.array([2])})
    assert not isinstance(caught.value, InvalidInputError)


def test_what_is_no_model_is_told_at_load(tmp_path: Path) -> None:
    with pytest.raises(EdgeError, match="there is no model file"):
        OnnxModel(tmp_path / "missing.onnx")
    for name, content in (("empty", b""), ("text", b"hello"), ("truncated", _truncated(tmp_path))):
        (tmp_path / f"{name}.onnx").write_bytes(content)
        with pytest.raises(EdgeError, match=rf"{name}\.onnx"):
            OnnxModel(tmp_path / f"{name}.onnx")


def _truncated(folder: Path) -> bytes:
    whole = models.affine(folder / "whole.onnx").read_bytes()
    return whole[: len(whole) * 2 // 3]


def test_types_that_are_no_tensors_are_told_at_load(tmp_path: Path) -> None:
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n"])
    y = helper.make_value_info("y", helper.make_sequence_type_proto(x.type))
    graph = helper.make_graph([helper.make_node("SequenceConstruct", ["x"], ["y"])], "g", [x], [y])
    onnx.save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10),
        tmp_path / "s.onnx",
    )
    with pytest.raises(EdgeError, match=r"output 'y' is a seq\(tensor\(float\)\)"):
        OnnxModel(tmp_path / "s.onnx")
    path = models.save(
        tmp_path / "f8.onnx",
        [helper.make_node("Identity", ["x"], ["y"])],
        inputs=[("x", TensorProto.FLOAT8E4M3FN, [1])],
        outputs=[("y", TensorProto.FLOAT8E4M3FN, [1])],
    )
    with pytest.raises(EdgeError, match=r"f8\.onnx"):
        OnnxModel(path)


@pytest.mark.parametrize(
    ("device", "words"),
    [
        ("cuda:0", "needs ONNX Runtime's CUDAExecutionProvider"),
        ("gpu", "expected one of 'cpu', 'cuda'"),
        ("cpu:x", "expected"),
    ],
)
def test_a_device_that_is_not_there_is_told(affine_model: Path, device: str, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        OnnxModel(affine_model, device=device)


def test_without_onnxruntime_the_extra_is_named(affine_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(MissingExtraError, match=r"mcp2026\[edge\]"):
        OnnxModel(affine_model)


def test_many_threads_share_a_model(affine_model: Path) -> None:
    model = OnnxModel(affine_model)
    wrong: list[int] = []

    def call(seed: int) -> None:
        rng = np.random.default_rng(seed)
        for _ in range(50):
            x = rng.standard_normal((rng.integers(0, 5), 3)).astype(np.float32)
            if not np.allclose(model.run({"x": x})["probs"], x @ models.WEIGHTS + models.BIAS, atol=1e-5):
                wrong.append(seed)

    threads = [threading.Thread(target=call, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def _matmul(path: Path) -> Path:
    """Large enough for ONNX Runtime to use its thread pool."""
    return models.save(
        path,
        [helper.make_node("MatMul", ["x", "w"], ["y"])],
        inputs=[("x", TensorProto.FLOAT, [256, 256])],
        outputs=[("y", TensorProto.FLOAT, [256, 256])],
        constants={"w": np.eye(256, dtype=np.float32)},
    )


def test_a_forked_child_can_run_a_model_that_its_parent_used(tmp_path: Path) -> None:
    path = _matmul(tmp_path / "m.onnx")
    code = f"""
import os, numpy as np
from mcp_client.edge.model import OnnxModel
model = OnnxModel({str(path)!r}, threads=2)
x = np.ones((256, 256), np.float32)
model.run({{"x": x}})
child = os.fork()
if child == 0:
    os._exit(0 if np.array_equal(model.run({{"x": x}})["y"], x) else 3)
assert os.waitpid(child, 0)[1] == 0
assert np.array_equal(model.run({{"x": x}})["y"], x)
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, timeout=60)


def test_a_child_does_not_run_another_file_than_its_parent(tmp_path: Path) -> None:
    path = models.affine(tmp_path / "m.onnx")
    code = f"""
import os, pathlib, numpy as np
from mcp_client.edge.model import OnnxModel
from mcp_client.errors import IntegrityError
model = OnnxModel({str(path)!r})
pathlib.Path({str(path)!r}).write_bytes(b"another file")
child = os.fork()
if child == 0:
    try:
        model.run({{"x": np.zeros((1, 3), np.float32)}})
    except IntegrityError:
        os._exit(0)
    os._exit(3)
assert os.waitpid(child, 0)[1] == 0
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, timeout=60)


def test_a_file_replaced_while_it_is_loaded_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = models.affine(tmp_path / "m.onnx")
    load = OnnxModel._open

    def load_slowly(self: OnnxModel, digest: str) -> object:
        session = load(self, digest)
        models.affine(tmp_path / "new.onnx", scale=2.0).replace(path)
        return session

    monkeypatch.setattr(OnnxModel, "_open", load_slowly)
    with pytest.raises(IntegrityError, match="changed while it was loaded"):
        OnnxModel(path)


def test_warming_a_model_that_can_not_take_zeros_is_no_error(tmp_path: Path) -> None:
    table = numpy_helper.from_array(np.float32([1, 2]), "table")
    graph = helper.make_graph(
        [helper.make_node("Reshape", ["x", "shape"], ["y"])],
        "g",
        [
            helper.make_tensor_value_info("x", TensorProto.FLOAT, [3]),
            helper.make_tensor_value_info("shape", TensorProto.INT64, [1]),
        ],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [table],
    )
    onnx.save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10),
        tmp_path / "m.onnx",
    )
    OnnxModel(tmp_path / "m.onnx").warm()
