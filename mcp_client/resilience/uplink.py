"""Whether the way to the servers is open, for callers who have somewhere else to go. No I/O; times are passed in."""

from __future__ import annotations

import random
import threading
from typing import Literal


class Uplink:
    """Up → (one lost exchange) → lost → (a probe that is answered) → returning → up.

    While it is lost no caller waits for it: probes go beside them, one at a time, the first at once and then with jittered pauses
    that double from 0.25 s to 5 s. While it returns, calls are let through by chance, more of them as time passes, so that
    neither the threads of this process nor a fleet that lost the same server come back to it all at once.
    """

    _PAUSE_S = 0.25
    _MAX_PAUSE_S = 5.0
    _RETURN_S = 1.0  # from the first answered probe to all calls; each client draws 0.5 to 1.5 of it

    def __init__(self, rng: random.Random | None = None) -> None:
        self.lock = threading.Lock()
        self._rng = rng or random.Random()
        self._pause_s = self._PAUSE_S
        self._probe_at: float | None = None  # set: lost
        self._back_at: float | None = None  # set: returning since then
        self._return_s = self._RETURN_S
        self._probing = False

    def state(self) -> Literal["up", "lost", "returning"]:
        if self._probe_at is not None:
            return "lost"
        return "returning" if self._back_at is not None else "up"

    def admits(self, now: float) -> bool:
        """Whether a call may go to a server."""
        if self._probe_at is None and self._back_at is None:  # the usual case: no lock
            return True
        with self.lock:
            if self._probe_at is not None or self._back_at is None:
                return self._probe_at is None
            share = (now - self._back_at) / self._return_s
            if share >= 1:
                self._back_at = None
                return True
            return self._rng.random() < share

    def takes_probe(self, now: float) -> bool:
        """Whether a probe is due; ``True`` makes the caller the one who sends it, and ``probed`` must follow."""
        with self.lock:
            if self._probe_at is None or now < self._probe_at or self._probing:
                return False
            self._probing = True
            return True

    def probed(self, now: float, answered: bool) -> None:
        with self.lock:
            self._probing = False
            if answered:
                if self._probe_at is not None:
                    self._back_at = now
                    self._return_s = self._RETURN_S * self._rng.uniform(0.5, 1.5)
                self._probe_at = None
                self._pause_s = self._PAUSE_S
            elif self._probe_at is not None:
                self._probe_at = now + self._pause_s * self._rng.uniform(0.5, 1.5)
                self._pause_s = min(self._MAX_PAUSE_S, self._pause_s * 2)

    def lost(self, now: float) -> None:
        """An exchange could not be had: no connection, or no answer in time."""
        with self.lock:
            if self._probe_at is None:
                self._probe_at = now
                self._back_at = None

    def reset(self) -> None:
        """No probe is under way: in the child after a fork."""
        self._probing = False
