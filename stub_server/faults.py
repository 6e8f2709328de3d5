"""Faults to inject: latency and errors, the errors drawn from a seeded sequence so that a run can be
repeated."""

from __future__ import annotations

import random
import threading


class Faults:
    """What to do to each inference; both figures may change while the server runs."""

    def __init__(self, latency_ms: float = 0.0, error_rate: float = 0.0, seed: int | None = None) -> None:
        self.latency_ms = latency_ms
        self.error_rate = error_rate
        self._random = random.Random(seed)  # no secret depends on it
        self._lock = threading.Lock()

    @property
    def latency_ms(self) -> float:
        """Milliseconds that every inference waits before it is computed."""
        return self._latency_ms

    @latency_ms.setter
    def latency_ms(self, value: float) -> None:
        if not 0 <= value < float("inf"):
            raise ValueError(f"latency_ms must be milliseconds ≥ 0; got {value}")
        self._latency_ms = float(value)

    @property
    def error_rate(self) -> float:
        """The fraction of inferences that are answered 503."""
        return self._error_rate

    @error_rate.setter
    def error_rate(self, value: float) -> None:
        if not 0 <= value <= 1:
            raise ValueError(f"error_rate must be between 0 and 1; got {value}")
        self._error_rate = float(value)

    def strikes(self) -> bool:
        """Whether this inference fails. One draw an inference, whatever the rate: the n-th depends on seed
        and n alone."""
        with self._lock:
            return self._random.random() < self._error_rate
