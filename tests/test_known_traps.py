"""The traps that other inference clients' trackers are full of, one test each where no other file has it.

| trap | tested |
|---|---|
| all requests stick to one replica because of keep-alive | ``test_requests_reach_a_replica_that_came_later`` |
| a client shared between threads swaps results | ``tests/test_promises.py``, ``tests/transports/`` (each protocol) |
| … and crashes under gevent | ``test_greenlets_share_a_client`` |
| using it after ``fork`` hangs | ``tests/test_promises.py``, ``tests/transports/test_grpc_transport.py`` |
| a close from the garbage collector in another thread raises | ``test_a_client_that_the_collector_closes_in_another_thread`` |
| an asyncio client fails in a second event loop | ``test_two_event_loops_at_once``; in turn: ``tests/test_promises.py`` |
| a dropped keep-alive connection surfaces | ``tests/resilience/test_connections.py`` |
| gRPC's limit of 4 MB | ``test_tensors_larger_than_grpcs_default_limit`` |
| gzip by accident | ``tests/transports/test_compression.py`` |
| FP16 and BF16 through JSON | ``test_small_floats_to_a_server_without_binary_data`` |
| object arrays of str against bytes | ``test_strings_of_every_kind_to_a_real_server`` |
| outputs in another order than asked for | ``tests/test_call_options.py`` |
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import socket
import subprocess
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from mcp_client import AsyncMCPClient, InvalidInputError, MCPClient
from mcp_client.transports import connections
from stub_server import StubServer
from tests import models
from tests.conftest import RawServer, read_request, respond


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StubServer]:
    root = tmp_path_factory.mktemp("models")
    models.identity(root / "floats.onnx", "FP32", ("n", 3))
    models.identity(root / "text.onnx", "BYTES")
    with StubServer(root, grpc=True, uds=root / "http.sock", grpc_uds=root / "grpc.sock") as running:
        running.socket_urls = [f"unix://{root}/http.sock", f"grpc+unix://{root}/grpc.sock"]  # type: ignore[attr-defined]
        yield running


@pytest.fixture(params=["http", "grpc", "unix", "grpc+unix"])
def url(request: pytest.FixtureRequest, server: StubServer) -> str:
    urls = [server.url, server.grpc_url, *server.socket_urls]  # type: ignore[attr-defined]
    return next(url for url in urls if url.startswith(f"{request.param}:"))


def test_requests_reach_a_replica_that_came_later(
    affine_model: Path, raw_server: Callable[..., RawServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A balancer chooses by connection: one that lives for ever never sees a replica that was added."""
    monkeypatch.setattr(connections, "MAX_AGE_S", 0.2)
    with StubServer(affine_model) as one, StubServer(affine_model) as other:
        ports = [one._port]
        turns = itertools.count()

        def balance(connection: socket.socket) -> None:
            with socket.create_connection(("127.0.0.1", ports[next(turns) % len(ports)])) as replica:

                def answers() -> None:
                    with suppress(OSError):
                        while data := replica.recv(65536):
                            connection.sendall(data)

                threading.Thread(target=answers, daemon=True).start()
                while data := connection.recv(65536):
                    replica.sendall(data)

        with MCPClient(raw_server(balance).url, cache=None) as client:
            client.infer([1.0, 2.0, 3.0])
            ports.append(other._port)
            deadline = threading.Event()
            for _ in range(200):
                client.infer([1.0, 2.0, 3.0])
                if other.received["demand"]:
                    break
                deadline.wait(0.02)
        assert other.received["demand"]
        assert one.received["demand"]


GREENLETS = """
from gevent import monkey
monkey.patch_all()
import sys, gevent, numpy as np
if sys.argv[1].startswith("grpc"):
    import grpc.experimental.gevent
    grpc.experimental.gevent.init_gevent()  # grpcio's own requirement
from mcp_client import MCPClient

with MCPClient(sys.argv[1], model="floats") as client:
    def work(n):
        for k in range(10):
            x = np.full((n % 5 + 1, 3), n * 100 + k, np.float32)
            assert np.array_equal(client.infer(x, cache=False).output, x), (n, k)
            assert np.array_equal(client.infer(x[:1] * 0 + k).output, x[:1] * 0 + k), (n, k)
        return 1
    jobs = [gevent.spawn(work, n) for n in range(20)]
    gevent.joinall(jobs, raise_error=True, timeout=60)
    print(sum(job.value for job in jobs))
"""


def test_greenlets_share_a_client(url: str) -> None:
    pytest.importorskip("gevent", reason="gevent is a development tool")
    done = subprocess.run(
        [sys.executable, "-c", GREENLETS, url], capture_output=True, text=True, timeout=90, check=False
    )
    assert (done.stdout.strip(), done.returncode) == ("20", 0), done.stderr[-2000:]


