"""HTTP/1.1 exchanges over pooled connections, each under one deadline that covers connecting, writing and every read.

The client's own pool is used directly (``httpcore``, what ``httpx`` sits on): redirects, cookies and content negotiation
have no place between an inference client and its server, and cost more than a small inference. A user's own
``httpx.Client`` can be passed in instead, with its proxies, auth and transports.
"""

from __future__ import annotations

import asyncio
import select
import socket
import time
import zlib
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from .._httpx import httpcore, httpx
from ..errors import ConfigurationError, ConnectionFailedError, DeadlineExceededError, MCPError, ProtocolError
from ..protocols import WireRequest, WireResponse

# Connections unused for this long are closed rather than trusted: load balancers drop idle ones silently, the
# commonest (AWS ALB) after 60 s.
_KEEPALIVE_S = 55.0
_MAX_CONNECTIONS = 128

_deadline: ContextVar[float] = ContextVar("mcp_deadline")


def _left(timeout: float | None) -> float:
    """Seconds this socket operation may take: what is left of the call. Raises once nothing is."""
    left = _deadline.get() - time.monotonic()
    if left <= 0:
        raise httpcore.ReadTimeout("deadline exceeded")
    return left if timeout is None else min(left, timeout)


class _DeadlineStream(httpcore.NetworkStream):
    """Bounds every single read and write by the call's deadline, so that a server that drips bytes can't stretch it."""

    def __init__(self, stream: httpcore.NetworkStream) -> None:
        self._stream = stream

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        return self._stream.read(max_bytes, _left(timeout))

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        self._stream.write(buffer, _left(timeout))

    def close(self) -> None:
        self._stream.close()

    def start_tls(
        self, ssl_context: Any, server_hostname: str | None = None, timeout: float | None = None
    ) -> httpcore.NetworkStream:
        return _DeadlineStream(self._stream.start_tls(ssl_context, server_hostname, _left(timeout)))

    def get_extra_info(self, info: str) -> Any:
        return self._stream.get_extra_info(info)


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
            return self._socket.recv(max_bytes)
        except OSError as error:
            kind = httpcore.ReadTimeout if isinstance(error, TimeoutError) else httpcore.ReadError
            raise kind(str(error)) from error

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


class _DeadlineBackend(httpcore.NetworkBackend):
    def __init__(self) -> None:
        self._backend = httpcore.SyncBackend()

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Any = None,
    ) -> httpcore.NetworkStream:
        stream = self._backend.connect_tcp(host, port, _left(timeout), local_address, socket_options)
        return _DeadlineStream(stream)

    def connect_unix_socket(
        self, path: str, timeout: float | None = None, socket_options: Any = None
    ) -> httpcore.NetworkStream:
        return _UnixStream(path, _left(timeout))

    def sleep(self, seconds: float) -> None:
        self._backend.sleep(seconds)


class _Body(httpx.SyncByteStream, httpx.AsyncByteStream):
    """The parts of a request's body, written one after another without joining them."""

    def __init__(self, parts: Iterable[bytes | memoryview]) -> None:
        self._parts = parts

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._parts)  # type: ignore[arg-type]  # h11 writes any buffer

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for part in self._parts:
            yield part  # type: ignore[misc]


class _Origin:
    """What both transports share: the endpoint's address, the headers of every request, the limit of a response."""

    def __init__(self, url: str, headers: Mapping[str, str], max_response_bytes: int) -> None:
        self.uds = _socket_path(url) if url.startswith("unix:") else None
        try:
            parsed = httpx.URL(url if self.uds is None else "http://localhost")
        except httpx.InvalidURL as error:
            raise ConfigurationError(
                f"{url!r} is not a URL: {error}; expected http://host:port or https://host:port"
            ) from None
        if parsed.scheme not in ("http", "https") or not parsed.host:
            raise ConfigurationError(f"{url!r} must be http://host:port or https://host:port")
        if parsed.userinfo:
            raise ConfigurationError(
                "credentials do not belong in the URL (they end up in logs); pass api_key=… or headers=…"
            )
        self.url = str(parsed).rstrip("/") if self.uds is None else url
        self.prefix = parsed.raw_path.decode("ascii").rstrip("/")
        self.parts: dict[str, Any] = {
            "scheme": parsed.raw_scheme,
            "host": parsed.raw_host,
            "port": parsed.port,
        }
        self.headers = [(b"Host", parsed.netloc)]
        self.headers += [(name.encode("ascii"), value.encode("latin-1")) for name, value in headers.items()]
        # Without this a library negotiates gzip, which makes a large tensor eight times slower (PROTOCOL.md section 2).
        if "accept-encoding" not in {name.lower() for name in headers}:
            self.headers.append((b"Accept-Encoding", b"identity"))
        self.max_response_bytes = max_response_bytes

    def core_request(self, wire: WireRequest) -> httpcore.Request:
        headers = [
            *self.headers,
            *((k.encode("ascii"), v.encode("latin-1")) for k, v in wire.headers.items()),
        ]
        content: Any = None
        if wire.body:
            headers.append((b"Content-Length", b"%d" % sum(len(part) for part in wire.body)))
            content = (
                wire.body[0] if len(wire.body) == 1 and isinstance(wire.body[0], bytes) else _Body(wire.body)
            )
        elif wire.method == "POST":
            headers.append((b"Content-Length", b"0"))
        url = httpcore.URL(**self.parts, target=(self.prefix + wire.path).encode("ascii"))
        return httpcore.Request(wire.method, url, headers=headers, content=content)

    def httpx_arguments(self, wire: WireRequest) -> dict[str, Any]:
        return {
            "method": wire.method,
            "url": self.url + wire.path,
            "headers": [
                *self.headers[1:],
                *((k.encode("ascii"), v.encode("latin-1")) for k, v in wire.headers.items()),
            ],
            "content": b"".join(wire.body) or None,
        }

    def collector(self, headers: Mapping[str, str]) -> _Collector:
        return _Collector(self.max_response_bytes, headers)


