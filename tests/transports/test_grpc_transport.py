"""gRPC on the wire: against mcp-server, and against servers that misbehave."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import numpy as np
import pytest

grpc = pytest.importorskip("grpc")

from mcp_client import (  # noqa: E402
    AsyncMCPClient,
    AuthenticationError,
    ConfigurationError,
    ConnectionFailedError,
    DeadlineExceededError,
    InvalidInputError,
    MCPClient,
    NotFoundError,
    OverloadedError,
    ProtocolError,
    RequestRejectedError,
    Retry,
    ServerError,
)
from mcp_client.protocols import WireRequest, management_grpc, oip_grpc  # noqa: E402
from mcp_client.protocols import oip_pb2 as pb  # noqa: E402
from mcp_client.result import Answer  # noqa: E402
from mcp_client.transports.grpc import GrpcTransport  # noqa: E402
from stub_server import StubServer  # noqa: E402
from tests import models  # noqa: E402

X = np.array([[0.1, 0.9, 0.4]], np.float32)
ONCE = Retry(attempts=1)


@pytest.fixture(scope="module")
def server(affine_model: Path) -> Iterator[StubServer]:
    with StubServer(affine_model, grpc=True) as running:
        yield running


Methods = dict[str, Callable[[bytes, Any], Any]]


@pytest.fixture
def peer() -> Iterator[Callable[..., str]]:
    """A gRPC server of a test's own methods, bytes to bytes: ``peer({"ModelInfer": …}, streams={…})`` → its URL."""
    with contextlib.ExitStack() as running:

        def start(methods: Methods, streams: Methods | None = None) -> str:
            server = grpc.server(futures.ThreadPoolExecutor(4))
            handlers = {name: grpc.unary_unary_rpc_method_handler(work) for name, work in methods.items()}
            for name, work in (streams or {}).items():
                handlers[name] = grpc.stream_stream_rpc_method_handler(work)
            server.add_generic_rpc_handlers(
                (grpc.method_handlers_generic_handler(management_grpc.SERVICE, handlers),)
            )
            port = server.add_insecure_port("127.0.0.1:0")
            server.start()
            running.callback(lambda: server.stop(0).wait())
            return f"grpc://127.0.0.1:{port}"

        yield start


def describe(message: bytes, context: Any) -> bytes:
    spec = {"name": "x", "datatype": "FP32", "shape": [-1, 3]}
    tensor = pb.ModelMetadataResponse.TensorMetadata
    return bytes(
        pb.ModelMetadataResponse(
            name="m", versions=["1"], inputs=[tensor(**spec)], outputs=[tensor(**{**spec, "name": "y"})]
        ).SerializeToString()
    )


def echo(message: bytes, context: Any) -> bytes:
    request = oip_grpc.parse_infer(message, {}).request
    return b"".join(
        oip_grpc.format_infer(Answer.of({"y": request.inputs["x"]}, model="m", version="1", id=request.id))
    )


# --- mcp-server ---------------------------------------------------------------------------------------------


def test_everything_a_client_asks_over_grpc(server: StubServer) -> None:
    with MCPClient(server.grpc_url) as client:
        assert client.ready()
        assert client.models() == ["affine"]
        metadata = client.metadata()
        assert (metadata.name, metadata.versions) == ("affine", ("1",))
        assert metadata.digest.startswith("sha256:")
        result = client.infer(X)
        np.testing.assert_allclose(result.output, X @ models.WEIGHTS + models.BIAS, rtol=1e-6)
        assert result.source == "server"
        assert client.infer(X).source == "cache"


def test_the_answer_is_the_one_over_http(server: StubServer) -> None:
    with MCPClient(server.url, cache=None) as http, MCPClient(server.grpc_url, cache=None) as client:
        assert np.array_equal(http.infer(X).output, client.infer(X).output)
        assert http.metadata() == client.metadata()


@pytest.mark.parametrize("datatype", models.IDENTITY_TYPES)
def test_every_datatype_makes_the_round_trip(datatype: str, tmp_path: Path) -> None:
    from mcp_client.tensors import dtype_of

    path = models.identity(tmp_path / "same.onnx", datatype, shape=("n", "m"))
    if datatype == "BYTES":
        value: Any = np.array([[b"a\0", b""], ["ü".encode(), b"\xf0\x9f\x98\x80"]], object)
    else:
        value = np.arange(4).reshape(2, 2).astype(dtype_of(datatype))
    with StubServer(path, grpc=True) as running, MCPClient(running.grpc_url) as client:
        for array in (value, value[:0]):
            came = client.infer(array).output
            assert came.dtype == array.dtype
            assert came.shape == array.shape
            assert (
                came.tobytes() == array.tobytes() if datatype != "BYTES" else came.tolist() == array.tolist()
            )


