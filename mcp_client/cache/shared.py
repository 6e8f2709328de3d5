"""The shared tier: entries for a fleet in Redis or Valkey (extra ``redis``)."""

from __future__ import annotations

import base64
import time
from collections.abc import Callable
from typing import Any

from ..errors import MissingExtraError
from .blob import DamagedEntryError, decode, encode
from .fingerprint import to_text
from .guard import Guard
from .memory import Entry, Selector

# Beyond this a cache in the same data centre is broken, and asking the model is the better idea.
_TIMEOUT_S = 0.25


class SharedTier:
    """Entries by fingerprint in the store at ``url`` (``redis://``, ``rediss://``, ``unix://``), each until it expires.

    ``prefix`` keeps applications apart that share a store. The store's own ``maxmemory`` policy makes room. Entries carry a
    checksum, but whoever can write to the store can write answers: give it a password and a network of its own.

    Nothing here raises because of the store: one that is away or slow is a miss, a warning once, and counted in ``failures``.
    """

    name = "shared"

    def __init__(self, url: str, *, prefix: str = "mcp", wall: Callable[[], float] = time.time) -> None:
        try:
            import redis
        except ImportError as error:
            raise MissingExtraError("redis", "redis", "a shared cache") from error
        self._store: Any = redis.Redis.from_url(
            url, socket_timeout=_TIMEOUT_S, socket_connect_timeout=_TIMEOUT_S, retry=None
        )
        self._prefix = prefix
        self._wall = wall
        self._guard = Guard("the shared cache", (redis.RedisError, OSError))

    @property
    def failures(self) -> int:
        """How often the store failed."""
        return self._guard.failures

    def get(self, key: bytes, now: float) -> Entry | None:
        """The fresh entry; ``None`` for what is missing, stale, damaged or not there in time."""
        found = self._guard.use(now, lambda: self._store.get(self._name(key)), None)
        if found is None:
            return None
        try:
            entry = decode(key, found, now=now, wall=self._wall())
        except DamagedEntryError as error:
            self._guard.warn("damaged", f"holds an entry that can't be used, and loses it: {error}")
            self.remove(key, now)
            return None
        return entry if entry.expires_at > now else None

    def put(self, key: bytes, entry: Entry, now: float) -> None:
        """Keep an entry until it expires."""
        left_ms = int((entry.expires_at - now) * 1000)
        if left_ms <= 0 or self._guard.paused(now):
            return
        wall = self._wall()
        blob, name, index = (
            encode(key, entry, now=now, wall=wall),
            self._name(key),
            self._index(entry.answer.model),
        )

        def work() -> None:
            with self._store.pipeline(transaction=False) as steps:
                steps.set(name, blob, px=left_ms)
                # The model's entries by when they end, so that they can be dropped together; what has ended leaves.
                steps.zadd(index, {name: wall + left_ms / 1000})
                steps.zremrangebyscore(index, "-inf", wall)
                steps.pexpire(index, left_ms, nx=True)
                steps.pexpire(index, left_ms, gt=True)
                steps.execute()

        self._guard.use(now, work, None)

    def remove(self, key: bytes, now: float) -> None:
        """Drop one entry, for the whole fleet, as the two below."""
        self._guard.use(now, lambda: self._store.delete(self._name(key)), None)

    def invalidate(self, model: str, now: float) -> None:
        def work() -> None:
            index = self._index(model)
            for name, _ in self._store.zscan_iter(index):
                self._store.unlink(name)
            self._store.unlink(index)

        self._guard.use(now, work, None)

    def invalidate_where(self, matches: Selector, now: float) -> None:
        """Drop what fits: every entry of this prefix is read for it."""

        def work() -> None:
            for name in self._store.scan_iter(f"{self._prefix}:e:*"):
                blob = self._store.get(name)
                key = base64.b32decode(name.rpartition(b":")[2].upper())
                if blob is not None and _fits(key, blob, matches, now, self._wall()):
                    self._store.unlink(name)

        self._guard.use(now, work, None)

    def size(self, now: float) -> tuple[int, int] | None:
        """Unknown: counting would read the whole store. It has figures of its own."""
        return None

    def lead(self, key: bytes) -> bool:
        """Always: machines don't wait for one another."""
        return True

    def land(self, key: bytes) -> None:
        """Nothing is held."""

    def clear(self, now: float) -> None:
        def work() -> None:
            for name in self._store.scan_iter(f"{self._prefix}:*"):
                self._store.unlink(name)

        self._guard.use(now, work, None)

    def close(self) -> None:
        self._store.close()

    def _name(self, key: bytes) -> str:
        return f"{self._prefix}:e:{to_text(key)}"

    def _index(self, model: str) -> str:
        return f"{self._prefix}:m:{model}"


def _fits(key: bytes, blob: bytes, matches: Selector, now: float, wall: float) -> bool:
    try:
        return matches(decode(key, blob, now=now, wall=wall))
    except DamagedEntryError:
        return True  # no loss
