"""A thread that says when something in a folder of models changes, so that a model is switched before the next call comes.

Where the system can't tell (network file systems) it looks every few seconds; without ``watchfiles`` (part of the extra
``edge``) only calls look, at most once in ``check_s`` seconds.
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
# How often it has the folder looked at however quiet it is: for file systems that tell nothing, for what changed before the
# kernel was asked to tell, and to end when nobody is left who wants to know.
_LOOK_MS = 5_000

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
            for _changes in watchfiles.watch(
                self._root,
                watch_filter=counts,
                step=_STEP_MS,
                rust_timeout=_LOOK_MS,
                yield_on_timeout=True,
                stop_event=self._stop,
                raise_interrupt=False,
            ):
                changed = self._changed()
                if changed is None:
                    return
                changed()
                del changed  # or it would keep its object alive until the next change
        except (OSError, RuntimeError) as error:  # no more watches to be had, or the folder is gone
            log.debug("edge: %s is not watched, calls look themselves: %s", self._root, error)
