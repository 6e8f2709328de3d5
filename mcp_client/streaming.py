"""A streamed inference: one request, any number of answers (gRPC's ModelStreamInfer, decoupled models). Never cached.

Once the first answer is out a stream can't be sent again, so there are no retries here; breaker, deadline and errors are
those of the flow.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from .effects import Call, Endpoint, Flow
from .errors import ConfigurationError, MCPError
from .exchanges import placed
from .flow import Engine
from .protocols import WireRequest, WireResponse
from .request import Request
from .result import InferResult


class StreamedCall:
    """What the sync and the async iterator share: they only fetch the responses."""

    def __init__(self, engine: Engine, call: Call, endpoint: Endpoint, codec: Any) -> None:
        self._engine = engine
        self._call = call
        self._codec = codec
        self._endpoint = endpoint
        self._request: Request = call.request()
        self.transport = endpoint.transport
        self.wire: WireRequest = codec.stream(self._request)
        self.deadline = call.deadline

    def result(self, response: WireResponse) -> InferResult | None:
        """The result in a message of the stream, if it has one."""
        answer = self._codec.decode_stream(response, self._request)
        if answer is None:
            return None
        latency_ms = (self._engine.clock() - self._call.started) * 1e3
        return InferResult(answer, source="server", latency_ms=latency_ms, request_id=self._call.id)

    @contextmanager
    def accounted(self) -> Iterator[None]:
        """The stream's outcome for the breaker; its errors say where they happened."""
        engine, call, endpoint = self._engine, self._call, self._endpoint
        try:
            yield
        except MCPError as error:
            engine.stream_ended(call, endpoint, error)
            raise error.at(request_id=call.id, endpoint=endpoint.url, attempts=1) from error.__cause__
        except BaseException as reason:  # the caller has had enough
            engine.stream_ended(call, endpoint, reason)
            raise
        engine.stream_ended(call, endpoint, None)


def open_stream(engine: Engine, call: Call) -> Flow[StreamedCall]:
    """Everything that comes before the first byte: the model's description, the checks, the endpoint."""
    yield from placed(call, engine.prepare(call))
    endpoint, codec = yield from placed(call, engine.reach(call))
    if not hasattr(codec, "stream"):
        error = ConfigurationError(
            f"{endpoint.url} can't stream: only gRPC has streamed inference; use grpc://host:port"
        )
        engine.stream_ended(call, endpoint, error)
        raise error.at(request_id=call.id, endpoint=endpoint.url)
    return StreamedCall(engine, call, endpoint, codec)
