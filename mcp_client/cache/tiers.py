"""The cache in memory with tiers behind it: disk, then shared. Memory hits never wait for them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

from .. import config
from .memory import Entry, MemoryCache


class Tier(Protocol):
    """A place for entries beyond this process. Its methods do I/O and never raise because of it: they miss."""

    name: str

    @property
    def failures(self) -> int: ...
    def get(self, key: bytes, now: float) -> Entry | None: ...
    def put(self, key: bytes, entry: Entry, now: float) -> None: ...
    def remove(self, key: bytes, now: float) -> None: ...
    def invalidate(self, model: str, now: float) -> None: ...
    def clear(self, now: float) -> None: ...
    def close(self) -> None: ...


class TieredCache(MemoryCache):
    """A ``MemoryCache`` whose ``fetch`` and ``keep`` reach further, and whose removals reach every tier.

    ``get``, ``peek`` and ``put`` are those of memory and do no I/O. On a miss the caller asks ``fetch`` where it may wait, and
    puts what it finds into memory as it would a server's answer; what a server answered it hands to ``keep``.
    ``invalidate`` and ``clear`` do I/O here. The nearest tier comes first.
    """

    def __init__(
        self, settings: config.Cache, tiers: Sequence[Tier], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(settings)
        self._tiers = tuple(tiers)
        self._clock = clock

    def fetch(self, key: bytes, now: float) -> Entry | None:
        """The fresh entry from the nearest tier that has it, kept from now on in the nearer ones too."""
        for number, tier in enumerate(self._tiers):
            entry = tier.get(key, now)
            if entry is not None:
                for nearer in self._tiers[:number]:
                    nearer.put(key, entry, now)
                return entry
        return None

    def keep(self, key: bytes, entry: Entry, now: float) -> None:
        """Store a new answer in every tier behind memory."""
        for tier in self._tiers:
            tier.put(key, entry, now)

    def invalidate(self, *, model: str | None = None, key: bytes | None = None) -> int:
        """As in memory, and in every tier; returns how many entries there were in memory."""
        count = super().invalidate(model=model, key=key)
        now = self._clock()
        for tier in self._tiers:
            if model is not None:
                tier.invalidate(model, now)
            elif key is not None:
                tier.remove(key, now)
        return count

    def clear(self) -> None:
        """Drop every entry of every tier: of all processes that share one."""
        super().clear()
        now = self._clock()
        for tier in self._tiers:
            tier.clear(now)

    def failures(self) -> dict[str, int]:
        """How often each tier failed and was passed over."""
        return {tier.name: tier.failures for tier in self._tiers}

    def close(self) -> None:
        for tier in self._tiers:
            tier.close()
