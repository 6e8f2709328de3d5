"""Hedged requests: when a second one is worth sending, and how the loser is called off. No I/O, no clock."""

from __future__ import annotations

import threading
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable
from contextvars import ContextVar


class LatencyWindow:
    """The latest answers' times by model, sorted, for their 95th percentile (Dean and Barroso, "The Tail at Scale", 2013)."""

    _KEPT = 200
    _FEWEST = 20  # fewer say nothing about a percentile
    _MODELS = 256

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._latest: dict[str, tuple[deque[float], list[float]]] = {}

    def add(self, model: str, seconds: float) -> None:
        with self.lock:
            if model not in self._latest and len(self._latest) >= self._MODELS:
                self._latest.pop(next(iter(self._latest)))
            latest, ordered = self._latest.setdefault(model, (deque(), []))
            latest.append(seconds)
            insort(ordered, seconds)
            if len(latest) > self._KEPT:
                del ordered[bisect_left(ordered, latest.popleft())]

    def p95(self, model: str) -> float | None:
        """Seconds; ``None`` where too few answers are known."""
        with self.lock:
            _, ordered = self._latest.get(model, ((), []))
            return ordered[int(0.95 * len(ordered))] if len(ordered) >= self._FEWEST else None


class Cancellation:
    """Lets one thread call off the exchange that another one is in: whatever carries it says how to hang up."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._hang_up: Callable[[], None] | None = None
        self.cancelled = False

    def attach(self, hang_up: Callable[[], None]) -> None:
        with self._lock:
            self._hang_up = hang_up
            if not self.cancelled:
                return
        hang_up()

    def cancel(self) -> None:
        with self._lock:
            self.cancelled = True
            hang_up = self._hang_up
        if hang_up is not None:
            hang_up()


class CalledOffError(Exception):
    """Thrown into a flow whose answer is not needed any more; it says nothing of the endpoint."""


cancelling: ContextVar[Cancellation | None] = ContextVar("mcp_cancelling", default=None)
