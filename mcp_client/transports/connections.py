"""Connections to one server and the pool that keeps them: bounded by the call's deadline, of a limited age, never silently dead.

Two of each, for threads and for asyncio. What is on the wire is ``http11.py``'s.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import select
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import ConnectionFailedError, DeadlineExceededError
from ..protocols import Buffer, WireResponse
from ..resilience.hedge import cancelling
from .http11 import Reply, receive_buffer
from .tls import TlsContexts, WrongPeerError

log = logging.getLogger("mcp_client.transports")

# A connection is closed after this, give or take a fifth, once it is idle: behind a balancer each new one may reach another
# replica, so that load spreads again after a scale-up.
MAX_AGE_S = 300.0
# Connections unused for this long are closed rather than trusted: load balancers drop idle ones silently, the
# commonest (AWS ALB) after 60 s.
_KEEPALIVE_S = 55.0
# A step of a sequence can't be sent again, so it does not go out on a connection that may have been dropped meanwhile.
_TRUSTED_IDLE_S = 2.0
# A dead host is noticed after 5 to 10 s, and does not take the whole of the call's time.
_CONNECT_S = 5.0
_MAX_CONNECTIONS = 128
# Parts of a body below this are joined with what goes before them: one write less.
_JOINED = 16 * 2**10


def _socket_options() -> list[tuple[int, int, int]]:
    """No waiting for more to send; a peer that is gone without a word (power, cable, an overlay network) is noticed within
    half a minute.
    """
    options = [(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1), (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)]
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


@dataclass(frozen=True, slots=True)
class Target:
    """Where connections go. ``address``: the host's, if the caller knows it (the certificate is still the host's)."""

    url: str
    host: str
    port: int
    tls: TlsContexts | None = None  # None: no TLS
    address: str | None = None
    socket_path: str | None = None


class Stale(Exception):
    """The server, or something on the way, had dropped the kept connection before it was used again: send it once more."""


class _Age:
    """When a connection is too old, or was idle for too long to be trusted with an exchange."""

    def __init__(self) -> None:
        self.used_at = time.monotonic()
        self._too_old_at = self.used_at + MAX_AGE_S * random.uniform(0.8, 1.2)

    def is_over(self, repeatable: bool) -> bool:
        now = time.monotonic()
        idle = now - self.used_at
        return now > self._too_old_at or idle > (_KEEPALIVE_S if repeatable else _TRUSTED_IDLE_S)


# --- threads ------------------------------------------------------------------------------------------------------


class Pool:
    """Kept connections, the last used first; at most ``_MAX_CONNECTIONS`` are in use. Thread-safe."""

    def __init__(self, target: Target, limit: int) -> None:
        self._target = target
        self._limit = limit
        self._lock = threading.Lock()
        self._freed = threading.Condition(self._lock)
        self._in_use = self._waiting = 0
        self._idle: list[_Connection] = []

    def exchange(
        self, head: bytes, body: Sequence[Buffer], deadline: float, *, repeatable: bool
    ) -> WireResponse:
        """Send and receive by ``deadline``. ``repeatable``: a kept connection that proves dead costs no error."""
        with self._lock:
            while self._in_use >= _MAX_CONNECTIONS:
                self._waiting += 1
                try:
                    freed = self._freed.wait(_left(self._target, deadline))
                finally:
                    self._waiting -= 1
                if not freed:
                    raise _busy(self._target)
            self._in_use += 1
        try:
            while True:
                connection = self._kept(repeatable)
                fresh = connection is None
                if connection is None:
                    connection = _Connection(self._target, deadline)
                try:
                    reply = Reply(self._limit, connection.buffer)
                    connection.exchange(head, body, reply, deadline, may_be_stale=repeatable and not fresh)
                except Stale as stale:
                    log.debug("a kept connection was dropped while it was idle: %s", stale.__cause__)
                    connection.close()
                    continue
                except BaseException:
                    connection.close()
                    raise
                if reply.keep_alive:
                    self._keep(connection)
                else:
                    connection.close()
                return reply.response()
        finally:
            with self._lock:
                self._in_use -= 1
                if self._waiting:
                    self._freed.notify()

    def _kept(self, repeatable: bool) -> _Connection | None:
        while True:
            with self._lock:
                if not self._idle:
                    return None
                connection = self._idle.pop()
            if connection.is_usable(repeatable):
                return connection
            connection.close()

    def _keep(self, connection: _Connection) -> None:
        with self._lock:
            self._idle.append(connection)
            oldest = self._idle.pop(0) if self._idle[0].age.is_over(True) else None
        if oldest is not None:
            oldest.close()

    def close(self) -> None:
        """Close what is idle. Without the lock: after a fork, in the child, somebody who is not there may hold it."""
        idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()


class _Connection:
    """A socket. Each operation on it may take what is left of the call's time, and no longer."""

    def __init__(self, target: Target, deadline: float) -> None:
        self._target = target
        self.age = _Age()
        self.buffer = receive_buffer()
        self._poll: Any = None
        self._socket = self._connected(deadline)

    def _connected(self, deadline: float) -> socket.socket:
        target = self._target
        within = _connecting(_left(target, deadline))
        try:
            if target.socket_path is not None:
                return _unix(target.socket_path, within)
            until = time.monotonic() + within
            return self._secured(
                socket.create_connection((target.address or target.host, target.port), within), until
            )
        except OSError as error:
            raise _no_connection(target, error, deadline) from error

    def _secured(self, plain: socket.socket, until: float) -> socket.socket:
        target = self._target
        try:
            for option in _OPTIONS:
                plain.setsockopt(*option)
            if target.tls is None:
                return plain
            plain.settimeout(max(0.001, until - time.monotonic()))
            secured = target.tls.current().wrap_socket(plain, server_hostname=target.host)
        except BaseException:
            plain.close()
            raise
        try:
            target.tls.check_peer(secured.getpeercert())
        except BaseException:
            secured.close()
            raise
        return secured

    def exchange(
        self, head: bytes, body: Sequence[Buffer], reply: Reply, deadline: float, *, may_be_stale: bool
    ) -> None:
        cancellation = cancelling.get()
        if cancellation is not None:
            cancellation.attach(self._hang_up)
        broken: OSError | None = None
        try:
            try:
                self._write(head, body, deadline)
            except (BrokenPipeError, ConnectionResetError) as error:
                broken = error  # it may have answered before it hung up: "too large", as a rule
            self._read(reply, deadline)
        except (OSError, _Hung) as error:
            called_off = cancellation is not None and cancellation.cancelled
            if may_be_stale and not reply.begun and not called_off and not isinstance(error, TimeoutError):
                raise Stale from error
            raise _broken(self._target, broken or error, deadline) from error
        if broken is not None:
            reply.keep_alive = False
        self.age.used_at = time.monotonic()

    def _write(self, head: bytes, body: Sequence[Buffer], deadline: float) -> None:
        for part in _joined(head, body):
            self._socket.settimeout(_left(self._target, deadline))
            self._socket.sendall(part)  # the time limit is for all of the part

    def _read(self, reply: Reply, deadline: float) -> None:
        receive, set_timeout = self._socket.recv_into, self._socket.settimeout
        while not reply.complete:
            set_timeout(_left(self._target, deadline))
            count = receive(reply.room())
            if count:
                reply.got(count)
            elif not reply.ended():
                raise _Hung("it closed the connection before its answer was complete")

    def is_usable(self, repeatable: bool) -> bool:
        """Not too old, and nothing has come that nobody asked for, as the end of the connection would be."""
        if self.age.is_over(repeatable):
            return False
        return not self._readable()

    def _readable(self) -> bool:
        if not hasattr(select, "poll"):  # Windows
            return bool(select.select([self._socket], [], [], 0)[0])
        if self._poll is None:
            self._poll = select.poll()  # select() can't take descriptors over 1023
            self._poll.register(self._socket, select.POLLIN)
        return bool(self._poll.poll(0))

    def _hang_up(self) -> None:
        """From another thread: wakes the one that waits for this connection, which then closes it."""
        with contextlib.suppress(OSError):  # it may be closed already
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()


