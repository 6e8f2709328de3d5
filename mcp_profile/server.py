"""Runs the Profile API: in this process for tests and demos, or as the command's main thing."""

from __future__ import annotations

import ipaddress
import shutil
import socket
import tempfile
import threading
import time
import weakref
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

import uvicorn

from .access import Access
from .app import create_app
from .intake import Intake
from .limits import RateLimit
from .service import Profiles
from .store import Store

if TYPE_CHECKING:
    from .grpc_service import GrpcServer

_START_S = 10.0


class ProfileServer:
    """A Profile API on a thread of this process.

        with ProfileServer() as server:
            client = MCPClient(url, telemetry=server.url)

    ``db``: a SQLAlchemy URL or the path of an SQLite file; ``None`` is a temporary file, gone when the server
    is closed. ``port`` 0 takes a free one, and ``start()`` after ``stop()`` takes the same one again.
    ``api_key``: asked of every caller; needed, here or in the database, on an address that is not loopback.
    ``max_events_per_s``: what each application may send; 0 is no limit. ``grpc_port``: serves gRPC, too; 0 takes a free one.
    """

    def __init__(
        self,
        db: str | Path | None = None,
        port: int = 0,
        *,
        host: str = "127.0.0.1",
        api_key: str | None = None,
        max_events_per_s: float = 0,
        grpc_port: int | None = None,
    ) -> None:
        self.host = host
        self.port = port
        self.grpc_port = grpc_port
        self._remove: weakref.finalize[[str, bool], ProfileServer] | None = None
        if db is None:
            folder = tempfile.mkdtemp(prefix="mcp-profile-")
            self._remove = weakref.finalize(self, shutil.rmtree, folder, True)
            self._remove.atexit = False  # a forked child's exit must not take it from its parent
            db = f"{folder}/profile.sqlite"
        self._db = database_url(db)
        self._api_key = api_key
        self._max_events_per_s = max_events_per_s
        self._server: Server | None = None
        self._thread: threading.Thread | None = None

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"

    @property
    def grpc_url(self) -> str:
        """For ``Telemetry(grpc_url, http_url=url)``; only with ``grpc_port``."""
        return f"{self.url.replace('http', 'grpc', 1).rpartition(':')[0]}:{self.grpc_port}"

    @property
    def store(self) -> Store:
        """The database of a server that runs."""
        if self._server is None:
            raise RuntimeError("the Profile API is not running; call start()")
        return self._server.store

    def start(self) -> Self:
        """Open the database and answer requests; returns when it does."""
        if self._server is not None:
            return self
        listener = listen(self.host, self.port)
        self.port = listener.getsockname()[1]
        try:
            self._server = Server(
                self._db,
                self.host,
                self._api_key,
                max_events_per_s=self._max_events_per_s,
                grpc_port=self.grpc_port,
            )
        except BaseException:
            listener.close()
            raise
        self._thread = threading.Thread(
            target=self._server.run, args=([listener],), name="mcp-profile", daemon=True
        )
        self._thread.start()
        self.grpc_port = self._server.grpc_port
        deadline = time.monotonic() + _START_S
        while not self._server.started:
            if not self._thread.is_alive() or time.monotonic() > deadline:
                self.stop()
                raise RuntimeError(f"the Profile API did not start on {self.url} within {_START_S:.0f} s")
            time.sleep(0.005)
        return self

    def stop(self) -> None:
        """Stop answering; the database stays. Idempotent."""
        server, thread = self._server, self._thread
        self._server = self._thread = None
        if server is not None and thread is not None:
            server.stop()
            thread.join(_START_S)
            server.close()

    def close(self) -> None:
        """Stop for good; a temporary database is deleted."""
        self.stop()
        if self._remove is not None:
            self._remove()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Server:
    """The database, and HTTP and gRPC in front of it, ready to run. ``ValueError`` if it would be open to the network."""

    def __init__(
        self,
        db: str,
        host: str,
        api_key: str | None,
        *,
        log_level: str = "warning",
        max_events_per_s: float = 0,
        grpc_port: int | None = None,
    ) -> None:
        self.store = Store(db)
        access = Access(self.store, master=api_key)
        if not is_loopback(host) and access.is_open():
            self.store.close()
            raise ValueError(
                f"refusing to serve {host} without a key: anybody who can reach it could read and write. "
                "Make one with `mcp-profile keys create`, set MCP_PROFILE_API_KEY, or serve 127.0.0.1"
            )
        profiles = Profiles(self.store)
        intake = Intake(self.store, RateLimit(max_events_per_s))
        self._http = uvicorn.Server(
            uvicorn.Config(
                create_app(self.store, profiles, access, intake),
                log_level=log_level,
                lifespan="off",
                server_header=False,
                timeout_graceful_shutdown=2,
            )
        )
        self._grpc: GrpcServer | None = None
        if grpc_port is not None:
            try:
                from .grpc_service import GrpcServer

                self._grpc = GrpcServer(host, grpc_port, self.store, profiles, access, intake)
                self._grpc.start()
            except BaseException:
                self.store.close()
                raise

    @property
    def grpc_port(self) -> int | None:
        return self._grpc.port if self._grpc is not None else None

    @property
    def started(self) -> bool:
        return self._http.started

    def run(self, sockets: list[socket.socket]) -> None:
        """Answer until ``stop`` or, in the main thread, a signal."""
        self._http.run(sockets=sockets)

    def stop(self) -> None:
        self._http.should_exit = True

    def close(self) -> None:
        """After ``run`` has returned."""
        if self._grpc is not None:
            self._grpc.stop()
        self.store.close()


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; bound here so that port 0 is known before anything starts."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(2048)
    except BaseException:
        listener.close()
        raise
    return listener


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def database_url(db: str | Path) -> str:
    """``db`` as a SQLAlchemy URL; what is none is the path of an SQLite file."""
    text = str(db)
    return text if "://" in text else f"sqlite:///{text}"
