"""gRPC exchanges with one server: a channel for threads, and one per event loop for asyncio.

Messages go in and come out as bytes (``protocols/oip_grpc.py`` makes them), so gRPC's own stubs are not needed.
"""

from __future__ import annotations

import asyncio
import os
import re
import threading
import time
import traceback
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ..config import TLS
from ..errors import (
    ConfigurationError,
    ConnectionFailedError,
    DeadlineExceededError,
    InvalidInputError,
    MCPError,
    MissingExtraError,
    ProtocolError,
)
from ..protocols import WireRequest, WireResponse
from ..protocols.grpc_status import GRPC_STATUS, STATUS_OF
from ..protocols.oip_grpc import MAX_MESSAGE_BYTES
from .credential import Credential
from .ipc import Arena

# gRPC reads this once, at import. With it gRPC stops its threads before a fork and starts afresh in the child, provided that no
# thread is inside a call at that moment (`_ForkGate`); without it, or otherwise, every call in the child hangs.
# (grpc/grpc doc/fork_support.md; pull request 41752; tried with 1.85: tests/transports/test_grpc_transport.py.)
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "1")
try:
    import grpc
    import grpc.aio
except ImportError as missing:
    raise MissingExtraError("grpc", "grpcio", "grpc://") from missing

SCHEMES = ("grpc", "grpcs", "grpc+unix")
# As over HTTP: what was unused for this long is closed rather than trusted.
_IDLE_MS = 55_000
# gRPC waits up to two minutes before it connects again, and fails every call meanwhile. How long a server is left alone is the
# circuit breaker's business.
_RECONNECT_MS = (50, 500)


# grpc_compression_algorithm, in gRPC's own numbers.
_ALGORITHMS = {None: 0, "deflate": 1, "gzip": 2}

# gRPC makes up a status where no server gave one, and says so in its text alone (seen with 1.85).
_MADE_UP = ("UNAVAILABLE", "CANCELLED", "UNKNOWN", "INTERNAL")
_NO_ANSWER = re.compile(
    r"failed to connect|all backends failing|connect failed|resolv|resolution|stream removed|rst_stream|socket closed"
    r"|recvmsg|connection (reset|refused|closed)|broken pipe|goaway|keepalive|transport closed|endpoint closing"
    r"|channel closed",
    re.IGNORECASE,
)


class _ForkGate:
    """Lets a fork wait until no thread is inside gRPC, and keeps new calls out meanwhile.

    A process that forked although a call went on (longer than ``_WAIT_S``), or while asyncio channels were open (gRPC's
    asyncio side does not support fork), can't use gRPC in the child: ``broken`` says so there, where gRPC would hang.
    """

    _WAIT_S = 5.0

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._calls = 0
        self._forking = False
        self._unsafe = False
        self.aio_channels = 0
        self.broken = False
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(
                before=self._before, after_in_parent=self._after, after_in_child=self._in_child
            )

    def __enter__(self) -> None:
        if self.broken:
            raise ConnectionFailedError(
                "gRPC can't be used in this process: it was forked while a gRPC call or an asyncio gRPC client was in use; "
                "start workers before the first call, use multiprocessing's 'spawn', or http://"
            )
        with self._lock:
            while self._forking:
                self._changed.wait()
            self._calls += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._calls -= 1
            if self._forking and not self._calls:
                self._changed.notify_all()

    def _before(self) -> None:
        with self._lock:
            self._forking = True
            quiet = self._changed.wait_for(lambda: not self._calls, self._WAIT_S)
            self._unsafe = self.aio_channels > 0 or not quiet

    def _after(self) -> None:
        with self._lock:
            self._forking = False
            self._changed.notify_all()

    def _in_child(self) -> None:
        self.broken = self.broken or self._unsafe
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._calls = self.aio_channels = 0
        self._forking = False


_gate = _ForkGate()


