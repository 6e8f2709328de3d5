"""A circuit breaker: an endpoint that keeps failing is left alone for a while, then probed by one request."""

from __future__ import annotations

import threading
from typing import Literal


class CircuitBreaker:
    """Closed → (``failures`` in a row) → open for ``open_s`` → half-open: one probe decides. Times are passed in.

    Each failed probe doubles the pause up to ``max_open_s``, so that a long outage costs little and a short one is
    over quickly.
    """

    def __init__(self, *, failures: int = 5, open_s: float = 0.5, max_open_s: float = 10.0) -> None:
        self._limit = failures
        self._first_open_s = open_s
        self._max_open_s = max_open_s
        self.lock = threading.Lock()
        self._in_a_row = 0
        self._open_s = open_s
        self._open_until: float | None = None
        self._probing = False

    def admits(self, now: float) -> bool:
        """Whether a request may be sent. Where the circuit is half-open, ``True`` makes the caller the probe."""
        with self.lock:
            if self._open_until is None:
                return True
            if now < self._open_until or self._probing:
                return False
            self._probing = True
            return True

    def state(self, now: float) -> Literal["closed", "open", "half-open"]:
        """``half-open``: the next request that is admitted is the probe."""
        with self.lock:
            if self._open_until is None:
                return "closed"
            return "open" if now < self._open_until or self._probing else "half-open"

    def retry_in(self, now: float) -> float:
        """Seconds until the next probe may go (0: now)."""
        with self.lock:
            return max(0.0, self._open_until - now) if self._open_until is not None else 0.0

    def succeeded(self) -> None:
        with self.lock:
            self._in_a_row = 0
            self._open_s = self._first_open_s
            self._open_until = None
            self._probing = False

    def failed(self, now: float) -> None:
        with self.lock:
            self._in_a_row += 1
            if self._probing:
                self._open_s = min(self._max_open_s, self._open_s * 2)
            if self._probing or (self._open_until is None and self._in_a_row >= self._limit):
                self._open_until = now + self._open_s
                self._probing = False

    def abandoned(self) -> None:
        """The request was given up for a reason that says nothing of the endpoint (it was cancelled)."""
        with self.lock:
            self._probing = False
