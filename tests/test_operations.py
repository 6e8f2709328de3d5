"""What clients ask of servers beside inference: the same answers over HTTP and gRPC, with threads and asyncio."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mcp_client import (
    AsyncMCPClient,
    ConfigurationError,
    ConnectionFailedError,
    IndexEntry,
    MCPClient,
    MCPError,
    NotFoundError,
    NotOfferedError,
    RequestRejectedError,
    TensorSpec,
)
from stub_server import StubServer
from tests import models
from tests.conftest import RawServer, read_request, respond

X = np.array([[0.1, 0.9, 0.4]], np.float32)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StubServer]:
    root = tmp_path_factory.mktemp("repository")
    models.repository(root, affine={"1": 1.0, "2": 2.0, "10": 10.0})
    models.add(root / "add.onnx")
    (root / "broken.onnx").write_bytes(b"no model")
    with StubServer(root, grpc=True) as running:
        yield running


@pytest.fixture(params=["http", "grpc"])
def url(request: pytest.FixtureRequest, server: StubServer) -> str:
    return server.grpc_url if request.param == "grpc" else server.url


Ask = Callable[..., Any]


@pytest.fixture(params=["threads", "asyncio"])
def ask(request: pytest.FixtureRequest) -> Ask:
    """``ask(url, "method", …)``: that method of a client, sync or async."""

    def sync(url: str, method: str, *arguments: Any, protocol: Any = "auto", **options: Any) -> Any:
        with MCPClient(url, protocol=protocol) as client:
            return getattr(client, method)(*arguments, **options)

    def awaited(url: str, method: str, *arguments: Any, protocol: Any = "auto", **options: Any) -> Any:
        async def work() -> Any:
            async with AsyncMCPClient(url, protocol=protocol) as client:
                return await getattr(client, method)(*arguments, **options)

        return asyncio.run(work())

    return sync if request.param == "threads" else awaited


def test_what_the_server_is(url: str, ask: Ask) -> None:
    told = ask(url, "server")
    assert told.name == "mcp-server"
    assert {"model_repository", "model_configuration", "statistics"} <= set(told.extensions)


def test_liveness_and_readiness(url: str, ask: Ask) -> None:
    assert ask(url, "live")
    assert ask(url, "ready")
    assert ask(url, "ready", model="affine")
    assert ask(url, "ready", model="affine", version="10")
    assert not ask(url, "ready", model="broken")
    assert not ask(url, "ready", model="affine", version="3")
    assert not ask(url, "ready", model="nobody")


def test_the_index_has_what_is_not_ready_too(url: str, ask: Ask) -> None:
    index = ask(url, "index")
    assert IndexEntry("affine", "10", "READY") in index
    (broken,) = (entry for entry in index if entry.name == "broken")
    assert broken.state == "UNAVAILABLE"
    assert "can't be loaded" in broken.reason
    assert ask(url, "models") == ["add", "affine"]


def test_the_configuration(url: str, ask: Ask) -> None:
    config = ask(url, "config", "affine")
    assert (config.name, config.backend, config.max_batch_size) == ("affine", "onnxruntime", 0)
    assert config.inputs == (TensorSpec("x", "FP32", (-1, 3)),)
    assert config.outputs == (TensorSpec("probs", "FP32", (-1, 2)),)
    assert not config.decoupled
    assert config.extra["version_policy"] == {"all": {}}


def test_statistics_count_what_was_asked(url: str, ask: Ask) -> None:
    def count(version: str) -> tuple[int, float]:
        (one,) = ask(url, "statistics", "affine", version)
        return one.inferences, one.compute_infer.seconds

    before, seconds = count("2")
    ask(url, "infer", X, model="affine", version="2")
    after, more = count("2")
    assert after == before + 1
    assert more > seconds
    (two,) = ask(url, "statistics", "affine", "2")
    assert two.success.count == two.executions == after
    assert two.last_inference > 1.7e9  # seconds of this century, not milliseconds
    assert two.endpoint == url
    assert [each.version for each in ask(url, "statistics", "affine")] == ["1", "2", "10"]
    assert {each.name for each in ask(url, "statistics")} == {"affine", "add"}


@pytest.mark.parametrize("method", ["metadata", "statistics", "config", "load", "unload"])
def test_a_model_that_is_not_there(url: str, ask: Ask, method: str) -> None:
    with pytest.raises(NotFoundError, match="nobody") as raised:
        ask(url, method, "nobody")
    assert raised.value.endpoint == url
    assert raised.value.request_id


def test_unload_and_load(tmp_path: Path, ask: Ask, stub_server: Callable[..., StubServer]) -> None:
    models.repository(tmp_path, m={"1": 1.0})
    running = stub_server(tmp_path, grpc=True)
    for url in (running.url, running.grpc_url):
        ask(url, "unload", "m")
        assert not ask(url, "ready", model="m")
        (entry,) = ask(url, "index")
        assert (entry.state, entry.reason) == ("UNAVAILABLE", "unloaded")
        ask(url, "load", "m")
        assert ask(url, "ready", model="m")


@pytest.mark.parametrize("kind", ["url", "grpc_url"])
def test_a_load_drops_what_was_cached_of_the_model(
    tmp_path: Path, stub_server: Callable[..., StubServer], kind: str
) -> None:
    models.repository(tmp_path, m={"1": 1.0}, other={"1": 1.0})
    running = stub_server(tmp_path, grpc=True)
    with MCPClient(getattr(running, kind)) as client:
        first = client.infer(X, model="m").output
        client.infer(X, model="other")
        models.affine(tmp_path / "m" / "1" / "model.onnx", scale=2.0)
        client.load("m")
        second = client.infer(X, model="m")
        assert second.source == "server"
        np.testing.assert_allclose(second.output, first * 2, rtol=1e-6)
        assert client.infer(X, model="other").source == "cache"
        client.unload("m")
        with pytest.raises(MCPError, match="unloaded"):
            client.infer(X, model="m")


def test_a_configuration_and_files_of_its_own(
    tmp_path: Path, ask: Ask, stub_server: Callable[..., StubServer]
) -> None:
    models.repository(tmp_path / "models", m={"1": 1.0, "2": 2.0})
    running = stub_server(tmp_path / "models", grpc=True)
    content = models.affine(tmp_path / "other.onnx", scale=5.0).read_bytes()
    for url in (running.url, running.grpc_url):
        ask(url, "load", "m", config={"version_policy": {"specific": {"versions": [1]}}})
        assert [entry.version for entry in ask(url, "index")] == ["1"]
        assert ask(url, "config", "m").extra["version_policy"] == {"specific": {"versions": [1]}}
        ask(url, "load", "m", config='{"backend": "onnxruntime"}', files={"7/model.onnx": content})
        result = ask(url, "infer", X, model="m")
        assert result.version == "7"
        np.testing.assert_allclose(result.output, 5 * (X @ models.WEIGHTS + models.BIAS), rtol=1e-5)
        for wrong in ({"config": {"max_batch_size": 8}}, {"files": {"1/model.onnx": content}},
                      {"config": "{", "files": {}}, {"config": {}, "files": {"../x": b""}}):  # fmt: skip
            with pytest.raises(RequestRejectedError):
                ask(url, "load", "m", **wrong)
        ask(url, "load", "m")
        assert [entry.version for entry in ask(url, "index")] == ["1", "2"]


def test_every_endpoint_is_told(tmp_path: Path, ask: Ask, stub_server: Callable[..., StubServer]) -> None:
    models.repository(tmp_path, m={"1": 1.0})
    one, other = stub_server(tmp_path), stub_server(tmp_path)
    urls = [one.url, other.url]
    assert [each.endpoint for each in ask(urls, "statistics", "m")] == urls
    ask(urls, "unload", "m")
    assert not ask(one.url, "ready", model="m")
    assert not ask(other.url, "ready", model="m")
    one.kill()
    with pytest.raises(ConnectionFailedError) as raised:
        ask(urls, "load", "m", protocol="oip")
    assert raised.value.endpoint == one.url
    assert ask(other.url, "ready", model="m")


CALLS: dict[str, tuple[Any, ...]] = {
    "server": (), "index": (), "config": ("m",), "statistics": ("m",), "load": ("m",), "unload": ("m",)
}  # fmt: skip


@pytest.mark.parametrize("method", CALLS)
@pytest.mark.parametrize(
    ("status", "body"),
    [(404, b'{"detail":"Not Found"}'), (404, b""), (404, b"404 page not found"), (405, b""), (501, b"no")],
)
def test_a_server_without_the_call_says_so(
    raw_server: Callable[..., RawServer], ask: Ask, method: str, status: int, body: bytes
) -> None:
    asked = []

    def handle(connection: socket.socket) -> None:
        while (request := read_request(connection)) is not None:
            asked.append(request[0])
            known = request[0].startswith("GET /v2 ") and len(asked) == 1  # the protocol is found out by it
            respond(
                connection, 200 if known else status, b'{"name": "bare", "extensions": []}' if known else body
            )

    with pytest.raises(NotOfferedError, match="does not offer") as raised:
        ask(raw_server(handle).url, method, *CALLS[method], protocol="oip")
    assert raised.value.request_id
    assert raised.value.endpoint
    assert len(asked) == 2  # nothing was sent again


def test_a_server_with_neither_an_index_nor_a_list_of_models(
    raw_server: Callable[..., RawServer], ask: Ask
) -> None:
    def handle(connection: socket.socket) -> None:
        while (request := read_request(connection)) is not None:
            known = request[0].startswith("GET /v2 ")
            respond(
                connection, 200 if known else 404, b'{"name": "bare"}' if known else b'{"detail":"Not Found"}'
            )

    server = raw_server(handle)
    with pytest.raises(NotOfferedError, match="repository index") as raised:
        ask(server.url, "models", protocol="oip")
    assert raised.value.request_id
    assert raised.value.endpoint == server.url


def test_models_of_a_server_with_a_list_instead_of_an_index(
    raw_server: Callable[..., RawServer], ask: Ask
) -> None:
    """KServe. Its only model is the default too."""
    answers = {
        "GET /v2": b'{"name": "kserve", "version": "0.21.0"}',
        "GET /v2/models": b'{"models": ["only"]}',
        "GET /v2/models/only": b'{"name": "only", "inputs": [], "outputs": []}',
    }

    def handle(connection: socket.socket) -> None:
        while (request := read_request(connection)) is not None:
            body = answers.get(request[0].removesuffix(" HTTP/1.1"))
            respond(connection, 404 if body is None else 200, body or b'{"detail":"Not Found"}')

    assert ask(raw_server(handle).url, "models", protocol="oip") == ["only"]
    assert ask(raw_server(handle).url, "metadata", protocol="oip").name == "only"


def test_mcps_own_protocol_has_readiness_and_models_alone(server: StubServer, ask: Ask) -> None:
    assert ask(server.url, "live", protocol="mcp")
    assert ask(server.url, "ready", protocol="mcp")
    assert ask(server.url, "ready", model="affine", protocol="mcp")
    assert not ask(server.url, "ready", model="broken", protocol="mcp")
    assert ask(server.url, "models", protocol="mcp") == ["add", "affine"]
    for method, arguments in CALLS.items():
        with pytest.raises(NotOfferedError, match="protocol='oip'"):
            ask(server.url, method, *("affine" for _ in arguments), protocol="mcp")


def test_no_server_at_all(tmp_path: Path, ask: Ask) -> None:
    models.affine(tmp_path / "m.onnx")
    for method, arguments in CALLS.items():
        with pytest.raises(ConfigurationError, match="no server"):
            ask(f"edge:{tmp_path}", method, *("m" for _ in arguments))
    assert not ask(f"edge:{tmp_path}", "live")
