"""HTTP/1.1 exchanges over pooled connections, each under one deadline that covers connecting, writing and every read.

The client's own pool is used directly (``httpcore``, what ``httpx`` sits on): redirects, cookies and content negotiation
have no place between an inference client and its server, and cost more than a small inference. A user's own
``httpx.Client`` can be passed in instead, with its proxies, auth and transports.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
import time
import zlib
from collections.abc import AsyncGenerator, AsyncIterator, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from .._httpx import httpcore, httpx
from ..config import TLS
from ..errors import ConfigurationError, ConnectionFailedError, DeadlineExceededError, MCPError, ProtocolError
from ..protocols import WireRequest, WireResponse
from ..resilience.hedge import cancelling
from .connections import AsyncBackend, Backend, Exchange, current
from .credential import Credential
from .ipc import Arena
from .tls import TlsContexts

log = logging.getLogger("mcp_client.transports")

# Connections unused for this long are closed rather than trusted: load balancers drop idle ones silently, the
# commonest (AWS ALB) after 60 s.
_KEEPALIVE_S = 55.0
_MAX_CONNECTIONS = 128


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

    def arena(self) -> Arena | None:
        """Shared memory, where the server may be on this machine."""
        host, port = self.parts["host"].decode("ascii"), self.parts["port"]
        return Arena.for_address(f"{host}:{port or 0}" if self.uds is None else f"unix:{self.uds}")

    def core_request(self, wire: WireRequest, token: str) -> httpcore.Request:
        headers = [
            *self.headers,
            *_authorization(token),
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

    def httpx_arguments(self, wire: WireRequest, token: str) -> dict[str, Any]:
        return {
            "method": wire.method,
            "url": self.url + wire.path,
            "headers": [
                *self.headers[1:],
                *_authorization(token),
                *((k.encode("ascii"), v.encode("latin-1")) for k, v in wire.headers.items()),
            ],
            "content": b"".join(wire.body) or None,
            "follow_redirects": False,  # they would carry the credentials along
        }

    def collector(self, headers: Mapping[str, str]) -> _Collector:
        return _Collector(self.max_response_bytes, headers)


class _BearerAuth(httpx.Auth):
    def __init__(self, credential: Credential) -> None:
        self._credential = credential

    def auth_flow(self, request: httpx.Request) -> Generator[httpx.Request, httpx.Response, None]:
        token = self._credential.token()
        request.headers["Authorization"] = f"Bearer {token}"
        response = yield request
        if response.status_code == 401 and self._credential.renew(token):
            request.headers["Authorization"] = f"Bearer {self._credential.token()}"
            yield request


def bearer_auth(credential: Credential | None) -> httpx.Auth | None:
    """The credential for an ``httpx.Client`` (model files are downloaded with one)."""
    return _BearerAuth(credential) if credential is not None else None


def _authorization(token: str) -> list[tuple[bytes, bytes]]:
    return [(b"Authorization", b"Bearer " + token.encode("ascii"))] if token else []


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
        silent = ConnectionFailedError(f"{url} did not answer: {_words(error)}")
        silent.nothing_sent = isinstance(error, (httpcore.ConnectTimeout, httpx.ConnectTimeout))
        raise silent from error
    except (httpcore.NetworkError, httpx.NetworkError) as error:
        advice = "is the server running there?"
        if "CERTIFICATE_VERIFY_FAILED" in str(error):
            advice = "its certificate is not trusted; TLS(ca=…) names a private authority"
        failed = ConnectionFailedError(f"no connection to {url}: {_words(error)}; {advice}")
        failed.nothing_sent = isinstance(error, (httpcore.ConnectError, httpx.ConnectError))
        raise failed from error
    except (
        ssl.SSLError
    ) as error:  # asyncio's sockets raise it as it is, where a server refuses our certificate
        raise ConnectionFailedError(f"{url} broke the TLS connection: {error}") from error
    except (httpcore.RemoteProtocolError, httpx.RemoteProtocolError) as error:
        if "disconnected" in str(error) or "closed connection" in str(error) or "incomplete" in str(error):
            raise ConnectionFailedError(
                f"{url} closed the connection before its answer was complete: {error}"
            ) from error
        raise ProtocolError(f"{url} does not speak HTTP/1.1 correctly: {error}") from error
    except (httpcore.ProtocolError, httpcore.UnsupportedProtocol, httpx.HTTPError) as error:
        raise ProtocolError(f"the exchange with {url} failed: {_words(error)}") from error


def _was_stale(exchange: Exchange, error: ConnectionFailedError) -> bool:
    """Whether the server, or something on the way, had dropped the kept connection before it was used again.

    Then the same request goes out again, on the next kept connection or a fresh one: each failure takes one out of the pool.
    """
    cancellation = cancelling.get()
    called_off = cancellation is not None and cancellation.cancelled
    stale = exchange.repeatable and not exchange.fresh and not exchange.answered and not called_off
    if stale:
        log.debug("a kept connection was dropped while it was idle: %s", error)
    return stale


def _words(error: Exception) -> str:
    return str(error) or type(error).__name__


def _lower(headers: Iterable[tuple[bytes, bytes]]) -> dict[str, str]:
    return {name.decode("ascii", "replace").lower(): value.decode("latin-1") for name, value in headers}


def _socket_path(url: str) -> str:
    path = url.removeprefix("unix://")
    if not path.startswith("/") or len(path) < 2:
        raise ConfigurationError(f"{url!r} can't be used; expected unix:///path/to/the.sock")
    return path


# The pool insists on one and sets its protocols; what is used comes from TlsContexts, for each new connection.
_UNUSED_CONTEXT = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)


def _pool_options(uds: str | None) -> dict[str, Any]:
    return {
        "uds": uds,
        "ssl_context": _UNUSED_CONTEXT,
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
        address: str | None = None,
        tls: TLS | None = None,
        credential: Credential | None = None,
    ) -> None:
        self._origin = _Origin(url, headers, max_response_bytes)
        self._address = address
        self._tls = TlsContexts(tls)
        self._credential = credential
        self.url = self._origin.url
        self.arena = self._origin.arena() if client is None else None
        if client is not None and self._origin.uds is not None:
            raise ConfigurationError(
                "http_client is for http:// and https:// only: give it the socket itself"
            )
        self._client = client
        self._pool: httpcore.ConnectionPool | None = None
        self.reset()

    def reset(self) -> None:
        """Start with no connections; the old ones are left alone (after a fork they are the parent's)."""
        if self.arena is not None:
            self.arena.reset()
        if self._client is None:
            self._pool = httpcore.ConnectionPool(
                network_backend=Backend(self._tls, self._address), **_pool_options(self._origin.uds)
            )

    def send(self, wire: WireRequest, deadline: float) -> WireResponse:
        """One exchange, over by ``deadline`` (``time.monotonic()`` seconds)."""
        if self._credential is None:
            return self._send(wire, deadline, "")
        token = self._credential.token()
        response = self._send(wire, deadline, token)
        if response.status == 401 and self._credential.renew(token):
            response = self._send(wire, deadline, self._credential.token())
        return response

    def _send(self, wire: WireRequest, deadline: float, token: str) -> WireResponse:
        while True:
            exchange = Exchange(deadline, wire.repeatable)
            reset = current.set(exchange)
            try:
                with _our_errors(self.url, deadline):
                    if self._client is not None:
                        return self._send_with(self._client, wire, deadline, token)
                    assert self._pool is not None
                    request = self._origin.core_request(wire, token)
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
            except ConnectionFailedError as error:
                if self._client is not None or not _was_stale(exchange, error):
                    raise
            finally:
                current.reset(reset)

    def _send_with(
        self, client: httpx.Client, wire: WireRequest, deadline: float, token: str
    ) -> WireResponse:
        left = max(0.001, deadline - time.monotonic())
        with client.stream(**self._origin.httpx_arguments(wire, token), timeout=left) as response:
            headers = _lower(response.headers.raw)
            collector = self._origin.collector(headers)
            for chunk in response.iter_raw():
                collector.add(chunk)
                if time.monotonic() > deadline:
                    raise DeadlineExceededError(f"{self.url} did not answer before the deadline")
            return WireResponse(response.status_code, headers, collector.body())

    def close(self) -> None:
        if self.arena is not None:
            self.arena.close()
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
        address: str | None = None,
        tls: TLS | None = None,
        credential: Credential | None = None,
    ) -> None:
        self._origin = _Origin(url, headers, max_response_bytes)
        self._address = address
        self._tls = TlsContexts(tls)
        self._credential = credential
        self.url = self._origin.url
        self.arena = self._origin.arena() if client is None else None
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
        if self.arena is not None:
            self.arena.reset()

    async def _pool(self) -> httpcore.AsyncConnectionPool:
        loop = asyncio.get_running_loop()
        known = self._pools.get(loop)
        if known is None:
            pool = httpcore.AsyncConnectionPool(
                network_backend=AsyncBackend(self._tls, self._address), **_pool_options(self._origin.uds)
            )
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
        """As ``HttpTransport.send``. Cancelling the task cancels the exchange."""
        credential = self._credential
        if credential is None:
            return await self._send(wire, deadline, "")
        # The user's function may block: it runs in a thread.
        token = credential.token() if credential.at_hand else await asyncio.to_thread(credential.token)
        response = await self._send(wire, deadline, token)
        if response.status == 401 and await asyncio.to_thread(credential.renew, token):
            response = await self._send(wire, deadline, credential.token())
        return response

    async def _send(self, wire: WireRequest, deadline: float, token: str) -> WireResponse:
        while True:
            left = deadline - time.monotonic()
            exchange = Exchange(deadline, wire.repeatable)
            reset = current.set(exchange)
            try:
                async with asyncio.timeout(left):
                    with _our_errors(self.url, deadline):
                        if self._client is not None:
                            return await self._send_with(self._client, wire, left, token)
                        response = await (await self._pool()).handle_async_request(
                            self._origin.core_request(wire, token)
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
            except ConnectionFailedError as error:
                if self._client is not None or not _was_stale(exchange, error):
                    raise
            finally:
                current.reset(reset)

    async def _send_with(
        self, client: httpx.AsyncClient, wire: WireRequest, left: float, token: str
    ) -> WireResponse:
        async with client.stream(**self._origin.httpx_arguments(wire, token), timeout=left) as response:
            headers = _lower(response.headers.raw)
            collector = self._origin.collector(headers)
            async for chunk in response.aiter_raw():
                collector.add(chunk)
            return WireResponse(response.status_code, headers, collector.body())

    async def close(self) -> None:
        """Close this loop's connections; those of other loops go with their loops."""
        if self.arena is not None:
            self.arena.close()
        known = self._pools.get(asyncio.get_running_loop())
        if known is not None:
            await known[1].aclose()
