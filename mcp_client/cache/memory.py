"""The L4 cache in memory: answers by fingerprint under a byte and an entry budget, with expiry.

An answer's arrays are read-only, so a hit hands out the entry itself: nothing is copied, under the lock or
elsewhere.

What was prefetched waits apart (``_ahead``) until somebody asks for it; only then does the policy hear of
it. Meanwhile it may fill free room, and up to ``_AHEAD_SHARE`` of the budgets in place of entries that nobody
has come back to. It never takes the place of an entry that has proven itself, and makes room for demanded
answers when it has more than its share or has outlived a whole turnover of the cache unasked.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from blake3 import blake3

from .. import config
from ..errors import InvalidInputError
from ..result import Answer
from .adaptive import Adaptive
from .lru_k import LRUK
from .policy import Policy
from .s3_fifo import S3FIFO

_AHEAD_SHARE = 0.25
_MOST_NOTED = 256  # hits between two looks of the policy at most: enough to make the lock's cost vanish


@dataclass(slots=True)
class Entry:
    """An answer in the cache. Times are seconds of the monotonic clock.

    It is fresh until ``fresh_until``; until ``revalidate_until`` it may be handed out while a new one is fetched, and until
    ``expires_at``, when it goes, if no server answers. ``nbytes`` is what its arrays truly hold; ``path`` and ``session`` are
    those of the request that brought it.
    """

    answer: Answer
    stored_at: float
    expires_at: float
    nbytes: int
    fresh_until: float = math.inf
    revalidate_until: float = -math.inf
    path: str = ""
    session: str = ""


Lost = tuple[bytes, Entry]


class TierStats(NamedTuple):
    """Of a tier behind memory: how often it had what memory lacked, had it not, and failed."""

    hits: int
    misses: int
    failures: int


class ModelStats(NamedTuple):
    """Of one model, in memory: hits, misses and evictions so far; entries, their bytes and the oldest's age in seconds, now."""

    hits: int
    misses: int
    evictions: int
    entries: int
    bytes: int
    oldest_s: float


class CacheStats(NamedTuple):
    """What happened since the cache was made, and what it holds now.

    An entry that was asked for after it had expired counts as an expiration and as a miss.
    """

    hits: int
    misses: int
    evictions: int
    expirations: int
    entries: int
    bytes: int
    tiers: Mapping[str, TierStats] = {}


Selector = Callable[[Entry], bool]


def session_tag(session: str) -> str:
    """How an entry remembers whose request brought it: the id itself is nobody's business on a disk or in a store."""
    return blake3(session.encode("utf-8", "surrogatepass")).hexdigest(length=10) if session else ""


def selector(model: str | None, path: str | None, session: str | None) -> Selector:
    """Which entries fit everything that is given."""
    tag = None if session is None else session_tag(session)

    def matches(entry: Entry) -> bool:
        return (
            (model is None or entry.answer.model == model)
            and (path is None or entry.path == path)
            and (tag is None or entry.session == tag)
        )

    return matches


def _policy(settings: config.Cache) -> Policy[bytes]:
    def lru_k() -> Policy[bytes]:
        return LRUK(settings.k, correlated_s=settings.correlated_s, retained_s=settings.retained_s)

    if settings.policy == "adaptive":
        return Adaptive([S3FIFO, lru_k])
    return S3FIFO() if settings.policy == "s3-fifo" else lru_k()


