"""Protobuf messages as bytes: taken apart so that their large ``bytes`` fields are never copied."""

from __future__ import annotations

from typing import TypeVar

from google.protobuf.message import DecodeError, Message

from ..errors import ProtocolError

M = TypeVar("M", bound=Message)


def parse(kind: type[M], body: bytes, what: str) -> M:
    try:
        message: M = kind.FromString(body)
    except (
        DecodeError,
        ValueError,
    ) as error:  # ValueError: text that is not UTF-8, in the pure-Python protobuf
        raise ProtocolError(f"{what} is not a {kind.__name__}, or is damaged ({len(body)} bytes)") from error
    return message


def read_varint(body: bytes | memoryview, at: int) -> tuple[int, int]:
    """The number at ``at`` and where it ends. ``IndexError`` if the bytes end first."""
    byte = body[at]
    if byte < 0x80:  # quick for the commonest case
        return byte, at + 1
    value, shift = byte & 0x7F, 7
    while True:
        at += 1
        byte = body[at]
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at + 1
        shift += 7
        if shift > 63:
            raise IndexError


def write_varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def split(body: bytes | memoryview, field: int, what: str) -> tuple[bytes, list[memoryview]]:
    """A message without one of its ``bytes`` fields, and that field's values, as views: nothing large is copied."""
    tag = field << 3 | 2
    view = memoryview(body)
    rest: list[memoryview] = []
    values: list[memoryview] = []
    at = kept = 0
    end = len(body)
    try:
        while at < end:
            start = at
            key, at = read_varint(body, at)
            kind = key & 7
            if kind == 2:
                length, at = read_varint(body, at)
                if key == tag:
                    if kept < start:
                        rest.append(view[kept:start])
                    values.append(view[at : at + length])
                    kept = at + length
                at += length
            elif kind == 0:
                _, at = read_varint(body, at)
            elif kind in (1, 5):
                at += 8 if kind == 1 else 4
            else:
                raise ProtocolError(f"{what} is damaged: wire type {kind} at byte {start}")
    except IndexError:
        at = end + 1
    if at != end:
        raise ProtocolError(f"{what} is truncated: {end} bytes, and its last field goes on")
    if not values:
        return bytes(body), values
    if kept < end:
        rest.append(view[kept:])
    return b"".join(rest), values
