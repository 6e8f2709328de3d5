"""Servers we did not write, each started for a ``with`` on free ports of the loopback interface. No pytest needed.

with triton() as server:
    print(server.http, server.grpc)          # http://127.0.0.1:40123 grpc://127.0.0.1:40124
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.models import IDENTITY_TYPES

from . import onnx_repository, triton_repository
from .venvs import PeerError, packages_of, python_of

_START_S = 240.0  # a loaded machine of two cores took 83 s for all of Triton's models
_STOP_S = 15.0


@dataclass(frozen=True, slots=True)
class Server:
    """A running server: its URLs as the client takes them, and the file that its output goes to."""

    name: str
    http: str
    grpc: str
    log: Path


@contextmanager
def triton(models: Sequence[str] = ("identity_fp32_2",)) -> Iterator[Server]:
    """A real Triton, with models of its Python backend that ``triton_repository`` describes.

    By default there is ``identity_fp32_2`` only: ``x`` FP32 [-1, -1] → ``y``, unchanged.
    """
    python = python_of("triton")
    packages = packages_of(python)
    home = packages / "pytriton" / "tritonserver"
    with tempfile.TemporaryDirectory(prefix="mcp-triton-") as scratch:
        repository = triton_repository.write(Path(scratch) / "models", models)
        backends = triton_repository.backends(Path(scratch) / "backends", home)
        http, grpc = free_ports(2)
        regions = f"{Path(scratch).name}-"
        command = [
            str(home / "bin" / "tritonserver"),
            f"--model-repository={repository}",
            f"--backend-directory={backends}",
            "--model-control-mode=explicit",
            "--load-model=*",
            "--model-load-thread-count=4",
            f"--backend-config=python,shm-region-prefix-name={regions}",
            "--http-address=127.0.0.1",
            f"--http-port={http}",
            "--grpc-address=127.0.0.1",
            f"--grpc-port={grpc}",
            "--allow-metrics=false",
            "--http-header-forward-pattern=(?i)x-test.*",  # to models, as parameters
            "--grpc-header-forward-pattern=x-test.*",
        ]
        # The backend's stub takes the first numpy it finds, and with one of 2 or newer answers wrong numbers.
        environment = {
            "PYTHONPATH": str(packages),
            "PYTHONNOUSERSITE": "1",
            "PATH": f"{python.parent}:{os.environ['PATH']}",
        }
        try:
            with _running("triton", command, environment, http, grpc, Path(scratch) / "log") as server:
                yield server
        finally:
            for left in Path("/dev/shm").glob(
                f"{regions}*"
            ):  # by its backend, where it did not end by itself
                left.unlink(missing_ok=True)


@contextmanager
def mlserver() -> Iterator[Server]:
    """MLServer with the runtimes of ``mlserver_models.py``."""
    python = python_of("mlserver")
    with tempfile.TemporaryDirectory(prefix="mcp-mlserver-") as scratch:
        http, grpc, metrics = free_ports(3)
        settings = {
            "host": "127.0.0.1",
            "http_port": http,
            "grpc_port": grpc,
            "grpc_max_message_length": 2**30,  # its default is gRPC's 4 MB
            "metrics_port": metrics,
            "parallel_workers": 0,
            "gzip_enabled": False,  # it would keep responses from being streamed
            "debug": False,
        }
        (Path(scratch) / "settings.json").write_text(json.dumps(settings))
        for name, (runtime, described) in _MLSERVER_MODELS.items():
            (Path(scratch) / name).mkdir()
            model = {"name": name, "implementation": f"mlserver_models.{runtime}", **described}
            model["parameters"] = {"version": "1"}
            (Path(scratch) / name / "model-settings.json").write_text(json.dumps(model))
        command = [str(python), "-m", "mlserver.cli.main", "start", "."]
        environment = {"PYTHONPATH": str(Path(__file__).parent), "MLSERVER_METRICS_DIR": scratch}
        with _running("mlserver", command, environment, http, grpc, Path(scratch) / "log") as server:
            yield server


def _tensors(*names: str, datatype: str = "FP32") -> list[dict[str, object]]:
    return [{"name": name, "datatype": datatype, "shape": [-1]} for name in names]


# name: (class in mlserver_models.py, what its settings say of its tensors)
_MLSERVER_MODELS: dict[str, tuple[str, dict[str, object]]] = {
    **{f"identity_{datatype.lower()}": ("Identity", {}) for datatype in IDENTITY_TYPES},
    "add": ("Add", {"inputs": _tensors("a", "b"), "outputs": _tensors("sum", "difference")}),
    "fail": ("Fail", {}),
    "slow": ("Slow", {}),
    "spare": ("Identity", {}),
    "echo": ("Echo", {}),
    "sequence": ("Sequence", {}),
    "repeat": ("Repeat", {}),
}


@contextmanager
def kserve() -> Iterator[Server]:
    """KServe's Python server with the models of ``kserve_models.py``."""
    python = python_of("kserve")
    with tempfile.TemporaryDirectory(prefix="mcp-kserve-") as scratch:
        http, grpc = free_ports(2)
        script = Path(__file__).parent / "kserve_models.py"
        command = [str(python), str(script), f"--http_port={http}", f"--grpc_port={grpc}"]
        with _running("kserve", command, {}, http, grpc, Path(scratch) / "log") as server:
            yield server


@contextmanager
def mcp_server() -> Iterator[Server]:
    """Our own server, as a process like the others."""
    with tempfile.TemporaryDirectory(prefix="mcp-server-") as scratch:
        folder = onnx_repository.write(Path(scratch) / "models")
        http, grpc = free_ports(2)
        command = [sys.executable, "-c", "from stub_server.cli import main; main()", f"--model-path={folder}"]
        command += [f"--port={http}", f"--grpc-port={grpc}"]
        environment = {"PYTHONPATH": str(Path(__file__).resolve().parents[2])}
        with _running("mcp-server", command, environment, http, grpc, Path(scratch) / "log") as server:
            yield server


def free_ports(count: int) -> list[int]:
    """Ports of the loopback interface that nobody listens on now."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()


@contextmanager
def _running(
    name: str, command: list[str], environment: Mapping[str, str], http: int, grpc: int, log: Path
) -> Iterator[Server]:
    """Start a server in a process group of its own, wait until it is ready, and end the whole group afterwards."""
    server = Server(name, f"http://127.0.0.1:{http}", f"grpc://127.0.0.1:{grpc}", log)
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "MCP_"))}
    with open(log, "wb") as output:
        process = subprocess.Popen(
            ["setpriv", "--pdeathsig", "TERM", *command],  # a suite that is killed takes its servers along
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**inherited, **environment},
            cwd=log.parent,
            start_new_session=True,
        )
    try:
        _wait_until_ready(server, process)
        yield server
    finally:
        _end(process)


def _wait_until_ready(server: Server, process: subprocess.Popen[bytes]) -> None:
    give_up = time.monotonic() + _START_S
    while time.monotonic() < give_up:
        if process.poll() is not None:
            raise PeerError(
                f"{server.name} ended with status {process.returncode} as it started:\n{_tail(server.log)}"
            )
        try:
            with urllib.request.urlopen(f"{server.http}/v2/health/ready", timeout=2):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.1)
    raise PeerError(f"{server.name} was not ready within {_START_S:.0f} s:\n{_tail(server.log)}")


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ask the server to stop, then make whatever is left of its group."""
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_STOP_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(_STOP_S)


def _tail(log: Path, size: int = 6000) -> str:
    return log.read_text(errors="replace")[-size:]