def test_errors_are_the_same_kinds_as_over_http(server: StubServer) -> None:
    with MCPClient(server.grpc_url, retry=ONCE) as client:
        with pytest.raises(NotFoundError, match="nope") as caught:
            client.infer(X, model="nope")
        assert caught.value.code == "model_not_found"
        assert caught.value.endpoint == server.grpc_url
        server.error_rate = 1.0
        try:
            with pytest.raises(OverloadedError, match="injected"):
                client.infer(X)
        finally:
            server.error_rate = 0.0
    transport = GrpcTransport(server.grpc_url, headers={}, max_response_bytes=2**20)
    wire = WireRequest("POST", management_grpc.method("ModelInfer"), body=(b"\xff",))
    assert transport.send(wire, time.monotonic() + 5).status == 400
    wire = WireRequest("POST", management_grpc.method("NoSuchMethod"))
    assert transport.send(wire, time.monotonic() + 5).status == 501
    transport.close()


def test_management_over_grpc(tmp_path: Path) -> None:
    models.affine(tmp_path / "one.onnx")
    models.identity(tmp_path / "two.onnx", "BYTES")
    with StubServer(tmp_path, grpc=True) as running:
        channel = grpc.insecure_channel(running.grpc_url.removeprefix("grpc://"))

        def ask(name: str, request: Any, answer: Any) -> Any:
            call = channel.unary_unary(
                management_grpc.method(name), type(request).SerializeToString, answer.FromString
            )
            return call(request, timeout=10)

        assert ask("ServerLive", pb.ServerLiveRequest(), pb.ServerLiveResponse).live
        assert (
            ask("ServerMetadata", pb.ServerMetadataRequest(), pb.ServerMetadataResponse).name == "mcp-server"
        )
        assert ask("ModelReady", pb.ModelReadyRequest(name="one"), pb.ModelReadyResponse).ready
        config = ask("ModelConfig", pb.ModelConfigRequest(name="two"), pb.ModelConfigResponse).config
        assert config.input[0].data_type == pb.TYPE_STRING
        assert not config.model_transaction_policy.decoupled
        with MCPClient(running.grpc_url) as client:
            client.infer(X, model="one")
            stats = ask(
                "ModelStatistics", pb.ModelStatisticsRequest(), pb.ModelStatisticsResponse
            ).model_stats
            assert {s.name: s.inference_count for s in stats} == {"one": 1, "two": 0}
            ask("RepositoryModelUnload", pb.RepositoryModelUnloadRequest(model_name="one"),
                pb.RepositoryModelUnloadResponse)  # fmt: skip
            assert not ask("ModelReady", pb.ModelReadyRequest(name="one"), pb.ModelReadyResponse).ready
            assert client.models() == ["two"]
            ask("RepositoryModelLoad", pb.RepositoryModelLoadRequest(model_name="one"),
                pb.RepositoryModelLoadResponse)  # fmt: skip
            assert sorted(client.models()) == ["one", "two"]
        channel.close()


def test_a_restarted_server_is_found_again(affine_model: Path) -> None:
    with StubServer(affine_model, grpc=True) as running:
        url = running.grpc_url
        with MCPClient(url, cache=None, timeout=20) as client:
            client.infer(X)
            running.kill()
            with pytest.raises(ConnectionFailedError):
                client.infer(X, timeout=2)
            assert not client.ready()
            running.start()
            assert running.grpc_url == url
            deadline = time.monotonic() + 10
            while not client.ready() and time.monotonic() < deadline:
                time.sleep(0.02)
            assert client.infer(X).source == "server"


# --- what travels beside the message ------------------------------------------------------------------------


def test_headers_arrive_in_lower_case(peer: Callable[..., str]) -> None:
    seen: dict[str, str] = {}

    def infer(message: bytes, context: Any) -> bytes:
        seen.update(dict(context.invocation_metadata()))
        assert context.time_remaining() < 8
        return echo(message, context)

    url = peer({"ModelMetadata": describe, "ModelInfer": infer})
    with MCPClient(url, model="m", api_key="secret", headers={"Traffic.Color": "blue"}) as client:
        client.infer(X, session="s ü", path="/a", timeout=7)
    assert seen["authorization"] == "Bearer secret"
    assert seen["traffic.color"] == "blue"
    assert seen["x-mcp-session"] == "s%20%C3%BC"
    assert seen["x-mcp-purpose"] == "demand"
    assert 0 < int(seen["x-mcp-deadline-ms"]) <= 7000


