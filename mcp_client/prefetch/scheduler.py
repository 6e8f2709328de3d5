"""Whether to fetch a candidate now: its expected value, the budget, the load, the server's mood. No I/O, no threads, no clock."""

from __future__ import annotations

import math
import threading
from bisect import bisect_left
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from ..config import Prefetch
from .costs import Estimate, Pace
from .decisions import Decision, Decisions, Outcome
from .predictor import Candidate, Predictor

# Measured precision is trusted after so many outcomes, and forgotten at this rate.
_ENOUGH = 20
_FORGET = 0.998
_REMEMBERED_DECISIONS = 256
# From this share of the cap on, a candidate has to be worth more, up to certainty where the cap is reached: what is left of
# the budget goes to the best.
_SCARCE = 0.9
_SLOW_S = 2.0  # how long a slow server is left alone after its last slow answer
_MOST_MODELS = 256


@dataclass(frozen=True, slots=True)
class PrefetchStats:
    """``issued`` = ``used`` + ``wasted`` + ``failed`` + those whose use is still open.

    ``by_hand`` of those issued were asked for with ``client.prefetch``. ``cancelled`` ones were never sent.
    """

    demanded: int = 0
    issued: int = 0
    used: int = 0
    wasted: int = 0
    failed: int = 0
    by_hand: int = 0
    cancelled: int = 0

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
    """Whether candidates come true as often as predicted: those used over those expected to be, of the latest few hundred.

    What is fetched counts at once as expected, and when it is used: that something is *not* asked for turns out too late, if
    ever, and a ratio of settled ones alone would flatter.
    """

    predicted: float = 0.0
    used: float = 0.0
    count: float = 0.0

    def fetched(self, probability: float) -> None:
        self.predicted = self.predicted * _FORGET + probability
        self.used *= _FORGET
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
    issued_at: list[int] = field(default_factory=list)  # ascending

    def demand(self, count: int) -> None:
        self.demanded += count
        gone = bisect_left(self.issued_at, self.demanded - self.size + 1)
        del self.issued_at[:gone]

    def withdraw(self, issued_at: int) -> None:
        """Give back what was counted after that many demanded requests, unless the window has left it behind."""
        at = bisect_left(self.issued_at, issued_at)
        if at < len(self.issued_at) and self.issued_at[at] == issued_at:
            del self.issued_at[at]

    @property
    def has_room(self) -> bool:
        """The first prefetch may follow the first demand: until the first window is full, its part of the cap is rounded up."""
        issued = len(self.issued_at) + 1
        return issued <= self.share * self.size and issued <= math.ceil(
            self.share * min(self.demanded, self.size)
        )

    @property
    def scarcity(self) -> float:
        """0 while there is plenty of the cap left, 1 where it is reached."""
        cap = self.share * self.size
        return max(0.0, (len(self.issued_at) / cap - _SCARCE) / (1 - _SCARCE)) if cap else 1.0


def worth(candidate: Candidate) -> float:
    """What fetching now is worth: the mean of the probabilities that it is asked for soon, and next.

    Waiting a step costs the hit only if it is next, and by then more is known (and many sessions have ended). Measured in
    ``tests/benchmarks/prediction.py``: at equal server requests the mean hits more often than either alone.
    """
    return 0.5 * (candidate.probability + candidate.next_probability)


