"""Models while they are in use: loaded once, swapped without a failed call, kept when what is new can't
be used.
"""

from __future__ import annotations

import gc
import logging
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from mcp_client.edge.model import OnnxModel, file_digest
from mcp_client.edge.runtime import EdgeRuntime
from mcp_client.errors import ClientClosedError, EdgeError, IntegrityError, InvalidInputError
from mcp_client.request import Request
from tests import models

X = np.array([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]], dtype=np.float32)


def ask(runtime: EdgeRuntime, model: str = "", version: str = "", x: np.ndarray = X) -> np.ndarray:
    return runtime.run(Request(model=model, version=version, inputs={"x": x})).outputs["probs"]


def scaled(scale: float, x: np.ndarray = X) -> np.ndarray:
    return scale * (x @ models.WEIGHTS + models.BIAS)


def wait_until(met: Callable[[], bool], timeout_s: float = 20.0) -> None:
    give_up = time.monotonic() + timeout_s
    while not met():
        assert time.monotonic() < give_up, "it did not happen"
        time.sleep(0.005)


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The files that were loaded, in order."""
    loaded: list[Path] = []
    load = OnnxModel._open

    def counted(self: OnnxModel, digest: str) -> object:
        loaded.append(self.path)
        return load(self, digest)

    monkeypatch.setattr(OnnxModel, "_open", counted)
    return loaded


def test_an_answer_says_what_computed_it(tmp_path: Path) -> None:
    models.repository(tmp_path, m={"1": 1.0, "2": 2.0})
    runtime = EdgeRuntime(tmp_path)
    answer = runtime.run(Request(model="m", inputs={"x": X}, id="r-1"))
    assert np.allclose(answer.outputs["probs"], scaled(2.0))
    assert (answer.model, answer.version, answer.id) == ("m", "2", "r-1")
    assert answer.digest == file_digest(tmp_path / "m" / "2" / "model.onnx")
    assert np.allclose(ask(runtime, "m", "1"), scaled(1.0))
    assert runtime.models() == ["m"]
    assert runtime.metadata().version == "2"
    assert not answer.outputs["probs"].flags.writeable


def test_one_file_is_loaded_once_however_it_is_named(tmp_path: Path, loads: list[Path]) -> None:
    models.repository(tmp_path, m={"1": 1.0})
    runtime = EdgeRuntime(tmp_path)
    for model, version in (("", ""), ("m", ""), ("m", "1")):
        ask(runtime, model, version)
    assert len(loads) == 1


def test_callers_at_the_same_time_cause_one_load(tmp_path: Path, loads: list[Path]) -> None:
    models.repository(tmp_path, m={"1": 1.0})
    runtime = EdgeRuntime(tmp_path)
    start = threading.Barrier(16)

    def call(number: int) -> None:
        start.wait()
        ask(runtime, "m" if number % 2 else "")

    threads = [threading.Thread(target=call, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(loads) == 1


def test_errors_are_ours_and_a_missing_model_may_come_later(tmp_path: Path) -> None:
    runtime = EdgeRuntime(tmp_path / "models")
    with pytest.raises(EdgeError, match="has no models"):
        ask(runtime)
    models.repository(tmp_path / "models", m={"1": 1.0})
    assert np.allclose(ask(runtime), scaled(1.0))
    with pytest.raises(EdgeError, match="no model 'other'"):
        ask(runtime, "other")
    with pytest.raises(InvalidInputError):
        ask(runtime, x=X[0])
    assert list(runtime._slots) == [("", "")]  # names that callers made up do not pile up


def test_a_new_version_is_noticed_and_switched_to_in_the_background(tmp_path: Path) -> None:
    models.repository(tmp_path, m={"1": 1.0})
    now = [0.0]
    runtime = EdgeRuntime(tmp_path, check_s=1.0, clock=lambda: now[0])
    assert np.allclose(ask(runtime), scaled(1.0))
    models.repository(tmp_path, m={"2": 2.0})
    now[0] = 0.9
    assert np.allclose(ask(runtime), scaled(1.0))
    now[0] = 2.0
    wait_until(lambda: np.allclose(ask(runtime), scaled(2.0)))
    runtime.close()


def test_going_back_to_an_older_version_is_switched_to_as_well(tmp_path: Path) -> None:
    models.repository(tmp_path, m={"1": 1.0, "2": 2.0})
    runtime = EdgeRuntime(tmp_path)
    assert np.allclose(ask(runtime), scaled(2.0))
    runtime.repository.rollback("m")
    runtime.refresh()
    assert np.allclose(ask(runtime), scaled(1.0))


def test_a_version_that_can_not_be_loaded_is_reported_and_the_old_one_stays(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, loads: list[Path]
) -> None:
    models.repository(tmp_path, m={"1": 1.0})
    runtime = EdgeRuntime(tmp_path)
    ask(runtime)
    bad = tmp_path / "m" / "2" / "model.onnx"
    bad.parent.mkdir()
    bad.write_bytes(b"no model")
    with caplog.at_level(logging.WARNING, "mcp_client.edge"):
        runtime.refresh()
        runtime.refresh()
    assert np.allclose(ask(runtime), scaled(1.0))
    assert [record.getMessage().count("can't be loaded") for record in caplog.records] == [1]
    assert loads.count(bad) == 1  # not tried again until it changes
    models.affine(tmp_path / "good.onnx", scale=2.0).replace(bad)
    runtime.refresh()
    assert np.allclose(ask(runtime), scaled(2.0))


def test_a_first_load_falls_back_to_an_older_version_unless_one_was_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    models.repository(tmp_path, m={"1": 1.0, "2": 2.0})
    (tmp_path / "m" / "2" / "model.onnx.sha256").write_text("0" * 64)
    runtime = EdgeRuntime(tmp_path)
    assert np.allclose(ask(runtime, "m"), scaled(1.0))
    assert "stands in" in caplog.text
    with pytest.raises(IntegrityError, match="was not used"):
        ask(runtime, "m", "2")


def test_removed_models_stay_in_use_until_closed(tmp_path: Path) -> None:
    path = models.repository(tmp_path, m={"1": 1.0}) / "m" / "1" / "model.onnx"
    runtime = EdgeRuntime(tmp_path)
    ask(runtime)
    path.unlink()
    runtime.refresh()
    assert np.allclose(ask(runtime), scaled(1.0))
    runtime.close()
    with pytest.raises(ClientClosedError):
        ask(runtime)


def test_fifty_swaps_under_32_threads_fail_no_call_and_mix_no_outputs(tmp_path: Path) -> None:
    path = models.repository(tmp_path, m={"1": 1.0}) / "m" / "1" / "model.onnx"
    runtime = EdgeRuntime(tmp_path, check_s=0.05, threads=1)
    scale_of = {file_digest(path): 1.0}
    done = threading.Event()
    problems: list[object] = []
    seen: set[float] = set()

    def call(seed: int) -> None:
        x = np.random.default_rng(seed).standard_normal((seed % 4 + 1, 3)).astype(np.float32)
        request = Request(model="m" if seed % 2 else "", inputs={"x": x})
        while not done.wait(0.002):  # leaves the two cores some time for the swaps
            try:
                answer = runtime.run(request)
                scale = scale_of[answer.digest]
                seen.add(scale)
                if not np.allclose(answer.outputs["probs"], scaled(scale, x), rtol=1e-4, atol=1e-4):
                    problems.append((scale, answer))
            except Exception as error:
                problems.append(error)

    threads = [threading.Thread(target=call, args=(seed,)) for seed in range(32)]
    for thread in threads:
        thread.start()
    sessions = []
    try:
        for number in range(2, 52):
            sessions.append(weakref.ref(runtime._model("m", "")._session))
            fresh = models.affine(tmp_path / "fresh.tmp", scale=float(number))
            scale_of[file_digest(fresh)] = float(number)
            fresh.replace(path)
            runtime.refresh()
    finally:
        done.set()
        for thread in threads:
            thread.join()
    assert problems == []
    assert len(seen) > 10
    assert np.allclose(ask(runtime), scaled(51.0))
    gc.collect()
    assert [session for session in sessions if session() is not None] == []
    runtime.close()


def test_a_model_is_freed_when_the_runtime_lets_go(tmp_path: Path) -> None:
    models.repository(tmp_path, m={"1": 1.0})
    runtime = EdgeRuntime(tmp_path)
    answer = runtime.run(Request(model="m", inputs={"x": X}))
    session = weakref.ref(runtime._model("m", "")._session)
    runtime.close()
    gc.collect()
    assert session() is None
    assert np.allclose(answer.outputs["probs"], scaled(1.0))


def test_a_forked_child_answers(tmp_path: Path) -> None:
    models.repository(tmp_path, m={"1": 1.0})
    code = f"""
import os, numpy as np
from mcp_client.edge.runtime import EdgeRuntime
from mcp_client.request import Request
runtime = EdgeRuntime({str(tmp_path)!r}, check_s=0.0)
request = Request(model="m", inputs={{"x": np.zeros((1, 3), np.float32)}})
wanted = runtime.run(request).outputs["probs"]
slot = runtime._slots["m", ""]
slot.renewing.acquire()  # as if a thread of the parent were loading
child = os.fork()
if child == 0:
    runtime.refresh()
    os._exit(0 if np.array_equal(runtime.run(request).outputs["probs"], wanted) else 3)
assert os.waitpid(child, 0)[1] == 0
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, timeout=60)
