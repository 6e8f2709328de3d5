"""Connections as the pool of ``http.py`` sees them: bounded by the call's deadline, of a limited age, never silently dead."""

from __future__ import annotations

import contextlib
import random
import select
import socket
import ssl
import time
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from .._httpx import httpcore
from ..resilience.hedge import cancelling
from .tls import TlsContexts

# A connection is closed after this, give or take a fifth, once it is idle: behind a balancer each new one may reach another
# replica, so that load spreads again after a scale-up.
MAX_AGE_S = 300.0
# A dead host is noticed after 5 to 10 s, and does not take the whole of the call's time.
_CONNECT_S = 5.0
# A step of a sequence can't be sent again, so it does not go out on a connection that may have been dropped meanwhile.
_TRUSTED_IDLE_S = 2.0


def _socket_options() -> list[tuple[int, int, int]]:
    """A peer that is gone without a word (power, cable, an overlay network) is noticed within half a minute."""
    options = [(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)]
    for name, value in (
        ("TCP_KEEPIDLE", 15),
        ("TCP_KEEPINTVL", 5),
        ("TCP_KEEPCNT", 3),
        ("TCP_USER_TIMEOUT", 30_000),
    ):
        if hasattr(socket, name):
            options.append((socket.IPPROTO_TCP, getattr(socket, name), value))
    return options


_OPTIONS = _socket_options()


@dataclass(slots=True)
class Exchange:
    """The exchange under way in this thread or task, and what has become of it."""

    deadline: float
    repeatable: bool = True
    fresh: bool = False  # it opened a connection, or tried to
    answered: bool = False  # a byte of the response has come


current: ContextVar[Exchange] = ContextVar("mcp_exchange")


def _left(timeout: float | None) -> float:
    """Seconds this socket operation may take: what is left of the call. Raises once nothing is."""
    left = current.get().deadline - time.monotonic()
    if left <= 0:
        raise httpcore.ReadTimeout("deadline exceeded")
    return left if timeout is None else min(left, timeout)


def _connecting() -> float:
    """Marks the exchange as one with a connection of its own; seconds for connecting: half of the call's at most."""
    exchange = current.get()
    exchange.fresh = True
    left = _left(None)
    return min(_CONNECT_S, max(left / 2, min(left, 0.25)))


class _Age:
    """When a connection is too old, or was idle for too long to be trusted with this exchange."""

    def __init__(self) -> None:
        self._too_old_at = time.monotonic() + MAX_AGE_S * random.uniform(0.8, 1.2)
        self.used_at = time.monotonic()

    @property
    def is_over(self) -> bool:
        now = time.monotonic()
        if now > self._too_old_at:
            return True
        exchange = current.get(None)
        return exchange is not None and not exchange.repeatable and now - self.used_at > _TRUSTED_IDLE_S


class _Stream(httpcore.NetworkStream):
    """Bounds every single read and write by the call's deadline, so that a server that drips bytes can't stretch it."""

    def __init__(self, stream: httpcore.NetworkStream, tls: TlsContexts) -> None:
        self._stream = stream
        self._tls = tls
        self._age = _Age()

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        data = self._stream.read(max_bytes, _left(timeout))
        self._age.used_at = time.monotonic()
        if data:
            current.get().answered = True
        return data

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        cancellation = cancelling.get()
        if cancellation is not None:
            cancellation.attach(self._hang_up)
        self._stream.write(buffer, _left(timeout))

    def _hang_up(self) -> None:
        """From another thread: wakes the one that waits for this connection, which then closes it."""
        with contextlib.suppress(OSError):  # it may be closed already
            self._stream.get_extra_info("socket").shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._stream.close()

    def start_tls(
        self, ssl_context: Any, server_hostname: str | None = None, timeout: float | None = None
    ) -> httpcore.NetworkStream:
        stream = self._stream.start_tls(self._tls.current(), server_hostname, _connecting())
        try:
            _check_peer(self._tls, stream)
        except BaseException:
            stream.close()
            raise
        return _Stream(stream, self._tls)

    def get_extra_info(self, info: str) -> Any:
        """``is_readable`` is how the pool finds out that an idle connection can't be used any more."""
        if info == "is_readable" and self._age.is_over:
            return True
        return self._stream.get_extra_info(info)


