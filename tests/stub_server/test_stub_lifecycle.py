"""StubServer and mcp-server as processes and threads: start, stop, kill, restart, faults, the command
line."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from mcp_client._httpx import httpx
from mcp_client.errors import ConfigurationError, MCPError
from stub_server import StubServer
from stub_server.faults import Faults
from tests import models

BODY = {"input": [1, 2, 3], "shape": [1, 3]}


def statuses(server: StubServer, count: int) -> list[int]:
    with httpx.Client() as http:
        return [http.post(f"{server.url}/v1/infer", json=BODY).status_code for _ in range(count)]


def test_a_restart_keeps_the_port_and_refuses_connections_meanwhile(affine_model: Path) -> None:
    with StubServer(affine_model) as server:
        url = server.url
        for end in (server.stop, server.kill, server.stop):
            assert statuses(server, 1) == [200]
            end()
            with pytest.raises(httpx.ConnectError):
                httpx.get(f"{url}/v1/health/live")
            server.start()
            assert server.url == url
        assert statuses(server, 1) == [200]
        assert server.received["demand"] == 4


def test_start_and_stop_twice_do_nothing_more(affine_model: Path) -> None:
    server = StubServer(affine_model)
    server.stop()
    with server:
        server.start()
        assert statuses(server, 1) == [200]
    server.close()


def test_a_running_request_ends_well_on_stop(affine_model: Path) -> None:
    with StubServer(affine_model, latency_ms=300) as server:
        got: list[int] = []
        caller = threading.Thread(target=lambda: got.extend(statuses(server, 1)))
        caller.start()
        _until(lambda: server.received["demand"] == 1)
        server.stop()
        caller.join()
    assert got == [200]


def test_kill_drops_a_running_request(affine_model: Path) -> None:
    with StubServer(affine_model, latency_ms=60_000) as server:
        failed = threading.Event()

        def call() -> None:
            try:
                statuses(server, 1)
            except httpx.TransportError:
                failed.set()

        caller = threading.Thread(target=call)
        caller.start()
        _until(lambda: server.received["demand"] == 1)
        server.kill()
        caller.join(10)
    assert failed.is_set()


def test_a_client_that_leaves_within_its_body_harms_nobody(affine_model: Path) -> None:
    with StubServer(affine_model) as server:
        address = ("127.0.0.1", int(server.url.rpartition(":")[2]))
        with socket.create_connection(address) as connection:
            connection.sendall(b"POST /v1/infer HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        _until(lambda: b'status="400"' in server.metrics.exposition()[0])
        assert statuses(server, 1) == [200]


def test_no_thread_or_socket_is_left(affine_model: Path) -> None:
    before = threading.active_count(), len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with StubServer(affine_model) as server:
            statuses(server, 1)
    _until(lambda: threading.active_count() <= before[0])  # the pool's threads end by themselves
    assert len(os.listdir("/proc/self/fd")) <= before[1]


def test_a_taken_port_is_told(affine_model: Path) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        pytest.raises(ConfigurationError, match="can't listen"),
    ):
        StubServer(affine_model, port=taken.getsockname()[1])


@pytest.mark.parametrize("content", [None, b"not a model"])
def test_what_is_no_model_is_told(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "m.onnx"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(MCPError, match=r"m\.onnx"):
        StubServer(path)


def test_an_empty_folder_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="holds no model"):
        StubServer(tmp_path)


# --- faults
# ----------------------------------------------------------------------------------------------------------


def test_the_same_seed_fails_the_same_requests(affine_model: Path) -> None:
    runs = []
    for _ in range(2):
        with StubServer(affine_model, error_rate=0.3, seed=7) as server:
            runs.append(statuses(server, 60))
    assert runs[0] == runs[1]
    assert set(runs[0]) == {200, 503}


def test_the_error_rate_is_met() -> None:
    faults = Faults(error_rate=0.25, seed=1)
    assert sum(faults.strikes() for _ in range(10_000)) == pytest.approx(2500, abs=150)


def test_faults_change_while_the_server_runs(affine_model: Path) -> None:
    with StubServer(affine_model) as server:
        server.error_rate = 1.0
        assert statuses(server, 3) == [503] * 3
        server.error_rate = 0.0
        server.latency_ms = 50
        assert statuses(server, 1) == [200]
        assert httpx.post(f"{server.url}/v1/infer", json=BODY).elapsed.total_seconds() >= 0.05


@pytest.mark.parametrize(
    "options", [{"latency_ms": -1}, {"latency_ms": float("nan")}, {"error_rate": 1.1}, {"error_rate": -0.1}]
)
def test_impossible_faults_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        Faults(**options)


# --- the Unix socket and the command line
# -----------------------------------------------------------------------------


def test_a_unix_socket_serves_as_well(affine_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "mcp.sock"
    with StubServer(affine_model, uds=path) as server:
        assert path.stat().st_mode & 0o777 == 0o600
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(path))) as http:
            assert http.post("http://local/v1/infer", json=BODY).status_code == 200
        assert statuses(server, 1) == [200]
    assert not path.exists()


def test_a_socket_left_by_a_dead_server_is_replaced_and_a_live_one_is_not(
    affine_model: Path, tmp_path: Path
) -> None:
    path = tmp_path / "mcp.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    with StubServer(affine_model, uds=path), pytest.raises(ConfigurationError, match="can't listen"):
        StubServer(affine_model, uds=path).__enter__()


@contextmanager
def _served(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The command in a process of its own, and the URL that it says it listens on."""
    command = [sys.executable, "-c", "from stub_server.cli import main; main()", *arguments]
    environment = {**os.environ, "COLUMNS": "200"}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stderr is not None
        told = ""
        for line in process.stderr:
            told += line
            if "listens on" in line:
                break
        assert "listens on" in told, told
        try:
            yield process, told.split("listens on ")[1].split()[0]
        finally:
            process.kill()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_command_serves_until_it_is_told_to_stop(affine_model: Path, number: int) -> None:
    options = ["--port", "0", "--device", "cpu", "--latency-ms", "1", "--seed", "3"]
    with _served("--model-path", str(affine_model), *options) as (process, url):
        assert httpx.post(f"{url}/v1/infer", json=BODY).status_code == 200
        process.send_signal(number)
        assert process.wait(20) == 0


def test_the_command_says_what_is_wrong(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-c",
        "from stub_server.cli import main; main()",
        "--model-path",
        str(tmp_path),
    ]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert run.returncode == 1
    assert "holds no model" in run.stderr
    assert "Traceback" not in run.stderr


def test_importing_the_package_or_its_pytest_plugin_is_light() -> None:
    heavy = "['starlette', 'uvicorn', 'onnxruntime', 'prometheus_client']"
    code = (
        f"import sys, stub_server, stub_server.pytest_plugin; print([m for m in {heavy} if m in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert run.stdout.strip() == "[]"


def test_a_model_may_be_one_file_a_folder_or_a_repository(tmp_path: Path) -> None:
    models.affine(tmp_path / "one.onnx")
    models.repository(tmp_path, two={"7": 1.0})
    with StubServer(tmp_path) as server:
        listed = httpx.get(f"{server.url}/v1/models").json()["models"]
        assert [(model["id"], model["version"]) for model in listed] == [("one", "1"), ("two", "7")]
    with StubServer(tmp_path / "one.onnx") as server:
        assert [model["id"] for model in httpx.get(f"{server.url}/v1/models").json()["models"]] == ["one"]


def _until(condition: Callable[[], bool]) -> None:
    for _ in range(1000):
        if condition():
            return
        threading.Event().wait(0.01)
    raise AssertionError("it did not come about within 10 s")