# --- asyncio ------------------------------------------------------------------------------------------------------


class AsyncPool:
    """The same for the tasks of one event loop."""

    def __init__(self, target: Target, limit: int) -> None:
        self._target = target
        self._limit = limit
        self._free = asyncio.Semaphore(_MAX_CONNECTIONS)
        self._idle: list[_AsyncConnection] = []

    async def exchange(
        self, head: bytes, body: Sequence[Buffer], deadline: float, *, repeatable: bool
    ) -> WireResponse:
        """As ``Pool.exchange``. Cancelling the task closes the connection that it uses."""
        if self._free.locked():
            try:
                async with asyncio.timeout(_left(self._target, deadline)):
                    await self._free.acquire()
            except TimeoutError:
                raise _busy(self._target) from None
        else:
            await self._free.acquire()  # does not wait
        try:
            while True:
                connection = self._kept(repeatable)
                fresh = connection is None
                if connection is None:
                    connection = await _AsyncConnection.opened(self._target, deadline)
                try:
                    reply = Reply(self._limit, connection.buffer)
                    await connection.exchange(
                        head, body, reply, deadline, may_be_stale=repeatable and not fresh
                    )
                except Stale as stale:
                    log.debug("a kept connection was dropped while it was idle: %s", stale.__cause__)
                    connection.close()
                    continue
                except BaseException:
                    connection.close()
                    raise
                if reply.keep_alive and connection.is_usable(True):
                    self._idle.append(connection)
                    if self._idle[0].age.is_over(True):
                        self._idle.pop(0).close()
                else:
                    connection.close()
                return reply.response()
        finally:
            self._free.release()

    def _kept(self, repeatable: bool) -> _AsyncConnection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.is_usable(repeatable):
                return connection
            connection.close()
        return None

    def close(self) -> None:
        for connection in self._idle:
            connection.close()
        self._idle.clear()


