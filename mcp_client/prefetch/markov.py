"""Variable-order Markov counts over one alphabet of steps, learned on line: PPM, for the next step and for a horizon.

Two questions are counted for each context (the last 0 to ``order`` steps): what comes *next*, and what comes *within the
horizon*. The second is what prefetching wants to know: a page is worth fetching if it will be asked for soon, not
only if it is the very next step.

Orders are blended from the lowest up as in PPM with escape method C (Moffat 1990): a context seen n times with d
different outcomes trusts its own counts by n / (n + d), and the shorter context for the rest.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from .profile import SEPARATOR

# What a fleet's counts of a context weigh at most, in steps seen here: enough to start with, and overruled soon.
_PRIOR_WEIGHT = 20.0


@dataclass(frozen=True, slots=True)
class Guess:
    """A step that may come: how likely it is next, how likely within the horizon, and the longest context that knows it."""

    next: float
    soon: float
    order: int


@dataclass(slots=True)
class _Outcomes:
    """What followed one context: next steps, and steps within the horizon (each counted once a visit of the context)."""

    nexts: dict[str, float] = field(default_factory=dict)
    soon: dict[str, float] = field(default_factory=dict)
    seen: float = 0.0  # visits that were followed by a step


@dataclass(slots=True)
class Trail:
    """Where one session is: its last steps, and the contexts of the steps whose horizon is still open."""

    steps: deque[str]
    open: deque[tuple[list[_Outcomes], set[str]]]


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
        for age, (contexts, credited) in enumerate(reversed(trail.open)):
            first_time = step not in credited
            for outcomes in contexts:
                if age == 0:
                    outcomes.seen += 1.0  # now that it is known what followed
                    outcomes.nexts[step] = outcomes.nexts.get(step, 0.0) + 1.0
                if first_time:
                    outcomes.soon[step] = outcomes.soon.get(step, 0.0) + 1.0
            if first_time:
                credited.add(step)
        trail.steps.append(step)
        contexts = [self._at(context) for context in self._contexts_of(trail)]
        trail.open.append((contexts, set()))

    def predict(self, trail: Trail) -> dict[str, Guess]:
        """Every step that any of the trail's contexts has seen follow."""
        guesses: dict[str, Guess] = {}
        for order, context in enumerate(self._contexts_of(trail)):
            outcomes = self._contexts.get(context)
            prior = self._prior.get(context)
            nexts, soon, seen = (outcomes.nexts, outcomes.soon, outcomes.seen) if outcomes else ({}, {}, 0.0)
            if prior:
                total = sum(prior.values())
                scale = min(1.0, _PRIOR_WEIGHT / total)
                nexts = _sum(nexts, prior, scale)
                soon = _sum(soon, prior, scale)
                seen += total * scale
            if not seen:
                continue
            trust = seen / (seen + len(nexts) + 1.0)
            for step, known in guesses.items():
                if step not in soon:
                    guesses[step] = Guess(known.next * (1 - trust), known.soon * (1 - trust), known.order)
            for step, count in soon.items():
                known = guesses.get(step, _NOTHING)
                guesses[step] = Guess(
                    next=trust * nexts.get(step, 0.0) / seen + (1 - trust) * known.next,
                    soon=trust * min(1.0, count / seen) + (1 - trust) * known.soon,
                    order=order,
                )
        return guesses

    def load(self, counts: Mapping[str, Mapping[str, float]]) -> None:
        """Take a fleet's counts as what to believe before anything was seen here; those loaded before are replaced."""
        self._prior = counts

    def counts(self) -> dict[str, dict[str, float]]:
        """Context → next step → how often: what travels in a profile."""
        return {
            context: dict(outcomes.nexts) for context, outcomes in self._contexts.items() if outcomes.nexts
        }

    def _contexts_of(self, trail: Trail) -> list[str]:
        """The contexts that end here, from the empty one to the longest."""
        steps = list(trail.steps)
        return [SEPARATOR.join(steps[len(steps) - order :]) for order in range(len(steps) + 1)]

    def _at(self, context: str) -> _Outcomes:
        outcomes = self._contexts.get(context)
        if outcomes is None:
            outcomes = self._contexts[context] = _Outcomes()
            if len(self._contexts) > self._max_contexts:
                self._contexts.popitem(last=False)
        else:
            self._contexts.move_to_end(context)
        return outcomes


_NOTHING = Guess(0.0, 0.0, 0)


def _sum(mine: Mapping[str, float], others: Mapping[str, float], scale: float) -> dict[str, float]:
    total = dict(mine)
    for step, count in others.items():
        total[step] = total.get(step, 0.0) + scale * count
    return total
