"""OpenTelemetry (extra ``otel``): a span and a duration for every demanded request, and a span for each attempt at a server.

By the GenAI, HTTP and RPC conventions (https://opentelemetry.io/docs/specs/semconv/, gen-ai, http, rpc): their names where
they fit, ``mcp_client.*`` where none does.
No tensor, session, path or credential becomes an attribute.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from ..errors import MissingExtraError, ServerError
from .observer import Notice

try:
    from opentelemetry import metrics, trace
    from opentelemetry.context import Context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
except ImportError as missing:
    raise MissingExtraError("otel", "opentelemetry-api", "otel=True") from missing

# The convention's advice for gen_ai.client.operation.duration, and finer below: a cache hit takes microseconds.
_BUCKETS_S = (
    0.00001,
    0.0001,
    0.001,
    0.01,
    0.02,
    0.04,
    0.08,
    0.16,
    0.32,
    0.64,
    1.28,
    2.56,
    5.12,
    10.24,
    20.48,
    40.96,
    81.92,
)
_SERVICE = "inference.GRPCInferenceService"
_propagator = TraceContextTextMapPropagator()


def headers_of(context: Context | None) -> Mapping[str, str]:
    """``traceparent`` and ``tracestate``; ``None``: of the span that is active here. Empty where there is none."""
    carrier: dict[str, str] = {}
    _propagator.inject(carrier, context)
    return carrier


class OpenTelemetry:
    """Uses the application's own providers: what is recorded, and where it goes, is set up there."""

    def __init__(self) -> None:
        self._tracer = trace.get_tracer("mcp_client")
        meter = metrics.get_meter("mcp_client")
        self._duration = meter.create_histogram(
            "gen_ai.client.operation.duration",
            unit="s",
            description="Time of a request, from the call to its answer",
            explicit_bucket_boundaries_advisory=_BUCKETS_S,
        )

        self._difference = meter.create_histogram(
            "mcp_client.edge.difference",
            unit="1",
            description="Difference between a server's and the edge's answer, as a share of the largest value",
            explicit_bucket_boundaries_advisory=[0, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 0.1, 1],
        )

    def compared(self, notice: Notice) -> None:
        self._difference.record(notice.difference, {"gen_ai.request.model": notice.model})

    def started(self, notice: Notice) -> tuple[Any, Mapping[str, str]]:
        span = self._tracer.start_span(
            _name(notice), kind=trace.SpanKind.CLIENT, attributes=_attributes(notice)
        )
        return span, headers_of(trace.set_span_in_context(span))

    def attempt(self, call_span: Any, endpoint: str, number: int, *, infers: bool, hedges: bool) -> Attempt:
        url = urlsplit(endpoint.partition(" ")[0])
        attributes: dict[str, Any] = {"server.address": url.hostname or url.path}
        if url.port:
            attributes["server.port"] = url.port
        if url.scheme.startswith("grpc"):
            method = "ModelInfer" if infers else "ModelMetadata"
            name = f"{_SERVICE}/{method}"
            attributes |= {"rpc.system": "grpc", "rpc.service": _SERVICE, "rpc.method": method}
        else:
            name = "POST" if infers else "GET"
            attributes["http.request.method"] = name
        if number > 1:
            attributes["http.request.resend_count"] = number - 1
        if hedges:
            attributes["mcp_client.hedge"] = True
        context = trace.set_span_in_context(call_span)
        return Attempt(self._tracer.start_span(name, context, trace.SpanKind.CLIENT, attributes))

    def ended(self, notice: Notice, span: Any) -> None:
        attributes = _attributes(notice)
        self._duration.record(
            notice.latency_ms / 1e3, attributes, trace.set_span_in_context(span) if span is not None else None
        )
        if span is None:  # answered from the cache: it never was under way
            started = time.time_ns() - int(notice.latency_ms * 1e6)
            span = self._tracer.start_span(_name(notice), attributes=attributes, start_time=started)
        if span.is_recording():
            span.update_name(_name(notice))
            span.set_attributes({**attributes, "mcp_client.request.id": notice.request_id})
            if notice.attempts > 1:
                span.set_attribute("http.request.resend_count", notice.attempts - 1)
            if notice.error is not None:
                span.set_status(trace.StatusCode.ERROR, _told(notice.error))
        span.end()


class Attempt:
    """The span of one exchange with one endpoint. ``headers`` tell the server of it."""

    def __init__(self, span: Any) -> None:
        self._span = span
        self.headers = headers_of(trace.set_span_in_context(span))

    def ended(self, error: BaseException | None) -> None:
        """The first word counts."""
        if error is not None and self._span.is_recording():
            self._span.set_attribute("error.type", type(error).__name__)
            if isinstance(error, ServerError):
                self._span.set_attribute("http.response.status_code", error.status)
            self._span.set_status(trace.StatusCode.ERROR, _told(error))
        if self._span.is_recording():
            self._span.end()


def _told(error: BaseException) -> str:
    """Our own words only: what a server says may quote what it was sent, a token included."""
    return f"status {error.status}" if isinstance(error, ServerError) else str(error)


def _name(notice: Notice) -> str:
    return f"infer {notice.model}" if notice.model else "infer"


def _attributes(notice: Notice) -> dict[str, Any]:
    attributes: dict[str, Any] = {"gen_ai.operation.name": "infer"}
    if notice.model:
        attributes["gen_ai.request.model"] = notice.model
    if notice.source:
        attributes["mcp_client.source"] = notice.source
    if notice.endpoint and notice.source in ("", "server"):
        parts = urlsplit(notice.endpoint.partition(" ")[0])
        attributes["server.address"] = parts.hostname or parts.path
        if parts.port:
            attributes["server.port"] = parts.port
    if notice.error is not None:
        attributes["error.type"] = type(notice.error).__name__
        if isinstance(notice.error, ServerError):
            attributes["http.response.status_code"] = notice.error.status
    return attributes
