"""Shared memory between a client and a server on one machine: regions that hold one request's tensors each, and are reused.

Regions are POSIX shared memory (files in /dev/shm), mode 0600, named unguessably. A region is held under a file lock for as
long as its process lives, so that the next client to start can tell what a killed one has left behind, and removes it.
"""

from __future__ import annotations

import mmap
import os
import secrets
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from ..tensors import Array, to_raw

if sys.platform != "win32":
    import fcntl

_FOLDER = Path("/dev/shm")  # noqa: S108 - where POSIX puts shared memory; names are random and the mode is 0600
_PREFIX = "mcp2026-"
ALIGNMENT = 64  # as the widest vector registers want it, and ONNX Runtime's own allocations have it
# Below this a copy through the socket is as quick as the bookkeeping.
THRESHOLD = 64 * 2**10
_SMALLEST = 2**20
_MOST_BYTES = 512 * 2**20
_MOST_SIZES_KNOWN = 1024

Place = tuple[int, int]  # offset and size in bytes


@dataclass(slots=True)
class Region:
    """A piece of shared memory. ``registered``: the server knows it (it may forget: a restart)."""

    name: str
    memory: mmap.mmap
    fd: int
    size: int
    registered: bool = False


@dataclass(slots=True)
class Lease:
    """A region while one request uses it: where its inputs lie, and where its outputs are to go."""

    region: Region
    inputs: Mapping[str, Place]
    outputs: Mapping[str, Place | None] = field(default_factory=dict)  # None: in the message

    def read(self, offset: int, size: int) -> bytes:
        """A private copy: the region goes on to the next request, an answer stays as it is."""
        return self.region.memory[offset : offset + size]


def available() -> bool:
    return sys.platform != "win32" and _FOLDER.is_dir() and os.access(_FOLDER, os.W_OK)


class Arena:
    """The regions of one client and one server. Thread-safe; ``reset`` is for the child after a fork.

    ``threshold``: tensors of fewer bytes travel in the message, which is quicker (measured).
    """

    def __init__(self, threshold: int) -> None:
        self.threshold = threshold
        _remove_what_the_dead_left()
        self.reset()

    @classmethod
    def for_address(cls, address: str, threshold: int = THRESHOLD) -> Arena | None:
        """For a server that may be on this machine: ``unix:…``, or ``host:port`` of the loopback. Else ``None``."""
        host = address.rpartition(":")[0].strip("[]")
        local = address.startswith("unix:") or host in ("localhost", "::1") or host.startswith("127.")
        return cls(threshold) if local and available() else None

    def reset(self) -> None:
        """Start with nothing. What the parent has stays the parent's: files, locks and registrations."""
        self._lock = threading.Lock()
        self._free: list[Region] = []
        self._all: dict[str, Region] = {}
        self._orphans: list[str] = []
        self._sizes: dict[object, Mapping[str, int]] = {}
        self.enabled = True
        # Also runs at the interpreter's end, for a client that was never closed.
        self._finalizer = weakref.finalize(self, _remove, self._all, os.getpid())

    def lease(self, inputs: Mapping[str, Array], outputs: Mapping[str, int]) -> Lease | None:
        """Copy ``inputs`` into a region that has room for ``outputs`` too (bytes by name; 0: none needed).

        ``None`` if the arena is full.
        """
        places: dict[str, Place] = {}
        at = 0
        for name, array in inputs.items():
            places[name] = at, array.nbytes
            at = _aligned(at + array.nbytes)
        results: dict[str, Place | None] = {}
        for name, size in outputs.items():
            results[name] = (at, size) if size else None
            at = _aligned(at + size)
        region = self._take(at)
        if region is None:
            return None
        for name, array in inputs.items():
            offset, size = places[name]
            target = np.frombuffer(region.memory, np.uint8, size, offset)
            target[:] = np.frombuffer(to_raw(array), np.uint8)
        return Lease(region, places, results)

    def _take(self, size: int) -> Region | None:
        with self._lock:
            if not self.enabled:
                return None
            fitting = [region for region in self._free if region.size >= size]
            if fitting:
                region = min(fitting, key=lambda region: region.size)
                self._free.remove(region)
                return region
            rounded = max(_SMALLEST, 1 << (size - 1).bit_length())
            if sum(region.size for region in self._all.values()) + rounded > _MOST_BYTES:
                return None
            region = _create(rounded)
            self._all[region.name] = region
            return region

    def give_back(self, lease: Lease) -> None:
        """The exchange is over: the server has answered, and no longer looks at the region."""
        with self._lock:
            if lease.region.name in self._all:
                self._free.append(lease.region)

    def discard(self, lease: Lease) -> None:
        """The exchange broke off: the server may still write there, so the region is never used again."""
        with self._lock:
            if self._all.pop(lease.region.name, None) is not None:
                _unlink(lease.region)
                if lease.region.registered:
                    self._orphans.append(lease.region.name)

    def forget(self, question: object) -> None:
        """What was known may be so no more: the regions that the server knows, and how large these outputs are."""
        with self._lock:
            self._sizes.pop(question, None)
            for region in self._all.values():
                region.registered = False

    def registered(self) -> Sequence[str]:
        """The regions that the server knows, those that are no more included."""
        with self._lock:
            return [region.name for region in self._all.values() if region.registered] + self._orphans

    # Outputs need their place before the server computes them: their sizes are those of the last equal request.

    def sizes_of(self, question: object) -> Mapping[str, int]:
        return self._sizes.get(question, {})

    def learn_sizes(self, question: object, sizes: Mapping[str, int]) -> None:
        with self._lock:
            if len(self._sizes) >= _MOST_SIZES_KNOWN:
                self._sizes.clear()
            self._sizes[question] = sizes

    def close(self) -> None:
        with self._lock:
            self.enabled = False
            self._free.clear()
        self._finalizer()


def _aligned(at: int) -> int:
    return -(-at // ALIGNMENT) * ALIGNMENT


def _create(size: int) -> Region:
    name = _PREFIX + secrets.token_hex(16)
    # Under another name until it is locked: a client that starts at this moment would take it for a dead one's.
    path = _FOLDER / f".{name}"
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        path = path.rename(_FOLDER / name)
        os.posix_fallocate(fd, 0, size)  # fails here where /dev/shm is full, not as SIGBUS at the first write
        memory = mmap.mmap(fd, size)
    except OSError:
        path.unlink(missing_ok=True)
        os.close(fd)
        raise
    return Region(name, memory, fd, size)


def _unlink(region: Region) -> None:
    (_FOLDER / region.name).unlink(missing_ok=True)
    os.close(region.fd)


def _remove(regions: dict[str, Region], owner: int) -> None:
    if os.getpid() != owner:  # a child that ended: the files are its parent's
        return
    while regions:
        _unlink(regions.popitem()[1])


def _remove_what_the_dead_left() -> None:
    """A lock that can be had belongs to nobody: its process was killed."""
    for path in _FOLDER.glob(_PREFIX + "*"):
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:  # gone meanwhile, or another user's
            continue
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink(missing_ok=True)
        except OSError:  # its process lives
            continue
        finally:
            os.close(fd)
