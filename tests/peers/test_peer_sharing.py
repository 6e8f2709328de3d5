"""One client in many hands: shared memory, threads, fork, event loops, replicas."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mcp_client import MCPClient
from tests.peers.conftest import Peer

BIG = np.random.default_rng(1).random((2, 200_000), np.float32)


def regions(client: Any) -> int:
    """How many regions of shared memory the server knows of."""
    (endpoint,) = client._engine.endpoints
    return len(endpoint.transport.arena.registered())


def test_shared_memory(peer: Peer, client: MCPClient) -> None:
    """Large tensors go through shared memory by themselves."""
    model = peer.identity("FP32", 2)
    results = [client.infer({"x": BIG + i}, model=model)["y"] for i in range(4)]
    assert regions(client) > 0
    assert all(
        np.array_equal(y, BIG + i) for i, y in enumerate(results)
    )  # also after the regions were reused


def test_large_tensors_anyhow(peer: Peer, client: MCPClient) -> None:
    """Large tensors on one machine, shared memory or not."""
    model = peer.identity("FP32", 2)
    results = [client.infer({"x": BIG + i}, model=model)["y"] for i in range(4)]
    assert all(np.array_equal(y, BIG + i) for i, y in enumerate(results))


def test_threads(client: MCPClient) -> None:
    """Eight threads share a client, each gets its own answers."""

    def work(number: int) -> None:
        for i in range(10):
            a = np.array([number, i], np.float32)
            result = client.infer({"a": a, "b": a}, model="add")
            assert result["sum"].ravel().tolist() == [2 * number, 2 * i]

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))


FORK = """
import os, sys
import numpy as np
from mcp_client import MCPClient

client = MCPClient(sys.argv[1], protocol="oip", cache=None, timeout=20)
x = np.array([1, 2], np.float32)
ask = lambda: client.infer({"a": x, "b": x}, model="add")["sum"].ravel().tolist() == [2, 4]
assert ask()
child = os.fork()
if child == 0:
    os._exit(0 if ask() and ask() else 1)
assert ask()
_, status = os.waitpid(child, 0)
assert os.waitstatus_to_exitcode(status) == 0
assert ask()
client.close()
"""


def test_fork(peer: Peer) -> None:
    """A client made before `fork` works in both processes."""
    ran = subprocess.run(
        [sys.executable, "-c", FORK, peer.url],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr


def test_event_loops(peer: Peer) -> None:
    """An asyncio client used from one event loop after another."""
    client = peer.aio()
    x = np.array([1, 2], np.float32)

    async def ask(last: bool) -> list[float]:
        result = await client.infer({"a": x, "b": x}, model="add")
        if last:
            await client.close()
        numbers: list[float] = result["sum"].ravel().tolist()
        return numbers

    assert [asyncio.run(ask(last)) for last in (False, False, True)] == [[2, 4]] * 3
    gc.collect()


def test_many_at_once(peer: Peer) -> None:
    """Sixteen requests at once with asyncio, each gets its own answer."""

    async def go() -> None:
        async with peer.aio() as client:

            async def ask(number: int) -> None:
                a = np.array([number, 1], np.float32)
                result = await client.infer({"a": a, "b": a}, model="add")
                assert result["sum"].ravel().tolist() == [2 * number, 2]

            for _ in range(3):
                await asyncio.gather(*(ask(number) for number in range(16)))

    asyncio.run(go())


def test_cancelled(peer: Peer) -> None:
    """A cancelled task lets go of its request, and the client goes on."""

    async def go() -> None:
        async with peer.aio() as client:
            x = np.array([1, 2], np.float32)
            await client.infer({"a": x, "b": x}, model="add")
            task = asyncio.create_task(client.infer({"x": x}, model="slow"))
            await asyncio.sleep(0.2)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert (await client.infer({"a": x, "b": x}, model="add"))["sum"].ravel().tolist() == [2, 4]

    asyncio.run(go())
    gc.collect()


def test_replicas(peer: Peer) -> None:
    """Two URLs of it, one of them of nobody: every call is answered."""
    nobody = "http://127.0.0.1:9" if peer.protocol == "http" else "grpc://127.0.0.1:9"
    x = np.array([1, 2], np.float32)
    with MCPClient([nobody, peer.url], protocol="oip", cache=None) as client:
        for _ in range(6):
            assert client.infer({"a": x, "b": x}, model="add")["sum"].ravel().tolist() == [2, 4]
    assert threading.active_count() < 50
