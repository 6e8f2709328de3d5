"""What one call can say beside its inputs, over every protocol: classes, headers, ids, sequences, priority, timeout."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcp_client import (
    AsyncMCPClient,
    Class,
    InferResult,
    InvalidInputError,
    MCPClient,
    ProtocolError,
    RequestRejectedError,
    ServerTimeoutError,
)
from mcp_client._httpx import httpx
from mcp_client.classification import classify, read_classes
from mcp_client.effects import Call
from mcp_client.protocols import WireRequest, mcp_v1, oip_grpc, oip_http
from mcp_client.protocols.mcp_v1 import McpV1Codec
from mcp_client.protocols.oip_grpc import OipGrpcCodec
from mcp_client.protocols.oip_http import OipHttpCodec
from mcp_client.request import Request
from stub_server import StubServer
from tests import models
from tests.conftest import RawServer, read_request, respond

X = np.array([[0.1, 0.9, 0.4], [1.0, 0.0, 0.0]], np.float32)
PROBS = X @ models.WEIGHTS + models.BIAS
PROTOCOLS = ["mcp", "oip", "json", "grpc"]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StubServer]:
    root = tmp_path_factory.mktemp("models")
    models.repository(root, m={"1": 1.0}, plain={"1": 1.0})
    (root / "m" / "1" / "labels.txt").write_text("cat\ndog: \u00fcber\n")
    models.identity(root / "ints.onnx", "INT64")
    models.identity(root / "text.onnx", "BYTES")
    with StubServer(root, grpc=True) as running:
        yield running


Infer = Callable[..., InferResult]


@pytest.fixture(params=[*PROTOCOLS, "asyncio"])
def infer(request: pytest.FixtureRequest, server: StubServer) -> Infer:
    """``infer(…)`` of a client without a cache that speaks the protocol."""

    def call(inputs: Any, **options: Any) -> InferResult:
        if request.param == "asyncio":

            async def work() -> InferResult:
                async with AsyncMCPClient(server.grpc_url, cache=None) as client:
                    return await client.infer(inputs, **options)

            return asyncio.run(work())
        protocol = request.param if request.param == "mcp" else "oip"
        url = server.grpc_url if request.param == "grpc" else server.url
        with MCPClient(url, protocol="auto" if request.param == "grpc" else protocol, cache=None) as client:
            if request.param == "json":
                for endpoint in client._engine.endpoints:
                    endpoint.codec = OipHttpCodec(binary=False)
            return client.infer(inputs, **options)

    return call


# --- classes ------------------------------------------------------------------------------------------------


def test_the_best_classes_with_their_labels(infer: Infer) -> None:
    result = infer(X, model="m", outputs={"probs": 2})
    for row, classes in zip(PROBS, result.classes("probs"), strict=True):
        order = np.argsort(-row)
        labels = ["cat", "dog: über"]
        assert [each.index for each in classes] == order.tolist()
        assert [each.label for each in classes] == [labels[index] for index in order]
        np.testing.assert_allclose([each.score for each in classes], row[order], atol=1e-6)
    assert result.output.dtype == object
    assert result.output.shape == (2, 2)
    assert result.output[0, 0] == f"{PROBS[0].max():f}:{PROBS[0].argmax()}:dog: über".encode()


def test_fewer_classes_and_no_labels(infer: Infer) -> None:
    ((best,), _) = infer(X, model="plain", outputs={"probs": 1}).classes()
    assert best == Class(pytest.approx(PROBS[0].max(), abs=1e-6), int(PROBS[0].argmax()))
    assert len(infer(X, model="plain", outputs={"probs": 99}).classes()[0]) == 2
    numbers = infer(np.array([5, 2**62, 5, -1]), model="ints", outputs={"y": 3})
    assert numbers.output.tolist() == [f"{2**62}:1".encode(), b"5:0", b"5:2"]  # one axis: no batch


def test_a_dict_of_none_asks_for_the_tensor(infer: Infer) -> None:
    result = infer(X, model="m", outputs={"probs": None})
    np.testing.assert_allclose(result.output, PROBS, rtol=1e-6)
    with pytest.raises(InvalidInputError, match="no classification"):
        result.classes()


def test_what_has_no_classes(infer: Infer) -> None:
    with pytest.raises(RequestRejectedError, match="only numbers"):
        infer(["a"], model="text", outputs={"y": 1})
    for count in (0, -1, 1.5, True, "3"):
        with pytest.raises(InvalidInputError, match="best classes"):
            infer(X, model="m", outputs={"probs": count})


def test_labels_in_the_onnx_file_itself(tmp_path: Path, stub_server: Callable[..., StubServer]) -> None:
    path = models.affine(tmp_path / "m.onnx")
    model = onnx.load(path)
    onnx.helper.set_model_props(model, {"labels": "a\nb", "author": "x"})
    onnx.save(model, path)
    for url in (stub_server(path).url, f"edge:{tmp_path}"):
        with MCPClient(url) as client:
            assert client.infer(X, outputs={"probs": 1}).output[0, 0].endswith(b":1:b")


def test_the_edge_has_the_servers_labels(server: StubServer, tmp_path: Path) -> None:
    with MCPClient(server.url, edge=tmp_path) as client:
        client.edge.sync(["m"])
        there = client.infer(X, model="m", outputs={"probs": 2})
    with MCPClient(f"edge:{tmp_path}") as client:
        here = client.infer(X, model="m", outputs={"probs": 2})
    assert (there.source, here.source) == ("server", "edge")
    assert here.output.tolist() == there.output.tolist()


@pytest.mark.parametrize("kind", ["url", "grpc_url"])
def test_classes_of_tensors_in_shared_memory(server: StubServer, kind: str) -> None:
    x = np.tile(X, (20_000, 1))
    with MCPClient(getattr(server, kind), model="m", cache=None) as client:
        (endpoint,) = client._engine.endpoints
        for outputs in (["probs"], {"probs": 1}, {"probs": 2}, ["probs"]):  # each twice: sizes are learned
            for _ in range(2):
                result = client.infer(x, outputs=outputs)
                if isinstance(outputs, dict):
                    assert result.output.shape == (40_000, outputs["probs"])
                    assert result.classes()[0][0].index == PROBS[0].argmax()
                else:
                    np.testing.assert_allclose(result.output[:2], PROBS, rtol=1e-5)
        assert endpoint.transport.arena.enabled
        assert endpoint.transport.arena.registered()


def test_classes_and_tensor_are_cached_apart(server: StubServer) -> None:
    with MCPClient(server.url) as client:
        assert client.infer(X, model="m", outputs=["probs"]).output.dtype == np.float32
        assert client.infer(X, model="m", outputs={"probs": 1}).output.shape == (2, 1)
        assert client.infer(X, model="m", outputs={"probs": 2}).output.shape == (2, 2)
        again = client.infer(X, model="m", outputs={"probs": 1})
        assert (again.source, again.output.shape) == ("cache", (2, 1))


@given(
    st.lists(st.floats(allow_nan=False, width=32), max_size=12),
    st.integers(1, 5),
    st.lists(st.text(max_size=4), max_size=12),
)
def test_classes_are_the_largest_in_order(scores: list[float], count: int, labels: list[str]) -> None:
    classes = read_classes(classify(np.array(scores, np.float32), count, labels, "y"), "y")
    best = sorted(range(len(scores)), key=lambda index: -scores[index])[
        :count
    ]  # sorted() keeps equal ones in order
    assert [each.index for each in classes] == best
    assert [each.label for each in classes] == [
        labels[index] if index < len(labels) else "" for index in best
    ]
    for each in classes:
        assert each.score == float(f"{scores[each.index]:f}")


@given(st.binary(max_size=20))
def test_what_is_no_class_is_one_of_our_errors(item: bytes) -> None:
    with suppress(ProtocolError):
        read_classes(np.array([item], object), "y")


@given(st.lists(st.text(min_size=1, max_size=5), min_size=1, max_size=4, unique=True), st.data())
def test_a_request_for_classes_arrives(names: list[str], data: st.DataObject) -> None:
    classes = data.draw(st.dictionaries(st.sampled_from(names), st.integers(1, 2**31 - 1)))
    request = Request("m", {"x": X}, outputs=tuple(names), classes=classes)
    for protocol in PROTOCOLS:
        seen = seen_by(protocol, request)
        assert (seen.outputs, dict(seen.classes)) == (tuple(names), classes), protocol


# --- headers and ids ----------------------------------------------------------------------------------------


def test_headers_and_ids_of_one_call_arrive(infer: Infer, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, str]] = []
    from stub_server import service

    def read(headers: Any) -> Any:
        seen.append(dict(headers))
        return read_context(headers)

    read_context = service.read_context
    monkeypatch.setattr(service, "read_context", read)
    result = infer(X, model="m", headers={"X-Tenant": "a b", "traceparent": "00-x"}, request_id="my id/1")
    assert result.request_id == "my id/1"
    assert seen[0]["x-tenant"] == "a b"
    assert seen[0]["traceparent"] == "00-x"
    assert seen[0]["x-request-id"] == "my%20id/1"
    infer(X, model="m")
    assert "x-tenant" not in seen[1]


@pytest.mark.parametrize(
    "headers",
    [{"a b": "x"}, {"": "x"}, {"x": "a\r\nb: c"}, {"x": "ü"}, {"Host": "x"}, {"content-length": "1"}, {"x": 1},
     {"grpc-timeout": "1"}, {"a-bin": "x"}, {"X-Request-Id": "x"}, {"X-MCP-Purpose": "prefetch"}, ["X-A: b"], "X: b"],
)  # fmt: skip
def test_headers_that_can_not_be(infer: Infer, headers: Any) -> None:
    with pytest.raises(InvalidInputError, match=r"header|request_id"):
        infer(X, model="m", headers=headers)


@pytest.mark.parametrize("request_id", ["", 7, b"x"])
def test_ids_that_can_not_be(infer: Infer, request_id: Any) -> None:
    with pytest.raises(InvalidInputError, match="request_id"):
        infer(X, model="m", request_id=request_id)


def test_an_answer_is_not_handed_to_a_call_with_other_headers(server: StubServer) -> None:
    with MCPClient(server.url) as client:
        first = client.infer(X, model="m", headers={"X-Tenant": "a"})
        other = client.infer(X, model="m", headers={"X-Tenant": "b"})
        same = client.infer(X, model="m", headers={"x-tenant": "a"})
        none = client.infer(X, model="m")
    assert [each.source for each in (first, other, same, none)] == ["server", "server", "cache", "server"]


def test_a_calls_header_takes_the_place_of_the_clients_over_grpc(
    server: StubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mcp_client.transports.grpc import GrpcTransport

    metadata: list[Any] = []
    send = GrpcTransport._send

    def spied(self: Any, wire: WireRequest, message: bytes, left: float, told: Any, deadline: float) -> Any:
        metadata.append(told)
        return send(self, wire, message, left, told, deadline)

    monkeypatch.setattr(GrpcTransport, "_send", spied)
    with MCPClient(server.grpc_url, headers={"X-Tenant": "all", "x-other": "1"}, api_key="k") as client:
        client.infer(X, model="m", headers={"x-tenant": "one", "Authorization": "Basic x"})
    told = [pair for pair in metadata[-1] if pair[0] in ("x-tenant", "x-other", "authorization")]
    assert sorted(told) == [("authorization", "Basic x"), ("x-other", "1"), ("x-tenant", "one")]


@pytest.mark.parametrize("own", [False, True])
def test_a_calls_header_takes_the_place_of_the_clients_over_http(
    raw_server: Callable[..., RawServer], own: bool
) -> None:
    heads: list[dict[str, str]] = []
    twice: list[str] = []

    def handle(connection: socket.socket) -> None:
        connection.settimeout(20)
        while raw := connection.recv(65536, socket.MSG_PEEK):
            request = read_request(connection)
            assert request is not None
            heads.append(request[1])
            twice.extend(name for name in request[1] if raw.lower().count(f"\n{name}:".encode()) != 1)
            respond(connection, 200, b'{"name":"m","outputs":[]}')

    with ExitStack() as open_ones:
        options: dict[str, Any] = {"http_client": open_ones.enter_context(httpx.Client())} if own else {}
        client = open_ones.enter_context(
            MCPClient(
                raw_server(handle).url,
                protocol="oip",
                headers={"X-Tenant": "all", "x-other": "1"},
                api_key="k",
                cache=None,
                **options,
            )
        )
        one = {"x-tenant": "one", "accept-encoding": "gzip"} | ({} if own else {"Authorization": "Basic x"})
        client.infer({"x": X}, model="m", headers=one)
        client.infer({"x": X}, model="m")
    assert not twice
    first, second = heads[-2:]
    assert (first["x-tenant"], first["x-other"], first["accept-encoding"]) == ("one", "1", "gzip")
    assert (second["x-tenant"], second["x-other"], second["accept-encoding"]) == ("all", "1", "identity")
    assert second["authorization"] == "Bearer k"
    assert own or first["authorization"] == "Basic x"


# --- sequences, priority, timeout ---------------------------------------------------------------------------


def seen_by(protocol: str, request: Request) -> Request:
    """A request as the server has it, for the codecs of each protocol."""
    if protocol == "mcp":
        wire = McpV1Codec().infer(request, None)
    elif protocol == "grpc":
        wire = OipGrpcCodec().infer(request, None)
    else:
        wire = OipHttpCodec(binary=protocol == "oip").infer(request, None)
    body, headers = b"".join(wire.body), {name.lower(): value for name, value in wire.headers.items()}
    if protocol == "mcp":
        return mcp_v1.parse_infer(body, headers).request
    if protocol == "grpc":
        return oip_grpc.parse_infer(body, headers).request
    return oip_http.parse_infer(body, headers, model=request.model, version=request.version).request


def called(**options: Any) -> Request:
    """The request that a client makes of such a call."""
    with MCPClient("http://127.0.0.1:1") as client:
        call: Call = client._call(X, "m", **options)
    call.inputs, call.model_name = {"x": X}, "m"
    return call.request()


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("sequence_id", [7, 2**63 - 1, "user-42/\u00fc"])
def test_a_step_of_a_sequence(protocol: str, sequence_id: int | str) -> None:
    parameters = {"sequence_id": sequence_id, "sequence_start": True, "sequence_end": False}
    seen = seen_by(protocol, called(parameters=parameters))
    assert dict(seen.parameters) == parameters
    assert type(seen.parameters["sequence_start"]) is bool
    assert not seen.cacheable


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_priority_and_timeout_are_said_to_the_server(protocol: str) -> None:
    seen = seen_by(protocol, called(priority=3, timeout=5.0))
    assert seen.priority == 3
    assert 4000 < (seen.timeout_ms or 0) <= 5000
    # As the Open Inference Protocol has them: microseconds, and what the user says goes before the deadline.
    seen = seen_by(
        protocol, called(parameters={"priority": 2, "timeout": 1_500_000, "other": 1}, timeout=5.0)
    )
    assert seen.priority == 2
    assert seen.timeout_ms == 1500
    assert dict(seen.parameters) == {"other": 1}


def test_a_server_side_timeout_is_kept(infer: Infer, server: StubServer) -> None:
    server.latency_ms = 300
    try:
        with pytest.raises(ServerTimeoutError, match="deadline of 20 ms"):
            infer(X, model="m", parameters={"timeout": 20_000}, timeout=20)
    finally:
        server.latency_ms = 0


@pytest.mark.parametrize(
    "parameters", [{"timeout": -1}, {"timeout": "1"}, {"priority": True}, {"priority": 1.5}]
)
def test_priority_and_timeout_are_whole_numbers(parameters: Any) -> None:
    with pytest.raises(InvalidInputError, match="whole number"):
        called(parameters=parameters)


@pytest.mark.parametrize("priority", [-1, 1.5, "1", True, 2**63])
def test_priorities_that_can_not_be(priority: Any) -> None:
    with pytest.raises(InvalidInputError, match="priority must be a whole number"):
        called(priority=priority)


def test_priority_and_timeout_do_not_tell_answers_apart(server: StubServer) -> None:
    with MCPClient(server.url) as client:
        client.infer(X, model="m", parameters={"timeout": 1_000_000})
        assert client.infer(X, model="m", parameters={"priority": 1}).source == "cache"


# --- outputs ------------------------------------------------------------------------------------------------


def test_outputs_come_in_the_order_asked_for(
    tmp_path: Path, stub_server: Callable[..., StubServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also from a server that answers in an order of its own, and with more than was asked for."""
    from mcp_client.edge.model import OnnxModel

    run = OnnxModel.run

    def stubborn(self: Any, inputs: Any, outputs: Any = ()) -> dict[str, Any]:
        return dict(sorted(run(self, inputs).items()))

    monkeypatch.setattr(OnnxModel, "run", stubborn)
    running = stub_server(models.add(tmp_path / "add.onnx"), grpc=True)
    one = np.ones(2, np.float32)
    for url, protocol in ((running.url, "mcp"), (running.url, "oip"), (running.grpc_url, "auto")):
        with MCPClient(url, protocol=protocol, cache=None) as client:  # type: ignore[arg-type]
            assert list(client.infer({"a": one, "b": one}, outputs=["sum", "difference"])) == [
                "sum",
                "difference",
            ]
            assert list(client.infer({"a": one, "b": one}, outputs=["sum"])) == ["sum"]
            assert list(client.infer({"a": one, "b": one})) == ["difference", "sum"]


def test_the_requests_of_classes_on_the_wire() -> None:
    """As tritonclient writes them: a parameter of the output."""
    request = Request("m", {"x": X}, outputs=("a", "b"), classes={"b": 3})
    wire = OipHttpCodec(binary=False).infer(request, None)
    assert json.loads(b"".join(wire.body))["outputs"] == [
        {"name": "a"},
        {"name": "b", "parameters": {"classification": 3}},
    ]
    binary = b"".join(OipHttpCodec().infer(request, None).body)
    assert b'{"name":"b","parameters":{"binary_data":true,"classification":3}}' in binary
    assert json.loads(b"".join(McpV1Codec().infer(request, None).body))["outputs"] == [
        "a",
        {"name": "b", "classification": 3},
    ]
