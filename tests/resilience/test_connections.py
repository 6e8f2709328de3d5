"""Kept connections that were dropped never surface as errors; cancelling an exchange leaves nothing behind."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from mcp_client import AsyncMCPClient, ConnectionFailedError, MCPClient, Retry
from mcp_client.transports import connections
from tests.conftest import RawServer, read_request, respond

ONCE = Retry(attempts=1)


def answer(connection: socket.socket, first: str) -> None:
    if first.startswith("GET /v2 "):
        respond(connection, 200, b'{"name": "t", "version": "1", "extensions": []}')
    elif first.startswith("GET "):
        tensor = {"name": "x", "datatype": "FP32", "shape": [-1]}
        respond(connection, 200, json.dumps({"name": "m", "inputs": [tensor], "outputs": [tensor]}).encode())
    else:
        output = {"name": "x", "datatype": "FP32", "shape": [1], "data": [1.5]}
        respond(connection, 200, json.dumps({"model_name": "m", "outputs": [output]}).encode())


def reset(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def closes_after_each(connection: socket.socket) -> None:
    """Says nothing of it in its headers."""
    request = read_request(connection)
    if request is not None:
        answer(connection, request[0])


def resets_on_the_second(connection: socket.socket) -> None:
    """As a balancer that has forgotten the connection: it looks alive until it is used."""
    request = read_request(connection)
    if request is not None:
        answer(connection, request[0])
        read_request(connection)
        reset(connection)


def closes_on_the_second(connection: socket.socket) -> None:
    request = read_request(connection)
    if request is not None:
        answer(connection, request[0])
        read_request(connection)
        connection.shutdown(socket.SHUT_RDWR)


def half_closes(connection: socket.socket) -> None:
    """Its end sends no more, but goes on reading."""
    request = read_request(connection)
    if request is not None:
        answer(connection, request[0])
        connection.shutdown(socket.SHUT_WR)
        read_request(connection)


@pytest.mark.parametrize(
    "behaviour", [closes_after_each, resets_on_the_second, closes_on_the_second, half_closes]
)
@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_dropped_connection_never_surfaces(
    raw_server: Callable[..., RawServer], behaviour: Callable[[socket.socket], None], kind: str
) -> None:
    running = raw_server(behaviour)
    if kind == "sync":
        with MCPClient(running.url, model="m", cache=None, retry=ONCE) as client:
            for _ in range(10):
                assert client.infer([1.0]).output[0] == 1.5
    else:

        async def scene() -> None:
            async with AsyncMCPClient(running.url, model="m", cache=None, retry=ONCE) as client:
                for _ in range(10):
                    await client.infer([1.0])

        asyncio.run(scene())
    assert running.connections >= 10


def test_a_whole_pool_of_dropped_connections_costs_no_error(raw_server: Callable[..., RawServer]) -> None:
    running = raw_server(resets_on_the_second)
    together = threading.Barrier(8)

    def meet(client: MCPClient) -> None:
        together.wait()
        client.infer([1.0])

    with MCPClient(running.url, model="m", cache=None, retry=ONCE) as client:
        client.infer([1.0])
        for _ in range(3):
            threads = [threading.Thread(target=meet, args=(client,)) for _ in range(8)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        client.infer([1.0])


def test_a_step_of_a_sequence_is_not_sent_twice(raw_server: Callable[..., RawServer]) -> None:
    steps: list[str] = []

    def handle(connection: socket.socket) -> None:
        while (request := read_request(connection)) is not None:
            if request[0].startswith("POST"):
                steps.append(request[0])
                if len(steps) == 2:
                    return
            answer(connection, request[0])

    running = raw_server(handle)
    with MCPClient(running.url, model="m", retry=Retry(attempts=5)) as client:
        client.infer([1.0], parameters={"sequence_id": 1})
        with pytest.raises(ConnectionFailedError):
            client.infer([1.0], parameters={"sequence_id": 1})
    assert len(steps) == 2


def test_a_step_of_a_sequence_does_not_go_on_a_connection_idle_for_long(
    raw_server: Callable[..., RawServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "_TRUSTED_IDLE_S", 0.0)
    running = raw_server(resets_on_the_second)
    with MCPClient(running.url, model="m", retry=ONCE) as client:
        for _ in range(5):
            client.infer([1.0], parameters={"sequence_id": 1})


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_connections_have_a_maximum_age(
    raw_server: Callable[..., RawServer], monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    def handle(connection: socket.socket) -> None:
        while (request := read_request(connection)) is not None:
            answer(connection, request[0])

    async def scene(url: str) -> None:
        async with AsyncMCPClient(url, model="m", cache=None) as client:
            for _ in range(5):
                await client.infer([1.0])

    def go() -> int:
        running = raw_server(handle)
        if kind == "async":
            asyncio.run(scene(running.url))
        else:
            with MCPClient(running.url, model="m", cache=None) as client:
                for _ in range(5):
                    client.infer([1.0])
        return running.connections

    assert go() == 1
    monkeypatch.setattr(connections, "MAX_AGE_S", 0.0)
    assert go() == 8  # one for each exchange, discovery and metadata included


def test_a_dead_peer_is_noticed_by_the_kernel() -> None:
    options = {(level, name): value for level, name, value in connections._OPTIONS}
    assert options[socket.SOL_SOCKET, socket.SO_KEEPALIVE] == 1


# --- cancelling ---


class Hanging:
    """Answers everything but inferences, which it lets hang; tells when the client has hung up."""

    def __init__(self) -> None:
        self.asked = threading.Event()
        self.gone = threading.Event()
        self.hangs = True

    def __call__(self, connection: socket.socket) -> None:
        while (request := read_request(connection)) is not None:
            if request[0].startswith("POST") and self.hangs:
                self.asked.set()
                try:
                    if connection.recv(1) == b"":
                        self.gone.set()
                except OSError:
                    self.gone.set()
                return
            answer(connection, request[0])


def nothing_is_left(client: Any) -> None:
    engine = client._engine
    assert engine._flights == {}
    for endpoint in engine.endpoints:
        assert endpoint.load.outstanding == 0
        assert endpoint.breaker.state(time.monotonic()) == "closed"
    if client._prefetcher is not None:
        assert client._prefetcher._scheduler._demand_in_flight == 0


def sockets() -> int:
    count = 0
    for fd in os.listdir("/proc/self/fd"):
        try:
            count += os.readlink(f"/proc/self/fd/{fd}").startswith("socket:")
        except OSError:
            continue
    return count


def test_cancelling_a_task_cancels_the_exchange_and_leaves_nothing(
    raw_server: Callable[..., RawServer],
) -> None:
    hanging = Hanging()
    running = raw_server(hanging)

    async def scene() -> None:
        async with AsyncMCPClient(running.url, model="m") as client:
            await client.metadata()
            task = asyncio.create_task(client.infer([1.0], session="s", path="/p"))
            await asyncio.to_thread(hanging.asked.wait, 5)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert await asyncio.to_thread(hanging.gone.wait, 5), "the server still has the connection"
            nothing_is_left(client)
            hanging.hangs = False
            assert (await client.infer([1.0])).source == "server"

    before = sockets()
    asyncio.run(scene())
    running.close()
    deadline = time.monotonic() + 5
    while sockets() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert sockets() <= before


def test_ctrl_c_cancels_the_exchange_and_leaves_nothing(raw_server: Callable[..., RawServer]) -> None:
    hanging = Hanging()
    running = raw_server(hanging)
    with MCPClient(running.url, model="m") as client:
        client.metadata()

        def press() -> None:
            hanging.asked.wait(5)
            time.sleep(0.05)
            os.kill(os.getpid(), signal.SIGINT)

        presser = threading.Thread(target=press)
        presser.start()
        with pytest.raises(KeyboardInterrupt):
            client.infer([1.0], session="s", path="/p", timeout=10)
        presser.join()
        assert hanging.gone.wait(5), "the server still has the connection"
        nothing_is_left(client)
        hanging.hangs = False
        assert client.infer([1.0]).source == "server"


def test_a_cancelled_probe_leaves_the_circuit_to_the_next_one(raw_server: Callable[..., RawServer]) -> None:
    hanging = Hanging()
    running = raw_server(hanging)

    async def scene() -> None:
        async with AsyncMCPClient(running.url, model="m") as client:
            await client.metadata()
            (endpoint,) = client._engine.endpoints
            for _ in range(5):
                endpoint.breaker.failed(time.monotonic() - 60)
            task = asyncio.create_task(client.infer([1.0]))
            await asyncio.to_thread(hanging.asked.wait, 5)
            assert endpoint.breaker.state(time.monotonic()) == "open", "the probe is under way"
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            hanging.hangs = False
            assert (await client.infer([1.0])).source == "server"
            assert endpoint.breaker.state(time.monotonic()) == "closed"

    asyncio.run(scene())
