"""One cache on disk for the processes of a machine: shared, asked for once, and right whoever dies when."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mcp_client import Cache, MCPClient
from stub_server import StubServer
from tests import models

ROOT = Path(__file__).parents[2]
X = np.array([[0.1, 0.9, 0.4]], dtype=np.float32)

# Asks for the keys it is told to and prints a line for each: key, source, answer. "go" on stdin starts it.
CHILD = """
import json, resource, signal, sys, logging
import numpy as np
from mcp_client import Cache, MCPClient
url, directory, limit, keys = sys.argv[1], sys.argv[2], int(sys.argv[3]), json.loads(sys.argv[4])
logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format="WARNING %(message)s")
if limit:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
with MCPClient(url, model="affine", prefetch=None, cache=Cache(directory=directory), timeout=10) as client:
    client.metadata()
    print("ready", flush=True)
    sys.stdin.readline()
    for key in keys:
        x = np.random.default_rng(0).standard_normal((key.get("rows", 1), 3), np.float32)  # noise: it fills the disk
        x[0] = key["x"]
        result = client.infer(x)
        line = {"x": key["x"], "source": result.source, "y": result.output[0].tolist()}
        print(json.dumps({**line, "ms": result.latency_ms}), flush=True)
"""


class Child:
    def __init__(self, url: str, directory: Path, keys: list[Any], *, limit: int = 0) -> None:
        keys = [key if isinstance(key, dict) else {"x": key} for key in keys]
        self.process = subprocess.Popen(
            [sys.executable, "-c", CHILD, url, str(directory), str(limit), json.dumps(keys)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def go(self) -> None:
        assert self.process.stdout is not None
        assert self.process.stdin is not None
        assert self.process.stdout.readline() == "ready\n", self.process.stderr.read()  # type: ignore[union-attr]
        self.process.stdin.write("go\n")
        self.process.stdin.flush()

    def lines(self, *, killed: bool = False) -> list[dict[str, Any]]:
        """What it answered, each answer checked."""
        out, err = self.process.communicate(timeout=30)
        assert killed or self.process.returncode == 0, err
        self.warnings = [line for line in err.splitlines() if line.startswith("WARNING")]
        whole = out[: out.rfind("\n") + 1]
        answers = [json.loads(line) for line in whole.splitlines() if line != "ready"]
        for each in answers:
            right = np.full(3, each["x"], np.float32) @ models.WEIGHTS + models.BIAS
            np.testing.assert_allclose(each["y"], right, rtol=1e-5, atol=1e-6)
        return answers


@pytest.fixture
def server(affine_model: Path) -> Iterator[StubServer]:
    with StubServer(affine_model) as running:
        yield running


def test_another_process_answers_from_disk(server: StubServer, tmp_path: Path) -> None:
    for source in ("server", "cache"):
        child = Child(server.url, tmp_path / "cache", [1, 2, 3])
        child.go()
        assert [each["source"] for each in child.lines()] == [source] * 3
    assert server.received["demand"] == 3


def test_processes_that_ask_for_the_same_cold_keys_cost_one_request_a_key(
    server: StubServer, tmp_path: Path
) -> None:
    server.latency_ms = 20
    children = [Child(server.url, tmp_path / "cache", list(range(40))) for _ in range(3)]
    for child in children:
        child.go()
    for child in children:
        assert len(child.lines()) == 40
    assert server.received["demand"] == 40


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGSTOP])
def test_a_leader_that_dies_or_is_stopped_midway_blocks_nobody_for_long(
    server: StubServer, tmp_path: Path, end: signal.Signals
) -> None:
    server.latency_ms = 3000
    leader = Child(server.url, tmp_path / "cache", [7])
    try:
        leader.go()
        while not server.received["demand"]:
            time.sleep(0.005)
        server.latency_ms = 0
        threading.Timer(0.3, leader.process.send_signal, [end]).start()
        settings = Cache(directory=tmp_path / "cache")
        with MCPClient(server.url, prefetch=None, cache=settings, timeout=2.0) as client:
            started = time.monotonic()
            result = client.infer(np.full((1, 3), 7, np.float32))
            took = time.monotonic() - started
        assert result.source == "server"
        assert took < (0.8 if end == signal.SIGKILL else 1.5), took
        assert took >= 0.1, "it did not wait for the leader at all"
    finally:
        leader.process.kill()
        leader.process.communicate()


def test_answers_stay_right_while_processes_are_killed_over_and_over(
    server: StubServer, tmp_path: Path
) -> None:
    directory = tmp_path / "cache"
    keys = [{"x": x, "rows": 20_000} for x in range(30)] * 4
    steady = Child(server.url, directory, keys)
    steady.go()
    answered = 0
    for turn in range(6):
        victim = Child(server.url, directory, keys[turn:])
        victim.go()
        time.sleep(0.03 + 0.05 * turn)
        victim.process.kill()
        answered += len(victim.lines(killed=True))
    assert len(steady.lines()) == len(keys)
    last = Child(server.url, directory, keys[:30])
    last.go()
    assert len(last.lines()) == 30
    assert steady.warnings + last.warnings == []
    assert answered


def test_a_full_disk_is_one_warning_and_right_answers(server: StubServer, tmp_path: Path) -> None:
    child = Child(
        server.url, tmp_path / "cache", [{"x": x, "rows": 50_000} for x in range(10)], limit=300_000
    )
    child.go()
    answers = child.lines()
    assert [each["source"] for each in answers] == ["server"] * 10
    assert len(child.warnings) == 1, child.warnings


def test_a_forked_child_shares_the_tiers_with_its_parent(server: StubServer, tmp_path: Path) -> None:
    with MCPClient(server.url, prefetch=None, cache=Cache(directory=tmp_path / "cache")) as client:
        client.infer(X)
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                first = client.infer(X + 1)  # new: the child writes to the tier
                code = 0 if (first.source, client.infer(X).source) == ("server", "cache") else 2
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert client.infer(X + 1).source == "cache"
    assert server.received["demand"] == 2
