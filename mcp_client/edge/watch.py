"""A thread that says when something in a folder of models changes, so that a model is switched before the next call comes.

Without ``watchfiles`` (part of the extra ``edge``), or where the system can't tell (network file systems), nothing is lost but
that: a call looks for itself, at most once in ``check_s`` seconds.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .optimised import FOLDER
from .staging import STAGING

# How long a folder must be quiet, and how often the thread looks at what the kernel told it. An idle one took 0.36 ms of CPU a
# second and 1.4 MB.
_STEP_MS = 250
_LOOK_UP_MS = 10_000  # how often it looks whether anybody is left who wants to know

log = logging.getLogger("mcp_client.edge")


class Watch:
    """Calls ``changed`` (a method, whose object it does not keep alive) until ``close``. ``delay_s``: before it starts, as
    importing what it needs is not to slow a first answer.
    """

    def __init__(self, root: Path, changed: Callable[[], None], *, delay_s: float) -> None:
        self._root = root
        self._changed = weakref.WeakMethod(changed)
        self._delay_s = delay_s
        self._stop = threading.Event()
        self.thread = threading.Thread(target=self._run, name="mcp-edge-watch", daemon=True)
        self.thread.start()

    def close(self) -> None:
        """The thread ends soon."""
        self._stop.set()

    def _run(self) -> None:
        if self._stop.wait(self._delay_s):
            return
        try:
            import watchfiles
        except ImportError:
            log.debug("edge: without watchfiles, calls look at %s themselves", self._root)
            return
        hidden = tuple(str(self._root / name) for name in (STAGING, FOLDER))

        def counts(_: Any, path: str) -> bool:
            return not path.startswith(hidden)

        try:
            self._tell()  # what changed before it looked
            for changes in watchfiles.watch(
                self._root,
                watch_filter=counts,
                step=_STEP_MS,
                rust_timeout=_LOOK_UP_MS,
                yield_on_timeout=True,
                stop_event=self._stop,
                raise_interrupt=False,
            ):
                if self._changed() is None:
                    return
                if changes:
                    self._tell()
        except (OSError, RuntimeError) as error:  # no more watches to be had, or the folder is gone
            log.debug("edge: %s is not watched, calls look themselves: %s", self._root, error)

    def _tell(self) -> None:
        changed = self._changed()
        if changed is not None:
            changed()
