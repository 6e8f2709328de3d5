"""HTTP/1.1 messages without I/O: the head of a request as bytes, and a response put together as it comes in.

Responses are parsed by llhttp (``httptools``), Node's parser: what it does not accept is an error here as well. The body of
a large response bypasses it: once the head says how long it is, it is received where it will stay.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import httptools
import numpy as np

from ..errors import ConfigurationError, InvalidInputError, ProtocolError
from ..protocols import WireRequest, WireResponse
from .compression import ALGORITHMS, TooLargeError, UnpackError, unpack

_LONGEST_HEAD = 256 * 2**10
_CHUNK = 64 * 2**10
_ALIGNMENT = 64  # so that a tensor behind a JSON header can be used where it lies


class HeadWriter:
    """Writes the heads of one origin's requests. ``headers`` go with each of them."""

    def __init__(self, host: str, prefix: str, headers: Mapping[str, str]) -> None:
        self._prefix = prefix
        fixed = {"Host": host, **headers}
        # Without this some servers use gzip, which makes a large tensor eight times slower (PROTOCOL.md section 2).
        if "accept-encoding" not in {name.lower() for name in headers}:
            fixed["Accept-Encoding"] = "identity"
        self._headers = fixed
        self._names = frozenset(name.lower() for name in fixed)
        try:
            self._fixed = _lines(fixed)
        except InvalidInputError as error:
            raise ConfigurationError(error.message) from None

    def write(self, wire: WireRequest, size: int, token: str) -> bytes:
        """``size``: the body's bytes; ``token``: a bearer token, or nothing."""
        fixed, lines = self._fixed, _lines(wire.headers)
        said = {name.lower() for name in wire.headers}
        if not said.isdisjoint(self._names):
            fixed = _lines(without(self._headers, said))
        if wire.path.count(" ") or not wire.path.isprintable():
            raise InvalidInputError(f"{wire.path!r} can't be the path of a URL; percent-encode it")
        if token and "authorization" not in said:
            lines += f"Authorization: Bearer {token}\r\n"
        if size or wire.method == "POST":
            lines += f"Content-Length: {size}\r\n"
        head = f"{wire.method} {self._prefix}{wire.path} HTTP/1.1\r\n{fixed}{lines}\r\n"
        return head.encode("latin-1")


def without(headers: Mapping[str, str], said: Collection[str]) -> dict[str, str]:
    """What goes with every request, but for what one says itself (``said``: names in lower case)."""
    return {name: value for name, value in headers.items() if name.lower() not in said}


def _lines(headers: Mapping[str, str]) -> str:
    """Header lines; a name or value that would break out of its line is refused."""
    lines = "".join([f"{name}: {value}\r\n" for name, value in headers.items()])
    count = len(headers)
    if lines.count("\r") != count or lines.count("\n") != count or "\0" in lines:
        raise InvalidInputError(
            "a header's name or value holds a line break or a NUL, which HTTP can't carry"
        )
    try:
        lines.encode("latin-1")
    except UnicodeEncodeError:
        names = [name for name, value in headers.items() if any(ord(c) > 255 for c in name + value)]
        raise InvalidInputError(
            f"header {names[0]!r} holds characters beyond Latin-1, which HTTP can't carry"
        ) from None
    return lines


def receive_buffer() -> memoryview:
    return memoryview(bytearray(_CHUNK))