def test_a_client_that_the_collector_closes_in_another_thread(url: str, recwarn: Any) -> None:
    """A client in a circle of references, dropped in one thread and collected in another, after use in a third."""
    failures: list[Any] = []
    clients: list[weakref.ref[Any]] = []
    hook = sys.unraisablehook
    sys.unraisablehook = failures.append
    gc.disable()
    try:

        def use() -> None:
            circle: dict[str, Any] = {"client": MCPClient(url, model="floats")}
            circle["itself"] = circle
            circle["client"].infer([[1.0, 2.0, 3.0]])
            clients.append(weakref.ref(circle["client"]))

        async def use_async() -> None:
            circle: dict[str, Any] = {"client": AsyncMCPClient(url, model="floats")}
            circle["itself"] = circle
            await circle["client"].infer([[1.0, 2.0, 3.0]])
            clients.append(weakref.ref(circle["client"]))

        user = threading.Thread(target=lambda: (use(), asyncio.run(use_async())))
        user.start()
        user.join()
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore", ResourceWarning
            )  # a client that nobody closed: that much may be said
            collector = threading.Thread(target=gc.collect)
            collector.start()
            collector.join(30)
        assert not collector.is_alive()
    finally:
        gc.enable()
        sys.unraisablehook = hook
    assert [client() for client in clients] == [None, None]
    assert not [failure for failure in failures if not isinstance(failure.exc_value, ResourceWarning)]
    with MCPClient(url, model="floats") as client:  # nothing that others use went with it
        assert client.infer([[1.0, 2.0, 3.0]]).output.tolist() == [[1.0, 2.0, 3.0]]


def test_two_event_loops_at_once(url: str) -> None:
    client = AsyncMCPClient(url, model="floats", cache=None)
    failures: list[BaseException] = []

    async def work(seed: int) -> None:
        async def one(n: int) -> None:
            x = np.full((1, 3), seed * 100 + n, np.float32)
            assert np.array_equal((await client.infer(x)).output, x)

        await asyncio.gather(*(one(n) for n in range(20)))

    def loop(seed: int) -> None:
        try:
            asyncio.run(work(seed))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=loop, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    asyncio.run(client.close())
    assert not failures


def test_tensors_larger_than_grpcs_default_limit(url: str) -> None:
    """4 MB, both ways; in messages (shared memory has no limit of the kind)."""
    x = np.arange(3 * 500_000, dtype=np.float32).reshape(-1, 3)
    with MCPClient(url, model="floats", cache=None) as client:
        for endpoint in client._engine.endpoints:
            endpoint.transport.arena.enabled = False
        assert np.array_equal(client.infer(x).output, x)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_small_floats_to_a_server_without_binary_data(
    raw_server: Callable[..., RawServer], dtype: Any
) -> None:
    """Other clients send their bits as integers, or numbers that the server reads as something else."""
    asked: list[str] = []
    name = "FP16" if dtype is np.float16 else "BF16"
    metadata = (
        f'{{"name":"m","extensions":[],"inputs":[{{"name":"x","datatype":"{name}","shape":[-1]}}]}}'.encode()
    )

    def handle(connection: socket.socket) -> None:
        while (request := read_request(connection)) is not None:
            asked.append(request[0])
            respond(connection, 200, metadata)

    with (
        MCPClient(raw_server(handle).url, protocol="oip", model="m") as client,
        pytest.raises(InvalidInputError, match=f"{name}, which has no JSON form"),
    ):
        client.infer(np.ones(2, dtype))
    assert not [line for line in asked if line.startswith("POST")]


@pytest.mark.parametrize("protocol", ["auto", "mcp"])
def test_strings_of_every_kind_to_a_real_server(url: str, protocol: Any) -> None:
    if protocol == "mcp" and url.startswith("grpc"):
        pytest.skip("MCP's own protocol has no gRPC form")
    wanted = ["a", "", "tra\0iling\0", "Gr\u00fc\u00dfe"]
    forms: list[Any] = [
        wanted,
        [text.encode() for text in wanted],
        np.array(wanted, object),
        np.array([text.encode() for text in wanted], object),
        np.array(["a", "", "tra\0iling\0", "Gr\u00fc\u00dfe".encode()], object),
    ]
    with MCPClient(url, model="text", protocol=protocol, cache=None) as client:
        for form in forms:
            assert client.infer(form).output.tolist() == [text.encode() for text in wanted]
        fixed = ["a", "", "b\0c"]  # numpy's own string types have no trailing NULs
        for dtype in ("U", "S"):
            assert client.infer(np.array(fixed, dtype)).output.tolist() == [text.encode() for text in fixed]
