"""What keeps a tier's trouble from becoming the caller's: a failure is a miss, a warning once, and a pause."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import TypeVar

log = logging.getLogger("mcp_client")
T = TypeVar("T")

# A tier that failed is left alone this long: a full disk or a dead host must not cost every request its timeout.
_PAUSE_S = 10.0


class Guard:
    """For one tier. ``what`` names it in warnings; ``errors`` are the ways in which it may fail. Thread-safe."""

    def __init__(self, what: str, errors: tuple[type[BaseException], ...]) -> None:
        self._what = what
        self._errors = errors
        self._lock = threading.Lock()
        self._warned: set[str] = set()
        self._paused_until = float("-inf")
        self.failures = 0

    def turn_off(self, reason: str) -> None:
        """The tier could not be set up; it is not used at all."""
        with self._lock:
            self.failures += 1
            self._paused_until = float("inf")
        self.warn("off", f"is off: {reason}")

    def paused(self, now: float) -> bool:
        return now < self._paused_until

    def use(self, now: float, work: Callable[[], T], otherwise: T) -> T:
        """What ``work`` returns; ``otherwise`` if it fails, or if something did lately."""
        if now < self._paused_until:
            return otherwise
        try:
            return work()
        except self._errors as error:
            with self._lock:
                self.failures += 1
                self._paused_until = now + _PAUSE_S
            self.warn("failed", f"failed, which is a miss: {error!r}")
            return otherwise

    def warn(self, kind: str, message: str) -> None:
        """Tell it, the first time for its kind."""
        with self._lock:
            if kind in self._warned:
                return
            self._warned.add(kind)
        log.warning("%s %s", self._what, message)