class _Collector:
    """Puts a response's body together, and stops at the size limit instead of filling memory."""

    def __init__(self, limit: int, headers: Mapping[str, str]) -> None:
        self._limit = limit
        self._chunks: list[bytes] = []
        self._size = 0
        self._encoding = headers.get("content-encoding", "identity").strip().lower()
        if self._encoding not in ("identity", "", "gzip", "deflate"):
            raise ProtocolError(
                f"the server compressed its answer with {self._encoding!r}, which was not asked for"
            )
        announced = headers.get("content-length", "")
        if announced.isdigit() and int(announced) > limit:
            self._too_large(int(announced))

    def add(self, chunk: bytes) -> None:
        self._size += len(chunk)
        if self._size > self._limit:
            self._too_large(self._size)
        self._chunks.append(chunk)

    def body(self) -> bytes:
        raw = self._chunks[0] if len(self._chunks) == 1 else b"".join(self._chunks)
        if self._encoding in ("identity", ""):
            return raw
        unpacker = zlib.decompressobj(
            wbits=47 if self._encoding == "gzip" else 15
        )  # 47: gzip or zlib, found out
        try:
            plain = unpacker.decompress(raw, self._limit)
        except zlib.error as error:
            raise ProtocolError(f"the server's {self._encoding} body is damaged: {error}") from error
        if unpacker.unconsumed_tail:
            self._too_large(len(plain) + 1)
        if not unpacker.eof:
            raise ProtocolError(f"the server's {self._encoding} body is truncated")
        return plain

    def _too_large(self, size: int) -> None:
        raise ProtocolError(
            f"the response has {size} bytes or more, over the limit of {self._limit}; raise max_response_bytes if that is meant"
        )


@contextmanager
def _our_errors(url: str, deadline: float) -> Iterator[None]:
    """The HTTP library's errors (core and httpx have the same names) as ours."""
    try:
        yield
    except MCPError:
        raise
    except (httpcore.PoolTimeout, httpx.PoolTimeout) as error:
        raise DeadlineExceededError(
            f"no connection to {url} became free in time: {_MAX_CONNECTIONS} calls are under way"
        ) from error
    except (httpcore.TimeoutException, httpx.TimeoutException) as error:
        if time.monotonic() >= deadline - 0.001:
            raise DeadlineExceededError(f"{url} did not answer before the deadline") from error
        raise ConnectionFailedError(f"{url} did not answer: {_words(error)}") from error
    except (httpcore.NetworkError, httpx.NetworkError) as error:
        raise ConnectionFailedError(
            f"no connection to {url}: {_words(error)}; is the server running there?"
        ) from error
    except (httpcore.RemoteProtocolError, httpx.RemoteProtocolError) as error:
        if "disconnected" in str(error) or "closed connection" in str(error) or "incomplete" in str(error):
            raise ConnectionFailedError(
                f"{url} closed the connection before its answer was complete: {error}"
            ) from error
        raise ProtocolError(f"{url} does not speak HTTP/1.1 correctly: {error}") from error
    except (httpcore.ProtocolError, httpcore.UnsupportedProtocol, httpx.HTTPError) as error:
        raise ProtocolError(f"the exchange with {url} failed: {_words(error)}") from error


def _words(error: Exception) -> str:
    return str(error) or type(error).__name__


def _lower(headers: Iterable[tuple[bytes, bytes]]) -> dict[str, str]:
    return {name.decode("ascii", "replace").lower(): value.decode("latin-1") for name, value in headers}


def _socket_path(url: str) -> str:
    path = url.removeprefix("unix://")
    if not path.startswith("/") or len(path) < 2:
        raise ConfigurationError(f"{url!r} can't be used; expected unix:///path/to/the.sock")
    return path


def _pool_options(uds: str | None) -> dict[str, Any]:
    return {
        "uds": uds,
        "ssl_context": httpx.create_ssl_context(),
        "max_connections": _MAX_CONNECTIONS,
        "max_keepalive_connections": _MAX_CONNECTIONS,
        "keepalive_expiry": _KEEPALIVE_S,
    }


