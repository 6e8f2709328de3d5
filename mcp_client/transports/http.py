"""HTTP/1.1 exchanges over pooled connections, each under one deadline that covers connecting, writing and every read.

The connections are the SDK's own (``connections.py``), over sockets and llhttp: what an HTTP library does between an
inference client and its server (redirects, cookies, content negotiation) has no place there, and costs more than a small
inference; none lets one deadline cover a whole exchange. A user's own ``httpx.Client`` can be passed in instead.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Mapping
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from ..config import TLS
from ..errors import ConfigurationError, DeadlineExceededError
from ..protocols import WireRequest, WireResponse
from .connections import AsyncPool, Pool, Target
from .credential import Credential
from .http11 import HeadWriter
from .ipc import Arena
from .tls import TlsContexts

if TYPE_CHECKING:
    from .._httpx import httpx


class _Origin:
    """What both transports share: where the endpoint is, the headers of every request, the limit of a response."""

    def __init__(
        self,
        url: str,
        headers: Mapping[str, str],
        max_response_bytes: int,
        address: str | None,
        tls: TLS | None,
        has_client: bool,
    ) -> None:
        path = _socket_path(url) if url.startswith("unix:") else None
        if path is not None and has_client:
            raise ConfigurationError(
                "http_client is for http:// and https:// only: give it the socket itself"
            )
        try:
            parsed = urlsplit(url if path is None else "http://localhost")
            host, port = parsed.hostname or "", parsed.port
            ascii_host = host if host.isascii() else host.encode("idna").decode("ascii")
        except ValueError as error:  # UnicodeError is one
            raise ConfigurationError(
                f"{url!r} is not a URL: {error}; expected http://host:port or https://host:port"
            ) from None
        if parsed.scheme not in ("http", "https") or not host or not url.isprintable() or " " in url:
            raise ConfigurationError(f"{url!r} must be http://host:port or https://host:port")
        if parsed.username is not None or parsed.password is not None:
            raise ConfigurationError(
                "credentials do not belong in the URL (they end up in logs); pass api_key=… or headers=…"
            )
        if parsed.query or parsed.fragment:
            raise ConfigurationError(f"{url!r} has a query or a fragment; a server's URL ends with its path")
        prefix = parsed.path.rstrip("/")
        secure = parsed.scheme == "https"
        self.url = f"{parsed.scheme}://{parsed.netloc}{prefix}" if path is None else url
        self.headers = dict(headers)
        self.limit = max_response_bytes
        named = f"[{ascii_host}]" if ":" in ascii_host else ascii_host
        self.writer = HeadWriter(named if port is None else f"{named}:{port}", prefix, headers)
        contexts = TlsContexts(tls)
        self.target = Target(
            self.url, ascii_host, port or (443 if secure else 80), contexts if secure else None, address, path
        )

    def arena(self) -> Arena | None:
        """Shared memory, where the server may be on this machine."""
        if self.target.socket_path is not None:
            return Arena.for_address(f"unix:{self.target.socket_path}")
        return Arena.for_address(f"{self.target.host}:{self.target.port}")

    def client_headers(self, token: str) -> dict[str, str]:
        """For a user's own client, which writes its own ``Host``."""
        asked = {name.lower() for name in self.headers}
        identity = {} if "accept-encoding" in asked else {"Accept-Encoding": "identity"}
        return {**self.headers, **identity, **({"Authorization": f"Bearer {token}"} if token else {})}


def _socket_path(url: str) -> str:
    path = url.removeprefix("unix://")
    if not path.startswith("/") or len(path) < 2:
        raise ConfigurationError(f"{url!r} can't be used; expected unix:///path/to/the.sock")
    return path


def _size(wire: WireRequest) -> int:
    return sum(map(len, wire.body))


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
        self._origin = _Origin(url, headers, max_response_bytes, address, tls, client is not None)
        self._credential = credential
        self.url = self._origin.url
        self.arena = self._origin.arena() if client is None else None
        self._client = client
        self._pool = Pool(self._origin.target, max_response_bytes)

    def reset(self) -> None:
        """Start with no connections; the parent's go on, as this process only gives up its share of them."""
        if self.arena is not None:
            self.arena.reset()
        self._pool.close()
        self._pool = Pool(self._origin.target, self._origin.limit)

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
        origin = self._origin
        if self._client is not None:
            from . import httpx_client

            headers = origin.client_headers(token)
            return httpx_client.send(self._client, self.url, headers, wire, deadline, origin.limit)
        head = origin.writer.write(wire, _size(wire), token)
        return self._pool.exchange(head, wire.body, deadline, repeatable=wire.repeatable)

    def close(self) -> None:
        if self.arena is not None:
            self.arena.close()
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
        self._origin = _Origin(url, headers, max_response_bytes, address, tls, client is not None)
        self._credential = credential
        self.url = self._origin.url
        self.arena = self._origin.arena() if client is None else None
        self._client = client
        self.reset()

    def reset(self) -> None:
        self._pools: dict[asyncio.AbstractEventLoop, tuple[AsyncPool, AsyncGenerator[None, None]]] = {}
        if self.arena is not None:
            self.arena.reset()

    async def _pool(self) -> AsyncPool:
        loop = asyncio.get_running_loop()
        known = self._pools.get(loop)
        if known is None:
            pool = AsyncPool(self._origin.target, self._origin.limit)
            keeper = self._closing(loop, pool)
            known = self._pools[loop] = pool, keeper
            await anext(keeper)
        return known[0]

    async def _closing(self, loop: asyncio.AbstractEventLoop, pool: AsyncPool) -> AsyncGenerator[None, None]:
        """Closes the pool when its loop ends: a loop closes the async generators that are still open in it."""
        try:
            yield
        finally:
            self._pools.pop(loop, None)
            pool.close()
            await asyncio.sleep(0)  # the loop closes the sockets in its next round

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
        origin = self._origin
        if self._client is not None:
            from . import httpx_client

            headers = origin.client_headers(token)
            try:
                async with asyncio.timeout(deadline - time.monotonic()):
                    return await httpx_client.asend(
                        self._client, self.url, headers, wire, deadline, origin.limit
                    )
            except TimeoutError as error:
                raise DeadlineExceededError(f"{self.url} did not answer before the deadline") from error
        head = origin.writer.write(wire, _size(wire), token)
        pool = await self._pool()
        return await pool.exchange(head, wire.body, deadline, repeatable=wire.repeatable)

    async def close(self) -> None:
        """Close this loop's connections; those of other loops go with their loops."""
        if self.arena is not None:
            self.arena.close()
        known = self._pools.get(asyncio.get_running_loop())
        if known is not None:
            await known[1].aclose()
