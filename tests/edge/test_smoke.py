"""A version that fails its smoke input is never switched to, and is reported; the one in use stays."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper

from mcp_client.edge.model import OnnxModel
from mcp_client.edge.runtime import EdgeRuntime
from mcp_client.edge.smoke import prove
from mcp_client.errors import EdgeError, IntegrityError
from mcp_client.request import Request
from tests import models
from tests.edge.test_edge_runtime import ask, scaled

X = np.array([[1.0, 2.0, 3.0]], dtype=np.float32)


def smoke(model_file: Path, **arrays: Any) -> Path:
    """``smoke.npz`` beside a model; ``_`` in a name stands for ``/``."""
    path = model_file.with_name("smoke.npz")
    np.savez(path, **{name.replace("_", "/", 1): array for name, array in arrays.items()})
    return path


def publish(root: Path, version: str, scale: float, **arrays: Any) -> Path:
    """A version that appears in one step, as a sync brings it."""
    fresh = models.affine(root / ".fresh" / "model.onnx", scale=scale)
    if arrays:
        smoke(fresh, **arrays)
    (root / "m").mkdir(parents=True, exist_ok=True)
    return fresh.parent.rename(root / "m" / version) / "model.onnx"


def single(path: Path, op: str, kind: int = TensorProto.FLOAT) -> Path:
    """``y = op(x)``, FP32 [n]."""
    node = helper.make_node(op, ["x"], ["y"])
    return models.save(path, [node], inputs=[("x", kind, ["n"])], outputs=[("y", kind, ["n"])])


GOOD: dict[str, dict[str, Any]] = {
    "inputs alone": {},
    "outputs": {"outputs_probs": scaled(1.0, X)},
    "within rtol": {"outputs_probs": scaled(1.05, X), "rtol": 0.1},
    "within atol": {"outputs_probs": scaled(1.0, X) + 0.5, "atol": 1.0, "rtol": 0.0},
}
BAD: dict[str, dict[str, Any]] = {
    "another output": {"outputs_probs": scaled(1.1, X)},
    "another shape": {"outputs_probs": scaled(1.0, X)[0]},
    "no such output": {"outputs_nothing": X},
    "an input that does not fit": {"inputs_x": X[:, :2]},
    "no such input": {"inputs_y": X},
    "an answer that is not finite": {"inputs_x": X * np.inf},
    "another name": {"something": X},
}


@pytest.mark.parametrize("case", GOOD)
def test_a_model_that_answers_as_it_should_is_used(tmp_path: Path, case: str) -> None:
    publish(tmp_path, "1", 1.0, **({"inputs_x": X} | GOOD[case]))
    assert np.allclose(ask(EdgeRuntime(tmp_path), x=X), scaled(1.0, X))


@pytest.mark.parametrize("case", BAD)
def test_a_model_that_does_not_is_refused(tmp_path: Path, case: str) -> None:
    publish(tmp_path, "1", 1.0, **({"inputs_x": X} | BAD[case]))
    with pytest.raises(EdgeError, match=r"smoke\.npz"):
        ask(EdgeRuntime(tmp_path), x=X)


@pytest.mark.parametrize(
    "content", [b"", b"rubbish", b"PK\x03\x04 cut off", "pickled", "no archive"], ids=str
)
def test_a_damaged_smoke_input_is_no_pass_and_nothing_is_unpickled(tmp_path: Path, content: Any) -> None:
    path = publish(tmp_path, "1", 1.0).with_name("smoke.npz")
    if content == "pickled":
        np.savez(path, **{"inputs/x": np.array([object()])})  # type: ignore[arg-type]
    elif content == "no archive":
        with path.open("wb") as file:
            np.save(file, X)
    else:
        path.write_bytes(content)
    with pytest.raises(IntegrityError, match=r"smoke\.npz can't be read"):
        ask(EdgeRuntime(tmp_path), x=X)


def test_a_version_that_fails_is_rolled_back_and_reported_and_used_once_it_is_mended(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    publish(tmp_path, "1", 1.0)
    runtime = EdgeRuntime(tmp_path)
    ask(runtime, x=X)
    path = publish(tmp_path, "2", 2.0, inputs_x=X, outputs_probs=scaled(3.0, X))
    with caplog.at_level(logging.WARNING, "mcp_client.edge"):
        runtime.refresh()
        runtime.refresh()
    assert np.allclose(ask(runtime, x=X), scaled(1.0, X))
    assert len(caplog.records) == 1
    assert "off by up to" in caplog.text
    assert "off by up to" in runtime.refused()["m", "2"]
    smoke(path, inputs_x=X, outputs_probs=scaled(2.0, X))
    runtime.refresh()
    assert np.allclose(ask(runtime, x=X), scaled(2.0, X))
    assert runtime.refused() == {}


def test_a_cold_start_takes_the_version_before(tmp_path: Path) -> None:
    publish(tmp_path, "1", 1.0)
    publish(tmp_path, "2", 2.0, inputs_x=X, outputs_probs=scaled(3.0, X))
    runtime = EdgeRuntime(tmp_path)
    assert np.allclose(ask(runtime, x=X), scaled(1.0, X))
    assert runtime.refused().keys() == {("m", "2")}


def test_on_zeros_a_version_must_only_not_be_worse_than_the_one_in_use(tmp_path: Path) -> None:
    x = np.ones(2, np.float32)
    single(tmp_path / "m" / "1" / "model.onnx", "Log")  # −∞ at zero, as it is meant to be
    runtime = EdgeRuntime(tmp_path)
    assert ask_y(runtime, x).tolist() == [0.0, 0.0]
    single(tmp_path / "m" / "2" / "model.onnx", "Reciprocal")
    runtime.refresh()
    assert ask_y(runtime, x).tolist() == [1.0, 1.0]
    single(tmp_path / "m" / "3" / "model.onnx", "Neg")
    runtime.refresh()
    assert ask_y(runtime, x).tolist() == [-1.0, -1.0]
    path = single(tmp_path / "m" / "4" / "model.onnx", "Reciprocal")
    runtime.refresh()
    assert ask_y(runtime, x).tolist() == [-1.0, -1.0]
    assert "not finite" in runtime.refused()["m", "4"]
    smoke(path, inputs_x=x)  # it is meant to be
    runtime.refresh()
    assert ask_y(runtime, x).tolist() == [1.0, 1.0]


def ask_y(runtime: EdgeRuntime, x: np.ndarray) -> np.ndarray:
    return runtime.run(Request(model="", inputs={"x": x})).outputs["y"]


@pytest.mark.parametrize("datatype", sorted(models.IDENTITY_TYPES))
def test_every_datatype_has_a_smoke_input(tmp_path: Path, datatype: str) -> None:
    path = models.identity(tmp_path / "model.onnx", datatype)
    model = OnnxModel(path)
    array = model.zeros()["x"]
    if datatype == "BYTES":
        array = np.array([b"one"])
    wrong = np.array([b"two"]) if datatype == "BYTES" else np.array([1]).astype(array.dtype)
    if datatype in ("BF16", "FP8E4M3FN", "FP8E5M2"):  # numpy can't save them by name
        array, wrong = (each.view(f"V{each.itemsize}") for each in (array, wrong))
    smoke(path, inputs_x=array, outputs_y=array)
    prove(model)
    smoke(path, inputs_x=array, outputs_y=wrong)
    with pytest.raises(EdgeError):
        prove(model)
