"""``StubServer``: the inference server in a thread of this process, on a free port, for tests and demos."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
import time
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Self

import uvicorn

from mcp_client.errors import ConfigurationError

from .app import make_app
from .faults import Faults
from .metrics import Metrics
from .models import Models
from .service import Service

MAX_BODY_BYTES = 256 * 2**20
_START_TIMEOUT_S = 30.0
_DRAIN_S = 5  # how long stop() lets running requests end


def default_threads() -> int:
    """ONNX Runtime spreads one inference over the cores by itself; a few more keep them busy between two."""
    return (os.cpu_count() or 1) + 2


def bind(host: str, port: int, *, shared: bool = False) -> socket.socket:
    """A TCP socket on an address, not yet listening; ``port`` 0 takes a free one.

    ``shared``: another socket of this user may be bound there too (gRPC makes its own).
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT if shared else socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
    except OSError as error:
        sock.close()
        raise ConfigurationError(f"can't listen on {host} port {port}: {error}") from error
    return sock


def bind_unix(path: str | os.PathLike[str]) -> socket.socket:
    """A Unix socket that only this user can reach; a socket left over by a server that is gone is
    replaced."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if os.path.exists(path) and _is_dead(path):
            os.unlink(path)
        sock.bind(os.fspath(path))
        os.chmod(path, 0o600)
    except OSError as error:
        sock.close()
        raise ConfigurationError(f"can't listen on the Unix socket {os.fspath(path)}: {error}") from error
    return sock


def _is_dead(path: str | os.PathLike[str]) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(os.fspath(path))
        except ConnectionRefusedError:
            return True
        return False


class StubServer:
    """A running server within ``with``; or call ``start()`` and ``stop()``.

    ``model_path``: a ``.onnx`` file, a folder of them, or ``{id}/{version}/model.onnx`` in it.
    ``grpc=True`` speaks gRPC too, on a free port or ``grpc_port``; ``grpc_uds`` is a Unix socket for it.
    ``latency_ms``, ``error_rate`` and ``seed`` inject faults; the first two may be set while it runs.
    ``stop()`` then ``start()`` is a restart on the same port with the same models; ``kill()`` drops every
    connection at once, as a crash would.
    """

    def __init__(
        self,
        model_path: str | os.PathLike[str],
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        uds: str | os.PathLike[str] | None = None,
        grpc: bool = False,
        grpc_port: int = 0,
        grpc_uds: str | os.PathLike[str] | None = None,
        device: str = "cpu",
        latency_ms: float = 0.0,
        error_rate: float = 0.0,
        seed: int | None = None,
        cache_control: str = "private",
        max_body_bytes: int = MAX_BODY_BYTES,
        threads: int | None = None,
    ) -> None:
        self.faults = Faults(latency_ms, error_rate, seed)
        self.models = Models(model_path, device=device)
        self.metrics = Metrics()
        self._cache_control = cache_control
        self._max_body_bytes = max_body_bytes
        self._threads = threads or default_threads()
        self._uds = uds
        self._host = host
        # Bound until close(). While the server is down it does not listen, which keeps the port ours for the
        # next start() and refuses connections meanwhile.
        self._socket = bind(host, port)
        self._port: int = self._socket.getsockname()[1]
        self._grpc_uds = grpc_uds
        self._grpc_socket = bind(host, grpc_port, shared=True) if grpc or grpc_port else None
        self._grpc_port: int = self._grpc_socket.getsockname()[1] if self._grpc_socket is not None else 0
        self._running: _Running | None = None

    @property
    def url(self) -> str:
        """``http://host:port``; stays the same over restarts."""
        return f"http://{self._shown_host}:{self._port}"

    @property
    def grpc_url(self) -> str:
        """``grpc://host:port``; stays the same over restarts."""
        if self._grpc_socket is None:
            raise ConfigurationError("this server speaks no gRPC; make it with grpc=True")
        return f"grpc://{self._shown_host}:{self._grpc_port}"

    @property
    def _shown_host(self) -> str:
        return f"[{self._host}]" if ":" in self._host else self._host

    @property
    def latency_ms(self) -> float:
        """Milliseconds added to every inference; settable while the server runs."""
        return self.faults.latency_ms

    @latency_ms.setter
    def latency_ms(self, value: float) -> None:
        self.faults.latency_ms = value

    @property
    def error_rate(self) -> float:
        """The fraction of inferences answered 503; settable while the server runs."""
        return self.faults.error_rate

    @error_rate.setter
    def error_rate(self, value: float) -> None:
        self.faults.error_rate = value

    @property
    def received(self) -> dict[str, int]:
        """Inferences that came in so far, by purpose: ``{"demand": n, "prefetch": n}``; restarts don't reset
        it."""
        return {purpose: self.metrics.received[purpose] for purpose in ("demand", "prefetch")}

    def start(self) -> Self:
        """Start, or start again after ``stop()`` or ``kill()``; returns once it answers."""
        if self._running is not None:
            return self
        if self._socket.fileno() == -1:
            self._socket = bind(self._host, self._port)
        sockets = [self._socket]
        if self._uds is not None:
            sockets.append(bind_unix(self._uds))
        service = Service(
            self.models, self.faults, self.metrics, threads=self._threads, cache_control=self._cache_control
        )
        grpc_at = [f"{self._shown_host}:{self._grpc_port}"] if self._grpc_socket is not None else []
        if self._grpc_uds is not None:
            grpc_at.append(f"unix:{os.fspath(self._grpc_uds)}")
        self._running = _Running(service, sockets, grpc_at, self._max_body_bytes)
        return self

    def stop(self) -> None:
        """Stop taking requests, let the running ones end, close every connection."""
        self._end(abruptly=False)

    def kill(self) -> None:
        """Drop every connection and request at once."""
        self._end(abruptly=True)

    def _end(self, *, abruptly: bool) -> None:
        if self._running is not None:
            self._running.end(abruptly=abruptly)
            self._running = None
            self._socket = bind(self._host, self._port)
            if self._uds is not None:
                os.unlink(self._uds)

    def close(self) -> None:
        """Stop, and give the port back."""
        self.stop()
        self._socket.close()
        if self._grpc_socket is not None:
            self._grpc_socket.close()

    def __enter__(self) -> Self:
        try:
            return self.start()
        except BaseException:
            self.close()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Running:
    """One run of the server, from start to end, in a thread with its own event loop."""

    def __init__(
        self, service: Service, sockets: list[socket.socket], grpc_at: list[str], max_body_bytes: int
    ) -> None:
        self._service = service
        self._sockets = sockets
        self._grpc_at = grpc_at
        self._max_body_bytes = max_body_bytes
        self._drain_s: float = _DRAIN_S
        self._failure: ConfigurationError | None = None
        config = uvicorn.Config(
            make_app(service, max_body_bytes=max_body_bytes),
            log_config=None,
            log_level="critical",
            access_log=False,
            lifespan="off",
            timeout_graceful_shutdown=_DRAIN_S,
        )
        self._server = uvicorn.Server(config)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="stub-server", daemon=True)
        self._thread.start()
        give_up = time.monotonic() + _START_TIMEOUT_S
        while not self._server.started:
            if not self._thread.is_alive() or time.monotonic() > give_up:
                self.end(abruptly=True)
                raise self._failure or ConfigurationError(
                    f"the stub server did not start within {_START_TIMEOUT_S:.0f} s"
                )
            time.sleep(0.002)

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=self._server.config.get_loop_factory()) as runner:
            self._loop = runner.get_loop()
            try:
                runner.run(self._serve())
            except ConfigurationError as error:
                self._failure = error

    async def _serve(self) -> None:
        async with AsyncExitStack() as stack:
            if self._grpc_at:
                from .grpc_service import serving

                grpc = serving(
                    self._service,
                    self._grpc_at,
                    max_body_bytes=self._max_body_bytes,
                    drain_s=lambda: self._drain_s,
                )
                await stack.enter_async_context(grpc)
            await self._server.serve(sockets=self._sockets)

    def end(self, *, abruptly: bool) -> None:
        if abruptly:
            self._drain_s = 0.0
        if abruptly and self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._drop_everything)
        self._server.should_exit = True
        self._thread.join()
        self._service.close()
        for sock in self._sockets:
            sock.close()

    def _drop_everything(self) -> None:
        """Again and again until the loop ends: a connection that was just accepted shows up a moment later."""
        assert self._loop is not None
        self._server.force_exit = True
        for server in self._server.servers:
            server.close()
        for connection in list(self._server.server_state.connections):
            connection.transport.abort()
        self._loop.call_later(0.002, self._drop_everything)