class MemoryCache:
    """Answers by fingerprint, safe to share between threads: a hit takes no lock, the rest one for
    microseconds.

    ``now`` is the time of the monotonic clock, in seconds.
    """

    def __init__(self, settings: config.Cache) -> None:
        self._max_bytes = settings.max_bytes
        self._max_entries = settings.max_entries
        self._lock = threading.Lock()
        # Hits that the policy has not been told of: (key, time). Appended to without the lock.
        self._noted: deque[tuple[bytes, float]] = deque()
        # All below is changed under the lock only.
        self._entries: dict[bytes, Entry] = {}
        self._policy = _policy(settings)
        # Prefetched and not asked for yet, oldest first: how many evictions there had been when it came.
        self._ahead: OrderedDict[bytes, int] = OrderedDict()
        self._ahead_bytes = 0
        self._bytes = 0
        self._model_hits: Counter[str] = Counter()
        self._model_misses: Counter[str] = Counter()
        self._model_evictions: Counter[str] = Counter()
        self._hits = self._misses = self._evictions = self._expirations = 0

    def get(self, key: bytes, now: float) -> Entry | None:
        """The fresh entry for a key that is asked for, which counts as a reference; an expired one is
        dropped."""
        entry = self._entries.get(key)
        if entry is None or entry.expires_at <= now or key in self._ahead:
            return self._get_under_lock(key, now)
        # A hit takes no lock: the reference is noted here and told to the policy before that next has to
        # decide.
        noted = self._noted
        noted.append((key, now))
        if len(noted) >= _MOST_NOTED:
            with self._lock:
                self._tell_policy()
        return entry

    def _get_under_lock(self, key: bytes, now: float) -> Entry | None:
        with self._lock:
            entry = self._entries.get(key)
            if entry is None:
                self._misses += 1
                return None
            self._tell_policy()
            if entry.expires_at <= now:
                self._drop(key)
                self._expirations += 1
                self._misses += 1
                return None
            self._hits += 1
            self._model_hits[entry.answer.model] += 1
            if key in self._ahead:
                del self._ahead[key]
                self._ahead_bytes -= entry.nbytes
                self._policy.insert(key, now)
            else:
                self._policy.record(((key, now),))
            return entry

    def peek(self, key: bytes, now: float) -> Entry | None:
        """The fresh entry, if there is one; nothing is counted and nothing changes."""
        entry = self._entries.get(key)
        return entry if entry is not None and entry.expires_at > now else None

    def put(self, key: bytes, entry: Entry, now: float, *, reference: bool = True) -> list[Lost]:
        """Store an answer; returns what is not in the cache because of it: the evicted, or the entry itself.

        The entry itself comes back if it is larger than the whole budget, or if it was prefetched
        (``reference=False``) and could only be kept in place of something that is more likely to be asked
        for.
        """
        with self._lock:
            return self._put(key, entry, now, reference=reference)

    def _put(self, key: bytes, entry: Entry, now: float, *, reference: bool) -> list[Lost]:
        lost: list[Lost] = []
        self._tell_policy()
        before = self._entries.get(key)
        if entry.nbytes > self._max_bytes:
            if before is not None:
                self._drop(key)
            return [(key, entry)]
        if before is not None and not reference and key not in self._ahead:
            self._entries[key] = entry  # its place stays: whoever asked for it before counts on
            self._bytes += entry.nbytes - before.nbytes
            while self._bytes > self._max_bytes:
                lost.append(self._evict(now))
            return lost
        if before is not None:
            self._drop(key)
        while self._bytes + entry.nbytes > self._max_bytes or len(self._entries) >= self._max_entries:
            if reference:
                lost.append(self._evict(now))
            elif (evicted := self._evict_for_prefetch(entry.nbytes, now)) is not None:
                lost.append(evicted)
            else:
                return [*lost, (key, entry)]
        self._entries[key] = entry
        self._bytes += entry.nbytes
        if reference:
            self._policy.insert(key, now)
        else:
            self._ahead[key] = self._evictions
            self._ahead_bytes += entry.nbytes
        return lost

    def invalidate(
        self,
        *,
        model: str | None = None,
        key: bytes | None = None,
        path: str | None = None,
        session: str | None = None,
    ) -> int:
        """Drop the entries of a model, or those that were fetched for a path or in a session (of several: those that fit
        all), or the one of a fingerprint; returns how many there were.
        """
        if key is None and model is None and path is None and session is None:
            raise InvalidInputError(
                "invalidate() takes model=…, path=…, session=… or key=…; clear() drops everything"
            )
        with self._lock:
            self._tell_policy()
            if key is not None:
                keys = [key] if key in self._entries else []
            else:
                # A scan, 0.1 s for a million entries: an index by model would cost every put more than all of
                # these rare calls together.
                matches = selector(model, path, session)
                keys = [each for each, entry in self._entries.items() if matches(entry)]
            for each in keys:
                self._drop(each)
        return len(keys)

    def clear(self) -> None:
        """Drop every entry, and what is remembered of earlier ones. The counts in ``stats()`` go on."""
        with self._lock:
            self._tell_policy()
            self._entries.clear()
            self._policy.clear()
            self._ahead.clear()
            self._bytes = self._ahead_bytes = 0

    def stats(self) -> CacheStats:
        with self._lock:
            self._tell_policy()
            return CacheStats(
                hits=self._hits,
                misses=self._misses,
                evictions=self._evictions,
                expirations=self._expirations,
                entries=len(self._entries),
                bytes=self._bytes,
            )

    def sizes(self) -> dict[str, tuple[int, int]]:
        """Entries and bytes by tier."""
        return {"memory": (len(self._entries), self._bytes)}

    def missed(self, model: str) -> None:
        """Say which model a ``get`` that found nothing was about: the cache sees fingerprints only."""
        with self._lock:
            self._model_misses[model] += 1

    def models(self, now: float) -> dict[str, ModelStats]:
        """The figures of each model. Reads every entry."""
        with self._lock:
            self._tell_policy()
            entries: Counter[str] = Counter()
            nbytes: Counter[str] = Counter()
            oldest: dict[str, float] = {}
            for entry in self._entries.values():
                model = entry.answer.model
                entries[model] += 1
                nbytes[model] += entry.nbytes
                oldest[model] = max(oldest.get(model, 0.0), now - entry.stored_at)
            names = {*self._model_hits, *self._model_misses, *self._model_evictions, *entries}
            return {
                model: ModelStats(
                    self._model_hits[model],
                    self._model_misses[model],
                    self._model_evictions[model],
                    entries[model],
                    nbytes[model],
                    oldest.get(model, 0.0),
                )
                for model in sorted(names)
            }

    def export(self, file: str | os.PathLike[str]) -> int:
        """Write what is in memory to a file; returns how many entries. ``warm`` reads it, here or on another machine."""
        from . import archive

        return archive.write(file, self.entries(), now=time.monotonic(), wall=time.time())

    def warm(self, file: str | os.PathLike[str]) -> int:
        """Take in what ``export`` wrote, within the budgets, but nothing older than what is here; returns how many."""
        from . import archive

        count = 0
        now = time.monotonic()
        for key, entry in archive.read(file, now=now, wall=time.time()):
            with self._lock:  # what another thread stores meanwhile is younger
                known = self._entries.get(key)
                if known is None or known.stored_at < entry.stored_at:
                    lost = self._put(key, entry, now, reference=True)
                    count += key not in {each for each, _ in lost}
        return count

    def entries(self) -> list[tuple[bytes, Entry]]:
        """What is in memory now, in no order."""
        with self._lock:
            return list(self._entries.items())

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: bytes) -> bool:
        """Whether there is an entry, fresh or not."""
        return key in self._entries

    # --- under the lock ---

    def _tell_policy(self) -> None:
        """Pass on the hits that were noted since the last time."""
        noted = self._noted
        if noted:
            # Other threads may add to it meanwhile: those are for the next time.
            references = [noted.popleft() for _ in range(len(noted))]
            self._hits += len(references)
            for key, _ in references:
                entry = self._entries.get(key)
                if entry is not None:
                    self._model_hits[entry.answer.model] += 1
            self._policy.record(references)

    def _evict(self, now: float) -> Lost:
        """Make room for a demanded answer."""
        lost = self._choose_victim(now)
        self._model_evictions[lost[1].answer.model] += 1
        return lost

    def _choose_victim(self, now: float) -> Lost:
        self._evictions += 1
        ahead = self._ahead
        if ahead:
            oldest = next(iter(ahead))
            if self._over_share(0, 0) or self._evictions - ahead[oldest] > len(self._entries):
                return oldest, self._drop(oldest)
        victim = self._policy.evict(now)
        if victim is None:
            victim = next(iter(ahead))  # over budget, so there is something, and the policy has none of it
            return victim, self._drop(victim)
        return victim, self._take_out(victim)

    def _evict_for_prefetch(self, nbytes: int, now: float) -> Lost | None:
        """Make room for a prefetched answer, as far as it has a right to it."""
        lost = self._choose_victim_for_prefetch(nbytes, now)
        if lost is not None:
            self._model_evictions[lost[1].answer.model] += 1
        return lost

    def _choose_victim_for_prefetch(self, nbytes: int, now: float) -> Lost | None:
        if not self._over_share(nbytes, 1):
            victim = self._policy.evict(now, spare_proven=True)
            if victim is not None:
                self._evictions += 1
                return victim, self._take_out(victim)
        if not self._ahead or nbytes > _AHEAD_SHARE * self._max_bytes:
            return None
        oldest = next(iter(self._ahead))
        self._evictions += 1
        return oldest, self._drop(oldest)

    def _over_share(self, nbytes: int, entries: int) -> bool:
        return self._ahead_bytes + nbytes > _AHEAD_SHARE * self._max_bytes or len(
            self._ahead
        ) + entries > max(1, _AHEAD_SHARE * self._max_entries)

    def _drop(self, key: bytes) -> Entry:
        """Take an entry out, whoever looks after it."""
        if key in self._ahead:
            del self._ahead[key]
            self._ahead_bytes -= self._entries[key].nbytes
        else:
            self._policy.remove(key)
        return self._take_out(key)

    def _take_out(self, key: bytes) -> Entry:
        """Take an entry out that the policy has let go."""
        entry = self._entries.pop(key)
        self._bytes -= entry.nbytes
        return entry
