"""Variable-order Markov counts over one alphabet of steps, learned on line: PPM, for the next step and for a horizon.

Two questions are counted for each context (the last 0 to ``order`` steps): what comes *next*, and what comes *within the
horizon*. The second is what prefetching wants to know: a page is worth fetching if it will be asked for soon, not
only if it is the very next step.

Orders are blended from the lowest up as in PPM with escape method C (Moffat 1990): a context seen n times with d
different outcomes trusts its own counts by n / (n + d), and the shorter context for the rest.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from .profile import SEPARATOR

# What a fleet's counts of a context weigh at most, in steps seen here: enough to start with, and overruled soon.
_PRIOR_WEIGHT = 20.0


class Guess(NamedTuple):
    """A step that may come: how likely within the horizon, how likely next, and the longest context that knows it."""

    step: str
    soon: float
    next: float
    order: int


@dataclass(slots=True)
class _Outcomes:
    """What followed one context: next steps, and steps within the horizon (each counted once a visit of the context)."""

    nexts: dict[str, float] = field(default_factory=dict)
    soon: dict[str, float] = field(default_factory=dict)
    seen: float = 0.0  # visits that were followed by a step


@dataclass(slots=True)
class Trail:
    """Where one session is: its last steps, the contexts that end here, and those whose horizon is still open."""

    steps: deque[str]
    open: deque[tuple[list[_Outcomes], set[str]]]
    contexts: list[str] = field(default_factory=lambda: [""])  # from the empty one to the longest


class Markov:
    """Counts for contexts of 0 to ``order`` steps. The contexts longest unused are dropped beyond ``max_contexts``."""

    def __init__(self, order: int, horizon: int, max_contexts: int) -> None:
        self._order = order
        self._horizon = horizon
        self._max_contexts = max_contexts
        self._contexts: OrderedDict[str, _Outcomes] = OrderedDict()
        self._prior: Mapping[str, Mapping[str, float]] = {}

    def __len__(self) -> int:
        return len(self._contexts)

    def trail(self) -> Trail:
        return Trail(deque(maxlen=self._order), deque(maxlen=self._horizon))

    def observe(self, trail: Trail, step: str) -> None:
        """Learn that ``step`` came after ``trail``, and move on to it."""
        if trail.open:
            for outcomes in trail.open[-1][0]:
                outcomes.seen += 1.0  # now that it is known what followed
                outcomes.nexts[step] = outcomes.nexts.get(step, 0.0) + 1.0
        for contexts, credited in trail.open:
            if step not in credited:
                credited.add(step)
                for outcomes in contexts:
                    outcomes.soon[step] = outcomes.soon.get(step, 0.0) + 1.0
        trail.steps.append(step)
        steps = list(trail.steps)
        trail.contexts = [SEPARATOR.join(steps[len(steps) - order :]) for order in range(len(steps) + 1)]
        trail.open.append(([self._at(context) for context in trail.contexts], set()))

    def predict(self, trail: Trail, limit: int) -> list[Guess]:
        """The steps likeliest within the horizon, best first, of all that any of the trail's contexts has seen follow."""
        soon: dict[str, float] = {}
        nexts: dict[str, float] = {}
        orders: dict[str, int] = {}
        rest = 1.0  # what the longer contexts leave to the shorter ones
        for order in range(len(trail.contexts) - 1, -1, -1):
            outcomes = self._known(trail.contexts[order])
            if outcomes is None or not outcomes.seen:
                continue
            trust = outcomes.seen / (outcomes.seen + len(outcomes.nexts))
            weight = rest * trust / outcomes.seen
            rest *= 1.0 - trust
            for step, count in outcomes.soon.items():
                soon[step] = soon.get(step, 0.0) + weight * count
                orders.setdefault(step, order)
            for step, count in outcomes.nexts.items():
                nexts[step] = nexts.get(step, 0.0) + weight * count
        best = heapq.nsmallest(limit, soon, key=lambda step: (-soon[step], -nexts.get(step, 0.0), step))
        return [Guess(step, min(1.0, soon[step]), nexts.get(step, 0.0), orders[step]) for step in best]

    def load(self, counts: Mapping[str, Mapping[str, float]]) -> None:
        """Take a fleet's counts as what to believe before anything was seen here; those loaded before are replaced."""
        self._prior = counts

    def counts(self) -> dict[str, dict[str, float]]:
        """Context → next step → how often: what travels in a profile."""
        return {
            context: dict(outcomes.nexts) for context, outcomes in self._contexts.items() if outcomes.nexts
        }

    def _known(self, context: str) -> _Outcomes | None:
        """What is known of a context: what was seen here, and the fleet's counts, weighing ``_PRIOR_WEIGHT`` at most."""
        mine = self._contexts.get(context)
        prior = self._prior.get(context)
        if not prior:
            return mine
        total = sum(prior.values())
        scale = min(1.0, _PRIOR_WEIGHT / total)
        if mine is None:
            mine = _Outcomes()
        return _Outcomes(
            nexts=_sum(mine.nexts, prior, scale),
            soon=_sum(mine.soon, prior, scale),
            seen=mine.seen + total * scale,
        )

    def _at(self, context: str) -> _Outcomes:
        outcomes = self._contexts.get(context)
        if outcomes is None:
            outcomes = self._contexts[context] = _Outcomes()
            if len(self._contexts) > self._max_contexts:
                self._contexts.popitem(last=False)
        else:
            self._contexts.move_to_end(context)
        return outcomes


def _sum(mine: Mapping[str, float], others: Mapping[str, float], scale: float) -> dict[str, float]:
    total = dict(mine)
    for step, count in others.items():
        total[step] = total.get(step, 0.0) + scale * count
    return total
