"""Several endpoints: load spreads, a dead one costs no error, a slow or unready one is spared, names are followed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

from mcp_client import AsyncMCPClient, ConfigurationError, ConnectionFailedError, MCPClient, Retry
from mcp_client.effects import Endpoint
from mcp_client.endpoints import Endpoints, Site
from mcp_client.resilience.load import Load, pick
from tests.conftest import read_request, respond


class Replica:
    """An OIP server of one model that counts, and that can be slow, unready or broken."""

    def __init__(self, host: str = "127.0.0.1", port: int = 0) -> None:
        self.served = 0
        self.hosts: list[str] = []
        self.pause_s = 0.0
        self.ready = True
        self.status = 200
        self.drop = False
        self.extra: dict[str, str] = {}
        self.connections = 0
        self._open: list[socket.socket] = []
        self._listener = socket.create_server((host, port))
        self.port: int = self._listener.getsockname()[1]
        self.url = f"http://{host}:{self.port}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            self._open.append(connection)
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            with connection:
                while (request := read_request(connection)) is not None:
                    self._answer(connection, request[0], request[1])
        except OSError:
            return  # the peer may go at any time

    def _answer(self, connection: socket.socket, first: str, headers: dict[str, str]) -> None:
        if first.startswith("GET /v2/health/ready "):
            respond(connection, 200 if self.ready else 503, b"{}")
        elif first.startswith("GET /v2 "):
            respond(connection, 200, b'{"name": "t", "version": "1", "extensions": []}')
        elif first.startswith("GET "):
            tensor = {"name": "x", "datatype": "FP32", "shape": [-1]}
            respond(
                connection, 200, json.dumps({"name": "m", "inputs": [tensor], "outputs": [tensor]}).encode()
            )
        else:
            self.served += 1
            self.hosts.append(headers["host"])
            if self.drop:
                connection.close()
                return
            time.sleep(self.pause_s)
            output = {"name": "x", "datatype": "FP32", "shape": [1], "data": [1.5]}
            body = {"model_name": "m", "outputs": [output]} if self.status == 200 else {"error": "as told"}
            respond(connection, self.status, json.dumps(body).encode(), **self.extra)

    def close(self) -> None:
        with contextlib.suppress(
            OSError
        ):  # closing alone would leave the thread in accept, and the port open
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for connection in self._open:
            connection.close()


@contextmanager
def replicas(count: int) -> Iterator[list[Replica]]:
    with ExitStack() as stack:
        running = [Replica() for _ in range(count)]
        for replica in running:
            stack.callback(replica.close)
        yield running


def ask(client: MCPClient, times: int) -> None:
    for _ in range(times):
        assert client.infer([1.0]).output[0] == 1.5


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def test_load_spreads_over_replicas() -> None:
    with replicas(3) as running, MCPClient([r.url for r in running], model="m", cache=None) as client:
        for replica in running:
            replica.pause_s = 0.002
        ask(client, 150)
        assert min(replica.served for replica in running) > 15, [r.served for r in running]


def test_a_dead_endpoint_costs_no_error_and_no_attempt() -> None:
    dead = [f"http://127.0.0.1:{free_port()}" for _ in range(4)]
    with replicas(1) as (alive,), MCPClient([*dead, alive.url], model="m", cache=None) as client:
        started = time.monotonic()
        ask(client, 60)
        assert time.monotonic() - started < 5
        assert alive.served == 60


def test_an_endpoint_that_dies_midway_costs_no_error() -> None:
    with replicas(2) as (one, other), MCPClient([one.url, other.url], model="m", cache=None) as client:
        ask(client, 20)
        one.close()
        ask(client, 60)
        assert other.served >= 40  # each of the 60 was answered, by whichever was left


def test_a_retry_goes_elsewhere_at_once() -> None:
    with (
        replicas(2) as (broken, whole),
        MCPClient([broken.url, whole.url], model="m", cache=None, retry=Retry(base_s=5, max_s=5)) as client,
    ):
        broken.status, broken.extra = 503, {"Retry_After": "7"}
        started = time.monotonic()
        ask(client, 40)
        assert time.monotonic() - started < 2, "a pause was made although another endpoint was there"
        assert broken.served <= 2, "an endpoint that asked for less was asked again"


def test_a_slow_endpoint_gets_less() -> None:
    with replicas(2) as (slow, quick), MCPClient([slow.url, quick.url], model="m", cache=None) as client:
        slow.pause_s, quick.pause_s = 0.05, 0.005
        ask(client, 100)
        assert slow.served < quick.served / 3, (slow.served, quick.served)


def test_an_endpoint_that_is_not_ready_is_set_aside_until_it_is() -> None:
    with replicas(2) as (starting, up), MCPClient([starting.url, up.url], model="m", cache=None) as client:
        starting.ready = False
        ask(client, 30)
        assert (starting.served, up.served) == (0, 30)
        starting.ready = True
        deadline = time.monotonic() + 10
        while not starting.served and time.monotonic() < deadline:
            ask(client, 1)
        assert starting.served


def test_a_step_of_a_sequence_fails_over_only_where_nothing_was_sent() -> None:
    step = {"sequence_id": 7}
    with replicas(1) as (alive,):
        dead = f"http://127.0.0.1:{free_port()}"
        with MCPClient([dead, alive.url], model="m") as client:
            for _ in range(10):
                client.infer([1.0], parameters=step)
        assert alive.served == 10
    with replicas(2) as (one, other), MCPClient([one.url, other.url], model="m") as client:
        one.drop = other.drop = True
        with pytest.raises(ConnectionFailedError):
            client.infer([1.0], parameters=step)
        assert one.served + other.served == 1


def test_the_asyncio_client_does_the_same() -> None:
    async def scene(urls: list[str]) -> None:
        async with AsyncMCPClient(urls, model="m", cache=None) as client:
            await asyncio.gather(*(client.infer([1.0]) for _ in range(64)))

    with replicas(2) as (one, other):
        asyncio.run(scene([f"http://127.0.0.1:{free_port()}", one.url, other.url]))
        assert one.served + other.served == 64
        assert min(one.served, other.served) > 8


def test_wrong_urls_are_told() -> None:
    with pytest.raises(ConfigurationError):
        MCPClient([])
    with pytest.raises(ConfigurationError, match="edge="):
        MCPClient(["edge:models/", "http://127.0.0.1:1"])


# --- names ---


@pytest.fixture
def resolver(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """A name service for the ``.test`` names of a test, in the place of the system's."""
    known: dict[str, list[str]] = {}
    real = socket.getaddrinfo

    def getaddrinfo(host: Any, port: Any, *rest: Any, **options: Any) -> Any:
        name = host.decode() if isinstance(host, bytes) else host
        if not str(name).endswith(".test"):
            return real(host, port, *rest, **options)
        if not known.get(name):
            raise socket.gaierror(socket.EAI_NONAME, "unknown")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in known[name]]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    return known


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_name_with_several_addresses_is_several_endpoints(
    resolver: dict[str, list[str]], kind: str
) -> None:
    one = Replica()
    other = Replica("127.0.0.2", one.port)
    resolver["svc.test"] = ["127.0.0.1", "127.0.0.2", "127.0.0.3"]  # nobody listens at the third
    url = f"http://svc.test:{one.port}"
    try:
        if kind == "sync":
            with MCPClient(url, model="m", cache=None) as client:
                ask(client, 60)
        else:

            async def scene() -> None:
                async with AsyncMCPClient(url, model="m", cache=None) as client:
                    for _ in range(60):
                        await client.infer([1.0])

            asyncio.run(scene())
        assert one.served + other.served == 60
        assert min(one.served, other.served) > 5
        assert {*one.hosts, *other.hosts} == {f"svc.test:{one.port}"}, "the Host header keeps the name"
    finally:
        one.close()
        other.close()


