"""What is in memory as one file, and back: to start a process warm, or to carry answers to a machine without a network.

    "MCPA" · u8 format · then for each entry: 20 bytes fingerprint · u32 length · the entry as ``blob.py`` has it

Each entry has a checksum of its own, so what is read is right. A damaged entry costs itself; a damaged length, what comes
after it too.
"""

from __future__ import annotations

import contextlib
import glob
import logging
import os
import secrets
import struct
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from ..errors import ConfigurationError
from .blob import DamagedEntryError, decode, encode
from .fingerprint import SIZE
from .memory import Entry

log = logging.getLogger("mcp_client")

_MAGIC = b"MCPA\x01"
_ABANDONED_S = 3600.0
_RECORD = struct.Struct(f"<{SIZE}sI")


def write(
    file: str | os.PathLike[str], entries: Iterable[tuple[bytes, Entry]], *, now: float, wall: float
) -> int:
    """Write the entries that have not expired; returns how many. The file is whole or is not replaced; mode 0600."""
    path = Path(file)
    _sweep(path)
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}.draft")
    count = 0
    try:
        with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as out:
            out.write(_MAGIC)
            for key, entry in entries:
                if entry.expires_at > now:
                    blob = encode(key, entry, now=now, wall=wall)
                    out.write(_RECORD.pack(key, len(blob)))
                    out.write(blob)
                    count += 1
            out.flush()
            os.fsync(out.fileno())
        draft.replace(path)
        _sync_folder(path.parent)
    finally:
        draft.unlink(missing_ok=True)
    return count


def _sync_folder(folder: Path) -> None:
    """Make the new name durable, where the system can (Windows can't open a folder)."""
    if hasattr(os, "O_DIRECTORY"):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _sweep(path: Path) -> None:
    """Remove what a process that was killed left of its export. A younger draft may be another process's at work."""
    for draft in path.parent.glob(f".{glob.escape(path.name)}.*.draft"):
        with contextlib.suppress(OSError):  # somebody else swept it
            if time.time() - draft.stat().st_mtime > _ABANDONED_S:
                draft.unlink()


def read(file: str | os.PathLike[str], *, now: float, wall: float) -> Iterator[tuple[bytes, Entry]]:
    """The entries that have not expired. Damaged ones are passed over with one warning.

    ``ConfigurationError`` for a file that is no archive; ``OSError`` for one that can't be read.
    """
    damaged = 0
    with Path(file).open("rb") as source:
        start = source.read(len(_MAGIC))
        if start != _MAGIC:
            raise ConfigurationError(
                f"{os.fspath(file)} is not an archive of cached answers: it starts with {start!r}, expected {_MAGIC!r}; "
                "write one with client.cache.export(file)"
            )
        while head := source.read(_RECORD.size):
            blob = b""
            if len(head) == _RECORD.size:
                key, length = _RECORD.unpack(head)
                blob = source.read(length) if length <= os.fstat(source.fileno()).st_size else b""
            try:
                entry = decode(key, blob, now=now, wall=wall) if blob else None
            except DamagedEntryError:
                entry = None
            if entry is None:
                damaged += 1
                if not blob:  # cut short: nothing after it can be found
                    break
            elif entry.expires_at > now:
                yield key, entry
    if damaged:
        log.warning("%s: %d damaged entries were passed over", os.fspath(file), damaged)
