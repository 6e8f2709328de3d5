"""Compression: nobody gets it who did not ask, whoever asked gets it both ways, and no bomb goes off."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import socket
import threading
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcp_client import (
    AsyncMCPClient,
    ConfigurationError,
    MCPClient,
    OverloadedError,
    ProtocolError,
    RequestRejectedError,
    Retry,
)
from mcp_client._httpx import httpx
from mcp_client.transports.compression import TooLargeError, UnpackError, pack, unpack
from stub_server import StubServer
from tests import models
from tests.conftest import RawServer, read_request, respond

ZEROS = np.zeros((20_000, 3), np.float32)  # 240 KB that hardly take any


@pytest.fixture(scope="module")
def server(affine_model: Path) -> Iterator[StubServer]:
    with StubServer(affine_model, grpc=True, max_body_bytes=2_000_000) as running:
        yield running


class Wiretap:
    """Passes everything on to a server, and counts the bytes that go each way."""

    def __init__(self, start: Callable[..., RawServer], target: str) -> None:
        host, _, port = target.rpartition("//")[2].rpartition(":")
        self._to = (host, int(port))
        self.there = self.back = 0
        self.heads: list[bytes] = []
        self.url = start(self._serve).url.replace("http", target.partition(":")[0])

    def _serve(self, connection: socket.socket) -> None:
        with socket.create_connection(self._to) as server:

            def answers() -> None:
                with contextlib.suppress(OSError):  # either side may go at any time
                    while data := server.recv(65536):
                        self.back += len(data)
                        self.heads.append(data)
                        connection.sendall(data)

            threading.Thread(target=answers, daemon=True).start()
            while data := connection.recv(65536):
                self.there += len(data)
                self.heads.append(data)
                server.sendall(data)


@pytest.fixture(params=["http", "mcp", "grpc"])
def tap(request: pytest.FixtureRequest, server: StubServer, raw_server: Callable[..., RawServer]) -> Wiretap:
    tap = Wiretap(raw_server, server.grpc_url if request.param == "grpc" else server.url)
    tap.protocol = request.param if request.param == "mcp" else "auto"  # type: ignore[attr-defined]
    return tap


def ask(tap: Any, *, asynchronous: bool, **options: Any) -> Any:
    options = {"cache": None, "protocol": tap.protocol, **options}
    if asynchronous:

        async def work() -> Any:
            async with AsyncMCPClient(tap.url, **options) as client:
                _no_shared_memory(client)
                return (await client.infer(ZEROS)).output

        return asyncio.run(work())
    with MCPClient(tap.url, **options) as client:
        _no_shared_memory(client)
        return client.infer(ZEROS).output


def _no_shared_memory(client: Any) -> None:
    for endpoint in client._engine.endpoints:
        if endpoint.transport.arena is not None:
            endpoint.transport.arena.enabled = False


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("algorithm", ["gzip", "deflate"])
def test_both_ways_are_compressed_where_it_was_asked_for(
    tap: Wiretap, algorithm: str, asynchronous: bool
) -> None:
    output = ask(tap, asynchronous=asynchronous, compression=algorithm)
    assert tap.there < 30_000
    assert tap.back < 30_000
    np.testing.assert_array_equal(output, np.broadcast_to(models.BIAS, (20_000, 2)))


@pytest.mark.parametrize("asynchronous", [False, True])
def test_nothing_is_compressed_where_it_was_not(tap: Wiretap, asynchronous: bool) -> None:
    """A server that compresses whenever a client lists gzip (Triton) made large tensors eight times slower."""
    ask(tap, asynchronous=asynchronous)
    if tap.protocol == "mcp":  # type: ignore[attr-defined]  # JSON: a zero is "0.0,"
        assert tap.there > 100_000
    else:
        assert tap.there > ZEROS.nbytes
    assert tap.back > 160_000
    heads = b"".join(tap.heads).lower()
    assert b"content-encoding" not in heads
    if not tap.url.startswith("grpc"):
        assert b"accept-encoding: identity" in heads


def test_a_users_own_client_is_not_compressed_either(
    server: StubServer, raw_server: Callable[..., RawServer]
) -> None:
    for options, there in (({}, False), ({"compression": "gzip"}, True)):
        tap = Wiretap(raw_server, server.url)
        with httpx.Client() as own, MCPClient(tap.url, http_client=own, cache=None, **options) as client:
            client.infer(ZEROS)
        assert (b"content-encoding: gzip" in b"".join(tap.heads).lower()) is there
        assert (tap.back < 30_000) is there


def test_answers_alone(server: StubServer, raw_server: Callable[..., RawServer]) -> None:
    """By the header, of a client or of a call: a small request with a large answer."""
    for client_headers, call_headers in (
        ({"Accept-Encoding": "gzip"}, None),
        (None, {"accept-encoding": "gzip"}),
    ):
        tap = Wiretap(raw_server, server.url)
        with MCPClient(tap.url, headers=client_headers, cache=None) as client:
            _no_shared_memory(client)
            client.infer(ZEROS, headers=call_headers)
        assert tap.there > ZEROS.nbytes
        assert tap.back < 30_000


def test_a_server_that_compresses_unasked_is_understood(raw_server: Callable[..., RawServer]) -> None:
    answer = json.dumps(
        {"model_name": "m", "outputs": [{"name": "y", "datatype": "INT64", "shape": [1], "data": [7]}]}
    )

    def handle(connection: socket.socket) -> None:
        while (request := read_request(connection)) is not None:
            if request[0].startswith("POST"):
                respond(connection, 200, gzip.compress(answer.encode()), Content_Encoding="gzip")
            else:
                respond(
                    connection, 200, b'{"name":"m","extensions":[],"inputs":[{"name":"x","datatype":"FP32"}]}'
                )

    with MCPClient(raw_server(handle).url, model="m", protocol="oip") as client:
        assert client.infer([1.0]).output.tolist() == [7]


@pytest.mark.parametrize("algorithm", ["br", "GZIP", "", 1])
def test_unknown_algorithms(algorithm: Any) -> None:
    with pytest.raises(ConfigurationError, match='"gzip", "deflate" or None'):
        MCPClient("http://127.0.0.1:1", compression=algorithm)


# --- bombs --------------------------------------------------------------------------------------------------

BOMB = zlib.compressobj(9, wbits=31)
BOMB = BOMB.compress(b"\0" * 200_000_000) + BOMB.flush()  # type: ignore[assignment, attr-defined]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_bomb_of_a_response_stops_at_the_limit(
    raw_server: Callable[..., RawServer], asynchronous: bool
) -> None:
    def handle(connection: socket.socket) -> None:
        while read_request(connection) is not None:
            respond(connection, 200, BOMB, Content_Encoding="gzip")  # type: ignore[arg-type]

    url = raw_server(handle).url

    async def awaited() -> None:
        async with AsyncMCPClient(url, protocol="oip", max_response_bytes=1_000_000) as client:
            await client.metadata("m")

    def described() -> None:
        with MCPClient(url, protocol="oip", max_response_bytes=1_000_000) as client:
            client.metadata("m")

    with pytest.raises(ProtocolError, match="max_response_bytes"):
        asyncio.run(awaited()) if asynchronous else described()


def test_a_bomb_of_a_response_over_grpc_stops_at_the_limit() -> None:
    from concurrent import futures

    def bomb(message: bytes, context: Any) -> bytes:
        context.set_compression(grpc.Compression.Gzip)
        return bytes(100_000_000)

    server = grpc.server(futures.ThreadPoolExecutor(1), options=[("grpc.max_send_message_length", -1)])
    handlers = {"ServerMetadata": grpc.unary_unary_rpc_method_handler(bomb)}
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("inference.GRPCInferenceService", handlers),)
    )
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        with (
            MCPClient(f"grpc://127.0.0.1:{port}", max_response_bytes=1_000_000) as client,
            pytest.raises(ProtocolError, match="max_response_bytes") as raised,
        ):
            client.server()
        assert raised.value.attempts == 1
    finally:
        server.stop(0)


@pytest.mark.parametrize("route", ["/v1/infer", "/v2/models/affine/infer"])
def test_bodies_that_mcp_server_refuses(server: StubServer, route: str) -> None:
    good = b'{"input": [0, 0, 0], "shape": [1, 3]}'
    with httpx.Client() as http:

        def post(body: bytes, encoding: str) -> tuple[int, str]:
            answer = http.post(server.url + route, content=body, headers={"Content-Encoding": encoding})
            document = answer.json()
            return answer.status_code, document["code"] if "code" in document else document["error"]["code"]

        assert post(BOMB, "gzip") == (413, "body_too_large")  # type: ignore[arg-type]
        assert post(good, "gzip") == (400, "malformed_request")
        assert post(gzip.compress(good)[:-5], "gzip") == (400, "malformed_request")
        assert post(zlib.compress(good) + b"more", "deflate") == (400, "malformed_request")
        assert post(good, "br") == (415, "unsupported_encoding")
        assert post(gzip.compress(b"") * 1000, "gzip") == (400, "malformed_request")


@pytest.mark.parametrize(
    ("asked", "given_back"),
    [("gzip", "gzip"), ("deflate, gzip;q=0.5", "deflate"), ("gzip;q=0, deflate", "deflate"), ("br, zstd", None),
     ("*", None), ("identity", None), ("", None), ("GZIP", "gzip"), ("gzip; q=0.0", None)],
)  # fmt: skip
def test_what_an_accept_encoding_asks_for(server: StubServer, asked: str, given_back: str | None) -> None:
    with httpx.Client() as http:
        answer = http.post(
            f"{server.url}/v1/infer",
            json={"input": [0, 0, 0], "shape": [1, 3]},
            headers={"Accept-Encoding": asked},
        )
    assert answer.headers.get("content-encoding") == given_back
    assert answer.json()["shape"] == [1, 2]


def test_a_request_too_large_for_a_grpc_server_is_refused_for_good(tmp_path: Path, stub_server: Any) -> None:
    """Not RESOURCE_EXHAUSTED as of an overloaded server: sending it again helps nobody."""
    url = stub_server(models.affine(tmp_path / "m.onnx"), grpc=True, max_body_bytes=100_000).grpc_url
    for compression in (None, "gzip"):
        with MCPClient(url, compression=compression, retry=Retry(attempts=3)) as client:
            _no_shared_memory(client)
            client.metadata()
            with pytest.raises((RequestRejectedError, ProtocolError)) as raised:
                client.infer(ZEROS)
            assert not isinstance(raised.value, OverloadedError)
            assert raised.value.attempts == 1


# --- bytes --------------------------------------------------------------------------------------------------


@given(st.binary(max_size=3000), st.sampled_from(["gzip", "deflate"]), st.integers(0, 40))
def test_what_is_packed_is_unpacked_again(body: bytes, algorithm: str, less: int) -> None:
    packed = pack(body, algorithm)
    assert unpack(packed, algorithm, len(body)) == body
    assert unpack(memoryview(packed), algorithm, len(body) + less) == body
    if body:
        with pytest.raises(TooLargeError):
            unpack(packed, algorithm, len(body) - 1)
    for end in range(0, len(packed), max(1, len(packed) // 20)):
        with pytest.raises(UnpackError):
            unpack(packed[:end], algorithm, len(body))


@given(st.binary(max_size=200), st.sampled_from(["gzip", "deflate"]))
def test_any_bytes_are_survived(body: bytes, algorithm: str) -> None:
    try:
        unpack(body, algorithm, 1000)
    except (UnpackError, TooLargeError):
        return


def test_members_one_after_another() -> None:
    assert unpack(gzip.compress(b"one") + gzip.compress(b"two"), "gzip", 6) == b"onetwo"