class _Target:
    """What both transports share: the address, the channel's options, the metadata of every call."""

    def __init__(
        self,
        url: str,
        headers: Mapping[str, str],
        max_response_bytes: int,
        tls: TLS | None,
        credential: Credential | None,
        compression: str | None,
    ) -> None:
        self.url, self.address, self.secure = _parse(url)
        if tls is not None and (tls.spiffe_id is not None or tls.min_version != "1.2"):
            raise ConfigurationError(
                "gRPC's Python library can set neither TLS(min_version=…) nor TLS(spiffe_id=…); use https:// for these"
            )
        self.tls = tls
        self.credential = credential
        self.arena = Arena.for_address(self.address)
        self.metadata = tuple(_pair(name, value) for name, value in headers.items())
        self.options = [
            ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
            ("grpc.max_receive_message_length", min(max_response_bytes, MAX_MESSAGE_BYTES)),
            ("grpc.client_idle_timeout_ms", _IDLE_MS),
            ("grpc.initial_reconnect_backoff_ms", _RECONNECT_MS[0]),
            ("grpc.min_reconnect_backoff_ms", _RECONNECT_MS[0]),
            ("grpc.max_reconnect_backoff_ms", _RECONNECT_MS[1]),
            ("grpc.lb_policy_name", "round_robin"),  # a name with several addresses is several replicas
            ("grpc.enable_retries", 0),  # there is one retry loop, in flow.py
            # A name with several addresses is several servers. gRPC resolves it again when a connection fails.
            ("grpc.service_config", '{"loadBalancingConfig": [{"round_robin": {}}]}'),
            (
                "grpc.enable_http_proxy",
                0,
            ),  # between an inference client and its server there is none, as over HTTP
            ("grpc.default_compression_algorithm", _ALGORITHMS[compression]),
            ("grpc.use_local_subchannel_pool", 1),  # a connection belongs to one client: close() closes it
        ]

    def credentials(self) -> Any:
        """What a secure channel is opened with: the files as they are now."""
        if self.tls is None:
            return grpc.ssl_channel_credentials()
        parts = (self.tls.ca, self.tls.key or self.tls.cert, self.tls.cert)
        try:
            read = [Path(part).read_bytes() if part is not None else None for part in parts]
        except OSError as error:
            raise ConfigurationError(f"the TLS files of {self.tls!r} can't be used: {error}") from error
        return grpc.ssl_channel_credentials(*read)

    def renewed(self, response: WireResponse, metadata: tuple[tuple[str, str], ...]) -> bool:
        """Whether the server refused the token that was sent and there is another one now."""
        return (
            response.status == 401
            and self.credential is not None
            and metadata[-1][0] == "authorization"
            and self.credential.renew(metadata[-1][1].removeprefix("Bearer "))
        )

    def call(self, wire: WireRequest, deadline: float) -> tuple[bytes, float, tuple[tuple[str, str], ...]]:
        """Message, timeout in seconds and metadata of a call."""
        size = sum(map(len, wire.body))
        if size > MAX_MESSAGE_BYTES:
            raise InvalidInputError(
                f"the request has {size} bytes; a gRPC message holds at most {MAX_MESSAGE_BYTES} (2 GiB - 1): "
                "send less at once, or use http://"
            )
        left = deadline - time.monotonic()
        if left <= 0:
            raise DeadlineExceededError(f"the deadline passed before the request was sent to {self.url}")
        metadata = self.metadata
        if wire.headers:
            # What a call says itself takes the place of what the client says with every call.
            own = tuple(pair for pair in metadata if pair[0] not in wire.headers)
            metadata = (*own, *wire.headers.items())
        if self.credential is not None and "authorization" not in wire.headers:
            metadata += (("authorization", f"Bearer {self.credential.token()}"),)
        return b"".join(wire.body), left, metadata

    def failure(self, error: Any, deadline: float) -> WireResponse:
        """A server's error as a response for the codec; anything else raises what it means."""
        code: str = error.code().name
        details: str = error.details() or ""
        headers = _headers(error.initial_metadata()) | _headers(error.trailing_metadata())
        if code == "DEADLINE_EXCEEDED" and (not headers or time.monotonic() >= deadline):
            raise DeadlineExceededError(f"{self.url} did not answer before the deadline") from error
        # The text is gRPC's own; where it does not say whose limit it was, the message was a compressed one.
        if code == "RESOURCE_EXHAUSTED" and "larger than max" in details and "SERVER" not in details:
            raise ProtocolError(
                f"the answer of {self.url} is over the limit: {details}; raise max_response_bytes if that is meant"
            ) from error
        if code == "RESOURCE_EXHAUSTED" and "larger than max" in details:
            # The server's limit: no overload, and sending it again is no use.
            return WireResponse(413, {**headers, GRPC_STATUS: code}, details.encode())
        if code in _MADE_UP and _NO_ANSWER.search(details):
            raise ConnectionFailedError(
                f"no answer from {self.url}: {details}; does a gRPC server run there?"
            ) from error
        return WireResponse(STATUS_OF.get(code, 500), {**headers, GRPC_STATUS: code}, details.encode())


