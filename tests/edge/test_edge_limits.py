"""Runs that end in time, runs that are called off, memory that is bounded, an event loop that is never blocked."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from mcp_client import AsyncMCPClient, DeadlineExceededError, EdgeError, MCPClient
from mcp_client.edge.limits import Watchdog, watchdog
from mcp_client.edge.model import OnnxModel
from mcp_client.resilience.hedge import Cancellation
from tests import models
from tests.edge.slow_model import slow

X = np.array([[1.0, 2.0, 3.0]], dtype=np.float32)


class Options:
    terminate = False


def test_the_watchdog_stops_what_is_late_and_nothing_else() -> None:
    dog = Watchdog()
    late, early, done = Options(), Options(), Options()
    dog.leave(dog.watch(time.monotonic() + 0.05, done))
    tickets = [dog.watch(time.monotonic() + 60, early), dog.watch(time.monotonic() + 0.05, late)]
    give_up = time.monotonic() + 10
    while not late.terminate:
        assert time.monotonic() < give_up
        time.sleep(0.005)
    assert not early.terminate
    assert not done.terminate
    for ticket in tickets:
        dog.leave(ticket)


def test_a_sooner_deadline_wakes_a_watchdog_that_sleeps() -> None:
    dog = Watchdog()
    far = [Options() for _ in range(200)]
    for options in far:
        dog.watch(time.monotonic() + 3600, options)
    for _ in range(20):
        soon = Options()
        asked = time.monotonic()
        ticket = dog.watch(asked + 0.01, soon)
        while not soon.terminate:
            assert time.monotonic() - asked < 10
            time.sleep(0.001)
        dog.leave(ticket)
    assert not any(options.terminate for options in far)


def test_a_run_ends_at_its_deadline(tmp_path: Path) -> None:
    model = OnnxModel(slow(tmp_path / "slow.onnx"))
    whole = time.monotonic()
    model.run({"x": X})
    whole = time.monotonic() - whole
    started = time.monotonic()
    with pytest.raises(DeadlineExceededError, match="was stopped"):
        model.run({"x": X}, deadline=time.monotonic() + whole / 10)
    assert time.monotonic() - started < 0.8 * whole
    assert np.allclose(model.run({"x": X})["probs"], X @ models.WEIGHTS + models.BIAS), (
        "it is usable afterwards"
    )
    assert not watchdog._watched


def test_a_run_can_be_called_off_before_and_while_it_runs(tmp_path: Path) -> None:
    model = OnnxModel(slow(tmp_path / "slow.onnx"))
    for delay in (0.0, 0.05):
        halt = Cancellation()
        threading.Timer(delay, halt.cancel).start()
        with pytest.raises(EdgeError, match="called off"):
            model.run({"x": X}, halt=halt)


def test_a_call_keeps_its_deadline_at_the_edge(tmp_path: Path) -> None:
    slow(tmp_path / "slow.onnx")
    with MCPClient(f"edge:{tmp_path}", cache=None) as client:
        client.metadata()
        with pytest.raises(DeadlineExceededError) as caught:
            client.infer(X, timeout=0.1)
        assert caught.value.request_id
        assert client.infer(X).source == "edge"


async def _heartbeat(gaps: list[float], done: asyncio.Event) -> None:
    last = time.perf_counter()
    while not done.is_set():
        await asyncio.sleep(0.005)
        now = time.perf_counter()
        gaps.append(now - last)
        last = now


async def _run_beside_a_heartbeat(folder: Path) -> tuple[list[float], float]:
    gaps: list[float] = []
    done = asyncio.Event()
    async with AsyncMCPClient(f"edge:{folder}", cache=None) as client:
        beating = asyncio.ensure_future(_heartbeat(gaps, done))
        await client.infer(X)  # loading, too, is none of the loop's business
        gaps.clear()
        started = time.perf_counter()
        await client.infer(X)
        took = time.perf_counter() - started
        done.set()
        await beating
    return gaps, took


def test_the_event_loop_goes_on_while_a_model_runs(tmp_path: Path) -> None:
    slow(tmp_path / "slow.onnx", steps=1000)
    gaps, took = asyncio.run(_run_beside_a_heartbeat(tmp_path))
    assert len(gaps) > 5
    assert max(gaps) < took / 2, f"the loop stood still for {max(gaps):.3f} of {took:.3f} s"


async def _cancelled(folder: Path) -> None:
    async with AsyncMCPClient(f"edge:{folder}", cache=None) as client:
        await client.metadata()
        call = asyncio.ensure_future(client.infer(X))
        await asyncio.sleep(0.05)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        give_up = time.monotonic() + 10
        while watchdog._watched:  # the run in its thread was stopped as well
            assert time.monotonic() < give_up
            await asyncio.sleep(0.005)


def test_cancelling_the_task_stops_the_run(tmp_path: Path) -> None:
    slow(tmp_path / "slow.onnx", steps=1000)
    started = time.monotonic()
    asyncio.run(_cancelled(tmp_path))
    assert time.monotonic() - started < 60


MEMORY = """
import sys, numpy as np
from mcp_client.edge.model import OnnxModel
from mcp_client.errors import EdgeError
model = OnnxModel(sys.argv[1], memory_bytes=int(sys.argv[2]))
for rows in (10, 400_000, 10):
    try:
        print("fits", len(model.run({"x": np.ones((rows, 3), np.float32)})["probs"]))
    except EdgeError as error:
        print("refused", error)
"""


def test_memory_is_bounded_and_the_model_goes_on(tmp_path: Path) -> None:
    # in a process of its own: ONNX Runtime has one arena for all sessions
    path = models.affine(tmp_path / "m.onnx")
    said = subprocess.run(
        [sys.executable, "-c", MEMORY, str(path), str(2 * 2**20)],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ,
    ).stdout.splitlines()
    assert said[0] == "fits 10"
    assert said[1].startswith("refused model 'm' needs more memory than memory_bytes=2097152 leaves it")
    assert said[2] == "fits 10"


def test_weights_over_the_limit_are_refused_at_once(tmp_path: Path) -> None:
    path = slow(tmp_path / "m.onnx", steps=1)
    with pytest.raises(EdgeError, match="bytes of weights"):
        OnnxModel(path, memory_bytes=100_000)
