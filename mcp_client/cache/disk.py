"""The disk tier: entries that outlive the process and are shared by the processes of a host (extra ``disk``).

``diskcache`` keeps them in one SQLite file (WAL: a kill -9 loses nothing that was committed). On its own it pickles
(CVE-2025-69872), so it gets a ``Disk`` that knows bytes and nothing else, for keys and for values: whatever else it finds
is refused before it is looked at. Values never become files of their own, so there are no paths in the database to follow
and no orphans after a crash.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import stat
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ..errors import ConfigurationError, MissingExtraError
from .blob import DamagedEntryError, decode, encode
from .guard import Guard
from .memory import Entry, Selector

try:
    import fcntl
except ImportError:  # Windows has none: there each process asks for itself
    fcntl = None  # type: ignore[assignment]

# How long another process's write may hold one up. A cache that is slower than this is no help.
_BUSY_S = 0.25


class DiskTier:
    """Entries by fingerprint in ``directory`` (made 0700), ``max_bytes`` on disk at most; the oldest go first.

    Nothing here raises because of the disk: a full, read-only or damaged one is a miss, a warning once, and counted in
    ``failures``. Safe to share between threads and processes, and after ``fork``.
    """

    name = "disk"

    def __init__(
        self, directory: str | os.PathLike[str], *, max_bytes: int, wall: Callable[[], float] = time.time
    ) -> None:
        self._directory = Path(directory)
        self._max_bytes = max_bytes
        self._wall = wall
        self._lock = threading.Lock()
        # The file whose locked bytes say which keys this process asks a server for.
        self._leads: int | None = None
        try:
            import diskcache
        except ImportError as error:
            raise MissingExtraError("disk", "diskcache", "a cache on disk") from error
        self._errors = (OSError, sqlite3.Error, diskcache.Timeout)
        self._guard = Guard(f"the cache on disk at {self._directory}", self._errors)
        self._store = self._open(diskcache)

    @property
    def failures(self) -> int:
        """How often the disk failed."""
        return self._guard.failures

    def get(self, key: bytes, now: float) -> Entry | None:
        """The fresh entry; ``None`` for what is missing, stale, damaged or not readable in time."""
        blob = self._guard.use(now, lambda: self._store.get(key), None)
        if blob is None:
            return None
        try:
            entry = decode(key, blob, now=now, wall=self._wall())
        except DamagedEntryError as error:
            self._guard.warn("damaged entry", f"holds a damaged entry, which is dropped: {error}")
            self.remove(key, now)
            return None
        return entry if entry.expires_at > now else None

    def put(self, key: bytes, entry: Entry, now: float) -> None:
        """Keep an entry until it expires or room is needed. One that takes a quarter of the room is not kept."""
        if self._guard.paused(now) or entry.nbytes > self._max_bytes / 4:
            return
        blob = encode(key, entry, now=now, wall=self._wall())
        expire = max(0.0, entry.expires_at - now)
        self._guard.use(now, lambda: self._store.set(key, blob, expire=expire, tag=entry.answer.model), None)

    def remove(self, key: bytes, now: float) -> None:
        """Drop one entry, for every process that shares the directory, as the two below."""
        self._guard.use(now, lambda: self._store.delete(key), None)

    def invalidate(self, model: str, now: float) -> None:
        self._guard.use(now, lambda: self._store.evict(model), None)

    def invalidate_where(self, matches: Selector, now: float) -> None:
        """Drop what fits: every entry is read for it."""
        self._guard.use(
            now, lambda: self._remove_all([key for key, entry in self.entries(now) if matches(entry)]), None
        )

    def entries(self, now: float) -> Iterator[tuple[bytes, Entry]]:
        """All readable entries, fresh or not; damaged ones are passed over."""
        for key in self._store if self._store is not None else ():
            blob = self._store.get(key)
            if blob is not None:
                with contextlib.suppress(DamagedEntryError):
                    yield key, decode(key, blob, now=now, wall=self._wall())

    def _remove_all(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            self._store.delete(key)

    def clear(self, now: float) -> None:
        if self._store is not None:
            self._guard.use(now, self._store.clear, None)

    def size(self, now: float) -> tuple[int, int] | None:
        """Entries, and bytes on disk; ``None`` where the disk can't say."""
        if self._store is None:
            return None
        return self._guard.use(now, lambda: (len(self._store), int(self._store.volume())), None)

    def __len__(self) -> int:
        size = self.size(time.monotonic())
        return size[0] if size is not None else 0

    def lead(self, key: bytes) -> bool:
        """Whether this process is to ask a server for ``key``: ``False`` while another one does.

        A lead ends with ``land``, and with the process, however it ends. Within a process the caller sees to it that a
        key has one leader. Byte locks of one file: the byte's place is taken from the key, so that there is nothing to
        make or to clean up for a key; two keys share a byte with a chance of 2⁻⁶².
        """
        if fcntl is None or self._store is None:
            return True
        try:
            with self._lock:
                if self._leads is None:
                    self._leads = os.open(
                        self._directory / "leads", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600
                    )
            fcntl.lockf(self._leads, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, _place(key))
        except BlockingIOError:
            return False
        except OSError as error:
            self._guard.warn(
                "leads",
                f"can't say who asks for what, so every process asks itself: {error}",
            )
        return True

    def land(self, key: bytes) -> None:
        """The answer is there, or there will be none: others may ask."""
        if fcntl is not None and self._leads is not None:
            with contextlib.suppress(OSError):  # the lock ends with the file anyhow
                fcntl.lockf(self._leads, fcntl.LOCK_UN, 1, _place(key))

    def close(self) -> None:
        if self._leads is not None:
            os.close(self._leads)
            self._leads = None
        if self._store is not None:
            self._store.close()
            # That was this thread's connection. Those of other threads close when nothing refers to them any more.
            self._store._local = threading.local()

    def _open(self, diskcache: Any) -> Any:
        try:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            found = self._directory.stat()
            if hasattr(os, "getuid") and found.st_uid != os.getuid():
                raise ConfigurationError(
                    f"the cache directory {self._directory} belongs to another user; choose one of your own"
                )
            if stat.S_IMODE(found.st_mode) != 0o700:
                self._directory.chmod(0o700)
            try:
                return self._connect(diskcache)
            except (sqlite3.DatabaseError, TypeError, ValueError, KeyError) as error:
                if isinstance(error, sqlite3.OperationalError):
                    raise  # locked, full or read-only, not damaged
                self._guard.warn("damaged", f"is damaged and starts over: {error}")
                for path in self._directory.glob("cache.db*"):
                    path.unlink(missing_ok=True)
                return self._connect(diskcache)
        except self._errors as error:
            self._guard.turn_off(str(error))
            return None

    def _connect(self, diskcache: Any) -> Any:
        # Every setting is given: what the database says of itself is not to be believed.
        given = {**diskcache.DEFAULT_SETTINGS, "size_limit": self._max_bytes}
        return diskcache.Cache(
            str(self._directory), timeout=_BUSY_S, disk=_bytes_only(diskcache, self._guard.warn), **given
        )


