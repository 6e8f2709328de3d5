"""Hot keys, and how much time lies between the steps of a session. For the planner's thread alone."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

# Two accesses less than this apart mark a key as hot (the seed article's figure).
HOT_S = 0.8
_MOST_HOT = 1000
_MOST_KEYS = 10_000
# The due times are looked at anew this often at most.
_LOOK_S = 0.05
_MOST_SESSIONS = 10_000
_IDLE_S = 1800.0  # a longer gap is another visit


class Life(Protocol):
    @property
    def stored_at(self) -> float: ...
    @property
    def fresh_until(self) -> float: ...


@dataclass(slots=True)
class _Hot:
    key: bytes
    last_at: float
    settled: bool = False  # not asked for since it was fetched last


class HotKeys:
    """Which keys are hot: asked for twice within 0.8 s, whoever asked.

    A hot key's answer is fetched anew shortly before it expires, as long as somebody has asked for it since it was fetched
    last: a key that has gone cold costs one refresh at most.
    """

    def __init__(self) -> None:
        self.next_due = math.inf
        self._seen: OrderedDict[str, tuple[bytes, float]] = OrderedDict()
        self._hot: OrderedDict[str, _Hot] = OrderedDict()
        self._looked_at = -math.inf

    def seen(self, path: str, key: bytes, at: float) -> None:
        """A demanded access."""
        hot = self._hot.get(path)
        if hot is not None and hot.key == key:
            hot.last_at = at
            if hot.settled:
                hot.settled = False
                self.next_due = -math.inf
            return
        known = self._seen.get(path)
        self._seen[path] = key, at
        if known is not None and known[0] == key and at - known[1] < HOT_S:
            del self._seen[path]
            self._hot[path] = _Hot(key, at)
            self.next_due = -math.inf  # look at it soon
            if len(self._hot) > _MOST_HOT:
                self._hot.popitem(last=False)
        elif known is None and len(self._seen) > _MOST_KEYS:
            self._seen.popitem(last=False)

    def __contains__(self, path: str) -> bool:
        return path in self._hot

    def due(
        self, now: float, life_of: Callable[[bytes], Life | None], seconds: Callable[[str], float]
    ) -> list[str]:
        """The paths to fetch anew now. ``seconds``: how long the server takes for one."""
        if now < self.next_due or now - self._looked_at < _LOOK_S:
            return []
        self._looked_at = now
        self.next_due = math.inf
        due: list[str] = []
        for path, hot in tuple(self._hot.items()):
            life = life_of(hot.key)
            if life is None:
                del self._hot[path]  # it expired or was evicted: nobody kept it hot
            elif life.fresh_until == math.inf:  # under way
                self.next_due = min(self.next_due, now + HOT_S)
            elif hot.last_at > life.stored_at:
                whole = life.fresh_until - life.stored_at
                at = life.fresh_until - min(whole / 2, max(0.05 * whole, 3 * seconds(path), 0.05))
                if now >= at:
                    due.append(path)
                    at = now + _LOOK_S  # if it can't be fetched now
                self.next_due = min(self.next_due, at)
            else:
                hot.settled = True
                self.next_due = min(self.next_due, life.fresh_until)
        self.next_due = max(self.next_due, now + _LOOK_S)
        return due


class Gaps:
    """The usual time from one step of a session to its next."""

    def __init__(self) -> None:
        self._last: OrderedDict[str, float] = OrderedDict()
        self._mean = 0.0
        self._count = 0

    def step(self, session: str, at: float) -> None:
        last = self._last.pop(session, None)
        self._last[session] = at
        if last is None:
            if len(self._last) > _MOST_SESSIONS:
                self._last.popitem(last=False)
        elif 0 < (gap := at - last) < _IDLE_S:
            self._count += 1
            self._mean += max(0.05, 1 / self._count) * (gap - self._mean)

    def to_next_step(self) -> float:
        """Seconds within which most next steps come: twice the mean gap. 0 while nothing is known."""
        return 2 * self._mean
