"""Whether to fetch a candidate now: the budget, the load, the server's mood. No I/O, no threads, no clock of its own."""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from ..config import Prefetch
from .predictor import Candidate, Predictor

Outcome = Literal["used", "expired", "evicted", "cancelled", "failed"]

# Measured precision is trusted after so many outcomes, and forgotten at this rate.
_ENOUGH = 20
_FORGET = 0.998
_REMEMBERED_DECISIONS = 256


@dataclass(frozen=True, slots=True)
class Decision:
    """What was decided about one candidate, and why."""

    session: str
    candidate: Candidate
    fetched: bool
    reason: str


@dataclass(frozen=True, slots=True)
class PrefetchStats:
    """``issued`` = ``used`` + ``wasted`` + ``failed`` + those whose use is still open."""

    demanded: int = 0
    issued: int = 0
    used: int = 0
    wasted: int = 0
    failed: int = 0

    @property
    def overfetch(self) -> float:
        """Issued per demanded request."""
        return self.issued / self.demanded if self.demanded else 0.0

    @property
    def precision(self) -> float:
        """Used, of those issued."""
        return self.used / self.issued if self.issued else 0.0


@dataclass(slots=True)
class _Calibration:
    """Whether candidates come true as often as predicted: the ratio of outcomes to predictions, over recent ones."""

    predicted: float = 0.0
    used: float = 0.0
    count: float = 0.0

    def settle(self, probability: float, *, used: bool) -> None:
        self.predicted = self.predicted * _FORGET + probability
        self.used = self.used * _FORGET + used
        self.count = self.count * _FORGET + 1.0

    @property
    def factor(self) -> float:
        if self.count < _ENOUGH:
            return 1.0
        return min(2.0, max(0.25, self.used / self.predicted))


@dataclass(slots=True)
class _Window:
    """The prefetches issued during the last ``size`` demanded requests, so that the cap holds in every such window."""

    size: int
    share: float
    demanded: int = 0
    issued_at: deque[int] = field(default_factory=deque)

    def demand(self) -> None:
        self.demanded += 1
        while self.issued_at and self.issued_at[0] <= self.demanded - self.size:
            self.issued_at.popleft()

    @property
    def has_room(self) -> bool:
        """The first prefetch may follow the first demand: until the first window is full, its part of the cap is rounded up."""
        issued = len(self.issued_at) + 1
        return issued <= self.share * self.size and issued <= math.ceil(
            self.share * min(self.demanded, self.size)
        )


def worth(candidate: Candidate) -> float:
    """What fetching now is worth: the mean of the probabilities that it is asked for soon, and next.

    Waiting a step costs the hit only if it is next, and by then more is known (and many sessions have ended). Measured in
    ``tests/benchmarks/prediction.py``: at equal server requests the mean hits more often than either alone.
    """
    return 0.5 * (candidate.probability + candidate.next_probability)


class Scheduler:
    """Decides by probability, corrected by how often such candidates came true, within budget and load."""

    def __init__(self, config: Prefetch, predictor: Predictor) -> None:
        self._config = config
        self._predictor = predictor
        self.lock = threading.Lock()
        self._window = _Window(config.window, config.max_overfetch)
        self._calibration = _Calibration()
        self._in_flight = 0
        self._demand_in_flight = 0
        self._back_off_until = 0.0
        self._counts = {"issued": 0, "used": 0, "wasted": 0, "failed": 0}
        self._decisions: deque[Decision] = deque(maxlen=_REMEMBERED_DECISIONS)

    def observe(
        self, session: str, path: str, now: float, *, wanted: Callable[[str], bool] = lambda path: True
    ) -> list[Candidate]:
        """Learn a demanded step; returns what to fetch now, each counted against the budget.

        ``wanted`` says whether a path can be fetched and is neither cached nor under way.
        """
        self._predictor.observe(session, path, now)
        with self.lock:
            self._window.demand()
            if self._config.max_overfetch == 0 or not self._window.has_room or now < self._back_off_until:
                return []
        candidates = self._predictor.predict(session, limit=4 * self._config.per_step)
        candidates.sort(key=worth, reverse=True)
        released: list[Candidate] = []
        for candidate in candidates:
            reason = self._against(candidate, len(released), now) or (
                "" if wanted(candidate.path) else "not wanted"
            )
            with self.lock:
                if not reason and not self._window.has_room:
                    reason = "over budget"
                self._decisions.append(Decision(session, candidate, not reason, reason or candidate.reason))
                if reason:
                    continue
                self._window.issued_at.append(self._window.demanded)
                self._in_flight += 1
                self._counts["issued"] += 1
            released.append(candidate)
        return released

    def _against(self, candidate: Candidate, released: int, now: float) -> str:
        """The reason not to fetch a candidate now, or ""."""
        with self.lock:
            if worth(candidate) * self._calibration.factor < self._config.threshold:
                return "too unlikely"
            if released >= self._config.per_step:
                return "enough for this step"
            if self._in_flight >= self._config.max_in_flight:
                return "enough under way"
            if self._demand_in_flight > self._config.max_in_flight:
                return "demand goes first"
            return "over budget" if not self._window.has_room else ""

    def fetched(self, candidate: Candidate) -> None:
        """A released candidate's answer is in the cache; whether it will be used is open."""
        with self.lock:
            self._in_flight -= 1

    def withdrawn(self, candidate: Candidate) -> None:
        """A released candidate was not sent after all: the budget gets it back."""
        with self.lock:
            self._in_flight -= 1
            self._counts["issued"] -= 1
            if self._window.issued_at:
                self._window.issued_at.pop()

    def failed(self, candidate: Candidate) -> None:
        """A released candidate was sent and brought nothing."""
        with self.lock:
            self._in_flight -= 1
            self._counts["failed"] += 1

    def settled(self, candidate: Candidate, *, used: bool) -> None:
        """What was fetched was asked for, or left the cache before anyone did."""
        with self.lock:
            self._counts["used" if used else "wasted"] += 1
            self._calibration.settle(candidate.probability, used=used)

    def demand_started(self) -> None:
        with self.lock:
            self._demand_in_flight += 1

    def demand_finished(self) -> None:
        with self.lock:
            self._demand_in_flight -= 1

    def forget_in_flight(self) -> None:
        """In the child after a fork: what was under way is so in the parent only."""
        with self.lock:
            self._in_flight = self._demand_in_flight = 0

    def back_off(self, seconds: float, now: float) -> None:
        """The server is overloaded or slow: fetch nothing ahead for a while."""
        with self.lock:
            self._back_off_until = max(self._back_off_until, now + seconds)

    def stats(self) -> PrefetchStats:
        with self.lock:
            return PrefetchStats(demanded=self._window.demanded, **self._counts)

    def explain(self) -> list[Decision]:
        """The last decisions, oldest first."""
        with self.lock:
            return list(self._decisions)
