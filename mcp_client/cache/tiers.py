"""The cache in memory with tiers behind it: disk, then shared. Memory hits never wait for them."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Protocol

from blake3 import blake3

from .. import config
from .fingerprint import SIZE
from .memory import CacheStats, Entry, MemoryCache, Selector, TierStats, selector


class Tier(Protocol):
    """A place for entries beyond this process. Its methods do I/O and never raise because of it: they miss."""

    name: str

    @property
    def failures(self) -> int: ...
    def get(self, key: bytes, now: float) -> Entry | None: ...
    def put(self, key: bytes, entry: Entry, now: float) -> None: ...
    def remove(self, key: bytes, now: float) -> None: ...
    def invalidate(self, model: str, now: float) -> None: ...
    def invalidate_where(self, matches: Selector, now: float) -> None: ...
    def size(self, now: float) -> tuple[int, int] | None: ...
    def lead(self, key: bytes) -> bool: ...
    def land(self, key: bytes) -> None: ...
    def clear(self, now: float) -> None: ...
    def close(self) -> None: ...


def open_cache(settings: config.Cache, credentials: bytes) -> MemoryCache:
    """The cache that the settings ask for. ``credentials``: 32 bytes for whoever asks, or b""; a ``tenant`` goes before it."""
    tiers: list[Tier] = []
    if settings.directory is not None:
        from .disk import DiskTier

        tiers.append(DiskTier(settings.directory, max_bytes=settings.disk_bytes))
    if settings.shared_url is not None:
        from .shared import SharedTier

        tiers.append(SharedTier(settings.shared_url))
    if not tiers:
        return MemoryCache(settings)
    scope = credentials if settings.tenant is None else blake3(b"tenant:" + settings.tenant.encode()).digest()
    return TieredCache(settings, tiers, scope=scope)


class TieredCache(MemoryCache):
    """A ``MemoryCache`` whose ``fetch`` and ``keep`` reach further, and whose removals reach every tier.

    ``get``, ``peek`` and ``put`` are those of memory and do no I/O. On a miss the caller asks ``fetch`` where it may wait, and
    puts what it finds into memory as it would a server's answer; what a server answered it hands to ``keep``.
    ``invalidate`` and ``clear`` do I/O here. The nearest tier comes first.

    ``scope`` (32 bytes) stands for whoever may see these answers. It is mixed into the keys behind memory, except for models
    that ``settings.public_models`` names, so that what was fetched with one credential is not found with another.
    """

    def __init__(
        self,
        settings: config.Cache,
        tiers: Sequence[Tier],
        *,
        scope: bytes = b"",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(settings)
        self._tiers = tuple(tiers)
        self._scope = scope
        self._public = frozenset(settings.public_models)
        self._clock = clock
        self._found: Counter[str] = Counter()  # by tier; a count lost to a race is no harm
        self._missed: Counter[str] = Counter()

    def fetch(self, key: bytes, model: str, now: float) -> Entry | None:
        """The entry from the nearest tier that has it, kept from now on in the nearer ones too."""
        scoped = self._scoped(key, model)
        for number, tier in enumerate(self._tiers):
            entry = tier.get(scoped, now)
            if entry is not None:
                self._found[tier.name] += 1
                for nearer in self._tiers[:number]:
                    nearer.put(scoped, entry, now)
                return entry
            self._missed[tier.name] += 1
        return None

    def keep(self, key: bytes, entry: Entry, now: float) -> None:
        """Store a new answer in every tier behind memory."""
        scoped = self._scoped(key, entry.answer.model)
        for tier in self._tiers:
            tier.put(scoped, entry, now)

    def lead(self, key: bytes, model: str) -> bool:
        """Whether this process is to ask a server; ``False`` while another process of this machine does."""
        return all(tier.lead(self._scoped(key, model)) for tier in self._tiers)

    def land(self, key: bytes, model: str) -> None:
        """The end of a ``lead``: the answer is kept, or there will be none."""
        for tier in self._tiers:
            tier.land(self._scoped(key, model))

    def invalidate(
        self,
        *,
        model: str | None = None,
        key: bytes | None = None,
        path: str | None = None,
        session: str | None = None,
    ) -> int:
        """As in memory, and in every tier; returns how many entries there were in memory."""
        count = super().invalidate(model=model, key=key, path=path, session=session)
        now = self._clock()
        for tier in self._tiers:
            if key is not None:
                for each in {key, self._scoped(key, "")}:  # a public model's, and any other's
                    tier.remove(each, now)
            elif model is not None and path is None and session is None:
                tier.invalidate(model, now)
            else:
                tier.invalidate_where(selector(model, path, session), now)
        return count

    def clear(self) -> None:
        """Drop every entry of every tier: of all processes that share one."""
        super().clear()
        now = self._clock()
        for tier in self._tiers:
            tier.clear(now)

    def stats(self) -> CacheStats:
        """As of memory, with ``tiers``: hits, misses and failures of each tier behind it."""
        found = {
            tier.name: TierStats(self._found[tier.name], self._missed[tier.name], tier.failures)
            for tier in self._tiers
        }
        return super().stats()._replace(tiers=found)

    def sizes(self) -> dict[str, tuple[int, int]]:
        """As of memory, and of the tiers that can say."""
        now = self._clock()
        found = {tier.name: tier.size(now) for tier in self._tiers}
        return super().sizes() | {name: size for name, size in found.items() if size is not None}

    def failures(self) -> dict[str, int]:
        """How often each tier failed and was passed over."""
        return {tier.name: tier.failures for tier in self._tiers}

    def close(self) -> None:
        for tier in self._tiers:
            tier.close()

    def _scoped(self, key: bytes, model: str) -> bytes:
        if not self._scope or model in self._public:
            return key
        return blake3(key, key=self._scope).digest(SIZE)
