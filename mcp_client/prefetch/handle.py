"""What ``client.prefetch`` returns: a prefetch that the application asked for itself, and how it ends."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Literal

from ..errors import DeadlineExceededError, MCPError

Ending = Literal["fetched", "at hand", "refused", "failed", "cancelled"]


class PrefetchHandle:
    """A prefetch by hand. There is no need to look at it; the next ``infer`` of the same finds the answer, or waits for it.

    How it ends: ``fetched``; ``at hand``: the answer was cached or on its way already; ``refused``: the server asked for less;
    ``failed``: ``error`` says why; ``cancelled``: the client was closed, or demanded requests left no moment for it.
    """

    def __init__(self) -> None:
        self._ending: Future[Ending] = Future()
        self.error: MCPError | None = None

    @property
    def done(self) -> bool:
        return self._ending.done()

    def wait(self, timeout: float | None = None) -> Ending:
        """Wait for the end. ``DeadlineExceededError`` if it does not come within ``timeout`` seconds; the prefetch goes on."""
        try:
            return self._ending.result(timeout)
        except TimeoutError:
            raise DeadlineExceededError(f"the prefetch has not ended within {timeout} s") from None

    def end(self, ending: Ending, error: MCPError | None = None) -> None:
        """For the prefetcher."""
        if not self._ending.done():
            self.error = error
            self._ending.set_result(ending)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._ending.result() if self.done else 'under way'})"