def test_a_name_is_resolved_again_when_its_address_fails(resolver: dict[str, list[str]]) -> None:
    one = Replica()
    resolver["svc.test"] = ["127.0.0.1"]
    with MCPClient(
        f"http://svc.test:{one.port}", model="m", cache=None, retry=Retry(attempts=8, base_s=0.3)
    ) as client:
        ask(client, 3)
        one.close()
        other = Replica("127.0.0.2", one.port)
        resolver["svc.test"] = ["127.0.0.2", "127.0.0.3"]
        try:
            ask(client, 5)
            assert other.served == 5
        finally:
            other.close()


def test_addresses_that_are_gone_are_closed_once_they_are_idle() -> None:
    made: list[str | None] = []

    def make(address: str | None) -> Endpoint:
        made.append(address)
        return Endpoint(url=str(address), transport=None, protocol="auto")

    site = Site.of("http://svc.test", make, resolve=True)
    endpoints = Endpoints([site], random.Random(1))
    assert endpoints.due(0.0) == [site]
    assert endpoints.due(1.0) == []
    endpoints.resolved(site, ["10.0.0.1", "10.0.0.2"])
    (name,) = endpoints.to_close()
    assert name.url == "None"
    busy = endpoints.choose(1.0)
    endpoints.resolved(site, ["10.0.0.8", "10.0.0.9"])
    assert busy not in endpoints.to_close()
    endpoints.finished(busy)
    assert busy in endpoints.to_close()
    assert endpoints.due(31.0) == [site]
    endpoints.unreachable(31.5)
    assert endpoints.due(31.6) == []  # not more often than once a second
    assert endpoints.due(32.1) == [site]
    assert made == [None, "10.0.0.1", "10.0.0.2", "10.0.0.8", "10.0.0.9"]


