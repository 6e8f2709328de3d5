"""HTTP/1.1 messages: any correct response is read the same however it is cut; any other gives one of our errors."""

from __future__ import annotations

import asyncio
import socket
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mcp_client import (
    AsyncMCPClient,
    ConfigurationError,
    InvalidInputError,
    MCPClient,
    ProtocolError,
    Retry,
    ServerError,
)
from mcp_client.protocols import WireRequest, WireResponse
from mcp_client.transports.http11 import HeadWriter, Reply, receive_buffer
from tests.conftest import RawServer

LIMIT = 10**6
LARGE = bytes(range(256)) * 1024


def read(raw: bytes, cuts: list[int], *, ends: bool = False, limit: int = LIMIT) -> Reply:
    """Feed ``raw`` in pieces, as sockets give them; ``ends``: the server closes then."""
    reply = Reply(limit, receive_buffer())
    at = 0
    for cut in [*sorted(cuts), len(raw)]:
        while at < cut and not reply.complete:
            room = reply.room()
            piece = raw[at : min(cut, at + len(room))]
            room[: len(piece)] = piece
            reply.got(len(piece))
            at += len(piece)
    if ends and not reply.complete:
        reply.ended()
    return reply


def message(body: bytes, *headers: str, status: str = "200 OK", version: str = "1.1") -> bytes:
    return "\r\n".join([f"HTTP/{version} {status}", *headers, "", ""]).encode() + body


def chunked(body: bytes, size: int) -> bytes:
    pieces = [body[at : at + size] for at in range(0, len(body), size)]
    return b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"


RESPONSES = {
    "empty": (message(b"", "Content-Length: 0"), b"", True),
    "small": (message(b"abc", "Content-Length: 3"), b"abc", True),
    "large": (message(LARGE, f"Content-Length: {len(LARGE)}"), LARGE, True),
    "large, binary": (
        message(LARGE, "Inference-Header-Content-Length: 77", f"Content-Length: {len(LARGE)}"),
        LARGE,
        True,
    ),
    "chunked": (message(chunked(LARGE, 7001), "Transfer-Encoding: chunked"), LARGE, True),
    "until the end": (message(LARGE, "Content-Type: x/y"), LARGE, False),
    "HTTP/1.0": (message(b"abc", "Content-Length: 3", version="1.0"), b"abc", False),
    "close": (message(b"abc", "Content-Length: 3", "Connection: close"), b"abc", False),
    "continue": (message(b"", status="100 Continue") + message(b"abc", "Content-Length: 3"), b"abc", True),
    "no content": (message(b"", status="204 No Content"), b"", True),
    "gzip": (
        message(
            packed := zlib.compress(LARGE, wbits=31),
            "Content-Encoding: gzip",
            f"Content-Length: {len(packed)}",
        ),
        LARGE,
        True,
    ),
}


@pytest.mark.parametrize("name", RESPONSES)
@given(data=st.data())
@settings(max_examples=25)
def test_a_response_is_the_same_however_it_is_cut(name: str, data: st.DataObject) -> None:
    raw, body, keep_alive = RESPONSES[name]
    near = st.integers(0, min(len(raw), 400))
    cuts = data.draw(st.lists(near | st.integers(0, len(raw)), max_size=6))
    reply = read(raw, cuts, ends=True)
    assert reply.complete
    response = reply.response()
    assert bytes(response.body) == body
    assert reply.keep_alive is keep_alive


def test_a_large_tensor_behind_a_json_header_lies_aligned() -> None:
    raw = RESPONSES["large, binary"][0]
    response = read(raw, []).response()
    tensor = np.frombuffer(response.body, np.uint8)[77:]
    assert tensor.ctypes.data % 64 == 0
    assert not tensor.flags.writeable
    with pytest.raises(ValueError, match="WRITEABLE"):
        tensor.flags.writeable = True


def test_headers_that_come_twice_are_one_list() -> None:
    raw = message(b"", "Cache-Control: max-age=5", "cache-control: no-store", "Content-Length: 0")
    assert read(raw, []).response().headers["cache-control"] == "max-age=5, no-store"


@pytest.mark.parametrize(
    "raw",
    [
        b"garbage\r\n\r\n",
        b"\x00\x01\x02",
        message(b"", "Content-Length: -1"),
        message(b"", "Content-Length: 1e3"),
        message(b"abc", "Content-Length: 3", "Content-Length: 4"),
        message(b"3\r\nabc\r\n0\r\n\r\n", "Content-Length: 3", "Transfer-Encoding: chunked"),
        message(b"zz\r\nabc", "Transfer-Encoding: chunked"),
        message(b"", status="101 Switching Protocols"),
        message(b"", "A" * 400_000 + ": b"),
        message(b"", *(f"A{n}: {'b' * 90}" for n in range(4000))),
        b"HTTP/2 200\r\n\r\n",
    ],
    ids=lambda raw: repr(raw[:30]),
)
def test_what_is_no_response_is_our_error(raw: bytes) -> None:
    with pytest.raises(ProtocolError):
        read(raw, [])


