"""Optimised graphs kept for the next start: the same answers, and never a reason for a model not to load."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from mcp_client.edge import optimised
from mcp_client.edge.model import OnnxModel
from mcp_client.edge.onnx_file import graph_inputs
from mcp_client.edge.repository import ModelRepository
from mcp_client.edge.runtime import EdgeRuntime
from mcp_client.edge.upkeep import remove
from mcp_client.request import Request
from tests import models

WEIGHTS = np.random.default_rng(7).standard_normal((300, 300)).astype(np.float32)
X = np.random.default_rng(8).standard_normal((4, 300)).astype(np.float32)


def large(path: Path, *, ir_version: int = 10, weights: np.ndarray = WEIGHTS) -> Path:
    """Two layers, 360 KB. With IR version 3 the weights are listed among the inputs, as they had to be then."""
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["h"]),
        helper.make_node("Add", ["h", "b"], ["s"]),
        helper.make_node("Relu", ["s"], ["y"]),
    ]
    constants = {"w": weights, "b": np.ones(300, np.float32)}
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 300])]
    if ir_version < 4:
        inputs += [
            helper.make_tensor_value_info(name, TensorProto.FLOAT, array.shape)
            for name, array in constants.items()
        ]
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 300])]
    initializers = [numpy_helper.from_array(array, name) for name, array in constants.items()]
    graph = helper.make_graph(nodes, "g", inputs, outputs, initializers)
    path.parent.mkdir(parents=True, exist_ok=True)
    onnx.save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=ir_version), path
    )
    return path


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The files that ONNX Runtime opened."""
    import onnxruntime as ort

    files: list[str] = []
    make = ort.InferenceSession.__init__

    def counted(self: object, path: str, *rest: object, **options: object) -> None:
        files.append(Path(path).name)
        make(self, path, *rest, **options)

    monkeypatch.setattr(ort.InferenceSession, "__init__", counted)
    return files


def answer(path: Path, cache: Path) -> np.ndarray:
    model = OnnxModel(path, cache_dir=cache)
    assert [str(spec) for spec in model.metadata.inputs] == ["'x' FP32 [-1, 300]"]
    return model.run({"x": X})["y"]


def test_the_second_start_uses_what_the_first_one_kept(tmp_path: Path, opened: list[str]) -> None:
    path, cache = large(tmp_path / "m.onnx"), tmp_path / "cache"
    first, second = answer(path, cache), answer(path, cache)
    assert first.tobytes() == second.tobytes() == answer(path, tmp_path / "other").tobytes()
    kept = [file.name for file in cache.glob("*.onnx")]
    assert len(kept) == 1
    assert opened == ["m.onnx", kept[0], "m.onnx"]
    assert cache.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("damage", ["truncated", "flipped", "missing", "no_sum", "another_model"])
def test_a_damaged_one_is_made_anew(tmp_path: Path, opened: list[str], damage: str) -> None:
    path, cache = large(tmp_path / "m.onnx"), tmp_path / "cache"
    wanted = answer(path, cache)
    kept, sums = next(cache.glob("*.onnx")), next(cache.glob("*.blake3"))
    content = kept.read_bytes()
    if damage == "truncated":
        kept.write_bytes(content[:-100])
    elif damage == "flipped":
        kept.write_bytes(content[:-100] + bytes([content[-100] ^ 1]) + content[-99:])
    elif damage == "missing":
        kept.unlink()
    elif damage == "no_sum":
        sums.unlink()
    else:
        kept.write_bytes(b"no model")
        sums.write_text(optimised._hash(kept))
    assert answer(path, cache).tobytes() == wanted.tobytes()
    assert answer(path, cache).tobytes() == wanted.tobytes()
    assert opened[-1] == kept.name


def test_weights_among_the_inputs_do_not_become_inputs(tmp_path: Path, opened: list[str]) -> None:
    path, cache = large(tmp_path / "m.onnx", ir_version=3), tmp_path / "cache"
    assert graph_inputs(path) == {"x", "w", "b"}
    for _ in range(3):
        answer(path, cache)
    assert list(cache.glob("*.onnx")) == [] or opened[-1] != "m.onnx"
    assert len(list(cache.iterdir())) <= 2


def test_another_file_or_another_onnxruntime_has_its_own(
    tmp_path: Path, opened: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, cache = large(tmp_path / "m.onnx"), tmp_path / "cache"
    first = answer(path, cache)
    large(tmp_path / "new.onnx", weights=2 * WEIGHTS).replace(path)
    assert not np.array_equal(answer(path, cache), first)
    monkeypatch.setattr(optimised, "cpu_identity", lambda: "another cpu")
    answer(path, cache)
    assert opened == ["m.onnx"] * 3
    assert len(list(cache.glob("*.onnx"))) == 2  # the one of the other CPU gave way


def test_small_split_and_unwritable_are_simply_loaded(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    OnnxModel(models.affine(tmp_path / "small.onnx"), cache_dir=cache)
    split = large(tmp_path / "split" / "m.onnx")
    model = onnx.load(split)
    onnx.save(model, split, save_as_external_data=True, location="w.bin", size_threshold=0)
    answer(split, cache)
    assert not cache.exists()
    (tmp_path / "file").write_text("in the way")
    answer(large(tmp_path / "m.onnx"), tmp_path / "file" / "cache")
    answer(tmp_path / "m.onnx", tmp_path / "file")


def test_what_can_not_be_written_does_not_keep_a_model_from_loading(tmp_path: Path) -> None:
    path, cache = large(tmp_path / "m.onnx"), tmp_path / "cache"
    answer(path, tmp_path / "other")
    name = next((tmp_path / "other").glob("*.onnx")).stem
    blocked = cache / f"{name}.{os.getpid()}-{threading.get_ident()}"  # where ONNX Runtime would write
    blocked.mkdir(parents=True)
    answer(path, cache)
    assert list(cache.iterdir()) == [blocked]


def test_a_runtime_keeps_them_in_its_folder_and_removes_them_with_the_model(tmp_path: Path) -> None:
    for version in ("1", "2"):
        large(tmp_path / "m" / version / "model.onnx", weights=float(version) * WEIGHTS)
    for _ in range(2):
        runtime = EdgeRuntime(tmp_path)
        first = runtime.run(Request(model="m", version="1", inputs={"x": X})).outputs["y"]
        second = runtime.run(Request(model="m", version="2", inputs={"x": X})).outputs["y"]
        assert not np.array_equal(first, second)
        runtime.close()
    folder = tmp_path / optimised.FOLDER
    assert len(list(folder.glob("*.onnx"))) == 2
    remove(ModelRepository(tmp_path), "m", "1")
    assert len(list(folder.glob("*.onnx"))) == 1
    assert len(list(folder.iterdir())) == 2
    assert ModelRepository(tmp_path).models() == ["m"]
