"""TLS for gRPC by Python's ``ssl``: gRPC's Python library can neither set a minimum version nor tell who the peer is.

gRPC connects to a Unix socket of this process, in a folder that only this user can enter, and each connection to it is carried
on over TLS to the server. No byte goes to a server before its version and its certificate have been checked.
"""

from __future__ import annotations

import contextlib
import os
import random
import select
import shutil
import socket
import ssl
import tempfile
import threading
from pathlib import Path

from .tls import TlsContexts

_CONNECT_S = 5.0
_CHUNK = 64 * 2**10
# What is read from one side and not yet taken by the other: two of HTTP/2's usual windows.
_MOST_WAITING = 2**20


class Tunnel:
    """Starts with the first use of ``address``. ``problem``: why the latest connection to the server failed, if it did."""

    def __init__(self, host: str, port: int, contexts: TlsContexts) -> None:
        self._host = host
        self._port = port
        self._contexts = contexts
        self._pid = os.getpid()
        self.problem: Exception | None = None
        self._folder = Path(tempfile.mkdtemp(prefix="mcp-tls-"))  # mode 0700
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._listener.bind(str(self._folder / "s"))
            self._listener.listen()
        except BaseException:
            self.close()
            raise
        self.address = f"unix:{self._folder}/s"
        threading.Thread(target=self._accept, name="mcp-tls", daemon=True).start()

    def close(self) -> None:
        """Take no more connections; those that are there go with their gRPC channel."""
        if os.getpid() != self._pid:  # in the child of a fork it is the parent's
            self._listener.close()
            return
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits in accept()
        self._listener.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _accept(self) -> None:
        while True:
            try:
                plain, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(plain,), name="mcp-tls", daemon=True).start()

    def _serve(self, plain: socket.socket) -> None:
        with plain:
            try:
                secured = self._connect()
            except OSError as error:  # ssl.SSLError is one
                self.problem = error
                return
            self.problem = None
            with secured, contextlib.suppress(OSError):
                _carry(plain, secured)

    def _connect(self) -> ssl.SSLSocket:
        """To one of the host's addresses, which share the connections."""
        found = socket.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
        random.shuffle(found)
        failed: OSError = ConnectionError(f"{self._host} has no address")
        for family, kind, protocol, _, address in found:
            plain = socket.socket(family, kind, protocol)
            try:
                plain.settimeout(_CONNECT_S)
                plain.connect(address)
            except OSError as error:
                plain.close()
                failed = error
                continue
            with contextlib.ExitStack() as stack:
                stack.enter_context(plain)
                plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                secured = self._contexts.current().wrap_socket(plain, server_hostname=self._host)
                stack.enter_context(secured)
                self._contexts.check_peer(secured.getpeercert())
                stack.pop_all()
                return secured
        raise failed


def _carry(plain: socket.socket, secured: ssl.SSLSocket) -> None:
    """Bytes from each side to the other until one hangs up. One thread: an SSL object is not for two at once."""
    plain.setblocking(False)
    secured.setblocking(False)
    up, down = bytearray(), bytearray()
    up_ended = down_ended = False
    while not (up_ended and not up) and not (down_ended and not down):
        poll = select.poll()
        wants = {plain: 0, secured: 0}
        if len(up) < _MOST_WAITING and not up_ended:
            wants[plain] |= select.POLLIN
        if down:
            wants[plain] |= select.POLLOUT
        if len(down) < _MOST_WAITING and not down_ended:
            wants[secured] |= select.POLLIN
        if up:
            wants[secured] |= select.POLLOUT
        for side, mask in wants.items():
            if mask:  # else poll() would tell again and again of a side that has hung up
                poll.register(side, mask)
        poll.poll(None if not secured.pending() else 0)
        up_ended = _take(plain, up) or up_ended
        down_ended = _take(secured, down) or down_ended
        _give(secured, up)
        _give(plain, down)


_NOT_NOW = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


def _take(side: socket.socket, waiting: bytearray) -> bool:
    """Whatever is there to be read; whether the side has hung up."""
    while len(waiting) < _MOST_WAITING:
        try:
            data = side.recv(_CHUNK)
        except _NOT_NOW:
            return False
        except OSError:
            return True
        if not data:
            return True
        waiting += data
    return False


def _give(side: socket.socket, waiting: bytearray) -> None:
    while waiting:
        try:
            sent = side.send(memoryview(waiting)[:_CHUNK])
        except _NOT_NOW:
            return
        del waiting[:sent]
