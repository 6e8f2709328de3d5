"""What an answer costs: how long the server takes for it and how many bytes it has, by path, by route and over all."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

# Weight of the newest answer in the smoothed figures.
_ALPHA = 0.2
_MOST_PATHS = 10_000
_MIB = 1024 * 1024
# A server is slow when its latest answers take so many times longer than its usual ones, or at least this much longer.
_SLOW = 2.5
_SLOW_S = 0.02
_ENOUGH = 20
# What the number of requests under way must vary by (the variance) before a slope over it means anything.
_VARIED = 0.2
_NEXT_TO_NOTHING = 0.1


class Estimate(NamedTuple):
    """Of one candidate: the time that a hit saves, what fetching it costs (both in ms), and how much it matters."""

    saved_ms: float = 1.0
    cost_ms: float = 1.0
    importance: float = 1.0


@dataclass(slots=True)
class _Mean:
    seconds: float = 0.0
    nbytes: float = 0.0
    count: int = 0

    def add(self, seconds: float, nbytes: int) -> None:
        self.count += 1
        alpha = max(_ALPHA, 1 / self.count)
        self.seconds += alpha * (seconds - self.seconds)
        self.nbytes += alpha * (nbytes - self.nbytes)


class Costs:
    """Smoothed times and sizes of the server's answers. For one thread. ``ms_per_mib``: the price of a MiB, in milliseconds."""

    def __init__(self, ms_per_mib: float, route_of: Callable[[str], str]) -> None:
        self._ms_per_mib = ms_per_mib
        self._route_of = route_of
        self._paths: OrderedDict[str, _Mean] = OrderedDict()
        self._routes: dict[str, _Mean] = {}
        self._all = _Mean()

    def note(self, path: str, seconds: float, nbytes: int) -> None:
        """A server's answer for a path took ``seconds`` and has ``nbytes``."""
        mean = self._paths.get(path)
        if mean is None:
            mean = self._paths[path] = _Mean()
            if len(self._paths) > _MOST_PATHS:
                self._paths.popitem(last=False)
        for each in (mean, self._routes.setdefault(self._route_of(path), _Mean()), self._all):
            each.add(seconds, nbytes)

    def estimate(self, path: str, importance: float = 1.0) -> Estimate:
        """From the path itself if it was answered three times, else from its route, else from all answers."""
        mean = self._paths.get(path)
        if mean is None or mean.count < 3:
            mean = self._routes.get(self._route_of(path), self._all)
        if not mean.count:
            return Estimate(importance=importance)
        saved_ms = max(mean.seconds * 1e3, 0.001)
        return Estimate(saved_ms, saved_ms + self._ms_per_mib * mean.nbytes / _MIB, importance)

    def seconds(self, path: str) -> float:
        """How long the server takes for it."""
        return self.estimate(path).saved_ms / 1e3


@dataclass(slots=True)
class Pace:
    """Whether a server answers as quickly as usual, and how much company slows its answers. Its owner's lock guards it."""

    usual: float = 0.0
    recent: float = 0.0
    count: int = 0
    # Exponentially weighted means of ``others`` and of the seconds, and their variance and covariance.
    others: float = 0.0
    seconds: float = 0.0
    variance: float = 0.0
    covariance: float = 0.0

    def answered(self, seconds: float, *, others: int) -> bool:
        """Take note of a demanded answer; whether the server is slow now. ``others``: this client's requests under way then."""
        self.count += 1
        self.usual += max(0.02, 1 / self.count) * (seconds - self.usual)
        self.recent += max(0.3, 1 / self.count) * (seconds - self.recent)
        alpha = max(0.02, 1 / self.count)
        more, longer = others - self.others, seconds - self.seconds
        self.others += alpha * more
        self.seconds += alpha * longer
        self.variance = (1 - alpha) * (self.variance + alpha * more * more)
        self.covariance = (1 - alpha) * (self.covariance + alpha * more * longer)
        return self.count > _ENOUGH and self.recent > max(_SLOW * self.usual, self.usual + _SLOW_S)

    @property
    def has_room(self) -> bool:
        """Whether one more request under way delays the others' answers by next to nothing, as far as that is known.

        The slope of the line through (others under way, seconds), by least squares, over the mean.
        """
        if self.count < _ENOUGH or self.variance < _VARIED:
            return False
        return self.covariance / self.variance <= _NEXT_TO_NOTHING * self.seconds
