"""Files changed by others are noticed without a call, where watchfiles is there; where it is not, by the next call."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from mcp_client.edge.runtime import EdgeRuntime
from mcp_client.edge.staging import STAGING
from tests import models
from tests.edge.test_edge_runtime import ask, scaled, wait_until
from tests.edge.test_smoke import publish


@pytest.fixture
def runtime(tmp_path: Path) -> EdgeRuntime:
    publish(tmp_path, "1", 1.0)
    return EdgeRuntime(tmp_path, check_s=0.1)


def in_use(runtime: EdgeRuntime) -> str:
    model = runtime._slots["", ""].model
    assert model is not None
    return model.metadata.version


def watching(runtime: EdgeRuntime) -> threading.Thread:
    """The thread that watches."""
    assert runtime._watch is not None
    return runtime._watch.thread


def test_a_version_is_switched_to_without_a_call(tmp_path: Path, runtime: EdgeRuntime) -> None:
    ask(runtime)
    for version in ("2", "3"):
        publish(tmp_path, version, float(version))
        wait_until(lambda version=version: in_use(runtime) == version)  # type: ignore[misc]
    runtime.repository.pin("m", "1")
    wait_until(lambda: in_use(runtime) == "1")
    runtime.close()


def test_what_a_sync_gathers_is_no_change(
    tmp_path: Path, runtime: EdgeRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask(runtime)
    publish(tmp_path, "2", 2.0)
    wait_until(lambda: in_use(runtime) == "2")
    looks: list[object] = []
    real = EdgeRuntime._renew
    monkeypatch.setattr(EdgeRuntime, "_renew", lambda self, *args: looks.append(args) or real(self, *args))
    for folder in (STAGING, ".optimised"):
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / "model.onnx.part").write_bytes(b"x" * 1000)
    threading.Event().wait(1.0)
    assert (
        len(looks) <= 2
    )  # one that was on its way when the version came, and one that comes every five seconds
    publish(tmp_path, "3", 3.0)
    wait_until(lambda: in_use(runtime) == "3")
    runtime.close()


def test_without_watchfiles_a_call_looks(
    tmp_path: Path, runtime: EdgeRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "watchfiles", None)
    ask(runtime)
    thread = watching(runtime)
    thread.join(10)
    assert not thread.is_alive()
    publish(tmp_path, "2", 2.0)
    threading.Event().wait(0.7)
    assert in_use(runtime) == "1"
    wait_until(lambda: np.allclose(ask(runtime), scaled(2.0)))
    runtime.close()


def test_a_folder_that_is_removed_ends_nothing(tmp_path: Path, runtime: EdgeRuntime) -> None:
    ask(runtime)
    publish(tmp_path, "2", 2.0)
    wait_until(lambda: in_use(runtime) == "2")
    (tmp_path / "m").rename(tmp_path.parent / f"{tmp_path.name}-gone")
    threading.Event().wait(0.7)
    assert np.allclose(ask(runtime), scaled(2.0))
    runtime.close()


def test_the_thread_ends_with_close_and_with_the_runtime(tmp_path: Path, runtime: EdgeRuntime) -> None:
    ask(runtime)
    thread = watching(runtime)
    runtime.close()
    thread.join(10)
    assert not thread.is_alive()
    forgotten = EdgeRuntime(tmp_path, check_s=0.0)
    ask(forgotten)
    thread = watching(forgotten)
    del forgotten
    gc.collect()
    publish(tmp_path, "2", 2.0)  # the next change shows that nobody is left
    thread.join(15)
    assert not thread.is_alive()


def test_a_single_file_is_not_watched(tmp_path: Path) -> None:
    runtime = EdgeRuntime(models.affine(tmp_path / "m.onnx"))
    ask(runtime)
    assert runtime._watch is None


def test_a_forked_child_watches_for_itself(tmp_path: Path) -> None:
    publish(tmp_path, "1", 1.0)
    publish(tmp_path / "later", "2", 2.0)
    code = f"""
import os, time, numpy as np
from pathlib import Path
from mcp_client.edge.runtime import EdgeRuntime
from mcp_client.request import Request
root = Path({str(tmp_path)!r})
runtime = EdgeRuntime(root, check_s=0.1)
request = Request(model="m", inputs={{"x": np.zeros((1, 3), np.float32)}})
runtime.run(request)
child = os.fork()
if child == 0:
    time.sleep(0.2)
    runtime.run(request)
    (root / "later" / "m" / "2").rename(root / "m" / "2")
    for _ in range(400):
        time.sleep(0.05)
        if runtime._slots["m", ""].model.metadata.version == "2":
            os._exit(0)
    os._exit(3)
assert os.waitpid(child, 0)[1] == 0
"""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, timeout=100, env=environment)