def _parse(url: str) -> tuple[str, str, bool]:
    """The URL to show, the address for gRPC, and whether TLS is meant."""
    expected = "expected grpc://host:port, grpcs://host:port or grpc+unix:///path"
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise ConfigurationError(f"{url!r} is not a URL: {error}; {expected}") from None
    if parts.username is not None or parts.password is not None:
        raise ConfigurationError(
            "credentials do not belong in the URL (they end up in logs); pass api_key=… or headers=…"
        )
    if parts.scheme == "grpc+unix" and not parts.netloc and len(parts.path) > 1:
        return url, f"unix:{parts.path}", False
    if parts.scheme not in ("grpc", "grpcs") or not host or port is None or parts.path.strip("/"):
        raise ConfigurationError(f"{url!r} can't be used; {expected}")
    shown = f"[{host}]" if ":" in host else host
    return f"{parts.scheme}://{shown}:{port}", f"{shown}:{port}", parts.scheme == "grpcs"


def _pair(name: str, value: str) -> tuple[str, str]:
    if not (value.isascii() and value.isprintable()):
        raise ConfigurationError(
            f"header {name!r} must be printable ASCII: gRPC metadata carries nothing else"
        )
    return name.lower(), value


def _headers(metadata: Any) -> dict[str, str]:
    return {name: value for name, value in metadata or () if isinstance(value, str)}


def _no_http_client(client: Any) -> None:
    if client is not None:
        raise ConfigurationError("http_client is for http:// and https:// only")


class GrpcTransport:
    """Blocking exchanges with one server. Safe to share between threads; ``reset`` is for the child after a fork."""

    def __init__(
        self,
        url: str,
        *,
        headers: Mapping[str, str],
        max_response_bytes: int,
        client: Any = None,
        tls: TLS | None = None,
        credential: Credential | None = None,
        compression: str | None = None,
    ) -> None:
        _no_http_client(client)
        self._target = _Target(url, headers, max_response_bytes, tls, credential, compression)
        self.url = self._target.url
        self.arena = self._target.arena
        self.reset()

    def reset(self) -> None:
        """Start with no channel; the old one is left alone (after a fork gRPC has closed the child's copy itself)."""
        self._lock = threading.Lock()
        self._channel: Any = None
        self._methods: dict[str, Any] = {}
        if self.arena is not None:
            self.arena.reset()

    def _connect(self) -> Any:
        """The channel, opened at the first call: before that a process may fork without a thought."""
        with self._lock:
            if self._channel is None:
                target = self._target
                self._channel = (
                    grpc.secure_channel(target.address, target.credentials(), target.options)
                    if target.secure
                    else grpc.insecure_channel(target.address, target.options)
                )
            return self._channel

    def send(self, wire: WireRequest, deadline: float) -> WireResponse:
        """One exchange, over by ``deadline`` (``time.monotonic()`` seconds)."""
        message, left, metadata = self._target.call(wire, deadline)
        response = self._send(wire, message, left, metadata, deadline)
        if self._target.renewed(response, metadata):
            message, left, metadata = self._target.call(wire, deadline)
            response = self._send(wire, message, left, metadata, deadline)
        return response

    def _send(
        self, wire: WireRequest, message: bytes, left: float, metadata: Any, deadline: float
    ) -> WireResponse:
        try:
            with _gate:
                method = self._methods.get(wire.path)
                if method is None:
                    method = self._methods[wire.path] = self._connect().unary_unary(wire.path)
                body, call = method.with_call(message, timeout=left, metadata=metadata)
            return WireResponse(200, _headers(call.initial_metadata()), body)
        except KeyboardInterrupt as interrupt:
            # gRPC cancels a call once nobody holds it: not the traceback either, which may be kept for long.
            traceback.clear_frames(interrupt.__traceback__)
            raise
        except grpc.RpcError as error:
            return self._target.failure(error, deadline)
        except ValueError as error:  # what gRPC raises on a closed channel
            raise _closed(self.url, error) from error

    def stream(self, wire: WireRequest, deadline: float) -> Iterator[WireResponse]:
        """Send one message on a stream and hand out the answers as they come; closing the iterator cancels the call."""
        message, left, metadata = self._target.call(wire, deadline)
        try:
            with _gate:
                pass  # a stream's calls are made in gRPC's own thread, which knows of forks
            call = self._connect().stream_stream(wire.path)(iter((message,)), timeout=left, metadata=metadata)
        except ValueError as error:
            raise _closed(self.url, error) from error
        try:
            for body in call:
                yield WireResponse(200, _headers(call.initial_metadata()), body)
        except grpc.RpcError as error:
            yield self._target.failure(error, deadline)
        finally:
            call.cancel()

    def close(self) -> None:
        if self.arena is not None:
            self.arena.close()
        with self._lock:
            if self._channel is not None:
                self._channel.close()