def _is_name(target: Target) -> bool:
    """Whether the host is a name that may have addresses of both families (no top-level domain ends in a digit)."""
    host = target.address or target.host
    return host != "localhost" and ":" not in host and not host[-1:].isdigit()


class _AsyncConnection(asyncio.BufferedProtocol):
    """A connection of asyncio's, which receives right into the reply's room."""

    _transport: asyncio.Transport

    def __init__(self, target: Target) -> None:
        self._target = target
        self.age = _Age()
        self._loop = asyncio.get_running_loop()
        self._reply: Reply | None = None
        self._done: asyncio.Future[None] | None = None
        self.buffer = receive_buffer()
        self._dead = False

    @classmethod
    async def opened(cls, target: Target, deadline: float) -> _AsyncConnection:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(_connecting(_left(target, deadline))):
                if target.socket_path is not None:
                    _, connection = await loop.create_unix_connection(lambda: cls(target), target.socket_path)
                else:
                    context = target.tls.current() if target.tls is not None else None
                    _, connection = await loop.create_connection(
                        lambda: cls(target),
                        target.address or target.host,
                        target.port,
                        ssl=context,
                        server_hostname=target.host if context is not None else None,
                        # For names only: asyncio's race of addresses forgets a socket where it is cancelled
                        # just as one connects.
                        happy_eyeballs_delay=0.25 if _is_name(target) else None,
                    )
        except OSError as error:  # TimeoutError is one
            raise _no_connection(target, error, deadline) from error
        if target.tls is not None:
            try:
                target.tls.check_peer(connection._transport.get_extra_info("peercert"))
            except OSError as error:
                connection.close()
                raise _no_connection(target, error, deadline) from error
        return connection

    async def exchange(
        self, head: bytes, body: Sequence[Buffer], reply: Reply, deadline: float, *, may_be_stale: bool
    ) -> None:
        self._reply = reply
        self._done = self._loop.create_future()
        late = self._loop.call_later(_left(self._target, deadline), self._fail, TimeoutError())
        try:
            for part in _joined(head, body):
                self._transport.write(part)
            await self._done
        except (OSError, _Hung) as error:
            if may_be_stale and not reply.begun and not isinstance(error, TimeoutError):
                raise Stale from error
            raise _broken(self._target, error, deadline) from error
        finally:
            late.cancel()
            self._reply = self._done = None
        if self._transport.get_write_buffer_size():  # answered before it was all sent: "too large", as a rule
            reply.keep_alive = False
        self.age.used_at = time.monotonic()

    def _fail(self, error: Exception) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(error)

    def is_usable(self, repeatable: bool) -> bool:
        return not self._dead and not self.age.is_over(repeatable)

    def close(self) -> None:
        self._dead = True
        self._transport.abort()

    # --- what asyncio calls ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        made = transport.get_extra_info("socket")
        if self._target.socket_path is None and made is not None:
            for option in _OPTIONS:
                made.setsockopt(*option)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self.buffer if self._reply is None or self._reply.complete else self._reply.room()

    def buffer_updated(self, nbytes: int) -> None:
        reply, done = self._reply, self._done
        if reply is None or done is None or reply.complete:  # nobody has asked for this
            self._dead = True
            self._transport.abort()
            return
        if done.done():
            return
        try:
            reply.got(nbytes)
        except Exception as error:
            done.set_exception(error)
            return
        if reply.complete:
            done.set_result(None)

    def eof_received(self) -> bool:
        self._dead = True
        if self._reply is not None and self._done is not None and not self._done.done():
            if self._reply.ended():
                self._done.set_result(None)
            else:
                self._fail(_Hung("it closed the connection before its answer was complete"))
        return False

    def connection_lost(self, error: Exception | None) -> None:
        self._dead = True
        self._fail(error or _Hung("it closed the connection before its answer was complete"))