def test_localhost_works_at_once_whichever_address_the_server_is_on() -> None:
    with replicas(1) as (alive,):
        started = time.monotonic()
        with MCPClient(f"http://localhost:{alive.port}", model="m", retry=Retry(attempts=1)) as client:
            ask(client, 1)
        asyncio.run(_ask_once(f"http://localhost:{alive.port}"))
        assert time.monotonic() - started < 1


async def _ask_once(url: str) -> None:
    async with AsyncMCPClient(url, model="m", retry=Retry(attempts=1)) as client:
        await client.infer([1.0])


# --- the choice itself ---


class _Loaded:
    def __init__(self, latency_s: float, outstanding: int = 0) -> None:
        self.load = Load()
        self.load.answered(latency_s)
        self.load.outstanding = outstanding


def test_the_choice_weighs_latency_and_outstanding_requests() -> None:
    rng = random.Random(7)
    equal = [_Loaded(0.01), _Loaded(0.01), _Loaded(0.01)]
    drawn = Counter(id(pick(equal, rng)) for _ in range(3000))
    assert all(900 < count < 1100 for count in drawn.values())
    busy, idle = _Loaded(0.01, outstanding=3), _Loaded(0.01)
    assert sum(pick([busy, idle], rng) is busy for _ in range(1000)) < 40
    slow, quick = _Loaded(0.1), _Loaded(0.01)
    slow_share = sum(pick([slow, quick], rng) is slow for _ in range(20000)) / 20000
    assert 0 < slow_share < 0.005


def test_a_half_open_endpoint_gets_one_live_request_as_its_probe() -> None:
    sites = [
        Site.of(f"http://127.0.0.{n}", lambda a, n=n: Endpoint(str(n), None, "auto"), resolve=False)
        for n in (1, 2)
    ]
    endpoints = Endpoints(sites, random.Random(3))
    broken = next(iter(endpoints))
    for _ in range(5):
        broken.breaker.failed(0.0)
    assert all(endpoints.choose(0.1) is not broken for _ in range(20))
    assert endpoints.choose(10.0, may_probe=False) is not broken
    assert endpoints.choose(10.0) is broken
    assert all(endpoints.choose(10.0) is not broken for _ in range(20)), "one probe at a time"
    broken.breaker.succeeded()
    assert any(endpoints.choose(10.1) is broken for _ in range(200))