class _AsyncStream(httpcore.AsyncNetworkStream):
    """The same for asyncio, where ``asyncio.timeout`` bounds the whole exchange."""

    def __init__(self, stream: httpcore.AsyncNetworkStream, tls: TlsContexts) -> None:
        self._stream = stream
        self._tls = tls
        self._age = _Age()

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        data = await self._stream.read(max_bytes, timeout)
        self._age.used_at = time.monotonic()
        if data:
            current.get().answered = True
        return data

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:
        await self._stream.write(buffer, timeout)

    async def aclose(self) -> None:
        await self._stream.aclose()

    async def start_tls(
        self, ssl_context: Any, server_hostname: str | None = None, timeout: float | None = None
    ) -> httpcore.AsyncNetworkStream:
        stream = await self._stream.start_tls(self._tls.current(), server_hostname, _connecting())
        try:
            _check_peer(self._tls, stream)
        except BaseException:
            await stream.aclose()
            raise
        return _AsyncStream(stream, self._tls)

    def get_extra_info(self, info: str) -> Any:
        if info == "is_readable" and self._age.is_over:
            return True
        return self._stream.get_extra_info(info)


def _check_peer(tls: TlsContexts, stream: Any) -> None:
    secured = stream.get_extra_info("ssl_object")
    try:
        tls.check_peer(secured.getpeercert() if secured is not None else None)
    except ssl.SSLError as error:
        raise httpcore.ConnectError(str(error)) from error


class _UnixStream(httpcore.NetworkStream):
    """A Unix socket, each operation bounded as above. (The library's own leaks the socket where nobody listens.)"""

    def __init__(self, path: str, timeout: float) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.settimeout(timeout)
            self._socket.connect(path)
        except OSError as error:
            self._socket.close()
            kind = httpcore.ConnectTimeout if isinstance(error, TimeoutError) else httpcore.ConnectError
            raise kind(str(error)) from error

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        self._socket.settimeout(_left(timeout))
        try:
            data = self._socket.recv(max_bytes)
        except OSError as error:
            kind = httpcore.ReadTimeout if isinstance(error, TimeoutError) else httpcore.ReadError
            raise kind(str(error)) from error
        if data:
            current.get().answered = True
        return data

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        view = memoryview(buffer)
        try:
            while view:
                self._socket.settimeout(_left(timeout))
                view = view[self._socket.send(view) :]
        except OSError as error:
            kind = httpcore.WriteTimeout if isinstance(error, TimeoutError) else httpcore.WriteError
            raise kind(str(error)) from error

    def close(self) -> None:
        self._socket.close()

    def get_extra_info(self, info: str) -> Any:
        """``is_readable`` is how the pool finds out that the server closed an idle connection."""
        if info == "is_readable":
            if self._socket.fileno() < 0:
                return True
            poll = select.poll()  # select() can't take descriptors over 1023
            poll.register(self._socket, select.POLLIN)
            return bool(poll.poll(0))
        return self._socket if info == "socket" else None


class Backend(httpcore.NetworkBackend):
    """Opens connections; ``address``: where the URL's host is, if the caller knows (name, SNI and Host stay the URL's)."""

    def __init__(self, tls: TlsContexts, address: str | None) -> None:
        self._tls = tls
        self._address = address
        self._backend = httpcore.SyncBackend()

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Any = None,
    ) -> httpcore.NetworkStream:
        stream = self._backend.connect_tcp(
            self._address or host, port, _connecting(), local_address, _OPTIONS
        )
        return _Stream(stream, self._tls)

    def connect_unix_socket(
        self, path: str, timeout: float | None = None, socket_options: Any = None
    ) -> httpcore.NetworkStream:
        return _UnixStream(path, _connecting())

    def sleep(self, seconds: float) -> None:
        self._backend.sleep(seconds)


class AsyncBackend(httpcore.AsyncNetworkBackend):
    """The same for asyncio."""

    def __init__(self, tls: TlsContexts, address: str | None) -> None:
        self._tls = tls
        self._address = address
        self._backend = httpcore.AnyIOBackend()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Any = None,
    ) -> httpcore.AsyncNetworkStream:
        stream = await self._backend.connect_tcp(
            self._address or host, port, _connecting(), local_address, _OPTIONS
        )
        return _AsyncStream(stream, self._tls)

    async def connect_unix_socket(
        self, path: str, timeout: float | None = None, socket_options: Any = None
    ) -> httpcore.AsyncNetworkStream:
        return _AsyncStream(await self._backend.connect_unix_socket(path, _connecting()), self._tls)

    async def sleep(self, seconds: float) -> None:
        await self._backend.sleep(seconds)
