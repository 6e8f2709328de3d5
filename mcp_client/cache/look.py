"""Look into a disk tier's folder without changing a byte of it: SQLite is opened for reading only, and ``diskcache`` not at all.

``DiskTier`` is made for use: it writes its settings when it opens a database, and starts over where one is damaged.
"""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from urllib.parse import quote

from ..errors import ConfigurationError
from .blob import DamagedEntryError, decode
from .memory import Entry

_RAW = (
    1  # diskcache's mode of a value that is bytes in the database itself, the only one that the tier writes
)


def entries(directory: str | os.PathLike[str]) -> Iterator[tuple[bytes, Entry | None]]:
    """Every key with its entry, fresh or not; ``None`` for one that is damaged or that no tier wrote.

    ``ConfigurationError`` if the folder is no cache, or its database can't be read.
    """
    file = _database(directory)
    try:
        with closing(_connect(file)) as db:
            rows = db.execute("SELECT key, raw, mode, filename, value FROM Cache ORDER BY rowid")
            for key, raw, mode, filename, value in rows:
                yield bytes(key) if isinstance(key, bytes) else b"", _read(key, raw, mode, filename, value)
    except sqlite3.Error as error:
        raise ConfigurationError(
            f"{file} can't be read as a cache, and nothing was changed: {error}"
        ) from error


def size_limit(directory: str | os.PathLike[str]) -> int:
    """The bytes that the folder may take, as its last user set it."""
    file = _database(directory)
    try:
        with closing(_connect(file)) as db:
            ((limit,),) = db.execute("SELECT value FROM Settings WHERE key = 'size_limit'").fetchall()
            return int(limit)
    except (sqlite3.Error, TypeError, ValueError) as error:
        raise ConfigurationError(
            f"{file} can't be read as a cache, and nothing was changed: {error}; to start over, delete the folder"
        ) from error


def _database(directory: str | os.PathLike[str]) -> Path:
    file = Path(directory) / "cache.db"
    if not file.is_file():
        raise ConfigurationError(
            f"{os.fspath(directory)} is no cache: there is no cache.db in it; name the folder of Cache(directory=…)"
        )
    return file


def _connect(file: Path) -> sqlite3.Connection:
    # Without a log beside it nobody has the database open, and it can be read where even SQLite's lock files can't be made.
    idle = not file.with_name("cache.db-wal").exists() and not os.access(file.parent, os.W_OK)
    options = "mode=ro&immutable=1" if idle else "mode=ro"
    return sqlite3.connect(f"file:{quote(str(file.absolute()))}?{options}", uri=True, timeout=5.0)


def _read(key: object, raw: object, mode: object, filename: object, value: object) -> Entry | None:
    if not (
        isinstance(key, bytes) and raw == 1 and mode == _RAW and filename is None and isinstance(value, bytes)
    ):
        return None
    try:
        return decode(key, value, now=time.monotonic(), wall=time.time())
    except DamagedEntryError:
        return None
