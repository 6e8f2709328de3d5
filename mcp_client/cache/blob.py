"""An entry as bytes, for the tiers beyond this process: what is read back is exact, or it is refused.

    "MCPE" · u8 format · u8 flags (1: zstd) · 16 bytes BLAKE3 of key and all that follows · u32 length · header, JSON
    · the tensors' bytes (``tensors.to_raw``) one after the other, compressed as one if flagged

The key is part of the checksum, so an entry filed under another key is refused like a damaged one. Times are of the wall
clock: the monotonic one means nothing to another process. Nothing is ever unpickled, evaluated or imported.
"""

from __future__ import annotations

import math
import struct
import sys
from typing import Any

import orjson
from blake3 import blake3

from ..errors import MCPError
from ..result import Answer
from ..tensors import datatype_of, from_raw, nbytes_of, to_raw
from .memory import Entry

try:  # of the extra ``disk``; without it entries are stored as they are
    # PEP 784's module: 1 MB on a device where ``zstandard`` takes 22
    if sys.version_info >= (3, 14):
        from compression import zstd
    else:
        from backports import zstd
except ImportError:
    zstd = None  # type: ignore[assignment]

FORMAT = 1
_MAGIC = b"MCPE"
_ZSTD = 1
_HEAD = struct.Struct("<4sBB16sI")
_ALIGNED = 16  # where the tensors begin in the bytes, as malloc has it: no copy is needed to read them
# Tensors below this gain nothing; of larger ones a sample says whether it pays (noise-like floats do not compress).
_COMPRESS_FROM = 1024
_SAMPLE = 64 * 1024
_PAYS_BELOW = 0.8
_LARGEST = 2**31 - 1  # bytes of an answer, as on the wire


class DamagedEntryError(MCPError):
    """The bytes are not an entry of this format, or not the one that was stored under this key."""


def encode(key: bytes, entry: Entry, *, now: float, wall: float) -> bytes:
    """``now`` is the monotonic clock's time and ``wall`` the wall clock's at the same moment."""
    answer = entry.answer
    raws = [bytes(to_raw(array)) for array in answer.outputs.values()]
    header: dict[str, Any] = {
        "model": answer.model,
        "version": answer.version,
        "id": answer.id,
        "digest": answer.digest,
        "max_age_s": answer.max_age_s,
        "stored_at": wall - (now - entry.stored_at),
        "expires_at": wall + (entry.expires_at - now),
        # what never ends, or never was, is null: JSON has no infinity
        "fresh_for": entry.fresh_until - entry.stored_at,
        "revalidate_for": entry.revalidate_until - entry.stored_at,
        "path": entry.path,
        "session": entry.session,
        "size": sum(map(len, raws)),
        "tensors": [
            [name, datatype_of(array), list(array.shape), len(raw)]
            for (name, array), raw in zip(answer.outputs.items(), raws, strict=True)
        ],
    }
    data = b"".join(raws)
    flags = 0
    if zstd is not None and len(data) >= _COMPRESS_FROM:
        sample = data[:_SAMPLE]
        if len(zstd.compress(sample, 1)) < _PAYS_BELOW * len(sample):
            data, flags = zstd.compress(data, 1), _ZSTD
    text = orjson.dumps(header)
    text += b" " * (-(_HEAD.size + len(text)) % _ALIGNED)
    digest = _digest(key, flags, text, data)
    return _HEAD.pack(_MAGIC, FORMAT, flags, digest, len(text)) + text + data


def decode(key: bytes, blob: bytes, *, now: float, wall: float) -> Entry:
    """The entry, its times on this process's monotonic clock. ``DamagedEntryError`` for anything but what was stored."""
    if len(blob) < _HEAD.size:
        raise DamagedEntryError(f"a stored entry has {_HEAD.size} bytes at least; got {len(blob)}")
    magic, form, flags, digest, length = _HEAD.unpack_from(blob)
    if magic != _MAGIC or form != FORMAT:
        raise DamagedEntryError(f"expected a stored entry of format {FORMAT}; got {magic!r}, format {form}")
    view = memoryview(blob)[_HEAD.size :]
    text, data = view[:length], view[length:]
    if _digest(key, flags, text, data) != digest:
        raise DamagedEntryError("a stored entry's checksum does not fit its bytes")
    try:  # a checksum is no signature: whoever can write to the store can make one that fits
        return _read(text, data, flags, now=now, wall=wall)
    except (MCPError, KeyError, TypeError, ValueError, OverflowError, MemoryError) as error:
        raise DamagedEntryError(f"a stored entry can't be read: {error}") from error


def _read(text: memoryview, data: memoryview, flags: int, *, now: float, wall: float) -> Entry:
    header = orjson.loads(text)
    if flags & _ZSTD:
        if zstd is None:
            raise DamagedEntryError("it is compressed: pip install 'mcp2026[disk]' to read it")
        size = header["size"]
        try:
            if zstd.get_frame_info(data).decompressed_size != size or size > _LARGEST:
                raise DamagedEntryError(
                    f"it says that it unpacks to {size} bytes; its frame says otherwise, or it is too many"
                )
            data = memoryview(zstd.ZstdDecompressor().decompress(data))
        except zstd.ZstdError as error:
            raise DamagedEntryError(str(error)) from error
    outputs = {}
    at = 0
    for name, datatype, shape, size in header["tensors"]:
        array = from_raw(data[at : at + size], datatype, shape, what=name)
        outputs[name] = array if array.flags.aligned else array.copy()  # behind a tensor of odd length
        at += size
    texts = {name: str(header[name]) for name in ("model", "version", "id", "digest")}
    stored_at = now - (wall - header["stored_at"])
    return Entry(
        answer=Answer.of(outputs, **texts, max_age_s=header["max_age_s"]),
        stored_at=stored_at,
        expires_at=now + (header["expires_at"] - wall),
        nbytes=nbytes_of(outputs),
        fresh_until=_after(stored_at, header["fresh_for"]),
        revalidate_until=_after(stored_at, header["revalidate_for"], otherwise=-math.inf),
        path=str(header["path"]),
        session=str(header["session"]),
    )


def _after(moment: float, seconds: float | None, otherwise: float = math.inf) -> float:
    return otherwise if seconds is None else moment + float(seconds)


def _digest(key: bytes, flags: int, text: bytes | memoryview, data: bytes | memoryview) -> bytes:
    hasher = blake3(key + bytes([FORMAT, flags]))
    hasher.update(struct.pack("<I", len(text)))
    hasher.update(text)
    hasher.update(data)
    return hasher.digest(16)
