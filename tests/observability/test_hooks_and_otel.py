"""Hooks, traceparent, spans and metrics: what an application sees of its requests."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from opentelemetry import metrics, trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from mcp_client import (
    AsyncMCPClient,
    AuthenticationError,
    ConnectionFailedError,
    MCPClient,
    Notice,
    RequestRejectedError,
    Retry,
)
from stub_server import StubServer
from tests.conftest import RawServer, read_request, respond

spans = InMemorySpanExporter()
reader = InMemoryMetricReader()


@pytest.fixture(scope="module", autouse=True)
def _providers() -> None:
    tracing = TracerProvider()
    tracing.add_span_processor(SimpleSpanProcessor(spans))
    trace.set_tracer_provider(tracing)
    metrics.set_meter_provider(MeterProvider([reader]))


@pytest.fixture(scope="module")
def server(affine_model: Path) -> Iterator[StubServer]:
    with StubServer(affine_model) as running:
        yield running


X = [[0.1, 0.9, 0.4]]


def test_a_hook_sees_requests_answers_and_errors(server: StubServer) -> None:
    seen: list[Notice] = []
    with MCPClient(server.url, hooks=seen.append) as client:
        result = client.infer(X, session="s", path="/p")
        client.infer(X)
    assert [(notice.kind, notice.source) for notice in seen] == [
        ("request", ""),
        ("response", "server"),
        ("response", "cache"),
    ]
    assert seen[1].request_id == result.request_id
    assert seen[1].endpoint == server.url
    assert (seen[1].model, seen[1].attempts, seen[1].session, seen[1].path) == ("affine", 2, "s", "/p")
    seen.clear()
    with (
        MCPClient("http://127.0.0.1:9", model="m", hooks=seen.append, retry=Retry(attempts=1)) as client,
        pytest.raises(ConnectionFailedError),
    ):
        client.infer(X)
    assert [notice.kind for notice in seen] == ["request", "error"]
    assert isinstance(seen[-1].error, ConnectionFailedError)


def test_a_hook_that_fails_fails_no_request(server: StubServer, caplog: pytest.LogCaptureFixture) -> None:
    def hook(notice: Notice) -> None:
        raise ValueError("a bug of the application")

    with MCPClient(server.url, hooks=hook) as client:
        assert client.infer(X).source == "server"
    assert "a bug of the application" in caplog.text


def test_a_cancelled_request_ends_too(raw_server: Callable[..., RawServer]) -> None:
    seen: list[Notice] = []
    running = raw_server(lambda connection: (read_request(connection), connection.recv(1)))

    async def scene() -> None:
        async with AsyncMCPClient(running.url, model="m", hooks=seen.append) as client:
            task = asyncio.create_task(client.infer(X))
            await asyncio.sleep(0.05)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    asyncio.run(scene())
    assert [notice.kind for notice in seen] == ["request", "error"]
    assert isinstance(seen[-1].error, asyncio.CancelledError)


def posts(raw_server: Callable[..., RawServer]) -> tuple[str, list[dict[str, str]]]:
    """A server that answers every inference with a 400, and the headers that it saw."""
    seen: list[dict[str, str]] = []

    def handle(connection: Any) -> None:
        while (request := read_request(connection)) is not None:
            if request[0].startswith("POST"):
                seen.append(request[1])
                respond(connection, 400, b'{"error": "no"}')
            elif request[0].startswith("GET /v2/models/m "):
                respond(connection, 200, b'{"name": "m", "inputs": [], "outputs": []}')
            else:
                respond(connection, 200, b'{"name": "t", "extensions": ["binary_tensor_data"]}')

    return raw_server(handle).url, seen


def test_the_active_spans_context_is_sent_on(raw_server: Callable[..., RawServer]) -> None:
    url, seen = posts(raw_server)
    with MCPClient(url, model="m", cache=None) as client:
        with trace.get_tracer("app").start_as_current_span("page") as span:
            for_this = f"{span.get_span_context().trace_id:032x}-{span.get_span_context().span_id:016x}"
            with pytest.raises(RequestRejectedError, match="no"):
                client.infer({"x": [1.0]})
        with pytest.raises(RequestRejectedError, match="no"):
            client.infer({"x": [1.0]})
    assert seen[0]["traceparent"].startswith(f"00-{for_this}-")
    assert "traceparent" not in seen[1]


def test_with_otel_the_server_continues_our_span_which_continues_the_applications(
    raw_server: Callable[..., RawServer],
) -> None:
    url, seen = posts(raw_server)
    spans.clear()
    with (
        MCPClient(url, model="m", cache=None, otel=True) as client,
        trace.get_tracer("app").start_as_current_span("page") as parent,
        pytest.raises(RequestRejectedError, match="no"),
    ):
        client.infer({"x": [1.0]})
    ours = next(span for span in spans.get_finished_spans() if span.name == "infer m")
    assert ours.parent is not None
    assert ours.parent.span_id == parent.get_span_context().span_id
    assert ours.context is not None
    attempt = next(span for span in spans.get_finished_spans() if span.name == "POST")
    assert attempt.parent is not None
    assert attempt.parent.span_id == ours.context.span_id
    assert seen[0]["traceparent"].split("-")[2] == f"{attempt.context.span_id:016x}"  # type: ignore[union-attr]
    assert ours.kind is trace.SpanKind.CLIENT
    assert ours.status.status_code is trace.StatusCode.ERROR
    attributes = dict(ours.attributes or {})
    assert attributes["error.type"] == "RequestRejectedError"
    assert attributes["http.response.status_code"] == 400
    assert attributes["server.address"] == "127.0.0.1"


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_spans_and_durations_say_where_the_answer_came_from(server: StubServer, kind: str) -> None:
    spans.clear()
    if kind == "sync":
        with MCPClient(server.url, otel=True) as client:
            client.infer(X, session="someone", path="/secret")
            client.infer(X, session="someone", path="/secret")
    else:

        async def scene() -> None:
            async with AsyncMCPClient(server.url, otel=True) as client:
                await client.infer(X, session="someone", path="/secret")
                await client.infer(X, session="someone", path="/secret")

        asyncio.run(scene())
    finished = [span for span in spans.get_finished_spans() if span.name.startswith("infer")]
    assert [span.name for span in finished] == ["infer affine", "infer affine"]
    assert [dict(span.attributes or {})["mcp_client.source"] for span in finished] == ["server", "cache"]
    told = " ".join(str(span.to_json()) for span in spans.get_finished_spans())
    assert "someone" not in told
    assert "/secret" not in told
    data = reader.get_metrics_data()
    assert data is not None
    (metric,) = data.resource_metrics[0].scope_metrics[0].metrics
    assert (metric.name, metric.unit) == ("gen_ai.client.operation.duration", "s")
    sources = {dict(point.attributes or {}).get("mcp_client.source") for point in metric.data.data_points}
    assert {"server", "cache"} <= sources


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_each_attempt_has_a_span_of_its_own(affine_model: Path, protocol: str) -> None:
    """The first attempt goes to a port where nobody listens, the second is answered."""
    with StubServer(affine_model, grpc=protocol == "grpc") as running:
        url = running.grpc_url if protocol == "grpc" else running.url
        urls = [f"{protocol}://127.0.0.1:9", url]
        for _ in range(40):  # until the dead one is drawn first
            spans.clear()
            with MCPClient(urls, cache=None, prefetch=None, otel=True) as client:
                client.infer(X)
            finished = spans.get_finished_spans()
            if dict(finished[-2].attributes or {}).get("http.request.resend_count"):
                break
    call = finished[-1]
    below = finished[:-1]
    assert call.name == "infer affine"
    assert all(span.parent.span_id == call.context.span_id for span in below)  # type: ignore[union-attr]
    assert {span.kind for span in below} == {trace.SpanKind.CLIENT}
    failed = [span for span in below if span.status.status_code is trace.StatusCode.ERROR]
    assert {dict(span.attributes or {})["error.type"] for span in failed} == {"ConnectionFailedError"}
    assert {dict(span.attributes or {})["server.port"] for span in failed} == {9}
    last = dict(below[-1].attributes or {})
    assert last["http.request.resend_count"] >= 1
    if protocol == "grpc":
        assert below[-1].name == "inference.GRPCInferenceService/ModelInfer"
        assert last["rpc.method"] == "ModelInfer"
    else:
        assert below[-1].name == last["http.request.method"] == "POST"


def test_a_hedge_has_a_span_and_the_loser_is_told(raw_server: Callable[..., RawServer]) -> None:
    stalls = threading.Event()
    traced: list[str] = []

    def handle(connection: Any) -> None:
        while (request := read_request(connection)) is not None:
            if request[0].startswith("POST"):
                traced.append(request[1]["traceparent"])
                if stalls.is_set():
                    stalls.clear()
                    connection.recv(1)
                    return
                output = {"name": "x", "datatype": "FP32", "shape": [1], "data": [1.5]}
                respond(connection, 200, json.dumps({"model_name": "m", "outputs": [output]}).encode())
            elif request[0].startswith("GET /v2 "):
                respond(connection, 200, b'{"name": "t", "extensions": []}')
            else:
                tensor = {"name": "x", "datatype": "FP32", "shape": [-1]}
                respond(
                    connection,
                    200,
                    json.dumps({"name": "m", "inputs": [tensor], "outputs": [tensor]}).encode(),
                )

    retry = Retry(hedge=True, budget=1.0)
    with MCPClient(raw_server(handle).url, model="m", cache=None, otel=True, retry=retry) as client:
        for _ in range(30):
            client.infer([1.0])
        spans.clear()
        traced.clear()
        stalls.set()
        client.infer([1.0])
    hedge = [s for s in spans.get_finished_spans() if dict(s.attributes or {}).get("mcp_client.hedge")]
    lost = [s for s in spans.get_finished_spans() if dict(s.attributes or {}).get("error.type")]
    assert len(hedge) == len(lost) == 1
    assert hedge[0] is not lost[0]
    sent = {line.split("-")[2] for line in traced}
    assert sent == {f"{span.context.span_id:016x}" for span in (hedge[0], lost[0])}  # type: ignore[union-attr]


def test_what_a_server_quotes_does_not_get_into_a_span(raw_server: Callable[..., RawServer]) -> None:
    def handle(connection: Any) -> None:
        while read_request(connection) is not None:
            respond(connection, 401, b'{"error": "no such token: hunter2"}')

    spans.clear()
    with (
        MCPClient(raw_server(handle).url, model="m", cache=None, otel=True, api_key="hunter2") as client,
        pytest.raises(AuthenticationError, match="hunter2"),
    ):
        client.infer({"x": [1.0]})
    told = [str(span.to_json()) for span in spans.get_finished_spans()]
    assert told
    assert "hunter2" not in " ".join(told)


def test_nothing_of_opentelemetry_is_imported_unasked(server: StubServer) -> None:
    code = (
        "import sys; from mcp_client import MCPClient\n"
        f"with MCPClient({server.url!r}) as client: client.infer({X})\n"
        "print(any(name.startswith('opentelemetry') for name in sys.modules))"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout.strip() == "False"
