"""The two servers, each a process of its own: their work does not share the client's interpreter, and a kill is a real one."""

from __future__ import annotations

import json
import socket
import subprocess
import sysconfig
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.request import urlopen

_START_S = 30.0


class Server:
    """A command that serves HTTP on a port of its own; ``kill()`` is SIGKILL, ``start()`` starts it again on the same port.

    Within ``with`` it is killed at the end, whatever its state.
    """

    def __init__(self, command: str, *arguments: str, ready: str, log: Path) -> None:
        self._port = _free_port()
        program = Path(sysconfig.get_path("scripts")) / command
        self._command = [str(program), *arguments, "--port", str(self._port)]
        self._ready = ready
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def start(self) -> None:
        """Start the process; ``wait()`` for it, maybe after starting others."""
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(self._command, stdout=log, stderr=log)

    def wait(self) -> None:
        """Until it answers that it is ready; ``RuntimeError`` with what it said if it does not come up."""
        assert self._process is not None
        give_up = time.monotonic() + _START_S
        while time.monotonic() < give_up and self._process.poll() is None:
            try:
                self.get(self._ready)
                return
            except OSError:  # not listening yet, or not ready yet
                time.sleep(0.1)
        self.kill()
        raise RuntimeError(
            f"{self._command[0]} did not start: {self._log.read_text(errors='replace')[-2000:]}"
        )

    def kill(self) -> None:
        """SIGKILL: no goodbye to anybody."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def get(self, path: str) -> Any:
        """The JSON that it answers to a GET; ``OSError`` if it does not answer, or not well."""
        with urlopen(self.url + path, timeout=10.0) as answer:
            body = answer.read()
        return json.loads(body) if body else None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()


def inference_server(models: Path, log: Path) -> Server:
    """``mcp-server`` over a folder of models."""
    return Server("mcp-server", "--model-path", str(models), ready="/v1/health/ready", log=log)


def profile_server(database: Path, log: Path) -> Server:
    """``mcp-profile`` over an SQLite file."""
    return Server("mcp-profile", "serve", "--db", str(database), ready="/readyz", log=log)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
