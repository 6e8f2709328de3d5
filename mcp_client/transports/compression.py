"""Compression, where it is asked for: of the requests' bodies here; of the responses' by the transports themselves.

Off by default: zlib is slower than all but slow networks, and most tensors hardly get smaller.
"""

from __future__ import annotations

import zlib
from dataclasses import replace
from typing import Any

from ..protocols import WireRequest, WireResponse

ALGORITHMS = ("gzip", "deflate")
# Smaller bodies fit into one packet anyway.
_SMALLEST = 1024
# Above this compressing takes milliseconds, which an event loop has not got.
_IN_A_THREAD = 64 * 2**10
_MOST_MEMBERS = 16
_LEVEL = 1  # numbers hardly get smaller by a higher one


def pack(body: bytes, algorithm: str) -> bytes:
    """``deflate`` is zlib's format, as HTTP means it (RFC 9110 8.4.1.2)."""
    packer = zlib.compressobj(_LEVEL, wbits=31 if algorithm == "gzip" else 15)
    return packer.compress(body) + packer.flush()


class UnpackError(ValueError):
    """A body is not what its encoding says."""


class TooLargeError(ValueError):
    """A body is larger than the limit once it is unpacked; it was not unpacked any further."""


def unpack(body: bytes | memoryview, algorithm: str, limit: int) -> bytes:
    """A body of at most ``limit`` bytes; gzip may have several members, one after another (RFC 1952 2.2)."""
    plain: list[bytes] = []
    size = 0
    for _ in range(_MOST_MEMBERS):
        unpacker = zlib.decompressobj(wbits=31 if algorithm == "gzip" else 15)
        try:
            part = unpacker.decompress(body, limit - size + 1)
        except zlib.error as error:
            raise UnpackError(str(error)) from error
        size += len(part)
        if size > limit:
            raise TooLargeError(f"it has {size} bytes or more")
        plain.append(part)
        if not unpacker.eof:
            raise UnpackError("it is truncated")
        body = unpacker.unused_data
        if not body:
            return b"".join(plain)
        if algorithm != "gzip":
            raise UnpackError(f"{len(body)} bytes are left over after its end")
    raise UnpackError(f"it has more than {_MOST_MEMBERS} gzip members")


def _is_packed(wire: WireRequest) -> bool:
    """Only inferences: no server is known to read anything else compressed."""
    return wire.path.endswith("/infer") and sum(map(len, wire.body)) >= _SMALLEST


def _packed(wire: WireRequest, algorithm: str) -> WireRequest:
    body = pack(b"".join(wire.body), algorithm)
    return replace(wire, headers={**wire.headers, "Content-Encoding": algorithm}, body=(body,))


class _Around:
    """An HTTP transport with its requests compressed; everything else is the transport's own."""

    def __init__(self, transport: Any, algorithm: str) -> None:
        self._transport = transport
        self._algorithm = algorithm

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class Compressing(_Around):
    """For threads."""

    def send(self, wire: WireRequest, deadline: float) -> WireResponse:
        if _is_packed(wire):
            wire = _packed(wire, self._algorithm)
        response: WireResponse = self._transport.send(wire, deadline)
        return response


class AsyncCompressing(_Around):
    """For asyncio."""

    async def send(self, wire: WireRequest, deadline: float) -> WireResponse:
        if _is_packed(wire):
            if sum(map(len, wire.body)) > _IN_A_THREAD:
                import asyncio

                wire = await asyncio.to_thread(_packed, wire, self._algorithm)
            else:
                wire = _packed(wire, self._algorithm)
        response: WireResponse = await self._transport.send(wire, deadline)
        return response