@pytest.mark.parametrize("announced", [True, False])
@pytest.mark.parametrize("size", [LIMIT + 1, 10**15])
def test_a_body_over_the_limit_is_refused_before_it_is_taken(announced: bool, size: int) -> None:
    piece = b"x" * 60_000
    raw = message(piece, f"Content-Length: {size}") if announced else message(piece * 20, "A: b")
    with pytest.raises(ProtocolError, match="max_response_bytes"):
        read(raw, [])


def test_a_bomb_is_refused() -> None:
    bomb = zlib.compress(b"\0" * (LIMIT + 1), wbits=31)
    raw = message(bomb, "Content-Encoding: gzip", f"Content-Length: {len(bomb)}")
    with pytest.raises(ProtocolError, match="max_response_bytes"):
        read(raw, []).response()


@given(
    name=st.sampled_from(sorted(RESPONSES)),
    change=st.sampled_from(["cut", "flip", "insert"]),
    place=st.floats(0, 1),
    byte=st.integers(0, 255),
    near=st.booleans(),
)
@settings(max_examples=400)
def test_a_damaged_response_is_read_or_is_our_error(
    name: str, change: str, place: float, byte: int, near: bool
) -> None:
    raw = bytearray(RESPONSES[name][0])
    at = int(place * (min(len(raw), 200) if near else len(raw)))
    if change == "cut":
        del raw[at:]
    elif change == "insert":
        raw.insert(at, byte)
    elif at < len(raw):
        raw[at] ^= byte
    try:
        reply = read(bytes(raw), [], ends=True)
        if reply.complete:
            assert isinstance(reply.response(), WireResponse)
    except ProtocolError:
        pass


def test_bytes_after_the_end_close_the_connection() -> None:
    for more in (b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", b"\0garbage"):
        reply = read(message(b"abc", "Content-Length: 3") + more, [])
        assert reply.complete
        assert not reply.keep_alive
        assert reply.response().body == b"abc"
        assert reply.response().status == 200


# --- what is sent ---


@pytest.mark.parametrize("bad", ["a\r\nX-Evil: 1", "a\nb", "a\0b", "日本"])
def test_a_header_can_not_break_out_of_its_line(bad: str) -> None:
    writer = HeadWriter("h", "", {})
    for headers in ({"X-A": bad}, {bad: "x"}):
        with pytest.raises(InvalidInputError, match="header"):
            writer.write(WireRequest("GET", "/", headers), 0, "")
        with pytest.raises(ConfigurationError, match="header"):
            HeadWriter("h", "", headers)


@pytest.mark.parametrize("path", ["/a b", "/a\r\nX-Evil: 1", "/a\tb"])
def test_a_path_can_not_break_out_of_its_line(path: str) -> None:
    with pytest.raises(InvalidInputError, match="percent-encode"):
        HeadWriter("h", "", {}).write(WireRequest("GET", path), 0, "")


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_an_answer_that_comes_before_all_was_sent_counts(
    raw_server: Callable[..., RawServer], kind: str
) -> None:
    """As from a proxy with a limit: it answers 413, and reads on for a while so that the answer arrives."""

    def handle(connection: socket.socket) -> None:
        while (request := first_line(connection)) is not None:
            if request.startswith("GET"):
                connection.sendall(message(b'{"name": "t", "extensions": []}', "Content-Length: 31"))
                continue
            connection.sendall(message(b'{"error": "too much"}', "Content-Length: 21", status="413 x"))
            connection.settimeout(1)
            while connection.recv(2**20):
                pass
            return

    def first_line(connection: socket.socket) -> str | None:
        head = b""
        while b"\r\n\r\n" not in head:
            if not (more := connection.recv(1)):
                return None
            head += more
        return head.decode("latin-1")

    running = raw_server(handle)
    x = np.zeros(8 * 2**20, np.float32)
    options: Any = {"model": "m", "cache": None, "retry": Retry(attempts=1), "protocol": "oip", "timeout": 10}

    def ask() -> None:
        with MCPClient(running.url, **options) as client:
            client.infer({"x": x})

    async def aask() -> None:
        async with AsyncMCPClient(running.url, **options) as client:
            await client.infer({"x": x})

    for _ in range(2):
        with pytest.raises(ServerError, match="too much") as caught:
            ask() if kind == "sync" else asyncio.run(aask())
        assert caught.value.status == 413
