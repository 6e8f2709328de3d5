"""A limit on how fast an application may send events, so that one of them can't take the server from the rest."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

# What an application may send at once after it was quiet: clients send every 30 s what they gathered.
_BURST_S = 60.0


class RateLimit:
    """A token bucket for each application; ``events_per_s`` 0 lets everything through. Safe to share between threads.

    A batch is let in while there is anything left and may take more than that: so no batch is too large ever to pass, and who
    took more waits longer.
    """

    def __init__(self, events_per_s: float, *, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._rate = events_per_s
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._buckets: dict[int, tuple[float, float]] = {}  # application → tokens, when they were counted

    def take(self, app: int, events: int) -> float:
        """Let ``events`` through and return 0, or return the seconds to wait before the next may come."""
        if not self._rate:
            return 0.0
        now = self._monotonic()
        with self._lock:
            tokens, counted = self._buckets.get(app, (self._rate * _BURST_S, now))
            tokens = min(self._rate * _BURST_S, tokens + (now - counted) * self._rate)
            if tokens <= 0:
                self._buckets[app] = (tokens, now)
                return (1 - tokens) / self._rate
            self._buckets[app] = (tokens - events, now)
            return 0.0
