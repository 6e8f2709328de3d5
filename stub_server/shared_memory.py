"""Regions of system shared memory that clients have registered (Triton's extension): read from and written to in place."""

from __future__ import annotations

import mmap
import os
import threading
from dataclasses import dataclass
from pathlib import Path

from mcp_client.errors import ServerError
from mcp_client.protocols import Buffer

_FOLDER = Path("/dev/shm")  # noqa: S108 - where POSIX puts shared memory


@dataclass(frozen=True, slots=True)
class Registered:
    """A region: ``offset`` and ``size`` are the part of the file ``key`` that may be used."""

    name: str
    key: str
    offset: int
    size: int
    memory: mmap.mmap

    def view(self, offset: int, size: int) -> memoryview:
        if offset + size > self.size:
            raise _refused(
                f"shared memory region {self.name!r} has {self.size} bytes; "
                f"{size} at offset {offset} are beyond its end"
            )
        start = self.offset + offset
        return memoryview(self.memory)[start : start + size]


class SharedMemory:
    """Thread-safe. A region that is unregistered while it is used stays mapped until its last use ends."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._regions: dict[str, Registered] = {}

    def register(self, name: str, key: str, offset: int, size: int) -> None:
        """Map ``size`` bytes at ``offset`` of the shared memory object ``key`` under ``name``."""
        file = key.removeprefix("/")
        if not name or not file or "/" in file or file in (".", ".."):
            raise _refused(f"can't register region {name!r} with key {key!r}: expected a name and /KEY")
        with self._lock:
            if name in self._regions:
                raise ServerError.of(
                    409, f"shared memory region {name!r} is already registered", code="region_exists"
                )
            try:
                fd = os.open(_FOLDER / file, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
                try:
                    if size <= 0 or offset + size > os.fstat(fd).st_size:
                        raise _refused(f"shared memory {key!r} has fewer than {offset} + {size} bytes")
                    memory = mmap.mmap(fd, 0)
                finally:
                    os.close(fd)
            except OSError as error:
                raise _refused(f"can't open shared memory region {name!r}, key {key!r}: {error}") from error
            self._regions[name] = Registered(name, key, offset, size, memory)

    def unregister(self, name: str) -> None:
        """Let go of a region, or of all of them where ``name`` is empty (as in Triton)."""
        with self._lock:
            if name:
                self._regions.pop(name, None)
            else:
                self._regions.clear()

    def status(self, name: str = "") -> list[Registered]:
        """The regions, or the one asked for."""
        with self._lock:
            if name and name not in self._regions:
                raise _unknown(name)
            return [self._regions[name]] if name else list(self._regions.values())

    def read(self, name: str, offset: int, size: int) -> Buffer:
        """The bytes where they lie; the client leaves them alone until it has its answer."""
        return self._get(name).view(offset, size).toreadonly()

    def write(self, name: str, offset: int, data: Buffer) -> None:
        self._get(name).view(offset, len(data))[:] = data

    def _get(self, name: str) -> Registered:
        with self._lock:
            region = self._regions.get(name)
        if region is None:
            raise _unknown(name)
        return region


def _refused(message: str) -> ServerError:
    return ServerError.of(400, message, code="shared_memory_refused")


def _unknown(name: str) -> ServerError:
    return ServerError.of(400, f"no shared memory region {name!r} is registered", code="region_unknown")