class AsyncGrpcTransport:
    """The same for asyncio, from any number of event loops: a channel belongs to the loop that opened it."""

    def __init__(
        self,
        url: str,
        *,
        headers: Mapping[str, str],
        max_response_bytes: int,
        client: Any = None,
        tls: TLS | None = None,
        credential: Credential | None = None,
        compression: str | None = None,
    ) -> None:
        _no_http_client(client)
        self._target = _Target(url, headers, max_response_bytes, tls, credential, compression)
        self.url = self._target.url
        self.arena = self._target.arena
        self.reset()

    def reset(self) -> None:
        self._channels: dict[asyncio.AbstractEventLoop, tuple[Any, AsyncGenerator[None, None]]] = {}
        if self.arena is not None:
            self.arena.reset()

    async def _channel(self) -> Any:
        loop = asyncio.get_running_loop()
        known = self._channels.get(loop)
        if known is None:
            with _gate:
                _gate.aio_channels += 1
            target = self._target
            channel = (
                grpc.aio.secure_channel(target.address, target.credentials(), target.options)
                if target.secure
                else grpc.aio.insecure_channel(target.address, target.options)
            )
            keeper = self._closing(loop, channel)
            known = self._channels[loop] = channel, keeper
            await anext(keeper)
        return known[0]

    async def _closing(self, loop: asyncio.AbstractEventLoop, channel: Any) -> AsyncGenerator[None, None]:
        """Closes the channel when its loop ends: a loop closes the async generators that are still open in it."""
        try:
            yield
        finally:
            self._channels.pop(loop, None)
            _gate.aio_channels -= 1
            await channel.close()

    async def send(self, wire: WireRequest, deadline: float) -> WireResponse:
        """As ``GrpcTransport.send``. Cancelling the task cancels the call."""
        if self._target.credential is not None and not self._target.credential.at_hand:
            await asyncio.to_thread(self._target.credential.token)
        message, left, metadata = self._target.call(wire, deadline)
        response = await self._send(wire, message, left, metadata, deadline)
        if response.status == 401 and await asyncio.to_thread(self._target.renewed, response, metadata):
            message, left, metadata = self._target.call(wire, deadline)
            response = await self._send(wire, message, left, metadata, deadline)
        return response

    async def _send(
        self, wire: WireRequest, message: bytes, left: float, metadata: Any, deadline: float
    ) -> WireResponse:
        channel = await self._channel()
        try:
            call = channel.unary_unary(wire.path)(message, timeout=left, metadata=metadata)
            body = await call
            return WireResponse(200, _headers(await call.initial_metadata()), body)
        except grpc.aio.AioRpcError as error:
            return self._target.failure(error, deadline)
        except grpc.aio.UsageError as error:
            raise _closed(self.url, error) from error

    async def stream(self, wire: WireRequest, deadline: float) -> AsyncIterator[WireResponse]:
        """As ``GrpcTransport.stream``."""
        message, left, metadata = self._target.call(wire, deadline)
        channel = await self._channel()
        try:
            call = channel.stream_stream(wire.path)(iter((message,)), timeout=left, metadata=metadata)
        except grpc.aio.UsageError as error:
            raise _closed(self.url, error) from error
        try:
            async for body in call:
                yield WireResponse(200, _headers(await call.initial_metadata()), body)
        except grpc.aio.AioRpcError as error:
            yield self._target.failure(error, deadline)
        finally:
            call.cancel()

    async def close(self) -> None:
        """Close this loop's channel; those of other loops go with their loops."""
        if self.arena is not None:
            self.arena.close()
        known = self._channels.get(asyncio.get_running_loop())
        if known is not None:
            await known[1].aclose()


def _closed(url: str, error: Exception) -> MCPError:
    return ConnectionFailedError(f"the channel to {url} was closed while it was used: {error}")
