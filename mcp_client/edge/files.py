"""What identifies a file: its digest, and a stamp that changes when the file does."""

from __future__ import annotations

import hashlib
from pathlib import Path

from ..errors import EdgeError

Stamp = tuple[int, int, int]


def file_digest(path: Path) -> str:
    """``sha256:…`` of a file."""
    try:
        with path.open("rb") as file:
            return "sha256:" + hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise EdgeError(f"{path} can't be read: {error}") from error


def file_stamp(path: Path) -> Stamp:
    """What changes when a file does: modification time in ns, size, inode."""
    try:
        found = path.stat()
    except OSError as error:
        raise EdgeError(f"{path} can't be read: {error}") from error
    return found.st_mtime_ns, found.st_size, found.st_ino
