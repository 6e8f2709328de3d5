"""Shared memory: used by itself where it pays, right where it can't be had, and gone when its owner is."""

from __future__ import annotations

import asyncio
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("grpc")

from mcp_client import AsyncMCPClient, MCPClient, Retry
from mcp_client.errors import ServerError
from mcp_client.transports import ipc
from mcp_client.transports.ipc import ALIGNMENT, Arena
from stub_server import StubServer
from stub_server.shared_memory import SharedMemory
from tests import models

pytestmark = pytest.mark.skipif(not ipc.available(), reason="no /dev/shm here")

BIG = np.random.default_rng(1).random((1, 3, 224, 224), np.float32)
SHM = Path("/dev/shm")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StubServer]:
    folder = tmp_path_factory.mktemp("models")
    models.identity(folder / "same.onnx", "FP32", ("a", "b", "c", "d"))
    models.add(folder / "add.onnx")
    with StubServer(folder, grpc=True) as running:
        yield running


@pytest.fixture(params=["http", "grpc"])
def url(server: StubServer, request: pytest.FixtureRequest) -> str:
    return server.url if request.param == "http" else server.grpc_url


def arena_of(client: Any) -> Arena:
    (endpoint,) = client._engine.endpoints
    arena: Arena = endpoint.transport.arena
    return arena


def wait_until_ready(client: MCPClient) -> None:
    deadline = time.monotonic() + 10
    while not client.ready() and time.monotonic() < deadline:
        time.sleep(0.02)


def used(client: Any) -> int:
    return len(arena_of(client).registered())


# --- in use -------------------------------------------------------------------------------------------------


def test_large_tensors_go_through_shared_memory_both_ways(url: str) -> None:
    with MCPClient(url, cache=None, model="same") as client:
        results = [client.infer(BIG + i) for i in range(4)]
        assert used(client) > 0
        assert any(arena_of(client)._sizes.values())
    for i, result in enumerate(results):  # also after the regions were reused and are gone
        assert np.array_equal(result.output, BIG + i)
        assert not result.output.flags.writeable


def test_small_tensors_stay_in_the_message(url: str) -> None:
    with MCPClient(url, cache=None, model="same") as client:
        client.infer(BIG[:, :, :2])
        assert used(client) == 0


def test_large_and_small_inputs_and_outputs_mix(url: str) -> None:
    a = np.arange(2**16, dtype=np.float32)
    with MCPClient(url, cache=None, model="add") as client:
        for _ in range(3):
            result = client.infer({"a": a, "b": a + 1})
            assert np.array_equal(result["sum"], 2 * a + 1)
            assert np.array_equal(client.infer({"a": a, "b": a}, outputs=["sum"])["sum"], 2 * a)
        assert used(client) > 0


def test_threads_and_tasks_share_the_arena_without_mixing(url: str) -> None:
    with MCPClient(url, cache=None, model="same") as client, ThreadPoolExecutor(6) as pool:
        inputs = [BIG + i for i in range(24)]
        for x, result in zip(inputs, pool.map(client.infer, inputs), strict=True):
            assert np.array_equal(result.output, x)
        assert used(client) <= 12  # six at a time, in two sizes

    async def main() -> None:
        async with AsyncMCPClient(url, cache=None, model="same") as aio:
            results = await asyncio.gather(*(aio.infer(BIG + i) for i in range(8)))
            assert all(np.array_equal(r.output, BIG + i) for i, r in enumerate(results))
            assert used(aio) > 0

    asyncio.run(main())


# --- where it can't be had ----------------------------------------------------------------------------------


def test_a_restarted_server_knows_no_regions_and_gets_them_anew(server: StubServer, url: str) -> None:
    with MCPClient(url, cache=None, model="same") as client:
        client.infer(BIG)
        server.stop()
        server.start()
        wait_until_ready(client)
        for i in range(3):
            assert np.array_equal(client.infer(BIG + i, timeout=20).output, BIG + i)
        assert used(client) > 0


def test_an_output_that_outgrew_its_place_comes_in_the_message(url: str) -> None:
    with MCPClient(url, cache=None, model="same") as client:
        client.infer(BIG)
        client.infer(BIG)
        arena = arena_of(client)
        (question,) = arena._sizes
        arena.learn_sizes(question, {"y": 100_000})
        for _ in range(2):
            assert np.array_equal(client.infer(BIG).output, BIG)


def test_a_full_arena_falls_back_to_messages(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ipc, "_MOST_BYTES", 0)
    with MCPClient(url, cache=None, model="same") as client:
        assert np.array_equal(client.infer(BIG).output, BIG)
        assert used(client) == 0