class Reply:
    """One response as it comes in: receive into ``room()``, say how much came with ``got(n)``, until it is ``complete``.

    ``limit``: bytes that a body may have, unpacked; ``buffer``: what ``receive_buffer`` made, one a connection. Raises
    ``ProtocolError`` for what is no correct response, or too large.
    """

    def __init__(self, limit: int, buffer: memoryview) -> None:
        self.complete = False
        self.keep_alive = False  # whether the connection can take another request
        self.status = 0
        self.headers: dict[str, str] = {}
        self._limit = limit
        self._parser: Any = httptools.HttpResponseParser(self)
        self._buffer = buffer
        self._chunks: list[bytes] = []
        self._size = 0
        self._head_size = 0
        self._in_body = False
        self._body: memoryview | None = None  # of a large response: all of it
        self._filled = 0

    # --- what came ---

    def room(self) -> memoryview:
        """Where the next bytes go."""
        return self._buffer if self._body is None else self._body[self._filled :]

    def got(self, count: int) -> None:
        """``count`` bytes have come into ``room()``."""
        if self._body is not None:
            self._filled += count
            self.complete = self._filled == len(self._body)
            return
        try:
            self._parser.feed_data(self._buffer[:count])
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            if not self.complete:  # else: bytes after its end, for which nobody has asked
                raise ProtocolError(
                    f"this is no correct HTTP/1.1: {str(error) or type(error).__name__}"
                ) from error
            self.keep_alive = False
        if self._size > self._limit:
            self._too_large(self._size)
        if not self._in_body:
            self._head_size += count
            if self._head_size > _LONGEST_HEAD:
                raise ProtocolError(f"the response's headers take more than {_LONGEST_HEAD} bytes")
        elif not self.complete:
            self._take_over()

    def ended(self) -> bool:
        """The server sends no more: whether this is where the response ends, as one without a length does."""
        delimited = "content-length" in self.headers or "chunked" in self.headers.get("transfer-encoding", "")
        self.complete = self._in_body and not delimited
        self.keep_alive = False
        return self.complete

    @property
    def begun(self) -> bool:
        return self._head_size > 0 or self._in_body

    def _take_over(self) -> None:
        """Receive the rest of a large body where it stays, without the parser in between."""
        length = self.headers.get("content-length", "")
        if not length:
            return
        size = int(length)  # the parser has checked it
        if size > self._limit:
            self._too_large(size)
        if size - self._size < _CHUNK:
            return
        before = self.headers.get("inference-header-content-length", "")
        offset = -int(before) % _ALIGNMENT if before.isdigit() and len(before) < 10 else 0
        space = memoryview(np.empty(size + 2 * _ALIGNMENT, np.uint8).data)
        offset += -np.frombuffer(space, np.uint8).ctypes.data % _ALIGNMENT
        self._body = space[offset : offset + size]
        for chunk in self._chunks:
            self._body[self._filled : self._filled + len(chunk)] = chunk
            self._filled += len(chunk)
        self._chunks = []

    # --- what the parser calls ---

    def on_message_begin(self) -> None:
        if self.complete:
            self.keep_alive = False  # a second response, for which nobody has asked

    def on_header(self, name: bytes, value: bytes) -> None:
        if self.complete:
            return
        key, text = name.decode("latin-1").lower(), value.decode("latin-1")
        self.headers[key] = f"{self.headers[key]}, {text}" if key in self.headers else text

    def on_headers_complete(self) -> None:
        if self.complete:
            return
        self.status = self._parser.get_status_code()
        if self.status < 200:  # "100 Continue" and its like: the response itself is still to come
            self.headers = {}
            return
        self._in_body = True
        self.keep_alive = self._parser.should_keep_alive()

    def on_body(self, chunk: bytes) -> None:
        if not self.complete:
            self._size += len(chunk)
            self._chunks.append(chunk)

    def on_message_complete(self) -> None:
        self.complete = self._in_body

    # --- what it is ---

    def response(self) -> WireResponse:
        body: bytes | memoryview
        if self._body is not None:
            body = self._body.toreadonly()
        else:
            body = self._chunks[0] if len(self._chunks) == 1 else b"".join(self._chunks)
        encoding = self.headers.get("content-encoding", "identity")
        return WireResponse(self.status, self.headers, unpacked(body, encoding, self._limit))

    def _too_large(self, size: int) -> None:
        raise too_large(size, self._limit)


def too_large(size: int, limit: int) -> ProtocolError:
    return ProtocolError(
        f"the response has {size} bytes or more, over the limit of {limit}; raise max_response_bytes if that is meant"
    )


def unpacked(body: bytes | memoryview, encoding: str, limit: int) -> bytes | memoryview:
    """A body as it was before ``Content-Encoding``."""
    encoding = encoding.strip().lower()
    if encoding in ("identity", "") or not len(body):
        return body
    if encoding not in ALGORITHMS:
        raise ProtocolError(f"the server compressed its answer with {encoding!r}, which was not asked for")
    try:
        return unpack(body, encoding, limit)
    except TooLargeError:
        raise too_large(limit + 1, limit) from None
    except UnpackError as error:
        raise ProtocolError(f"the server's {encoding} body is damaged: {error}") from error