def _place(key: bytes) -> int:
    return int.from_bytes(key[:8], "little") & (2**62 - 1)  # an offset in a file is a signed 64-bit number


def _bytes_only(diskcache: Any, warn: Callable[[str, str], None]) -> type:
    """diskcache's hook for what keys and values look like in the database: bytes, as they are."""

    class BytesOnly(diskcache.Disk):  # type: ignore[misc]
        def put(self, key: bytes) -> tuple[sqlite3.Binary, bool]:
            return sqlite3.Binary(key), True

        def get(self, key: Any, raw: bool) -> bytes:
            if not raw or not isinstance(key, bytes):
                raise OSError("a key that this cache did not write")
            return key

        def store(self, value: bytes, read: bool, key: Any = None) -> tuple[int, int, None, sqlite3.Binary]:
            return 0, diskcache.core.MODE_RAW, None, sqlite3.Binary(value)

        def fetch(self, mode: int, filename: str | None, value: Any, read: bool) -> bytes:
            if mode != diskcache.core.MODE_RAW or filename is not None or not isinstance(value, bytes):
                warn(
                    "planted",
                    f"{self._directory} holds a value that this cache did not write; it is left alone",
                )
                raise OSError("a value that this cache did not write")  # which diskcache takes for a miss
            return value

        def remove(self, file_path: str) -> None:
            """No value has a file, so a path in the database is not ours to follow."""

    return BytesOnly