class HttpTransport:
    """Blocking exchanges with one server. Safe to share between threads; ``reset`` is for the child after a fork."""

    def __init__(
        self,
        url: str,
        *,
        headers: Mapping[str, str],
        max_response_bytes: int,
        client: httpx.Client | None = None,
    ) -> None:
        self._origin = _Origin(url, headers, max_response_bytes)
        self.url = self._origin.url
        if client is not None and self._origin.uds is not None:
            raise ConfigurationError(
                "http_client is for http:// and https:// only: give it the socket itself"
            )
        self._client = client
        self._pool: httpcore.ConnectionPool | None = None
        self.reset()

    def reset(self) -> None:
        """Start with no connections; the old ones are left alone (after a fork they are the parent's)."""
        if self._client is None:
            self._pool = httpcore.ConnectionPool(
                network_backend=_DeadlineBackend(), **_pool_options(self._origin.uds)
            )

    def send(self, wire: WireRequest, deadline: float) -> WireResponse:
        """One exchange, over by ``deadline`` (``time.monotonic()`` seconds)."""
        token = _deadline.set(deadline)
        try:
            with _our_errors(self.url, deadline):
                if self._client is not None:
                    return self._send_with(self._client, wire, deadline)
                assert self._pool is not None
                request = self._origin.core_request(wire)
                request.extensions["timeout"] = {"pool": max(0.0, deadline - time.monotonic())}
                response = self._pool.handle_request(request)
                try:
                    headers = _lower(response.headers)
                    collector = self._origin.collector(headers)
                    for chunk in response.iter_stream():
                        collector.add(chunk)
                finally:
                    response.close()
                return WireResponse(response.status, headers, collector.body())
        finally:
            _deadline.reset(token)

    def _send_with(self, client: httpx.Client, wire: WireRequest, deadline: float) -> WireResponse:
        left = max(0.001, deadline - time.monotonic())
        with client.stream(**self._origin.httpx_arguments(wire), timeout=left) as response:
            headers = _lower(response.headers.raw)
            collector = self._origin.collector(headers)
            for chunk in response.iter_raw():
                collector.add(chunk)
                if time.monotonic() > deadline:
                    raise DeadlineExceededError(f"{self.url} did not answer before the deadline")
            return WireResponse(response.status_code, headers, collector.body())

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()


class AsyncHttpTransport:
    """The same for asyncio, from any number of event loops: connections belong to the loop that opened them."""

    def __init__(
        self,
        url: str,
        *,
        headers: Mapping[str, str],
        max_response_bytes: int,
        client: httpx.AsyncClient | None = None,
    ) -> None:
        self._origin = _Origin(url, headers, max_response_bytes)
        self.url = self._origin.url
        if client is not None and self._origin.uds is not None:
            raise ConfigurationError(
                "http_client is for http:// and https:// only: give it the socket itself"
            )
        self._client = client
        self.reset()

    def reset(self) -> None:
        self._pools: dict[
            asyncio.AbstractEventLoop, tuple[httpcore.AsyncConnectionPool, AsyncGenerator[None, None]]
        ] = {}

    async def _pool(self) -> httpcore.AsyncConnectionPool:
        loop = asyncio.get_running_loop()
        known = self._pools.get(loop)
        if known is None:
            pool = httpcore.AsyncConnectionPool(**_pool_options(self._origin.uds))
            keeper = self._closing(loop, pool)
            known = self._pools[loop] = pool, keeper
            await anext(keeper)
        return known[0]

    async def _closing(
        self, loop: asyncio.AbstractEventLoop, pool: httpcore.AsyncConnectionPool
    ) -> AsyncGenerator[None, None]:
        """Closes the pool when its loop ends: a loop closes the async generators that are still open in it."""
        try:
            yield
        finally:
            self._pools.pop(loop, None)
            await pool.aclose()

    async def send(self, wire: WireRequest, deadline: float) -> WireResponse:
        left = deadline - time.monotonic()
        try:
            async with asyncio.timeout(left):
                with _our_errors(self.url, deadline):
                    if self._client is not None:
                        return await self._send_with(self._client, wire, left)
                    response = await (await self._pool()).handle_async_request(
                        self._origin.core_request(wire)
                    )
                    try:
                        headers = _lower(response.headers)
                        collector = self._origin.collector(headers)
                        async for chunk in response.aiter_stream():
                            collector.add(chunk)
                    finally:
                        await response.aclose()
                    return WireResponse(response.status, headers, collector.body())
        except DeadlineExceededError:
            raise
        except TimeoutError as error:
            raise DeadlineExceededError(f"{self.url} did not answer before the deadline") from error

    async def _send_with(self, client: httpx.AsyncClient, wire: WireRequest, left: float) -> WireResponse:
        async with client.stream(**self._origin.httpx_arguments(wire), timeout=left) as response:
            headers = _lower(response.headers.raw)
            collector = self._origin.collector(headers)
            async for chunk in response.aiter_raw():
                collector.add(chunk)
            return WireResponse(response.status_code, headers, collector.body())

    async def close(self) -> None:
        """Close this loop's connections; those of other loops go with their loops."""
        known = self._pools.get(asyncio.get_running_loop())
        if known is not None:
            await known[1].aclose()