@pytest.mark.parametrize(
    ("code", "kind", "calls"),
    [
        ("UNAVAILABLE", OverloadedError, 3),
        ("RESOURCE_EXHAUSTED", OverloadedError, 3),
        ("INVALID_ARGUMENT", RequestRejectedError, 1),
        ("UNAUTHENTICATED", AuthenticationError, 1),
        ("PERMISSION_DENIED", AuthenticationError, 1),
        ("NOT_FOUND", NotFoundError, 1),
        ("UNIMPLEMENTED", ServerError, 1),
        ("INTERNAL", ServerError, 1),
    ],
)
def test_a_servers_code_is_an_error_of_ours(
    peer: Callable[..., str], code: str, kind: type[Exception], calls: int
) -> None:
    asked = []

    def infer(message: bytes, context: Any) -> None:
        asked.append(1)
        context.abort(grpc.StatusCode[code], "because")

    url = peer({"ModelMetadata": describe, "ModelInfer": infer})
    retry = Retry(attempts=3, base_s=0.001)
    with MCPClient(url, model="m", retry=retry) as client, pytest.raises(kind, match="because"):
        client.infer(X)
    assert len(asked) == calls


def test_a_server_without_an_index_is_named(peer: Callable[..., str]) -> None:
    with MCPClient(peer({"ModelMetadata": describe, "ModelInfer": echo})) as client:
        with pytest.raises(ServerError, match="name the one you want with model="):
            client.models()
        assert client.infer(X, model="m").output.tolist() == X.tolist()
        assert not client.ready()


def test_a_server_that_says_it_is_not_ready(peer: Callable[..., str]) -> None:
    with MCPClient(peer({"ServerReady": lambda *_: b""})) as client:
        assert not client.ready()


def test_damaged_answers_are_protocol_errors(peer: Callable[..., str]) -> None:
    url = peer({"ModelMetadata": describe, "ModelInfer": lambda *_: b"\x0a\x05abc"})
    with MCPClient(url, model="m") as client, pytest.raises(ProtocolError, match="truncated"):
        client.infer(X)


def test_an_answer_over_the_limit_is_refused(peer: Callable[..., str]) -> None:
    url = peer({"ModelMetadata": describe, "ModelInfer": lambda *_: bytes(2**20)})
    client = MCPClient(url, model="m", max_response_bytes=2**16)
    with client, pytest.raises(ProtocolError, match="max_response_bytes"):
        client.infer(X)


def test_messages_beyond_grpcs_default_of_4_mb_pass(peer: Callable[..., str]) -> None:
    big = np.ones((2**19, 3), np.float32)
    with MCPClient(peer({"ModelMetadata": describe}), model="m") as client:
        with pytest.raises(ServerError) as caught:
            client.infer(big)
        assert caught.value.status == 501  # the server took it all, and lacks ModelInfer


def test_a_request_over_2_gib_fails_before_it_is_sent() -> None:
    transport = GrpcTransport("grpc://127.0.0.1:9", headers={}, max_response_bytes=1)
    wire = WireRequest("POST", "/x/y", body=(b"head", memoryview(np.zeros(2**31, np.uint8))))
    with pytest.raises(InvalidInputError, match="2147483652 bytes"):
        transport.send(wire, time.monotonic() + 5)


# --- deadlines, cancellation, interruption ------------------------------------------------------------------


def test_the_deadline_holds(server: StubServer) -> None:
    server.latency_ms = 5000
    try:
        with MCPClient(server.grpc_url, cache=None) as client:
            client.metadata()
            started = time.monotonic()
            with pytest.raises(DeadlineExceededError):
                client.infer(X, timeout=0.2)
            assert time.monotonic() - started < 2
    finally:
        server.latency_ms = 0


def test_nobody_there_is_a_connection_error() -> None:
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        url = f"grpc://127.0.0.1:{reserved.getsockname()[1]}"
        with MCPClient(url, retry=ONCE) as client, pytest.raises(ConnectionFailedError, match="gRPC server"):
            client.infer(X, model="m")


