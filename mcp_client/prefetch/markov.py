"""Variable-order Markov counts over one alphabet of steps, learned on line: PPM, for the next step and for a horizon.

Two questions are counted for each context (the last 0 to ``order`` steps, where the start of the session is a step too): what
comes *next*, and what comes *within the horizon for the first time in the session*. The second is what prefetching wants to
know: a page is worth fetching if it will be asked for soon and is not at hand already, which a page seen before mostly is.

Orders are blended from the lowest up as in PPM (Moffat 1990): a context seen n times with d different outcomes trusts its
own counts by n / (n + 4 d), and the shorter context for the rest. Method C has d instead of 4 d; measured on
``tests/benchmarks/prediction.py``, 4 d lets five orders pay where plain PPM gets worse beyond three or four.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from .features import Level
from .profile import SEPARATOR

# Stands before a session's first step (U+001E, which no path holds): many sessions are short, and how they begin tells much.
START = "\x1e"
# The escape's weight for each different outcome.
_ESCAPE = 4.0
# Steps taken from one context, and looked at in one prediction: what is beyond these is never among the best.
_HEAD = 16
_MOST = 32
# A head is found anew when its context was seen so many times more often than when it was found last.
_GROWTH = 1.1
# Pages back in the session that count as seen before.
_VISITED = 16


class Guess(NamedTuple):
    """A step that may come: how likely within the horizon, how likely next, and the longest context that knows it."""

    step: str
    soon: float
    next: float
    order: int


@dataclass(slots=True)
class _Outcomes:
    """What followed the visits of one context. The visit of a session that is still there counts, too."""

    visits: int = 0
    followed: int = 0  # visits that were followed by a step
    nexts: dict[str, int] = field(default_factory=dict)  # step → visits after which it came next
    first: dict[str, int] = field(
        default_factory=dict
    )  # … within the horizon, for the first time in its session
    passed: dict[str, int] = field(default_factory=dict)  # … before which it had been seen in its session
    head: tuple[str, ...] = ()
    head_at: float = 0.0

    def candidates(self) -> Iterable[str]:
        """The steps that followed, or the most frequent of them."""
        if len(self.first) + len(self.nexts) <= _HEAD:
            return (*self.nexts, *self.first)
        if self.visits >= self.head_at:
            self.head = (
                *heapq.nlargest(_HEAD // 2, self.nexts, key=self.nexts.__getitem__),
                *heapq.nlargest(_HEAD // 2, self.first, key=self.first.__getitem__),
            )
            self.head_at = _GROWTH * self.visits
        return self.head


class _Prior(NamedTuple):
    """What a fleet knows of one context."""

    nexts: Mapping[str, float]
    total: float
    head: tuple[str, ...]


@dataclass(slots=True)
class Trail:
    """Where one session is: its last steps, the contexts that end here, and those whose horizon is still open."""

    steps: deque[str]
    open: deque[list[_Outcomes]]
    contexts: list[str] = field(default_factory=lambda: [""])  # from the empty one to the longest
    visited: OrderedDict[str, None] = field(default_factory=OrderedDict)


class Markov:
    """Counts for contexts of 0 to ``order`` steps. The contexts longest unused are dropped beyond ``max_contexts``."""

    def __init__(self, order: int, horizon: int, max_contexts: int) -> None:
        self._order = order
        self._horizon = horizon
        self._max_contexts = max_contexts
        self._contexts: OrderedDict[str, _Outcomes] = OrderedDict()
        self._prior: Mapping[str, _Prior] = {}

    def __len__(self) -> int:
        return len(self._contexts)

    def trail(self) -> Trail:
        return Trail(deque([START], maxlen=self._order), deque(maxlen=self._horizon))

    def observe(self, trail: Trail, step: str) -> None:
        """Learn that ``step`` came after ``trail``, and move on to it."""
        if trail.open:
            for outcomes in trail.open[-1]:
                outcomes.followed += 1
                outcomes.nexts[step] = outcomes.nexts.get(step, 0) + 1
        visited = trail.visited
        if step in visited:
            visited.move_to_end(step)
        else:
            for contexts in trail.open:
                for outcomes in contexts:
                    outcomes.first[step] = outcomes.first.get(step, 0) + 1
            visited[step] = None
            if len(visited) > _VISITED:
                visited.popitem(last=False)
        trail.steps.append(step)
        steps = list(trail.steps)
        trail.contexts = [SEPARATOR.join(steps[at:]) for at in range(len(steps), -1, -1)]
        here = [self._at(context) for context in trail.contexts]
        for outcomes in here:
            outcomes.visits += 1
            passed = outcomes.passed
            for page in visited:
                passed[page] = passed.get(page, 0) + 1
        trail.open.append(here)

    def predict(self, trail: Trail, limit: int) -> list[Guess]:
        """The steps likeliest within the horizon, best first, of those that followed the trail's contexts most often.

        A step seen before in the session counts as soon only as far as it is next.
        """
        levels = [
            (order, self._prior.get(context), self._contexts.get(context))
            for order, context in enumerate(trail.contexts)
        ]
        orders = self._candidates(levels)
        steps = list(orders)
        fresh = [step for step in steps if step not in trail.visited]
        nexts = [0.0] * len(steps)
        soon = [0.0] * len(fresh)
        goes_on = 0.5
        fleet = False
        for _, prior, mine in levels:
            if prior is not None:
                fleet = True
                weight = _ESCAPE * len(prior.nexts)
                whole = prior.total + weight
                counts = prior.nexts
                nexts = [
                    (weight * lower + counts.get(step, 0.0)) / whole
                    for step, lower in zip(steps, nexts, strict=True)
                ]
                soon = [
                    (weight * lower + counts.get(step, 0.0)) / whole
                    for step, lower in zip(fresh, soon, strict=True)
                ]
            if mine is not None and mine.followed:
                weight = _ESCAPE * len(mine.nexts)
                whole = mine.followed + weight
                others = mine.visits - 1  # without this session's own visit, of which nothing is known yet
                goes_on = (weight * goes_on + mine.followed) / (weight + max(others, mine.followed))
                known, first, passed = mine.nexts, mine.first, mine.passed
                nexts = [
                    (weight * lower + known.get(step, 0)) / whole
                    for step, lower in zip(steps, nexts, strict=True)
                ]
                soon = [
                    (weight * lower + (came := first.get(step, 0)))
                    / (weight + max(others - passed.get(step, 0), came))
                    for step, lower in zip(fresh, soon, strict=True)
                ]
        if not fleet:  # a fleet's counts do not tell where sessions end
            nexts = [goes_on * probability for probability in nexts]
        coming = dict(zip(steps, nexts, strict=True))
        for step, probability in zip(fresh, soon, strict=True):
            coming[step] = min(1.0, max(coming[step], probability))
        best = heapq.nsmallest(
            limit,
            zip(steps, nexts, strict=True),
            key=lambda one: (-coming[one[0]], -one[1], one[0]),
        )
        return [Guess(step, coming[step], probability, orders[step]) for step, probability in best]

    def evidence(self, trail: Trail, step: str) -> list[Level]:
        """What each of the trail's contexts, from the empty one to the longest, says of a step: a ranker's features."""
        found: list[Level] = []
        for context in trail.contexts:
            prior, mine = self._prior.get(context), self._contexts.get(context)
            total = came = 0.0
            soon = -1.0
            if prior is not None:
                total, came = prior.total, prior.nexts.get(step, 0.0)
            if mine is not None:
                total += mine.followed
                came += mine.nexts.get(step, 0)
                first = mine.first.get(step, 0)
                others = max(mine.visits - 1 - mine.passed.get(step, 0), first)
                soon = first / others if others else -1.0
            found.append(Level(came / total if total else -1.0, total, soon))
        return found

    def load(self, counts: Mapping[str, Mapping[str, float]]) -> None:
        """Take a fleet's counts as what to believe before anything was seen here; those loaded before are replaced."""
        self._prior = {
            context: _Prior(
                nexts, sum(nexts.values()), tuple(heapq.nlargest(_HEAD, nexts, key=nexts.__getitem__))
            )
            for context, nexts in counts.items()
            if nexts
        }

    def counts(self) -> dict[str, dict[str, float]]:
        """Context → next step → how often: what travels in a profile."""
        return {
            context: {step: float(count) for step, count in outcomes.nexts.items()}
            for context, outcomes in self._contexts.items()
            if outcomes.nexts
        }

    @staticmethod
    def _candidates(levels: list[tuple[int, _Prior | None, _Outcomes | None]]) -> dict[str, int]:
        """The steps worth a look, each with the longest context that it followed; longer contexts come first."""
        orders: dict[str, int] = {}
        for order, prior, mine in reversed(levels):
            for step in (
                *(mine.candidates() if mine is not None else ()),
                *(prior.head if prior is not None else ()),
            ):
                orders.setdefault(step, order)
            if len(orders) >= _MOST:
                break
        return orders

    def _at(self, context: str) -> _Outcomes:
        outcomes = self._contexts.get(context)
        if outcomes is None:
            outcomes = self._contexts[context] = _Outcomes()
            if len(self._contexts) > self._max_contexts:
                self._contexts.popitem(last=False)
        else:
            self._contexts.move_to_end(context)
        return outcomes
