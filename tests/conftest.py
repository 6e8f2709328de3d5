"""What several test modules share: a server of a small model, and sockets that misbehave."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests import models

# A loaded machine must not fail a property test: hypothesis' deadline of 200 ms an example measures the machine.
settings.register_profile("no_deadline", deadline=None)
settings.load_profile("no_deadline")


if os.environ.get("TEST_HTTP_LIBRARY") == "httpx":
    # An application may have pinned the original: then the SDK must do with it (see mcp_client/_httpx.py).
    sys.modules["httpx2"] = None  # type: ignore[assignment]


@pytest.fixture(autouse=True)
def _state_dir(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing a test does touches the developer's own spool or keys."""
    monkeypatch.setenv("MCP_STATE_DIR", str(tmp_path_factory.mktemp("state")))
    monkeypatch.delenv("DO_NOT_TRACK", raising=False)
    monkeypatch.delenv("MCP_TELEMETRY", raising=False)


class RawServer:
    """A TCP server that does with each connection what a test says, byte by byte."""

    def __init__(self, handle: Callable[[socket.socket], None]) -> None:
        self._handle = handle
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.connections = 0
        self._open: list[socket.socket] = []
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            self._open.append(connection)
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):  # the peer may go at any time
            self._handle(connection)

    def close(self) -> None:
        self._listener.close()
        for connection in self._open:
            connection.close()


@pytest.fixture
def raw_server() -> Iterator[Callable[[Callable[[socket.socket], None]], RawServer]]:
    servers: list[RawServer] = []

    def start(handle: Callable[[socket.socket], None]) -> RawServer:
        servers.append(RawServer(handle))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


def read_request(connection: socket.socket) -> tuple[str, dict[str, str], bytes] | None:
    """One HTTP request: its first line, its headers (lower case), its body. ``None`` when the peer closed."""
    data = b""
    while b"\r\n\r\n" not in data:
        chunk = connection.recv(65536)
        if not chunk:
            return None
        data += chunk
    head, _, body = data.partition(b"\r\n\r\n")
    first, *lines = head.decode("latin-1").split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    while len(body) < int(headers.get("content-length", "0")):
        body += connection.recv(65536)
    return first, headers, body


def respond(connection: socket.socket, status: int, body: bytes, **headers: str) -> None:
    """One HTTP response. Underscores in header names stand for dashes."""
    lines = [f"HTTP/1.1 {status} x", f"Content-Length: {len(body)}", "Content-Type: application/json"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    connection.sendall("\r\n".join(lines).encode() + b"\r\n\r\n" + body)


@pytest.fixture(scope="session")
def affine_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An ONNX file: x FP32 [-1, 3] → probs FP32."""
    path = tmp_path_factory.mktemp("models") / "affine.onnx"
    models.affine(path)
    return path
