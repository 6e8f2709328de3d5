"""A bound model: the same answers from the same buffers, and nothing allocated for them."""

from __future__ import annotations

import os
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto, helper

from mcp_client.edge.binding import ALIGNMENT, aligned
from mcp_client.edge.model import OnnxModel
from mcp_client.edge.runtime import EdgeRuntime
from mcp_client.errors import DeadlineExceededError, EdgeError, InvalidInputError
from tests import models
from tests.edge.slow_model import slow


def test_a_bound_run_gives_what_a_plain_one_gives(tmp_path: Path) -> None:
    model = OnnxModel(models.affine(tmp_path / "m.onnx"))
    bound = model.bind({"x": (5, 3)})
    rng = np.random.default_rng(0)
    for _ in range(20):
        x = rng.standard_normal((5, 3)).astype(np.float32)
        bound.inputs["x"][...] = x
        assert np.array_equal(bound.run()["probs"], model.run({"x": x})["probs"])


def test_buffers_are_aligned_and_used_again(tmp_path: Path) -> None:
    bound = OnnxModel(models.affine(tmp_path / "m.onnx")).bind({"x": (5, 3)})
    before = {name: array.ctypes.data for name, array in (*bound.inputs.items(), *bound.outputs.items())}
    assert not any(address % ALIGNMENT for address in before.values())
    outputs = [bound.run()["probs"] for _ in range(5)]
    assert all(each is outputs[0] for each in outputs)
    assert outputs[0].ctypes.data == before["probs"]
    for shape in ((), (0, 3), (7,), (3, 5)):
        array = aligned(shape, np.dtype(np.float64))
        assert array.shape == shape
        assert not array.any()
        assert array.ctypes.data % ALIGNMENT == 0 or not array.size


def test_a_steady_loop_allocates_nothing_for_inputs_and_outputs(tmp_path: Path) -> None:
    rows = 50_000
    bound = OnnxModel(models.affine(tmp_path / "m.onnx")).bind({"x": (rows, 3)})
    x = np.ones((rows, 3), np.float32)

    def step() -> None:
        bound.inputs["x"][...] = x
        bound.run()

    def arrays() -> int:
        numpys = tracemalloc.DomainFilter(inclusive=True, domain=np.lib.tracemalloc_domain)
        return sum(trace.size for trace in tracemalloc.take_snapshot().filter_traces([numpys]).traces)

    for _ in range(20):
        step()
    tracemalloc.start()
    try:
        before = arrays()
        held, _ = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        for _ in range(100):
            step()
        _, peak = tracemalloc.get_traced_memory()
        after = arrays()
    finally:
        tracemalloc.stop()
    assert after == before
    # The smaller of the two tensors has 400 KB; what else this process does meanwhile is far less.
    assert peak - held < 100_000, "a tensor, or a part of one, was allocated on the way"


@pytest.mark.parametrize("datatype", [name for name in models.IDENTITY_TYPES if name != "BYTES"])
def test_every_datatype_can_be_bound(tmp_path: Path, datatype: str) -> None:
    bound = OnnxModel(models.identity(tmp_path / "m.onnx", datatype, (4,))).bind({"x": (4,)})
    bound.inputs["x"][...] = np.array([0, 1, 1, 0]).astype(bound.inputs["x"].dtype)
    result = bound.run()["y"]
    assert result.dtype == bound.inputs["x"].dtype
    assert np.array_equal(result.astype(np.float64), [0, 1, 1, 0])


def test_what_can_not_be_bound_says_so(tmp_path: Path) -> None:
    strings = OnnxModel(models.identity(tmp_path / "s.onnx", "BYTES"))
    with pytest.raises(InvalidInputError, match="BYTES"):
        strings.bind({"x": (2,)})
    model = OnnxModel(models.affine(tmp_path / "m.onnx"))
    with pytest.raises(InvalidInputError, match="a shape for each input"):
        model.bind({"y": (1, 3)})
    with pytest.raises(InvalidInputError, match=r"\[1, 4\]"):
        model.bind({"x": (1, 4)})


def test_an_output_whose_shape_depends_on_the_data_is_an_error(tmp_path: Path) -> None:
    path = models.save(
        tmp_path / "m.onnx",
        [helper.make_node("NonZero", ["x"], ["y"])],
        inputs=[("x", TensorProto.FLOAT, [4])],
        outputs=[("y", TensorProto.INT64, [1, None])],
    )
    bound = OnnxModel(path).bind({"x": (4,)})
    bound.inputs["x"][...] = 1
    with pytest.raises(EdgeError, match="bound buffers"):
        bound.run()


def test_a_bound_run_keeps_a_deadline(tmp_path: Path) -> None:
    bound = OnnxModel(slow(tmp_path / "m.onnx")).bind({"x": (1, 3)})
    with pytest.raises(DeadlineExceededError):
        bound.run(deadline=time.monotonic() + 0.02)
    assert bound.run()["probs"].shape == (1, 2)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_binding_works_in_a_forked_child(tmp_path: Path) -> None:
    bound = EdgeRuntime(models.affine(tmp_path / "m.onnx")).bind({"x": (1, 3)})
    bound.inputs["x"][...] = 1
    wanted = bound.run()["probs"].copy()
    child = os.fork()
    if not child:
        good = np.array_equal(bound.run()["probs"], wanted)
        os._exit(0 if good else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
