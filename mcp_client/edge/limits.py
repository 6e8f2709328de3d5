"""What bounds a model: a run's deadline, being called off from elsewhere (ONNX Runtime looks between two nodes), and memory."""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol


class Halt(Protocol):
    """Lets another thread call a run off: it is told how (``resilience.hedge.Cancellation`` is one)."""

    def attach(self, hang_up: Callable[[], None]) -> None: ...


class Watchdog:
    """One thread for the process that sets ``terminate`` of the runs whose deadline has passed.

    A run costs two operations on a dict: the thread is woken only by a deadline before all those that it knows of.
    """

    _IDLE_S = 10.0  # without a run to watch: then the thread ends

    def __init__(self) -> None:
        self._wake = threading.Condition()
        self._watched: dict[int, tuple[float, Any]] = {}  # single operations are atomic
        self._wakes_at = (
            math.inf
        )  # while it looks, and while there is no thread: whoever comes then takes the lock
        self._running = False

    def watch(self, deadline: float, options: Any) -> int:
        """``options``: the run's ``RunOptions``. ``leave`` with what this returns must follow."""
        ticket = id(options)
        self._watched[ticket] = deadline, options
        if deadline < self._wakes_at:
            with self._wake:
                if self._running:
                    self._wake.notify()
                else:
                    threading.Thread(target=self._work, name="mcp-edge-watchdog", daemon=True).start()
                    self._running = True
        return ticket

    def leave(self, ticket: int) -> None:
        self._watched.pop(ticket, None)

    def reset(self) -> None:
        """In the child after a fork: the thread is not there, and the lock may be held by it."""
        self._wake = threading.Condition()
        self._watched = {}
        self._wakes_at = math.inf
        self._running = False

    def _work(self) -> None:
        idle_since: float | None = None
        with self._wake:
            while True:
                self._wakes_at = math.inf  # before the look: a run that comes during it is not overlooked
                watched = list(self._watched.values())
                now = time.monotonic()
                idle_since = None if watched else idle_since or now
                if idle_since is not None and now - idle_since >= self._IDLE_S:
                    self._running = False
                    return
                for deadline, options in watched:
                    if deadline <= now:
                        options.terminate = True
                left = (deadline for deadline, _ in watched if deadline > now)
                self._wakes_at = min(left, default=now + self._IDLE_S)
                self._wake.wait(max(0.0, min(self._wakes_at - now, threading.TIMEOUT_MAX)))


watchdog = Watchdog()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=watchdog.reset)


_memory_bytes: int | None = None
_memory_lock = threading.Lock()


def limit_memory(ort: Any, nbytes: int) -> None:
    """Have the sessions made from now on with ``session.use_env_allocators`` take their CPU memory from one arena of this size.

    ONNX Runtime has one such arena per process; another size replaces it for later sessions.
    """
    global _memory_bytes  # noqa: PLW0603 (as ONNX Runtime's own: one per process)
    with _memory_lock:
        if _memory_bytes == nbytes:
            return
        info = ort.OrtMemoryInfo("Cpu", ort.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, ort.OrtMemType.DEFAULT)
        # Grown by what is asked for: doubling would reach the limit with half of it unused.
        ort.create_and_register_allocator(
            info, ort.OrtArenaCfg({"max_mem": nbytes, "arena_extend_strategy": 1})
        )
        _memory_bytes = nbytes
