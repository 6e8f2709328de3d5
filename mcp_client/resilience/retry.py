"""Retries: which errors are worth another attempt, how long to pause before it, and how many the server is spared."""

from __future__ import annotations

import random
import threading

from ..config import Retry
from ..errors import (
    CircuitOpenError,
    ConnectionFailedError,
    DeadlineExceededError,
    MCPError,
    NotOfferedError,
    OverloadedError,
    ProtocolError,
    ServerError,
)


def is_retryable(error: MCPError, *, repeatable: bool) -> bool:
    """Whether sending the same request again can help and can do no harm.

    An inference is a pure function, so a connection that broke midway may be tried again; one step of a server-side
    sequence changes state there (``repeatable=False``), and is only sent again where the server said that it did nothing.
    """
    if isinstance(error, OverloadedError):
        return True
    if isinstance(error, (CircuitOpenError, DeadlineExceededError)):
        return False
    if isinstance(error, ConnectionFailedError):
        return repeatable or error.nothing_sent
    return False


def says_unhealthy(error: MCPError) -> bool:
    """Whether an error counts against the endpoint, rather than against this one request."""
    if isinstance(error, ServerError):
        return error.status >= 500 and not isinstance(error, NotOfferedError)
    return isinstance(error, (ConnectionFailedError, DeadlineExceededError, ProtocolError))


class RetryPolicy:
    """Pauses and the budget, shared by a client's calls.

    The budget is a token bucket (as in Finagle's and gRFC A6's retry throttling): every call adds ``budget`` of a token, a retry
    takes one, so that a server in trouble sees at most that share of extra requests.
    """

    _BURST = 10.0

    def __init__(self, config: Retry, rng: random.Random | None = None) -> None:
        self._config = config
        self.hedge = config.hedge
        self._rng = rng or random.Random()
        self._tokens = self._BURST
        self.lock = threading.Lock()

    def call_started(self) -> None:
        with self.lock:
            self._tokens = min(self._BURST, self._tokens + self._config.budget)

    def take(self) -> bool:
        """Whether the budget allows one more request beside those that callers made; if so it is spent."""
        with self.lock:
            if self._tokens < 1:
                return False
            self._tokens -= 1
            return True

    def pause_before(self, attempt: int, error: MCPError, *, repeatable: bool) -> float | None:
        """Seconds to wait before ``attempt`` (2, 3 …), or ``None``: don't try again."""
        if attempt > self._config.attempts or not is_retryable(error, repeatable=repeatable):
            return None
        if not self.take():
            return None
        pause = self._rng.uniform(0, min(self._config.max_s, self._config.base_s * 2 ** (attempt - 1)))
        asked = error.retry_after_s if isinstance(error, ServerError) else None
        return max(pause, asked) if asked is not None else pause
