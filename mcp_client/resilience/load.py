"""How busy and how quick an endpoint is, and the choice between two: power of two choices over both."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Protocol, TypeVar


class Load:
    """Requests under way at one endpoint, and the smoothed time it takes to answer. Its owner's lock guards it."""

    _ALPHA = 0.2  # weight of the newest answer: the last ten or so count
    _PENALTY = 2.0  # a failure makes the endpoint look this much slower, until it answers again
    _UNMEASURED_S = 0.001  # quick, so that a new endpoint is tried
    _SLOWEST_S = 60.0

    def __init__(self) -> None:
        self.outstanding = 0
        self.latency_s = self._UNMEASURED_S
        self._measured = False

    @property
    def cost(self) -> float:
        """The wait to expect, in seconds: what is under way there, and one more, at the usual pace."""
        return (self.outstanding + 1) * self.latency_s

    def answered(self, seconds: float) -> None:
        self.latency_s += (self._ALPHA if self._measured else 1.0) * (seconds - self.latency_s)
        self.latency_s = max(self.latency_s, 1e-6)
        self._measured = True

    def failed(self) -> None:
        self.latency_s = min(self.latency_s * self._PENALTY, self._SLOWEST_S)


class Loaded(Protocol):
    load: Load


L = TypeVar("L", bound=Loaded)


def pick(among: Sequence[L], rng: random.Random) -> L:
    """One of two drawn at random, the cheaper more often (Mitzenmacher, "The Power of Two Choices", 2001).

    The odds are those of the costs' third powers: equals share evenly, one twice as slow gets a ninth, one ten times as slow a
    thousandth, which is enough to notice that it has recovered.
    """
    if len(among) == 1:
        return among[0]
    one, other = rng.sample(among, 2)
    ratio = (one.load.cost / other.load.cost) ** 3
    return one if rng.random() * (1 + ratio) < 1 else other
