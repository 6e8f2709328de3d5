"""Keeps a client's profile and TTL policy those of the Profile API: told over gRPC, or asked over HTTP."""

from __future__ import annotations

import logging
import os
import random
import threading
from collections.abc import Callable

from ..cache.ttl import TTLPolicy
from ..errors import AuthenticationError, DeadlineExceededError, MCPError, ServerError
from ..prefetch.profile import Profile
from .grpc_api import Change, GrpcProfileAPI

log = logging.getLogger("mcp_client.telemetry")

# After a lost connection: at once, then ever longer; each pause is drawn, so that a fleet does not come back at once.
_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 60.0
# Where gRPC does not get through, HTTP is asked so often.
_POLL_S = 600.0
_CLOSE_S = 2.0
_RANDOM = random.SystemRandom()


class Watcher:
    """Calls ``on_profile`` and ``on_policy`` with what is new, in a daemon thread of its own that ``start`` starts.

    After a lost connection it resumes from the versions it has. A child after ``fork`` starts it again.
    """

    def __init__(
        self,
        api: GrpcProfileAPI,
        *,
        on_profile: Callable[[Profile], None],
        on_policy: Callable[[TTLPolicy], None],
        min_interval_s: float = 0.0,
    ) -> None:
        self._api = api
        self._on_profile = on_profile
        self._on_policy = on_policy
        self._min_interval_s = min_interval_s
        self._etag = ""
        self._version = 0
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        self._pid = 0

    def start(self) -> None:
        """Begin to watch; does nothing if that is under way."""
        if self._pid == os.getpid() or self._closed.is_set():
            return
        self._pid = os.getpid()
        self._closed = threading.Event()  # a lock of the parent's may be held for ever in a child
        self._thread = threading.Thread(target=self._run, name="mcp-profile-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop. The API is closed with it, which ends a stream that is open."""
        self._closed.set()
        self._api.close()
        if self._thread is not None and self._pid == os.getpid():
            self._thread.join(_CLOSE_S)

    def _run(self) -> None:
        closed = self._closed
        pause = _FIRST_PAUSE_S
        while not closed.is_set():
            try:
                for change in self._api.watch(self._etag, self._version, min_interval_s=self._min_interval_s):
                    pause = _FIRST_PAUSE_S
                    self._take(change)
                wait = pause  # the server ended the stream in order: it is being restarted
            except DeadlineExceededError:
                continue
            except MCPError as error:
                if closed.is_set():
                    return
                wait = self._after(error, pause)
            except Exception:
                log.exception("watching the Profile API failed; it is tried again")
                wait = _LONGEST_PAUSE_S
            pause = min(pause * 2, _LONGEST_PAUSE_S)
            closed.wait(_RANDOM.uniform(wait / 2, wait))

    def _after(self, error: MCPError, pause: float) -> float:
        """Ask over HTTP if there is a way; how long to wait before the next try."""
        log.log(
            logging.WARNING if isinstance(error, AuthenticationError) else logging.INFO,
            "the Profile API can't be watched (%s); what is known stays in use",
            error,
        )
        if self._api.http is None:
            asked = error.retry_after_s if isinstance(error, ServerError) else None
            return max(asked or 0.0, pause)
        try:
            profile, etag = self._api.http.profile(self._etag or None)
            if profile is not None:
                self._take(Change(profile, etag))
            policy = self._api.http.ttl_policy(self._version)
            if policy is not None:
                self._take(Change(policy=policy))
        except MCPError as failed:
            log.info("nor can it be asked over HTTP: %s", failed)
            return pause
        # gRPC was offered, so it is looked for again; seldom where there is no such service.
        return _POLL_S if isinstance(error, ServerError) and error.status == 501 else _LONGEST_PAUSE_S

    def _take(self, change: Change) -> None:
        if change.profile is not None:
            self._etag = change.etag
            self._on_profile(change.profile)
        elif change.policy is not None:
            self._version = change.policy.version
            self._on_policy(change.policy)
