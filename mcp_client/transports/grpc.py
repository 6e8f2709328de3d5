"""gRPC exchanges with one server: a channel for threads, and one per event loop for asyncio.

Messages go in and come out as bytes (``protocols/oip_grpc.py`` makes them), so gRPC's own stubs are not needed.
"""

from __future__ import annotations

import asyncio
import os
import random
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
from ..resilience.hedge import CalledOffError, cancelling
from .credential import Credential
from .ipc import Arena
from .tls import TlsContexts
from .tunnel import Tunnel

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
# As over HTTP too, give or take a fifth.
MAX_AGE_S = 300.0
# gRPC waits up to two minutes before it connects again, and fails every call meanwhile. How long a server is left alone is the
# circuit breaker's business.
_RECONNECT_MS = (50, 500)
# What gRPC calls its least back-off is the time that connecting may take, TLS and HTTP/2's first frames included.
_CONNECT_MS = 5000
# A server that gives up this shortly before the call's deadline gave up because of it: it was told.
_SAME_S = 0.05


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
        self.tls = tls
        self.contexts = TlsContexts(tls, alpn="h2")
        # gRPC's Python library can set neither of these.
        self.tunnelled = (
            self.secure and tls is not None and (tls.spiffe_id is not None or tls.min_version != "1.2")
        )
        self.credential = credential
        self.arena = Arena.for_address(self.address)
        self.metadata = tuple(_pair(name, value) for name, value in headers.items())
        self.options = [
            ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
            ("grpc.max_receive_message_length", min(max_response_bytes, MAX_MESSAGE_BYTES)),
            ("grpc.client_idle_timeout_ms", _IDLE_MS),
            ("grpc.initial_reconnect_backoff_ms", _RECONNECT_MS[0]),
            ("grpc.min_reconnect_backoff_ms", _CONNECT_MS),
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

    def tunnel(self) -> Tunnel:
        parts = urlsplit(self.url)
        assert parts.hostname is not None
        assert parts.port is not None
        return Tunnel(parts.hostname, parts.port, self.contexts)

    def channel(self, library: Any, tunnel: Tunnel | None) -> Any:
        """A new channel of ``grpc`` or ``grpc.aio``."""
        if tunnel is not None:
            return library.insecure_channel(
                tunnel.address, [*self.options, ("grpc.default_authority", self.address)]
            )
        if self.secure:
            return library.secure_channel(self.address, self.credentials(), self.options)
        return library.insecure_channel(self.address, self.options)

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

    def failure(self, error: Any, deadline: float, tunnel: Tunnel | None) -> WireResponse:
        """A server's error as a response for the codec; anything else raises what it means."""
        code: str = error.code().name
        details: str = error.details() or ""
        headers = _headers(error.initial_metadata()) | _headers(error.trailing_metadata())
        if code == "DEADLINE_EXCEEDED" and (not headers or time.monotonic() >= deadline - _SAME_S):
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
            why = f"{tunnel.problem}" if tunnel is not None and tunnel.problem is not None else details
            raise ConnectionFailedError(
                f"no answer from {self.url}: {why}; does a gRPC server run there?"
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


class _Channel:
    """A channel and the calls that use it. One that is too old, or whose TLS files have changed, takes no new ones and is closed
    after its last: its successor may reach another replica, and shows the new certificate.
    """

    _LOOK_EVERY_S = 1.0  # at the files

    def __init__(self, target: _Target, library: Any, tunnel: Tunnel | None) -> None:
        self._contexts = target.contexts
        self._stamps = target.contexts.stamps()
        now = time.monotonic()
        self._until = now + MAX_AGE_S * random.uniform(0.8, 1.2)
        self._look_at = now + self._LOOK_EVERY_S
        self._methods: dict[str, Any] = {}
        self.channel = target.channel(library, tunnel)
        self.calls = 0
        self.closed = False
        self.keeper: Any = None  # asyncio's: what closes it when its loop ends

    def unary(self, path: str) -> Any:
        method = self._methods.get(path)
        if method is None:
            method = self._methods[path] = self.channel.unary_unary(path)
        return method

    def is_over(self) -> bool:
        now = time.monotonic()
        if now >= self._until:
            return True
        if now >= self._look_at:
            self._look_at = now + self._LOOK_EVERY_S
            return self._contexts.stamps() != self._stamps
        return False


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
        self._current: _Channel | None = None
        self._tunnel: Tunnel | None = None
        if self.arena is not None:
            self.arena.reset()

    def _take(self) -> _Channel:
        """A channel for one call; ``_give`` must follow. It is opened at the first: before that a process may fork without
        a thought.
        """
        with self._lock:
            current, over = self._current, None
            if current is not None and current.is_over():
                over, self._current = current, None
            if self._current is None:
                if self._target.tunnelled and self._tunnel is None:
                    self._tunnel = self._target.tunnel()
                self._current = _Channel(self._target, grpc, self._tunnel)
            taken = self._current
            taken.calls += 1
        if over is not None and not over.calls:
            over.channel.close()
        return taken

    def _give(self, taken: _Channel) -> None:
        with self._lock:
            taken.calls -= 1
            over = taken is not self._current and not taken.calls
        if over:
            taken.channel.close()

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
        taken = self._take()
        cancellation = cancelling.get()
        try:
            with _gate:
                if cancellation is None:
                    body, call = taken.unary(wire.path).with_call(message, timeout=left, metadata=metadata)
                else:  # the slower way to call, which can be called off
                    call = taken.unary(wire.path).future(message, timeout=left, metadata=metadata)
                    cancellation.attach(call.cancel)
                    body = call.result()
            return WireResponse(200, _headers(call.initial_metadata()), body)
        except KeyboardInterrupt as interrupt:
            # gRPC cancels a call once nobody holds it: not the traceback either, which may be kept for long.
            traceback.clear_frames(interrupt.__traceback__)
            raise
        except grpc.FutureCancelledError:
            raise CalledOffError from None
        except grpc.RpcError as error:
            return self._target.failure(error, deadline, self._tunnel)
        except ValueError as error:  # what gRPC raises on a closed channel
            raise _closed(self.url, error) from error
        finally:
            self._give(taken)

    def stream(self, wire: WireRequest, deadline: float) -> Iterator[WireResponse]:
        """Send one message on a stream and hand out the answers as they come; closing the iterator cancels the call."""
        message, left, metadata = self._target.call(wire, deadline)
        taken = self._take()
        try:
            with _gate:
                pass  # a stream's calls are made in gRPC's own thread, which knows of forks
            call = taken.channel.stream_stream(wire.path)(iter((message,)), timeout=left, metadata=metadata)
            try:
                for body in call:
                    yield WireResponse(200, _headers(call.initial_metadata()), body)
            except grpc.RpcError as error:
                yield self._target.failure(error, deadline, self._tunnel)
            finally:
                call.cancel()
        except ValueError as error:
            raise _closed(self.url, error) from error
        finally:
            self._give(taken)

    def close(self) -> None:
        if self.arena is not None:
            self.arena.close()
        with self._lock:
            if self._current is not None:
                self._current.channel.close()
            if self._tunnel is not None:
                self._tunnel.close()


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
        self._channels: dict[asyncio.AbstractEventLoop, _Channel] = {}
        self._tunnel: Tunnel | None = None
        if self.arena is not None:
            self.arena.reset()

    async def _take(self) -> _Channel:
        """This loop's channel, for one call; ``_give`` must follow."""
        loop = asyncio.get_running_loop()
        known = self._channels.get(loop)
        if known is not None and known.is_over():
            over, known = known, None
            del self._channels[loop]
            if not over.calls:
                await self._end(over)
                known = self._channels.get(loop)  # another task's, meanwhile
        if known is None:
            with _gate:
                _gate.aio_channels += 1
            if self._target.tunnelled and self._tunnel is None:
                self._tunnel = self._target.tunnel()
            known = self._channels[loop] = _Channel(self._target, grpc.aio, self._tunnel)
            known.keeper = self._closing(loop, known)
            await anext(known.keeper)  # does not wait
        known.calls += 1
        return known

    async def _give(self, taken: _Channel) -> None:
        taken.calls -= 1
        if not taken.calls and self._channels.get(asyncio.get_running_loop()) is not taken:
            await self._end(taken)

    async def _closing(self, loop: asyncio.AbstractEventLoop, made: _Channel) -> AsyncGenerator[None, None]:
        """Closes the channel when its loop ends: a loop closes the async generators that are still open in it."""
        try:
            yield
        finally:
            if self._channels.get(loop) is made:
                del self._channels[loop]
            await self._end(made)

    async def _end(self, over: _Channel) -> None:
        if not over.closed:
            over.closed = True
            _gate.aio_channels -= 1
            await over.channel.close()

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
        taken = await self._take()
        try:
            call = taken.unary(wire.path)(message, timeout=left, metadata=metadata)
            body = await call
            return WireResponse(200, _headers(await call.initial_metadata()), body)
        except grpc.aio.AioRpcError as error:
            return self._target.failure(error, deadline, self._tunnel)
        except grpc.aio.UsageError as error:
            raise _closed(self.url, error) from error
        finally:
            await self._give(taken)

    async def stream(self, wire: WireRequest, deadline: float) -> AsyncIterator[WireResponse]:
        """As ``GrpcTransport.stream``."""
        message, left, metadata = self._target.call(wire, deadline)
        taken = await self._take()
        try:
            call = taken.channel.stream_stream(wire.path)(iter((message,)), timeout=left, metadata=metadata)
            try:
                async for body in call:
                    yield WireResponse(200, _headers(await call.initial_metadata()), body)
            except grpc.aio.AioRpcError as error:
                yield self._target.failure(error, deadline, self._tunnel)
            finally:
                call.cancel()
        except grpc.aio.UsageError as error:
            raise _closed(self.url, error) from error
        finally:
            await self._give(taken)

    async def close(self) -> None:
        """Close this loop's channel; those of other loops go with their loops."""
        if self.arena is not None:
            self.arena.close()
        known = self._channels.get(asyncio.get_running_loop())
        if known is not None:
            await known.keeper.aclose()
        if self._tunnel is not None:
            self._tunnel.close()


def _closed(url: str, error: Exception) -> MCPError:
    return ConnectionFailedError(f"the channel to {url} was closed while it was used: {error}")
