"""What an application can watch of its requests: a hook of its own, and OpenTelemetry. Neither can fail a request."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    from .otel import OpenTelemetry

log = logging.getLogger("mcp_client.hooks")


@dataclass(frozen=True, slots=True)
class Notice:
    """What happened to a demanded request: it goes to a server or the edge, it has ended, or was computed both ways.

    ``kind``: ``request`` (not for what was at hand in the cache), ``response`` or ``error``. ``source`` says who answered.
    ``agreement`` comes after the answer, from the background (``Edge(agreement=…)``): ``difference`` is how far the server's and
    the edge's answers are apart, as a share of the largest value. ``endpoint`` and ``attempts`` are those of the last attempt,
    ``error`` the ``MCPError``, or what interrupted the request.
    """

    kind: Literal["request", "response", "error", "agreement"]
    request_id: str
    model: str
    session: str = ""
    path: str = ""
    endpoint: str = ""
    attempts: int = 0
    source: str = ""
    latency_ms: float = 0.0
    error: BaseException | None = None
    difference: float = 0.0


class Attempt(Protocol):
    """One exchange with one endpoint, of the one or more that a request takes."""

    headers: Mapping[str, str]

    def ended(self, error: BaseException | None) -> None: ...


class Observer:
    """Hands notices on."""

    def __init__(self, hook: Callable[[Notice], None] | None, otel: OpenTelemetry | None) -> None:
        self._hook = hook
        self._otel = otel

    def started(self, notice: Notice) -> tuple[Any, Mapping[str, str] | None]:
        """The request's span, if there is one, and the headers that tell the server of it."""
        self._tell(notice)
        return self._otel.started(notice) if self._otel is not None else (None, trace_headers())

    def ended(self, notice: Notice, span: Any = None) -> None:
        self._tell(notice)
        if self._otel is not None:
            self._otel.ended(notice, span)

    def attempt(
        self, call_span: Any, endpoint: str, number: int, *, infers: bool, hedges: bool = False
    ) -> Attempt | None:
        """The span of an attempt below the call's; ``number`` counts from 1. ``infers``: it asks for an inference."""
        if self._otel is None or call_span is None:
            return None
        return self._otel.attempt(call_span, endpoint, number, infers=infers, hedges=hedges)

    def compared(self, notice: Notice) -> None:
        self._tell(notice)
        if self._otel is not None:
            self._otel.compared(notice)

    def _tell(self, notice: Notice) -> None:
        if self._hook is None:
            return
        try:
            self._hook(notice)
        except Exception:  # the application's own code
            log.exception("the hook failed on a %s notice", notice.kind)


def trace_headers() -> Mapping[str, str] | None:
    """W3C ``traceparent`` and ``tracestate`` of the application's active span; none where it has no OpenTelemetry in use."""
    if "opentelemetry.trace" not in sys.modules:  # then no span can be active
        return None
    from .otel import headers_of

    return headers_of(None)