class Scheduler:
    """Decides by expected value: probability × time saved × importance, less the price of the server's time and the bytes.

    The probability is corrected by how often such candidates came true. The price is ``threshold``: with importance 1 and
    small answers a candidate is fetched from that probability on. ``estimate`` tells what a path saves and costs.
    """

    def __init__(
        self,
        config: Prefetch,
        predictor: Predictor,
        estimate: Callable[[str], Estimate] = lambda path: Estimate(),
    ) -> None:
        self._config = config
        self._predictor = predictor
        self._estimate = estimate
        self.lock = threading.Lock()
        self._window = _Window(config.window, config.max_overfetch)
        self._calibration = _Calibration()
        self._paces: OrderedDict[str, Pace] = OrderedDict()
        self._in_flight = 0
        self._demand_in_flight = 0
        self._back_off_until = 0.0
        self._back_off_why = ""
        self._counts = {"issued": 0, "used": 0, "wasted": 0, "failed": 0, "by_hand": 0, "cancelled": 0}
        self._decisions: deque[Decision] = deque(maxlen=_REMEMBERED_DECISIONS)

    # --- deciding ---

    def observe(
        self, session: str, path: str, now: float, *, unwanted: Callable[[Candidate], str] = lambda one: ""
    ) -> list[Decision]:
        """Learn a demanded step; returns what to fetch now, as ``plan`` does."""
        self.learn(session, path, now)
        return self.plan(session, now, unwanted=unwanted)

    def learn(self, session: str, path: str, now: float) -> None:
        """A demanded step."""
        self._predictor.observe(session, path, now)
        self.demanded(1)

    def demanded(self, count: int) -> None:
        """Demanded requests that are no steps: reloads."""
        with self.lock:
            self._window.demand(count)

    def plan(
        self, session: str, now: float, *, unwanted: Callable[[Candidate], str] = lambda one: ""
    ) -> list[Decision]:
        """What to fetch now for a session, best first, each counted against the budget.

        ``unwanted`` says why a candidate can't be fetched or need not be, or "".
        """
        metered = self._is_metered()
        with self.lock:
            if why := self._closed_to_all(now, metered=metered):
                self._note(Decision(now, session, "", fetched=False, reason=why))
                return []
        candidates = self._predictor.predict(session, limit=4 * self._config.per_step)
        weighed = [self._weigh(candidate, session, now) for candidate in candidates]
        weighed.sort(key=lambda one: (one.value_ms, worth(one.candidate)), reverse=True)
        released: list[Decision] = []
        for decision in weighed:
            reason = self._against(decision, len(released)) or unwanted(decision.candidate)
            with self.lock:
                if not reason and not self._window.has_room:
                    reason = "over budget"
                if reason:
                    decision.reason = reason
                else:
                    self._release(decision)
                self._note(decision)
            if not reason:
                released.append(decision)
        return released

    def refresh(self, path: str, now: float, *, reason: str) -> Decision | None:
        """Whether to fetch a hot path anew before its answer expires; counts against the budget."""
        saved_ms, cost_ms, importance = self._estimate(path)
        value_ms = importance * saved_ms - self._config.threshold * cost_ms
        decision = Decision(now, "", path, False, reason, 1.0, value_ms, cost_ms)
        metered = self._is_metered()
        with self.lock:
            why = self._closed_to_all(now, metered=metered)
            if not why and self._in_flight >= self._config.max_in_flight:
                why = "enough under way"
            if why:
                decision.reason = why
            else:
                self._release(decision)
            self._note(decision)
        return decision if decision.fetched else None

    def by_hand(self, session: str, path: str, now: float) -> Decision:
        """What the application asks for itself is not weighed, but it counts: the scheduler's own make room for it."""
        decision = Decision(now, session, path, False, "by hand", 1.0, by_hand=True)
        with self.lock:
            if now < self._back_off_until:
                decision.reason = self._back_off_why
            else:
                self._release(decision)
                self._counts["by_hand"] += 1
            self._note(decision)
        return decision

    def _weigh(self, candidate: Candidate, session: str, now: float) -> Decision:
        saved_ms, cost_ms, importance = self._estimate(candidate.path)
        with self.lock:
            probability = min(1.0, worth(candidate) * self._calibration.factor)
            price = self._config.threshold
            price += (1 - price) * self._window.scarcity
        return Decision(
            now,
            session,
            candidate.path,
            False,
            candidate.reason,
            probability,
            probability * saved_ms * importance - price * cost_ms,
            cost_ms,
            candidate=candidate,
        )

    def _against(self, decision: Decision, released: int) -> str:
        """The reason not to fetch a candidate now, or ""."""
        if decision.value_ms < 0:
            return "too unlikely"
        if released >= self._config.per_step:
            return "enough for this step"
        with self.lock:
            if self._in_flight >= self._config.max_in_flight:
                return "enough under way"
            return "over budget" if not self._window.has_room else ""

    def _is_metered(self) -> bool:
        metered = self._config.metered
        return metered() if callable(metered) else metered

    def _closed_to_all(self, now: float, *, metered: bool) -> str:
        if self._config.max_overfetch == 0:
            return "max_overfetch is 0"
        if now < self._back_off_until:
            return self._back_off_why
        if metered:
            return "the connection is metered"
        return "" if self._window.has_room else "over budget"

    def _release(self, decision: Decision) -> None:
        decision.fetched = True
        decision.issued_after = self._window.demanded
        # A step of another thread may have been counted since: still ascending.
        self._window.issued_at.append(decision.issued_after)
        self._in_flight += 1
        self._counts["issued"] += 1

    def _note(self, decision: Decision) -> None:
        last = self._decisions[-1] if self._decisions else None
        if last is not None and not decision.path and (last.path, last.reason) == ("", decision.reason):
            self._decisions[-1] = decision  # one line for all the steps at which nothing was even looked at
        else:
            self._decisions.append(decision)

    # --- what became of it ---

    def fetched(self, decision: Decision) -> None:
        """A released candidate's answer is in the cache; whether it will be used is open."""
        with self.lock:
            self._in_flight -= 1
            if decision.candidate.path:  # was it predicted at all?
                self._calibration.fetched(decision.candidate.probability)

    def withdrawn(self, decision: Decision, why: str = "cancelled") -> None:
        """A released candidate was not sent after all: the budget gets it back."""
        with self.lock:
            self._in_flight -= 1
            self._counts["issued"] -= 1
            self._counts["by_hand"] -= decision.by_hand
            if why == "cancelled":
                self._counts["cancelled"] += 1
                decision.outcome = "cancelled"
            else:
                decision.reason = why
            decision.fetched = False
            self._window.withdraw(decision.issued_after)

    def failed(self, decision: Decision, outcome: Outcome = "failed") -> None:
        """A released candidate was sent and brought nothing."""
        with self.lock:
            self._in_flight -= 1
            self._counts["failed"] += 1
            decision.outcome = outcome

    def settled(self, decision: Decision, *, used: bool, outcome: Outcome = "") -> None:
        """What was fetched was asked for, or left the cache before anyone did."""
        with self.lock:
            self._counts["used" if used else "wasted"] += 1
            decision.outcome = outcome or ("used" if used else "expired")
            if decision.candidate.path and used:
                self._calibration.used += 1.0

    # --- demand, and how the server does ---

    def demand_started(self, waiting: int = 0) -> int:
        """How many other requests of this client are under way; ``waiting`` of the prefetches released were not sent yet."""
        with self.lock:
            others = self._demand_in_flight + self._in_flight - waiting
            self._demand_in_flight += 1
            return others

    def demand_finished(self, model: str, seconds: float | None, now: float, *, others: int) -> None:
        """``seconds``: how long the server took to answer; ``None`` if it did not."""
        with self.lock:
            self._demand_in_flight -= 1
            if seconds is None:
                return
            pace = self._paces.get(model)
            if pace is None:
                pace = self._paces[model] = Pace()
                if len(self._paces) > _MOST_MODELS:
                    self._paces.popitem(last=False)
            if pace.answered(seconds, others=others):
                self._leave_alone(now + _SLOW_S, "the server is slow")

    def goes_first(self) -> bool:
        """Whether prefetches wait for demanded requests under way: unless the server was as quick with several at once."""
        with self.lock:
            if not self._demand_in_flight:
                return False
            return not self._paces or not all(pace.has_room for pace in self._paces.values())

    def forget_in_flight(self) -> None:
        """In the child after a fork: what was under way is so in the parent only."""
        with self.lock:
            self._in_flight = self._demand_in_flight = 0

    def back_off(self, seconds: float, now: float, why: str = "the server is overloaded or away") -> None:
        """Fetch nothing ahead for a while."""
        with self.lock:
            self._leave_alone(now + seconds, why)

    def _leave_alone(self, until: float, why: str) -> None:
        if until > self._back_off_until:
            self._back_off_until, self._back_off_why = until, why

    def stats(self) -> PrefetchStats:
        with self.lock:
            return PrefetchStats(demanded=self._window.demanded, **self._counts)

    def explain(self) -> Decisions:
        """The last decisions, oldest first."""
        with self.lock:
            return Decisions(self._decisions)