def test_a_server_without_the_extension_is_asked_once(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise ServerError.of(501, "not here", code="no_shared_memory")

    asked: list[int] = []
    monkeypatch.setattr(SharedMemory, "register", lambda *a: (asked.append(1), refuse()))
    with MCPClient(url, cache=None, model="same", retry=Retry(attempts=1)) as client:
        for _ in range(3):
            assert np.array_equal(client.infer(BIG).output, BIG)
    assert len(asked) == 1


def test_a_region_the_server_may_still_write_to_is_not_used_again(server: StubServer, url: str) -> None:
    async def main() -> None:
        async with AsyncMCPClient(url, cache=None, model="same") as client:
            await client.infer(BIG)
            await client.infer(BIG)
            before = set(arena_of(client).registered())
            server.latency_ms = 500
            task = asyncio.create_task(client.infer(BIG))
            await asyncio.sleep(0.1)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            server.latency_ms = 0
            assert np.array_equal((await client.infer(BIG + 1)).output, BIG + 1)
            assert len(arena_of(client)._orphans) == 1
            assert set(arena_of(client)._orphans) <= before

    try:
        asyncio.run(main())
    finally:
        server.latency_ms = 0


# --- the arena ----------------------------------------------------------------------------------------------


def test_regions_are_private_aligned_and_reused() -> None:
    arena = Arena(0)
    try:
        inputs = {"a": np.arange(3, dtype=np.uint8), "b": np.arange(5, dtype=np.float64)[::-1]}
        lease = arena.lease(inputs, {"y": 10, "z": 0})
        assert lease is not None
        info = (SHM / lease.region.name).stat()
        assert stat.S_IMODE(info.st_mode) == 0o600
        assert len(lease.region.name) >= len("mcp2026-") + 32
        places = [*lease.inputs.values(), lease.outputs["y"]]
        assert all(place is not None and place[0] % ALIGNMENT == 0 for place in places)
        assert lease.outputs["z"] is None
        assert lease.read(*lease.inputs["b"]) == np.ascontiguousarray(inputs["b"]).tobytes()
        arena.give_back(lease)
        again = arena.lease({"a": np.zeros(1000)}, {})
        assert again is not None
        assert again.region is lease.region
        arena.discard(again)
        assert not (SHM / again.region.name).exists()
        third = arena.lease({"a": np.zeros(1000)}, {})
        assert third is not None
        assert third.region is not lease.region
    finally:
        arena.close()
    assert not (SHM / third.region.name).exists()
    assert arena.lease({"a": np.zeros(10)}, {}) is None


def test_only_addresses_of_this_machine_get_an_arena() -> None:
    for address in ("127.0.0.1:8001", "localhost:8001", "[::1]:8001", "unix:/tmp/x.sock"):
        arena = Arena.for_address(address)
        assert arena is not None
        arena.close()
    for address in ("10.0.0.1:8001", "host:8001", "[fe80::1]:8001", "localhost.example:1"):
        assert Arena.for_address(address) is None


_HOLDING = """
import sys, time
import numpy as np
from mcp_client.transports.ipc import Arena
arena = Arena(0)
lease = arena.lease({"a": np.zeros(10)}, {})
print(lease.region.name, flush=True)
sys.stdin.read()
"""


def holder() -> tuple[subprocess.Popen[str], Path]:
    process = subprocess.Popen(
        [sys.executable, "-c", _HOLDING], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    return process, SHM / process.stdout.readline().strip()


def test_a_process_that_ends_takes_its_regions_with_it() -> None:
    process, path = holder()
    with process:
        assert path.exists()
        process.communicate("")
    assert not path.exists()


def test_what_a_killed_process_left_is_removed_by_the_next_start_and_what_lives_is_not() -> None:
    living, its_path = holder()
    killed, path = holder()
    with living, killed:
        os.kill(killed.pid, signal.SIGKILL)
        killed.wait()
        assert path.exists()
        Arena(0).close()
        assert not path.exists()
        assert its_path.exists()
        living.communicate("")


def test_a_forked_child_leaves_the_parents_regions_alone() -> None:
    code = """
import os
import numpy as np
from mcp_client.transports.ipc import Arena, _FOLDER
arena = Arena(0)
name = arena.lease({"a": np.zeros(10)}, {}).region.name
pid = os.fork()
if pid == 0:
    arena.reset()
    mine = arena.lease({"a": np.zeros(10)}, {}).region.name
    assert mine != name
    arena.close()
    raise SystemExit(0 if not (_FOLDER / mine).exists() else 1)
assert os.waitpid(pid, 0)[1] == 0
assert (_FOLDER / name).exists()
arena.close()
assert not (_FOLDER / name).exists()
print("done")
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout == "done\n", done.stderr


# --- the server's side --------------------------------------------------------------------------------------


def test_a_server_reads_and_writes_only_within_what_was_registered() -> None:
    arena, memory = Arena(0), SharedMemory()
    lease = arena.lease({"a": np.arange(200, dtype=np.uint8)}, {})
    assert lease is not None
    try:
        key = f"/{lease.region.name}"
        memory.register("r", key, 64, 128)
        assert bytes(memory.read("r", 10, 3)) == bytes([74, 75, 76])
        memory.write("r", 127, b"x")
        assert lease.read(191, 1) == b"x"
        for offset, size in ((0, 129), (128, 1), (2**63, 1)):
            with pytest.raises(ServerError, match="beyond its end"):
                memory.read("r", offset, size)
        with pytest.raises(ServerError, match="already registered"):
            memory.register("r", key, 0, 8)
        assert [(r.name, r.key, r.offset, r.size) for r in memory.status()] == [("r", key, 64, 128)]
        memory.unregister("r")
        with pytest.raises(ServerError, match="no shared memory region 'r'"):
            memory.read("r", 0, 1)
        for bad in ("", "/", "/../etc/passwd", "/..", "/no-such-region"):
            with pytest.raises(ServerError, match="can't"):
                memory.register("r", bad, 0, 8)
        with pytest.raises(ServerError, match="fewer than"):
            memory.register("r", key, 0, 2**40)
    finally:
        arena.close()
