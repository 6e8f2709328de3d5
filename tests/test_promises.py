"""The ten promises of the design, one section each, against real servers and real models."""

from __future__ import annotations

import ast
import asyncio
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mcp_client import (
    AsyncMCPClient,
    Cache,
    CircuitOpenError,
    ClientClosedError,
    ConnectionFailedError,
    DeadlineExceededError,
    InferResult,
    IntegrityError,
    InvalidInputError,
    MCPClient,
    MCPError,
    OverloadedError,
    Prefetch,
    ProtocolError,
    RequestRejectedError,
    Retry,
)
from mcp_client._httpx import httpx
from mcp_profile import ProfileServer
from stub_server import StubServer
from tests import models
from tests.conftest import RawServer, read_request, respond

PACKAGES = ("mcp_client", "mcp_profile", "stub_server")
ROOT = Path(__file__).parents[1]
X = np.array([[0.1, 0.9, 0.4]], dtype=np.float32)
EXPECTED = X @ models.WEIGHTS + models.BIAS


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the affine model and the identity of every datatype."""
    folder = tmp_path_factory.mktemp("zoo")
    models.affine(folder / "affine.onnx")
    for datatype in models.IDENTITY_TYPES:
        models.identity(folder / f"id_{datatype.lower()}.onnx", datatype, None)
    return folder


@pytest.fixture(scope="module")
def server(zoo: Path) -> Iterator[StubServer]:
    with StubServer(zoo) as running:
        yield running


def sample(datatype: str, shape: tuple[int, ...]) -> np.ndarray:
    from mcp_client.tensors import dtype_of

    count = int(np.prod(shape))
    if datatype == "BYTES":
        flat = np.empty(count, dtype=object)
        flat[:] = [(b"", b"text", "é".encode())[i % 3] for i in range(count)]
        return flat.reshape(shape)
    if datatype == "BOOL":
        return (np.arange(count) % 2 == 0).reshape(shape)
    return (np.arange(count) % 100).astype(dtype_of(datatype)).reshape(shape)


# --- 1: the same answer with the cache on or off, over every protocol, and at the edge ---


@pytest.mark.parametrize("datatype", list(models.IDENTITY_TYPES))
def test_every_datatype_and_shape_comes_back_exactly_whatever_the_way(
    server: StubServer, zoo: Path, datatype: str
) -> None:
    ways = {
        "mcp": MCPClient(server.url, protocol="mcp"),
        "oip": MCPClient(server.url, protocol="oip"),
        "cache off": MCPClient(server.url, cache=None),
        "edge": MCPClient(f"edge:{zoo}"),
    }
    try:
        for shape in ((), (0,), (0, 3), (1,), (2, 3), (2, 1, 4)):
            x = sample(datatype, shape)
            for way, client in ways.items():
                for turn in ("first", "second"):
                    result = client.infer(x, model=f"id_{datatype.lower()}")
                    got = result.output
                    assert (got.dtype, got.shape) == (x.dtype, x.shape), (way, turn)
                    assert got.tolist() == x.tolist(), (way, turn)
                    cached = turn == "second" and way != "cache off"
                    assert result.source == ("cache" if cached else "edge" if way == "edge" else "server")
    finally:
        for client in ways.values():
            client.close()


# --- 2: a result handed out is never changed by anything that happens later ---


def test_results_are_read_only_and_outlive_every_later_call(server: StubServer) -> None:
    with MCPClient(server.url, cache=Cache(max_bytes=4096)) as client:
        x = X.copy()
        first = client.infer(x, model="affine")
        kept = first.output
        x[:] = 7  # the caller reuses the input buffer
        for n in range(500):  # and the cache turns over
            client.infer(np.full((1, 3), n, np.float32), model="affine")
        np.testing.assert_allclose(kept, EXPECTED, rtol=1e-6)
        with pytest.raises(ValueError, match="read-only"):
            kept[0, 0] = 1
        with pytest.raises(TypeError):
            first.outputs["probs"] = x  # type: ignore[index]


def test_a_hit_is_for_the_inputs_as_they_are_now(server: StubServer) -> None:
    with MCPClient(server.url) as client:
        x = X.copy()
        client.infer(x, model="affine")
        x[0, 0] += 1
        changed = client.infer(x, model="affine")
        assert changed.source == "server"
        np.testing.assert_allclose(changed.output, x @ models.WEIGHTS + models.BIAS, rtol=1e-6)


# --- 3: never cached: a sequence, an error, no-store ---


def oip_server(connection: Any, *, infer: Callable[[dict[str, str]], tuple[int, dict[str, str]]]) -> None:
    """A minimal OIP server without the binary extension."""
    while (request := read_request(connection)) is not None:
        first, headers, _ = request
        if first.startswith("GET /v2 "):
            respond(connection, 200, b'{"name": "t", "version": "1", "extensions": []}')
        elif first.startswith("GET /v2/models/m "):
            tensor = {"name": "x", "datatype": "FP32", "shape": [-1]}
            respond(
                connection, 200, json.dumps({"name": "m", "inputs": [tensor], "outputs": [tensor]}).encode()
            )
        elif first.startswith("POST /v2/models/m/infer "):
            status, extra = infer(headers)
            output = {"name": "x", "datatype": "FP32", "shape": [1], "data": [1.5]}
            body = {"model_name": "m", "outputs": [output]} if status == 200 else {"error": "as told"}
            respond(connection, status, json.dumps(body).encode(), **extra)
        else:
            respond(connection, 404, b"{}")


@pytest.mark.parametrize("header", ["no-store", "no-cache", "max-age=0", "private, no-store"])
def test_an_answer_that_the_server_forbids_to_keep_is_asked_for_again(
    raw_server: Callable[..., RawServer], header: str
) -> None:
    asked: list[int] = []

    def infer(headers: dict[str, str]) -> tuple[int, dict[str, str]]:
        asked.append(1)
        return 200, {"Cache_Control": header}

    running = raw_server(lambda connection: oip_server(connection, infer=infer))
    with MCPClient(running.url, model="m") as client:
        assert [client.infer([1.0]).source for _ in range(3)] == ["server"] * 3
    assert len(asked) == 3


def test_a_step_of_a_sequence_is_never_cached_nor_shared(server: StubServer) -> None:
    with MCPClient(server.url) as client:
        for _ in range(3):
            result = client.infer(X, model="affine", parameters={"sequence_id": 7, "sequence_start": True})
            assert result.source == "server"


def test_an_error_is_never_cached(zoo: Path) -> None:
    with (
        StubServer(zoo, error_rate=1.0, seed=1) as running,
        MCPClient(running.url, retry=Retry(attempts=1)) as client,
    ):
        with pytest.raises(OverloadedError):
            client.infer(X, model="affine")
        running.error_rate = 0.0
        assert client.infer(X, model="affine").source == "server"
        assert client.infer(X, model="affine").source == "cache"


# --- 4: a prefetch stays within its budget, and stops when the server says so ---


def turn_pages(client: MCPClient, reader: str, document: int, pages: int, pause: float) -> list[InferResult]:
    session = client.session(reader)
    results = []
    for page in range(pages):
        results.append(session.infer(path=f"/doc/{document}/page/{page}"))
        time.sleep(pause)
    return results


def page_route(client: MCPClient) -> None:
    @client.route("/doc/{id:int}/page/{n:int}", model="affine")
    def page(id: int, n: int) -> list[float]:
        return [float(id), float(n), 0.0]


def test_a_page_never_seen_is_there_before_it_is_asked_for(server: StubServer) -> None:
    with MCPClient(server.url, prefetch=Prefetch(max_overfetch=1.0)) as client:
        page_route(client)
        for document in range(3):
            turn_pages(client, f"reader-{document}", document, 8, 0.0)
        results = turn_pages(client, "new reader", 99, 8, 0.05)
        sources = [result.source for result in results]
        assert sources.count("prefetch") >= 5, sources
        for n, result in enumerate(results):
            x = np.array([[99, n, 0]], np.float32)
            np.testing.assert_allclose(result.output, x @ models.WEIGHTS + models.BIAS, rtol=1e-5)


def test_prefetches_stay_within_the_budget(zoo: Path) -> None:
    with (
        StubServer(zoo) as running,
        MCPClient(running.url, prefetch=Prefetch(max_overfetch=0.25, threshold=0.0)) as client,
    ):
        page_route(client)
        for reader in range(10):
            turn_pages(client, f"reader-{reader}", reader, 10, 0.002)
        issued = client.stats()["prefetch"].issued
        assert 0 < issued <= 25


def test_prefetch_stops_when_the_server_is_overloaded(zoo: Path) -> None:
    with (
        StubServer(zoo) as running,
        MCPClient(running.url, retry=Retry(attempts=1), prefetch=Prefetch(max_overfetch=1.0)) as client,
    ):
        page_route(client)
        for document in range(3):
            turn_pages(client, f"reader-{document}", document, 8, 0.01)
        running.error_rate = 1.0
        session = client.session("late")
        for page in range(30):
            with pytest.raises((OverloadedError, CircuitOpenError)):
                session.infer(path=f"/doc/50/page/{page}")
        before = client.stats()["prefetch"].issued
        assert before < 40, "prefetching went on against a server that answers 503"


# --- 5: telemetry never carries tensor data nor session ids; None sends nothing; nothing lost, nothing twice ---


def test_every_event_arrives_once_although_the_profile_api_was_away(
    server: StubServer, tmp_path: Path
) -> None:
    with ProfileServer(tmp_path / "profile.db") as profile:
        with MCPClient(server.url, telemetry=profile.url) as client:
            for n in range(20):
                client.infer([n, 0.0, 0.0], model="affine", session="user-42", path=f"/n/{n}")
            assert client.flush()
            profile.stop()
            for n in range(20):
                client.infer([n, 0.0, 0.0], model="affine", session="user-42", path=f"/n/{n}")
            client.flush(timeout=0.5)
            profile.start()
            assert client.flush(timeout=20)
        stats = httpx.get(profile.url + "/v1/stats").json()
        assert stats["events"] == 40
        raw = (tmp_path / "profile.db").read_bytes() + (tmp_path / "profile.db-wal").read_bytes()
        assert b"user-42" not in raw


def test_a_new_client_prefetches_from_its_first_request_what_others_have_taught(server: StubServer) -> None:
    with ProfileServer() as profile:
        with MCPClient(server.url, telemetry=profile.url, prefetch=None) as teacher:
            for reader in range(5):
                for step in (1.0, 2.0, 3.0):
                    teacher.infer(
                        [step, 0.0, 9.0], model="affine", session=f"r{reader}", path=f"/step/{step}"
                    )
            assert teacher.flush()
        with MCPClient(server.url, telemetry=profile.url) as fresh:

            @fresh.route("/step/{n}", model="affine")
            def step_inputs(n: str) -> list[float]:
                return [float(n), 0.0, 9.0]

            session = fresh.session("new")
            assert session.infer(path="/step/1.0").source == "server"
            deadline = time.monotonic() + 10
            while fresh.stats()["prefetch"].issued == 0 and time.monotonic() < deadline:
                time.sleep(0.01)
            time.sleep(0.1)
            assert session.infer(path="/step/2.0").source == "prefetch"


# --- 6: nothing is unpickled, evaluated or imported from data ---


def test_no_code_of_ours_unpickles_or_evaluates() -> None:
    forbidden = {"pickle", "marshal", "shelve", "dill", "cloudpickle"}
    for package in PACKAGES:
        for file in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.Import):
                    assert not forbidden & {alias.name.split(".")[0] for alias in node.names}, file
                if isinstance(node, ast.ImportFrom):
                    assert (node.module or "").split(".")[0] not in forbidden, file
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                    assert node.func.id not in ("eval", "exec"), file


# --- 7: a model file is used only when its digest is the announced one ---


def test_a_model_file_that_was_tampered_with_is_not_used(server: StubServer, tmp_path: Path) -> None:
    with MCPClient(server.url, edge=tmp_path / "models") as client:
        client.edge.sync(["affine"])
    (file,) = (tmp_path / "models" / "affine").rglob("*.onnx")
    raw = bytearray(file.read_bytes())
    raw[-1] ^= 1
    file.write_bytes(raw)
    with (
        MCPClient(f"edge:{tmp_path / 'models'}") as client,
        pytest.raises(IntegrityError, match="was not used"),
    ):
        client.infer(X, model="affine")


# --- 8: every error is ours, says what to do, and carries id, endpoint and attempts; deadlines hold ---


def test_errors_say_where_they_happened(server: StubServer) -> None:
    with MCPClient("http://127.0.0.1:9", retry=Retry(attempts=2)) as client:
        with pytest.raises(ConnectionFailedError) as caught:
            client.infer(X, model="affine")
        assert caught.value.request_id
        assert caught.value.endpoint == "http://127.0.0.1:9"
        assert caught.value.attempts == 2
    with MCPClient(server.url) as client:
        with pytest.raises(InvalidInputError, match=r"'affine'.*pass model"):
            client.infer(X)
        with pytest.raises(InvalidInputError, match="unknown input 'z', missing input 'x'"):
            client.infer({"z": X}, model="affine")
        with pytest.raises(InvalidInputError, match="astype"):
            client.infer(X.astype(np.float64), model="affine")
        with pytest.raises(MCPError, match="no-such-model"):
            client.infer(X, model="no-such-model")
    with pytest.raises(ClientClosedError):
        client.infer(X, model="affine")


def drip(connection: Any) -> None:
    read_request(connection)
    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n")
    for _ in range(200):
        connection.sendall(b"x")
        time.sleep(0.05)


def silence(connection: Any) -> None:
    read_request(connection)
    time.sleep(10)


@pytest.mark.parametrize("behaviour", [drip, silence])
@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_slow_server_cannot_stretch_the_deadline(
    raw_server: Callable[..., RawServer], behaviour: Callable[[Any], None], kind: str
) -> None:
    running = raw_server(behaviour)
    started = time.monotonic()
    if kind == "sync":
        with (
            MCPClient(running.url, model="m", protocol="mcp") as client,
            pytest.raises(DeadlineExceededError),
        ):
            client.infer([1.0], timeout=0.4)
    else:

        async def call() -> None:
            async with AsyncMCPClient(running.url, model="m", protocol="mcp") as client:
                await client.infer([1.0], timeout=0.4)

        with pytest.raises(DeadlineExceededError):
            asyncio.run(call())
    assert time.monotonic() - started < 1.5


@pytest.mark.parametrize(
    "behaviour",
    [
        lambda c: (read_request(c), c.sendall(b"not http at all\r\n\r\n")),
        lambda c: (read_request(c), respond(c, 200, b"\xff\xfe not json")),
        lambda c: (read_request(c), respond(c, 200, b"[" * 100_000)),
        lambda c: (read_request(c), respond(c, 200, b"x", Content_Encoding="br")),
        lambda c: (read_request(c), respond(c, 200, b"x", Content_Encoding="gzip")),
        lambda c: (read_request(c), respond(c, 500, b"<html>oops</html>")),
        lambda c: (read_request(c), c.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nabc")),
        lambda c: c.close(),
    ],
)
def test_whatever_a_server_does_the_error_is_ours(
    raw_server: Callable[..., RawServer], behaviour: Callable[[Any], None]
) -> None:
    running = raw_server(behaviour)
    for protocol in ("auto", "mcp", "oip"):
        with (
            MCPClient(running.url, model="m", protocol=protocol, retry=Retry(attempts=2)) as client,
            pytest.raises(MCPError) as caught,
        ):
            client.infer([1.0], timeout=3)
        assert caught.value.endpoint == running.url


def test_a_response_over_the_size_limit_is_refused(raw_server: Callable[..., RawServer]) -> None:
    running = raw_server(lambda c: (read_request(c), respond(c, 200, b" " * 5000)))
    with (
        MCPClient(running.url, model="m", protocol="mcp", max_response_bytes=4096) as client,
        pytest.raises(ProtocolError, match="max_response_bytes"),
    ):
        client.infer([1.0])


def test_a_server_that_answers_no_is_not_asked_again(raw_server: Callable[..., RawServer]) -> None:
    asked: list[int] = []

    def infer(headers: dict[str, str]) -> tuple[int, dict[str, str]]:
        asked.append(1)
        return 400, {}

    running = raw_server(lambda connection: oip_server(connection, infer=infer))
    with MCPClient(running.url, model="m") as client, pytest.raises(RequestRejectedError, match="as told"):
        client.infer([1.0])
    assert len(asked) == 1


def test_a_server_that_is_busy_is_asked_again_when_it_says(raw_server: Callable[..., RawServer]) -> None:
    asked: list[float] = []

    def infer(headers: dict[str, str]) -> tuple[int, dict[str, str]]:
        asked.append(time.monotonic())
        return (429, {"Retry_After": "1"}) if len(asked) == 1 else (200, {})

    running = raw_server(lambda connection: oip_server(connection, infer=infer))
    with MCPClient(running.url, model="m") as client:
        assert client.infer([1.0]).output[0] == 1.5
    assert len(asked) == 2
    assert asked[1] - asked[0] >= 1.0


# --- 9: threads, fork, several event loops; everything opened is closed ---


def test_threads_get_their_own_answers(server: StubServer) -> None:
    wrong: list[str] = []

    def work(client: MCPClient, seed: int) -> None:
        rng = np.random.default_rng(seed)
        for _ in range(40):
            x = rng.integers(0, 50, (1, 3)).astype(np.float32)
            got = client.infer(x, model="affine").output
            if not np.allclose(got, x @ models.WEIGHTS + models.BIAS, rtol=1e-5):
                wrong.append(f"{x} → {got}")

    with MCPClient(server.url) as client:
        threads = [threading.Thread(target=work, args=(client, seed)) for seed in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        answered = sum(client.stats()["sources"].values())
    assert not wrong
    assert answered == 8 * 40


def test_a_thousand_callers_for_one_cold_key_cost_one_request(zoo: Path) -> None:
    with StubServer(zoo, latency_ms=200) as running:

        async def crowd() -> list[InferResult]:
            async with AsyncMCPClient(running.url) as client:
                return await asyncio.gather(*(client.infer(X, model="affine") for _ in range(1000)))

        results = asyncio.run(crowd())
        assert len({id(result.output) for result in results}) == 1, (
            "more than one answer came from the server"
        )
        np.testing.assert_allclose(results[-1].output, EXPECTED, rtol=1e-6)


def test_a_leader_that_is_cancelled_does_not_fail_the_rest(zoo: Path) -> None:
    with StubServer(zoo, latency_ms=300) as running:

        async def scene() -> InferResult:
            async with AsyncMCPClient(running.url) as client:
                await client.metadata("affine")
                leader = asyncio.create_task(client.infer(X, model="affine"))
                await asyncio.sleep(0.05)
                follower = asyncio.create_task(client.infer(X, model="affine"))
                await asyncio.sleep(0.05)
                leader.cancel()
                return await follower

        np.testing.assert_allclose(asyncio.run(scene()).output, EXPECTED, rtol=1e-6)


def test_one_async_client_serves_one_event_loop_after_another(server: StubServer) -> None:
    client = AsyncMCPClient(server.url)
    for n in range(3):
        result = asyncio.run(client.infer([float(n), 0.0, 0.0], model="affine"))
        assert result.source == "server"
    asyncio.run(client.close())


def test_a_client_works_in_a_forked_child(server: StubServer) -> None:
    with MCPClient(server.url, telemetry=None) as client:
        client.infer(X, model="affine")
        stop = threading.Event()

        def busy() -> None:
            n = 0.0
            while not stop.is_set():
                n += 1
                client.infer([n, 0.0, 0.0], model="affine", session="s", path=f"/{n}")

        threads = [threading.Thread(target=busy) for _ in range(3)]
        for thread in threads:
            thread.start()
        try:
            for _ in range(5):
                pid = os.fork()
                if pid == 0:
                    try:
                        good = client.infer(X, model="affine").source == "cache"
                        fresh = client.infer(X + 1000, model="affine", session="c", path="/c")
                        good &= bool(np.allclose(fresh.output, (X + 1000) @ models.WEIGHTS + models.BIAS))
                        os._exit(0 if good else 1)
                    except BaseException:
                        os._exit(2)
                deadline = time.monotonic() + 20
                while True:
                    done, status = os.waitpid(pid, os.WNOHANG)
                    if done:
                        break
                    if time.monotonic() > deadline:
                        os.kill(pid, 9)
                        os.waitpid(pid, 0)
                        pytest.fail("the child hangs")
                    time.sleep(0.02)
                assert os.waitstatus_to_exitcode(status) == 0
        finally:
            stop.set()
            for thread in threads:
                thread.join()


def test_close_leaves_no_thread_and_no_socket(server: StubServer, tmp_path: Path) -> None:
    def sockets() -> int:
        return sum(os.readlink(f"/proc/self/fd/{fd}").startswith("socket:") for fd in _open_fds())

    before_sockets, before_threads = sockets(), threading.active_count()
    with MCPClient(server.url) as client:
        page_route(client)
        turn_pages(client, "r", 1, 5, 0.01)
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline and threading.active_count() > before_threads:
        time.sleep(0.01)
    assert threading.active_count() <= before_threads
    del client
    # the server's own ends go as soon as it notices
    while time.monotonic() < deadline and sockets() > before_sockets:
        time.sleep(0.01)
    assert sockets() <= before_sockets


def _open_fds() -> Iterator[str]:
    for fd in os.listdir("/proc/self/fd"):
        try:
            os.readlink(f"/proc/self/fd/{fd}")
        except OSError:
            continue
        yield fd


# --- 10: what importing pulls in ---


def test_importing_the_client_is_light() -> None:
    code = "import sys, mcp_client; print(' '.join(sys.modules))"
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    heavy = {
        "grpc",
        "onnxruntime",
        "sklearn",
        "fastapi",
        "starlette",
        "uvicorn",
        "diskcache",
        "sqlalchemy",
        "pydantic",
    }
    assert not heavy & set(loaded)


def test_an_edge_client_imports_only_what_an_answer_needs(tmp_path: Path) -> None:
    models.affine(tmp_path / "m.onnx")
    code = (
        "import sys; from mcp_client import MCPClient; client = MCPClient('edge:' + sys.argv[1]);"
        "client.infer([1.0, 2.0, 3.0]); client.close(); print(' '.join(sys.modules))"
    )
    loaded = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True
    ).stdout.split()
    late = {
        "asyncio",
        "ssl",
        "sqlite3",
        "email.utils",
        "importlib.metadata",
        "zipfile",
        "typer",
        "rich",
        "onnx",
    }
    late |= {"httpx", "httpx2", "httpcore", "httpcore2", "ml_dtypes", "grpc", "google.protobuf"}
    assert not late & set(loaded)


def test_the_packages_import_only_what_the_design_allows() -> None:
    for package in PACKAGES:
        for file in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.Import):
                    roots = {alias.name.split(".")[0] for alias in node.names}
                elif isinstance(node, ast.ImportFrom) and node.level == 0:
                    roots = {(node.module or "").split(".")[0]}
                else:
                    continue
                others = roots & set(PACKAGES) - {package}
                assert others <= ({"mcp_client"} if package != "mcp_client" else set()), file