def test_a_server_that_speaks_something_else(server: StubServer) -> None:
    url = server.url.replace("http://", "grpc://")
    with MCPClient(url, retry=ONCE) as client, pytest.raises((ConnectionFailedError, DeadlineExceededError)):
        client.infer(X, model="m", timeout=3)


def test_a_cancelled_task_cancels_the_call(peer: Callable[..., str]) -> None:
    running, cancelled = threading.Event(), threading.Event()

    def infer(message: bytes, context: Any) -> bytes:
        context.add_callback(cancelled.set)
        running.set()
        cancelled.wait(20)
        return b""

    async def main() -> None:
        async with AsyncMCPClient(
            peer({"ModelMetadata": describe, "ModelInfer": infer}), model="m"
        ) as client:
            task = asyncio.create_task(client.infer(X))
            assert await asyncio.to_thread(running.wait, 10)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert await asyncio.to_thread(cancelled.wait, 5)

    asyncio.run(main())


def test_the_loser_of_a_hedge_is_cancelled(peer: Callable[..., str]) -> None:
    stalls, cancelled = threading.Event(), threading.Event()

    def infer(message: bytes, context: Any) -> bytes:
        if stalls.is_set():
            stalls.clear()
            context.add_callback(cancelled.set)
            cancelled.wait(20)
            return b""
        return echo(message, context)

    url = peer({"ModelMetadata": describe, "ModelInfer": infer})
    with MCPClient(url, model="m", cache=None, retry=Retry(hedge=True, budget=1.0)) as client:
        for _ in range(30):
            client.infer(X)
        stalls.set()
        client.infer(X)
        assert cancelled.wait(5)


def test_an_interrupt_cancels_the_call(peer: Callable[..., str]) -> None:
    running, cancelled = threading.Event(), threading.Event()

    def infer(message: bytes, context: Any) -> bytes:
        context.add_callback(cancelled.set)
        running.set()
        cancelled.wait(20)
        return b""

    def interrupt() -> None:
        running.wait(10)
        time.sleep(
            0.1
        )  # gRPC loses a call that is interrupted in the moment in which it is made; it ends by its deadline
        os.kill(os.getpid(), signal.SIGINT)

    url = peer({"ModelMetadata": describe, "ModelInfer": infer})
    with MCPClient(url, model="m", cache=None) as client:
        client.metadata()
        threading.Thread(target=interrupt).start()
        with pytest.raises(KeyboardInterrupt):
            client.infer(X)
        gc.collect()
        assert cancelled.wait(5)


# --- asyncio, threads, fork ---------------------------------------------------------------------------------


def test_one_client_serves_several_event_loops(server: StubServer) -> None:
    client = AsyncMCPClient(server.grpc_url, cache=None)

    async def several() -> list[Any]:
        return await asyncio.gather(*(client.infer(X + i) for i in range(8)))

    for _ in range(2):
        results = asyncio.run(several())
        for i, result in enumerate(results):
            np.testing.assert_allclose(result.output, (X + i) @ models.WEIGHTS + models.BIAS, rtol=1e-5)
    with futures.ThreadPoolExecutor(2) as pool:
        assert all(pool.map(lambda _: asyncio.run(several()), range(2)))
    asyncio.run(client.close())


def test_threads_get_their_own_answers(server: StubServer) -> None:
    with MCPClient(server.grpc_url, cache=None) as client, futures.ThreadPoolExecutor(8) as pool:
        inputs = [X + i for i in range(64)]
        for x, result in zip(inputs, pool.map(client.infer, inputs), strict=True):
            np.testing.assert_allclose(result.output, x @ models.WEIGHTS + models.BIAS, rtol=1e-5)


