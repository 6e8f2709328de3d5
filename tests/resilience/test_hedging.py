"""Hedged requests: off by default, after the p95, to another endpoint, the loser cancelled on the wire and counted."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from mcp_client import AsyncMCPClient, MCPClient, Retry
from mcp_client.resilience.hedge import LatencyWindow
from tests.conftest import RawServer, read_request, respond

HEDGE = Retry(
    hedge=True, budget=1.0
)  # on a busy machine many a call exceeds the 95th percentile of a quick server


class Stalling:
    """Answers at once, except for the inferences that are to stall; counts those that the client hung up on."""

    def __init__(self) -> None:
        self.stall = 0
        self.served = 0
        self.hung_up = threading.Semaphore(0)

    def __call__(self, connection: socket.socket) -> None:
        while (request := read_request(connection)) is not None:
            first = request[0]
            if first.startswith("GET /v2/health"):
                respond(connection, 200, b"{}")
            elif first.startswith("GET /v2 "):
                respond(connection, 200, b'{"name": "t", "version": "1", "extensions": []}')
            elif first.startswith("GET "):
                tensor = {"name": "x", "datatype": "FP32", "shape": [-1]}
                document = {"name": "m", "inputs": [tensor], "outputs": [tensor]}
                respond(connection, 200, json.dumps(document).encode())
            elif self.stall:
                self.stall -= 1
                connection.settimeout(5)
                try:
                    gone = connection.recv(1) == b""
                except TimeoutError:
                    gone = False
                except OSError:
                    gone = True
                if gone:
                    self.hung_up.release()
                return
            else:
                self.served += 1
                output = {"name": "x", "datatype": "FP32", "shape": [1], "data": [1.5]}
                respond(connection, 200, json.dumps({"model_name": "m", "outputs": [output]}).encode())


def settled(client: Any) -> None:
    for endpoint in client._engine.endpoints:
        assert endpoint.load.outstanding == 0
        assert endpoint.breaker.state(time.monotonic()) == "closed"


@pytest.mark.parametrize("kind", ["sync", "async"])
@pytest.mark.parametrize("count", [1, 2])
def test_a_stalled_request_is_asked_a_second_time_and_called_off(
    raw_server: Callable[..., RawServer], kind: str, count: int
) -> None:
    servers = [Stalling() for _ in range(count)]
    urls = [raw_server(server).url for server in servers]

    def stall() -> None:
        for server in servers:
            server.stall = 1 if count == 1 or server is servers[0] else 0

    def was_hung_up() -> bool:
        return any(server.hung_up.acquire(timeout=1) for server in servers)

    options: dict[str, Any] = {"model": "m", "cache": None, "retry": HEDGE, "timeout": 4}
    if kind == "sync":
        with MCPClient(urls, **options) as client:
            for _ in range(40):
                client.infer([1.0])
            stall()
            started = time.monotonic()
            while any(server.stall for server in servers):
                client.infer([1.0])
            assert time.monotonic() - started < 1
            assert was_hung_up(), "the loser went on"
            settled(client)
            hedges = client.stats()["hedges"]
    else:

        async def scene() -> dict[str, int]:
            async with AsyncMCPClient(urls, **options) as client:
                for _ in range(40):
                    await client.infer([1.0])
                stall()
                started = time.monotonic()
                while any(server.stall for server in servers):
                    await client.infer([1.0])
                assert time.monotonic() - started < 1
                assert await asyncio.to_thread(was_hung_up), "the loser went on"
                settled(client)
                return dict(client.stats()["hedges"])

        hedges = asyncio.run(scene())
    assert hedges["sent"] >= 1
    assert hedges["won"] >= 1


@pytest.mark.parametrize(
    ("retry", "parameters"), [(Retry(), None), (HEDGE, {"sequence_id": 7})], ids=["by default", "a sequence"]
)
def test_never_hedged(
    raw_server: Callable[..., RawServer], retry: Retry, parameters: dict[str, int] | None
) -> None:
    servers = [Stalling(), Stalling()]
    with MCPClient([raw_server(s).url for s in servers], model="m", cache=None, retry=retry) as client:
        for _ in range(60):
            client.infer([1.0], parameters=parameters)
        assert client.stats()["hedges"] == {"sent": 0, "won": 0}


def test_hedges_stay_within_the_budget(raw_server: Callable[..., RawServer]) -> None:
    server = Stalling()
    with MCPClient(
        raw_server(server).url, model="m", cache=None, retry=Retry(hedge=True, budget=0.001)
    ) as client:
        for _ in range(25):
            client.infer([1.0])
        for _ in range(200):
            client._engine.servers._latencies.add("m", 0.0)  # type: ignore[union-attr]
        for _ in range(60):
            client.infer([1.0])
        assert 0 < client.stats()["hedges"]["sent"] <= 11


def test_the_percentile_is_that_of_the_latest_answers() -> None:
    window = LatencyWindow()
    for n in range(19):
        window.add("m", float(n))
    assert window.p95("m") is None
    for n in range(1000):
        window.add("m", float(n % 100))
    assert window.p95("m") == 95.0
    assert window.p95("other") is None
