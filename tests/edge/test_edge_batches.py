"""Many requests in one run: each gets its own answer, whatever the model does with a batch."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto, helper

from mcp_client import AsyncMCPClient, MCPClient
from mcp_client.edge.model import OnnxModel
from mcp_client.edge.runtime import EdgeRuntime
from mcp_client.errors import InvalidInputError
from mcp_client.request import Request
from tests import models

RNG = np.random.default_rng(3)


def feeds(*rows: int, width: int = 3) -> list[dict[str, np.ndarray]]:
    return [{"x": RNG.standard_normal((count, width)).astype(np.float32)} for count in rows]


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of each run that ONNX Runtime made."""
    made: list[int] = []
    call = OnnxModel._call

    def counted(
        self: OnnxModel, names: list[str], feed: dict[str, np.ndarray], options: object
    ) -> list[np.ndarray]:
        made.append(len(next(iter(feed.values()))))
        return call(self, names, feed, options)

    monkeypatch.setattr(OnnxModel, "_call", counted)
    return made


def assert_each_its_own(model: OnnxModel, asked: list[dict[str, np.ndarray]]) -> None:
    for feed, found in zip(asked, model.run_many(asked), strict=True):
        wanted = model.run(feed)
        assert found.keys() == wanted.keys()
        for name, array in found.items():
            assert array.shape == wanted[name].shape
            assert array.dtype == wanted[name].dtype
            assert np.allclose(array, wanted[name], rtol=1e-5, atol=1e-6)
            assert not array.flags.writeable


def test_rows_that_a_model_keeps_apart_are_one_run(tmp_path: Path, runs: list[int]) -> None:
    model = OnnxModel(models.affine(tmp_path / "m.onnx"))
    model.run_many(feeds(1, 1))  # the first is computed both ways
    runs.clear()
    model.run_many(feeds(1, 2, 0, 3, 1))
    assert runs == [7]
    assert_each_its_own(model, feeds(1, 2, 0, 3, 1))
    assert_each_its_own(model, feeds(4))
    assert model.run_many([]) == []


def test_a_large_batch_is_cut(tmp_path: Path, runs: list[int]) -> None:
    model = OnnxModel(models.affine(tmp_path / "m.onnx"))
    model.run_many(feeds(1, 1))
    runs.clear()
    model.run_many(feeds(*[100] * 5))
    assert runs == [200, 200, 100]


def test_inner_shapes_that_differ_are_not_mixed(tmp_path: Path) -> None:
    path = models.save(
        tmp_path / "m.onnx",
        [helper.make_node("Relu", ["x"], ["y"])],
        inputs=[("x", TensorProto.FLOAT, ["n", "m"])],
        outputs=[("y", TensorProto.FLOAT, ["n", "m"])],
    )
    assert_each_its_own(OnnxModel(path), feeds(1, 2, width=4) + feeds(1, 2, width=5) + feeds(3, width=6))


@pytest.mark.parametrize(
    ("operator", "attributes"), [("Softmax", {"axis": 0}), ("CumSum", None), ("ReduceSum", {"keepdims": 1})]
)
def test_a_model_that_mixes_its_rows_is_asked_one_by_one(
    tmp_path: Path, operator: str, attributes: dict[str, int] | None
) -> None:
    inputs = ["x"] if operator == "Softmax" else ["x", "first"]
    path = models.save(
        tmp_path / "m.onnx",
        [helper.make_node(operator, inputs, ["y"], **(attributes or {}))],
        inputs=[("x", TensorProto.FLOAT, ["n", 3])],
        outputs=[("y", TensorProto.FLOAT, ["k", 3])],
        constants={"first": np.array(0, np.int64) if operator == "CumSum" else np.array([0], np.int64)},
    )
    model = OnnxModel(path)
    for _ in range(3):
        assert_each_its_own(model, feeds(1, 2, 1))


def test_a_model_of_one_row_is_asked_one_by_one(tmp_path: Path, runs: list[int]) -> None:
    path = models.save(
        tmp_path / "m.onnx",
        [helper.make_node("Relu", ["x"], ["y"])],
        inputs=[("x", TensorProto.FLOAT, [1, 3])],
        outputs=[("y", TensorProto.FLOAT, [1, 3])],
    )
    OnnxModel(path).run_many(feeds(1, 1, 1))
    assert runs == [1, 1, 1]


def test_the_runtime_says_for_each_what_computed_it(tmp_path: Path) -> None:
    models.repository(tmp_path, m={"2": 2.0})
    runtime = EdgeRuntime(tmp_path)
    asked = [Request(model="m", inputs=feed, id=str(index)) for index, feed in enumerate(feeds(1, 1, 2))]
    answers = runtime.run_many(asked)
    assert [answer.id for answer in answers] == ["0", "1", "2"]
    for request, answer in zip(asked, answers, strict=True):
        assert (answer.model, answer.version) == ("m", "2")
        assert np.allclose(answer.outputs["probs"], 2 * (request.inputs["x"] @ models.WEIGHTS + models.BIAS))
    assert runtime.run_many([]) == []


def test_a_bad_request_is_told(tmp_path: Path) -> None:
    model = OnnxModel(models.affine(tmp_path / "m.onnx"))
    with pytest.raises(InvalidInputError):
        model.run_many([*feeds(1), {"x": np.ones((1, 4), np.float32)}])


def test_a_client_runs_many_at_once(tmp_path: Path) -> None:
    models.affine(tmp_path / "m.onnx")
    asked = [[0.1, 0.2, 0.3], [[1, 2, 3], [4, 5, 6]], np.ones((1, 3), np.float32)]
    with MCPClient(f"edge:{tmp_path}") as client:
        results = client.edge.infer_many(asked)
        for one, many in zip((client.infer(each, cache=False) for each in asked), results, strict=True):
            assert np.allclose(one.output, many.output)
            assert one.output.shape == many.output.shape
            assert many.source == "edge"
        assert client.edge.infer_many([]) == []
        with pytest.raises(InvalidInputError):
            client.edge.infer_many([[1.0, 2.0]])

    async def awaited() -> int:
        async with AsyncMCPClient(f"edge:{tmp_path}") as client:
            return len(await client.edge.infer_many(asked))

    assert asyncio.run(awaited()) == 3
