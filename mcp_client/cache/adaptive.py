"""Adaptive replacement: several policies look after the same pages, and the one that would have done best
chooses.

Which one that is, small caches tell that hold names only (shadows): one for each policy, each ruled by its
policy alone, over a sample of the keys and with the same share of the room. A sample of keys keeps the
pattern of references to each of them, so that hit ratios carry over (C. Waldspurger et al., "Efficient MRC
Construction with SHARDS", FAST 2015).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Generic, TypeVar

from .policy import Policy

Key = TypeVar("Key", bound=Hashable)

_SHADOW_PAGES = 512  # at least this many, up to the whole cache: fewer tell too little
_WINDOW = 4.0  # references between two decisions, per page of a shadow
_MEMORY = 0.8  # what the hits of the windows before count for


class Adaptive(Generic[Key]):
    """The policy over policies; not thread-safe. ``make`` has one maker for each; the first leads until
    others do better."""

    def __init__(self, make: Sequence[Callable[[], Policy[Key]]]) -> None:
        self._make = make
        self._policies = [each() for each in make]
        self._leader = 0
        self._shadows: list[Policy[Key]] = []  # none while there is room for everything
        self._hits = [0.0] * len(make)
        self._seen = 0
        self._one_in = 1  # keys in the sample: a power of two
        self._sized_for = 0

    def __len__(self) -> int:
        return len(self._policies[0])

    def __contains__(self, key: Key) -> bool:
        return key in self._policies[0]

    def record(self, references: Iterable[tuple[Key, float]]) -> None:
        references = list(references)
        for policy in self._policies:
            policy.record(references)
        if self._shadows:
            others = self._one_in - 1
            self._follow([each for each in references if not hash(each[0]) & others])

    def insert(self, key: Key, now: float) -> None:
        for policy in self._policies:
            policy.insert(key, now)
        if self._shadows and not hash(key) & (self._one_in - 1):
            self._follow([(key, now)])

    def evict(self, now: float, *, spare_proven: bool = False) -> Key | None:
        if not spare_proven and not 0.5 < self._sized_for / max(1, len(self)) < 2:
            self._size_shadows()
        victim = self._policies[self._leader].evict(now, spare_proven=spare_proven)
        if victim is not None:
            for policy in self._policies:
                if policy is not self._policies[self._leader]:
                    policy.remove(victim)
        return victim

    def remove(self, key: Key) -> None:
        for policy in self._policies:
            policy.remove(key)

    def clear(self) -> None:
        for policy in self._policies:
            policy.clear()
        self._shadows = []
        self._sized_for = 0

    def _size_shadows(self) -> None:
        """Start them over for as many pages as the cache turns out to hold."""
        self._sized_for = len(self)
        self._one_in = 1
        while self._sized_for // (2 * self._one_in) >= _SHADOW_PAGES:
            self._one_in *= 2
        self._shadows = [each() for each in self._make]
        self._hits = [0.0] * len(self._make)
        self._seen = 0

    def _follow(self, references: list[tuple[Key, float]]) -> None:
        """Let each shadow do what its policy would have done."""
        room = max(1, self._sized_for // self._one_in)
        for number, shadow in enumerate(self._shadows):
            for reference in references:
                if reference[0] in shadow:
                    shadow.record((reference,))
                    self._hits[number] += 1
                else:
                    if len(shadow) >= room:
                        shadow.evict(reference[1])
                    shadow.insert(*reference)
        self._seen += len(references)
        if self._seen >= _WINDOW * room + 256:
            self._leader = max(range(len(self._hits)), key=self._hits.__getitem__)
            self._hits = [_MEMORY * each for each in self._hits]
            self._seen = 0