def _unix(path: str, timeout: float) -> socket.socket:
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        made.settimeout(timeout)
        made.connect(path)
    except BaseException:
        made.close()
        raise
    return made


# --- both -----------------------------------------------------------------------------------------------------------


class _Hung(Exception):
    """The server hung up."""


def _joined(head: bytes, body: Sequence[Buffer]) -> list[Buffer]:
    """The head with the small parts behind it, then the large ones as they are."""
    parts: list[Buffer] = []
    small = [head]
    for part in body:
        if len(part) < _JOINED:
            small.append(bytes(part))
            continue
        if small:
            parts.append(b"".join(small))
            small = []
        parts.append(part)
    if small:
        parts.append(b"".join(small))
    return parts


def _left(target: Target, deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise DeadlineExceededError(f"{target.url} did not answer before the deadline")
    return left


def _connecting(left: float) -> float:
    """Seconds for connecting: half of the call's at most."""
    return min(_CONNECT_S, max(left / 2, min(left, 0.25)))


def _busy(target: Target) -> DeadlineExceededError:
    return DeadlineExceededError(
        f"no connection to {target.url} became free in time: {_MAX_CONNECTIONS} calls are under way"
    )


def _no_connection(
    target: Target, error: OSError, deadline: float
) -> ConnectionFailedError | DeadlineExceededError:
    """Why connecting failed; nothing was sent, so that the request may go elsewhere."""
    if isinstance(error, TimeoutError):
        if time.monotonic() >= deadline - 0.001:
            return DeadlineExceededError(f"{target.url} did not answer before the deadline")
        failed = ConnectionFailedError(f"{target.url} did not answer: {_words(error)}")
    else:
        advice = "is the server running there?"
        if "CERTIFICATE_VERIFY_FAILED" in str(error):
            advice = "its certificate is not trusted; TLS(ca=…) names a private authority"
        elif isinstance(error, WrongPeerError):
            advice = "is this the server you mean?"
        failed = ConnectionFailedError(f"no connection to {target.url}: {_words(error)}; {advice}")
    failed.nothing_sent = True
    return failed


def _broken(
    target: Target, error: Exception, deadline: float
) -> ConnectionFailedError | DeadlineExceededError:
    """Why an exchange under way ended without an answer."""
    if isinstance(error, TimeoutError) and time.monotonic() >= deadline - 0.005:
        return DeadlineExceededError(f"{target.url} did not answer before the deadline")
    return ConnectionFailedError(
        f"the connection to {target.url} broke before the answer was complete: {_words(error)}"
    )


def _words(error: Exception) -> str:
    return str(error) or type(error).__name__
