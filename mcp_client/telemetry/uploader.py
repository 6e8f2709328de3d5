"""The way of an event: a bounded ring in memory, the spool on disk, the Profile API;

none of it on the caller's time.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import queue
import random
import sqlite3
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

from blake3 import blake3

from ..config import Telemetry, state_dir
from ..errors import AuthenticationError, MCPError, ServerError
from .api import Counts, Reporter, deliver, open_api
from .events import MAX_EVENT_BYTES, Encoder, Raw
from .install import KEY_BYTES, install_key
from .spool import FORMAT, Spool

if TYPE_CHECKING:
    from .watch import Watcher

__all__ = ["TelemetryPipe", "TelemetryStats"]

log = logging.getLogger("mcp_client.telemetry")

# Events held until the next drain: half a second of a client that does nothing but hit its cache, about 25 MB
# when full.
RING = 1 << 16
_DRAIN_S = 1.0
_POLL_S = 0.1  # while gathering, how often the ring's fill is looked at
# The disk is tried again so long after it failed.
_DISK_RETRY_S = 60.0
_MEMORY_BYTES = 8 * 1024 * 1024
_LONGEST_PAUSE_S = 900.0
_EXIT_S = 2.0
_STORE_S = 5.0  # a full ring takes about 1 s; a disk that hangs must not hang the application's end
_RANDOM = (
    random.SystemRandom()
)  # not the shared generator: jitter that a fork or a user's seed would make equal is none


@dataclass(frozen=True, slots=True)
class TelemetryStats:
    """What became of the events that this process recorded, and what waits in the spool (of all processes).

    ``sent``: the server has them (``duplicates`` of them it had before). ``rejected``: it refused them.
    ``dropped``: they went because the ring or the spool was full, or could not be encoded. ``left_out``: by
    sampling or redaction.
    """

    enabled: bool
    recorded: int = 0
    spooled: int = 0
    sent: int = 0
    duplicates: int = 0
    rejected: int = 0
    dropped: int = 0
    left_out: int = 0
    pending: int = 0
    batches: int = 0
    last_error: str = ""


def enabled_by_environment() -> bool:
    """Whether neither ``DO_NOT_TRACK`` (consoledonottrack.com) nor ``MCP_TELEMETRY=0`` forbids telemetry."""
    do_not_track = os.environ.get("DO_NOT_TRACK", "").strip().lower() not in ("", "0", "false")
    return not do_not_track and os.environ.get("MCP_TELEMETRY", "").strip().lower() not in (
        "0",
        "false",
        "off",
        "no",
    )


class TelemetryPipe:
    """Records events at no cost to the caller and gets each to the Profile API once.

    ``clock`` gives an event its wall-clock time (s); all waiting is on the monotonic clock. Two daemon
    threads start with the first event: one empties the ring into the spool about every second, one uploads
    every ``interval_s`` (± 20 %), earlier when a batch is full, later when the server fails. After ``fork``
    the child starts empty: what the parent recorded is the parent's. ``watcher`` starts with them and is closed with the pipe.
    """

    def __init__(
        self,
        config: Telemetry,
        *,
        clock: Callable[[], float] = time.time,
        api: Reporter | None = None,
        watcher: Watcher | None = None,
    ) -> None:
        self.enabled = enabled_by_environment()
        self._config = config
        self._clock = clock
        self._api = api or open_api(config)
        self._watcher = watcher
        self._directory = Path(config.spool_dir) if config.spool_dir else state_dir() / "telemetry"
        # Events for one place must not go to another. The API key is no part of it: a key is replaced, the
        # events stay.
        place = blake3(config.url.rstrip("/").encode()).hexdigest(length=8)
        self._disk = Spool(self._directory / f"spool-v{FORMAT}-{place}.sqlite", config.max_spool_bytes)
        self._memory = Spool(None, min(config.max_spool_bytes, _MEMORY_BYTES))
        self._reset()
        if self.enabled:
            _pipes.add(self)

    def _reset(self) -> None:
        """All state that a forked child must not share with its parent."""
        self._ring: deque[Raw] = deque(maxlen=RING if self.enabled else 0)
        self._number = count()
        self._idle = (
            self.enabled
        )  # the drainer sleeps, or does not run yet: the next record has to see to that
        self._closed = False
        self._wake: queue.SimpleQueue[None] = (
            queue.SimpleQueue()
        )  # its put is re-entrant: a signal handler may record
        self._wake_uploader: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._last_error = ""

        self._draining = threading.Lock()  # guards what follows, up to the next blank line
        self._encoder: Encoder | None = None
        self._highest = -1
        self._drained = 0
        self._spooled = 0
        self._since_upload = 0
        self._left_out = 0
        self._dropped = 0
        self._disk_down_until = 0.0

        self._uploading = threading.Lock()  # guards the counts and the order of uploads
        self._counts = Counts()

    def record(
        self,
        session: str,
        path: str,
        route: str,
        fp: bytes,
        model: str,
        source: str,
        latency_ms: float,
        nbytes: int,
        prefetch_id: str = "",
        outcome: str = "",
    ) -> None:
        """Note one event. No I/O, no lock, never raises;

        when the ring is full the oldest event goes and is counted.
        """
        self._ring.append(
            (
                next(self._number),
                self._clock(),
                session,
                path,
                route,
                fp,
                model,
                source,
                latency_ms,
                nbytes,
                prefetch_id,
                outcome,
            )
        )
        # After the append, as the drainer looks at the ring after it has said that it is idle: one of the two
        # sees the other.
        if self._idle:
            self._rouse()

    def flush(self, timeout_s: float = 10.0) -> bool:
        """Get everything recorded so far to the Profile API; whether all of it is there. Never raises."""
        if not self.enabled:
            return True
        deadline = time.monotonic() + timeout_s
        self._drain(timeout_s)
        self._upload(deadline)
        return not self._ring and self._pending() == 0

    def close(self, timeout_s: float = _EXIT_S) -> None:
        """Stop. What can't be sent within the time stays in the spool for the next start; storing it there takes its own time.

        Idempotent; never raises.
        """
        if self._closed or not self.enabled:
            return
        deadline = time.monotonic() + timeout_s
        self._closed = True
        self._idle = False
        self._wake.put(None)
        self._wake_uploader.put(None)
        self._drain(_STORE_S)
        ring, self._ring = self._ring, deque(maxlen=0)  # what is recorded from now on goes nowhere
        if self._highest >= 0:  # a process that recorded nothing need not wait for anybody's server
            self._upload(deadline)
        for thread in self._threads:
            if thread.is_alive():
                thread.join(max(0.0, deadline - time.monotonic()))
        lost = len(ring) + self._memory.pending()
        if lost:
            self._dropped += lost
            log.warning(
                "%d telemetry events were in memory only and could not be sent in time; they are lost", lost
            )
        if self._watcher is not None:
            self._watcher.close()
        for closable in (self._disk, self._memory, self._api):
            closable.close()
        _pipes.discard(self)

    def stats(self) -> TelemetryStats:
        if not self.enabled:
            return TelemetryStats(enabled=False)
        waiting = len(self._ring)
        return TelemetryStats(
            enabled=True,
            recorded=self._highest + 1 + waiting,
            spooled=self._spooled,
            dropped=self._dropped + max(0, self._highest + 1 - self._drained),
            left_out=self._left_out,
            pending=waiting + self._pending(),
            sent=self._counts.sent,
            duplicates=self._counts.duplicates,
            rejected=self._counts.rejected,
            batches=self._counts.batches,
            last_error=self._last_error,
        )

    # --- from the ring to the spool ---

    def _rouse(self) -> None:
        self._idle = False
        if self._threads:
            self._wake.put(None)
            return
        drainer = threading.Thread(target=self._run_drainer, name="mcp-telemetry-spool", daemon=True)
        self._threads.append(drainer)
        try:
            drainer.start()
        except (
            RuntimeError
        ) as error:  # no more threads, or the interpreter is going down: flush and close still drain
            log.warning("telemetry stays in memory until flush() or close(): %s", error)

    def _run_drainer(self) -> None:
        uploader = threading.Thread(target=self._run_uploader, name="mcp-telemetry-upload", daemon=True)
        self._threads.append(uploader)
        try:
            uploader.start()
        except RuntimeError as error:
            log.warning("telemetry stays on disk until flush() or close(): %s", error)
        if self._watcher is not None:
            self._watcher.start()
        while not self._closed:
            until = time.monotonic() + _DRAIN_S
            while len(self._ring) < RING // 2 and not self._closed and time.monotonic() < until:
                with contextlib.suppress(queue.Empty):
                    self._wake.get(timeout=_POLL_S)
            self._drain()
            self._idle = True
            if not self._ring and not self._closed:
                self._wake.get()
            self._idle = False

    def _drain(self, timeout_s: float = -1) -> None:
        if not self._draining.acquire(timeout=timeout_s):
            return
        try:
            ring = self._ring
            end = self._drained + len(ring)  # and not: until it is empty, which may be never
            while ring and self._drained < end:
                self._store(self._encoded(ring))
        except Exception:
            log.exception("telemetry could not be spooled")  # a bug: told, and kept away from the application
        finally:
            self._draining.release()
        if self._since_upload >= self._config.max_batch:
            self._since_upload = 0
            self._wake_uploader.put(None)

    def _encoded(self, ring: deque[Raw]) -> list[bytes]:
        """Take events off the ring, as JSON, as many as the spool takes at once."""
        if self._encoder is None:
            self._encoder = Encoder(self._key(), sample=self._config.sample, redact=self._config.redact)
        bodies: list[bytes] = []
        size = 0
        while ring and size < self._disk.write_bytes - MAX_EVENT_BYTES:
            raw = ring.popleft()
            self._drained += 1
            self._highest = max(self._highest, raw[0])
            try:
                body = self._encoder.encode(raw)
            except (
                Exception
            ) as error:  # redact is the user's code: whatever it raises must not leak the event
                if not self._dropped:
                    log.warning(
                        "a telemetry event is dropped, it can't be encoded: %s: %s",
                        type(error).__name__,
                        error,
                    )
                self._dropped += 1
                continue
            if body is None:
                self._left_out += 1
            else:
                bodies.append(body)
                size += len(body)
        return bodies

    def _store(self, bodies: list[bytes]) -> None:
        if not bodies:
            return
        self._spooled += len(bodies)
        self._since_upload += len(bodies)
        went = self._add(bodies)
        if went:
            if not self._dropped:
                log.warning(
                    "the telemetry spool is full (%d bytes): the oldest events go",
                    self._config.max_spool_bytes,
                )
            self._dropped += went

    def _add(self, bodies: list[bytes]) -> int:
        if time.monotonic() < self._disk_down_until:
            return self._memory.add(bodies)
        try:
            went = self._disk.add(bodies)
        except (sqlite3.Error, OSError) as error:
            if self._disk.set_aside(error):
                return self._add(bodies)
            if not self._disk_down_until:
                log.warning(
                    "telemetry can't be written to %s and stays in memory: %s", self._directory, error
                )
            self._disk_down_until = time.monotonic() + _DISK_RETRY_S
            return self._memory.add(bodies)
        self._disk_down_until = 0.0
        return went

    def _key(self) -> bytes:
        try:
            return install_key(self._directory)
        except OSError as error:
            log.warning(
                "no telemetry key can be kept in %s (%s): session ids are hidden with a key of this process",
                self._directory,
                error,
            )
            return os.urandom(KEY_BYTES)

    # --- from the spool to the Profile API ---

    def _run_uploader(self) -> None:
        failures = 0
        wait = self._config.interval_s * _RANDOM.uniform(0.8, 1.2)
        next_at = time.monotonic() + wait
        while not self._closed:
            with contextlib.suppress(queue.Empty):
                self._wake_uploader.get(timeout=max(0.0, next_at - time.monotonic()))
                if failures and not self._closed and time.monotonic() < next_at:
                    continue  # a full batch is no reason to press a server that failed
            if self._closed:
                return
            error = self._upload(None)
            failures = failures + 1 if error else 0
            wait = self._config.interval_s * _RANDOM.uniform(0.8, 1.2)
            if error:
                asked = error.retry_after_s if isinstance(error, ServerError) else None
                longest = min(_LONGEST_PAUSE_S, wait * 2 ** min(failures, 16))
                wait = max(asked or 0.0, _RANDOM.uniform(min(wait, longest), longest))
            next_at = time.monotonic() + wait

    def _upload(self, deadline: float | None) -> Exception | None:
        """Send what is spooled;

        the error that stopped it. The uploader goes on until close; a caller, to its deadline.
        """
        if not self._uploading.acquire(
            timeout=-1 if deadline is None else max(0.0, deadline - time.monotonic())
        ):
            return None
        try:
            for spool in (self._memory, self._disk):
                while not self._deliver(spool, deadline):
                    if deadline is None or time.monotonic() >= deadline:
                        break
                    time.sleep(0.02)  # another process is uploading
            self._last_error = ""
            return None
        except MCPError as error:
            if isinstance(error, AuthenticationError) and not self._last_error:
                log.warning("the Profile API does not let us in; events are kept: %s", error)
            self._last_error = f"{type(error).__name__}: {error}"
            return error
        except (sqlite3.Error, OSError) as error:
            self._disk.set_aside(error)
            self._last_error = f"{type(error).__name__}: {error}"
            return None  # the disk's failure is no reason to leave the server alone: what is in memory can be sent
        except Exception as error:
            log.exception(
                "telemetry could not be uploaded"
            )  # a bug: told, and kept away from the application
            self._last_error = f"{type(error).__name__}: {error}"
            return error
        finally:
            if self._closed:  # a thread that close() did not wait for opens nothing that stays open
                self._disk.close()
            self._uploading.release()

    def _deliver(self, spool: Spool, deadline: float | None) -> bool:
        if spool is self._disk and time.monotonic() < self._disk_down_until:
            return True  # nothing could be settled there: the same events would go out again and again
        with spool.uploading() as mine:
            if mine:
                deliver(
                    self._api,
                    spool,
                    self._counts,
                    most=self._config.max_batch,
                    go_on=lambda: deadline is not None or not self._closed,
                    deadline=deadline,
                )
                spool.shrink()
            return mine

    def _pending(self) -> int:
        total = self._memory.pending()
        with contextlib.suppress(
            sqlite3.Error, OSError
        ):  # a disk that can't be read holds nothing that we could send
            total += self._disk.pending()
        return total


_pipes: weakref.WeakSet[TelemetryPipe] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for pipe in list(_pipes):
        pipe._reset()


def _close_all() -> None:
    for pipe in list(_pipes):
        pipe.close(_EXIT_S)


atexit.register(_close_all)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