_FORKING = """
import os, sys, threading, time
import numpy as np
from mcp_client import MCPClient

client = MCPClient(sys.argv[1], cache=None, timeout=8)
x = np.ones((1, 3), np.float32)
client.infer(x)
stop = threading.Event()

def keep_calling():
    while not stop.is_set():
        client.infer(x)

threads = [threading.Thread(target=keep_calling) for _ in range(2)]
for thread in threads:
    thread.start()
time.sleep(0.1)
for _ in range(2):
    pid = os.fork()
    if pid == 0:
        client.infer(x)
        client.close()
        os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    client.infer(x)
stop.set()
for thread in threads:
    thread.join()
client.close()
print("done")
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_fork_amid_calls_leaves_both_sides_working(server: StubServer) -> None:
    """In a process of its own: pytest's has other gRPC users (the server) that must not be forked."""
    done = subprocess.run(
        [sys.executable, "-c", _FORKING, server.grpc_url],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout == "done\n", done.stderr


# --- streams ------------------------------------------------------------------------------------------------


def countdown(messages: Iterator[bytes], context: Any) -> Iterator[bytes]:
    """A decoupled model: as many answers as the input's first number says."""
    request = oip_grpc.parse_infer(next(messages), {}).request
    for n in range(int(request.inputs["x"][0, 0]), 0, -1):
        answer = Answer.of({"y": np.full((1, 3), n, np.float32)}, model="m", id=request.id)
        yield oip_grpc.in_stream(b"".join(oip_grpc.format_infer(answer)))


def test_a_decoupled_models_answers_come_one_by_one(peer: Callable[..., str]) -> None:
    url = peer({"ModelMetadata": describe}, streams={"ModelStreamInfer": countdown})
    start = np.full((1, 3), 3, np.float32)
    with MCPClient(url, model="m") as client:
        for _ in range(2):  # never cached
            assert [float(r.output[0, 0]) for r in client.stream(start)] == [3, 2, 1]
        assert list(client.stream(start * 0)) == []
        assert client.stats()["cache"].entries == 0

    async def main() -> list[float]:
        async with AsyncMCPClient(url, model="m") as aio:
            return [float(r.output[0, 0]) async for r in aio.stream(start)]

    assert asyncio.run(main()) == [3, 2, 1]


def test_a_stream_that_is_left_is_cancelled(peer: Callable[..., str]) -> None:
    cancelled = threading.Event()

    def endless(messages: Iterator[bytes], context: Any) -> Iterator[bytes]:
        context.add_callback(cancelled.set)
        request = oip_grpc.parse_infer(next(messages), {}).request
        answer = b"".join(oip_grpc.format_infer(Answer.of({"y": request.inputs["x"]}, id=request.id)))
        while context.is_active():
            yield oip_grpc.in_stream(answer)

    url = peer({"ModelMetadata": describe}, streams={"ModelStreamInfer": endless})
    with MCPClient(url, model="m") as client:
        stream = client.stream(X)
        next(stream)
        stream.close()
        assert cancelled.wait(5)
        with pytest.raises(DeadlineExceededError):
            for _ in client.stream(X, timeout=0.2):
                pass


def test_mcp_server_answers_a_stream_once_and_tells_errors_in_it(server: StubServer) -> None:
    with MCPClient(server.grpc_url, retry=ONCE) as client:
        (result,) = client.stream(X)
        np.testing.assert_allclose(result.output, X @ models.WEIGHTS + models.BIAS, rtol=1e-6)
        server.error_rate = 1.0
        try:
            with pytest.raises(OverloadedError, match="injected"):
                list(client.stream(X))
        finally:
            server.error_rate = 0.0


def test_http_can_not_stream(server: StubServer) -> None:
    with MCPClient(server.url) as client, pytest.raises(ConfigurationError, match="grpc://"):
        list(client.stream(X))


# --- setting up ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "url",
    ["grpc://", "grpc://host", "grpc://host:x", "grpc://u:p@host:1", "grpc://h:1/path", "grpc+unix://h"],
)
def test_urls_that_can_not_be_used_are_refused(url: str) -> None:
    with pytest.raises(ConfigurationError, match=r"grpc|URL"):
        MCPClient(url)


@pytest.mark.parametrize("options", [{"headers": {"x": "ü"}}, {"protocol": "mcp"}, {"http_client": object()}])
def test_options_that_mean_nothing_over_grpc_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError):
        MCPClient("grpc://127.0.0.1:1", **options)


def test_importing_the_sdk_does_not_import_grpc_and_a_missing_one_is_named() -> None:
    code = """
import sys, mcp_client
assert not [name for name in sys.modules if name.split(".")[0] in ("grpc", "google")]
sys.modules["grpc"] = None
try:
    mcp_client.MCPClient("grpc://127.0.0.1:1")
except mcp_client.MissingExtraError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert "mcp2026[grpc]" in done.stdout, done.stderr


@pytest.mark.parametrize(("module", "package"), [("google", "protobuf"), ("grpc", "grpcio")])
def test_what_is_missing_is_named_as_it_is_installed(module: str, package: str) -> None:
    code = f"""
import sys
sys.modules[{module!r}] = None
import mcp_client
try:
    mcp_client.MCPClient("grpc://127.0.0.1:1")
except mcp_client.MissingExtraError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert f"the package {package!r}: pip install 'mcp2026[grpc]'" in done.stdout, done.stderr
