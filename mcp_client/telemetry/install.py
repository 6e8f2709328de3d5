"""The telemetry directory of this install:

its private key and the lock that lets one process at a time upload.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

KEY_BYTES = 32
_KEY_NAME = "install.key"


def make_private(directory: Path) -> None:
    """Make the directory, 0700, if it is not there.

    One that exists keeps its mode: it is the user's choice.
    """
    directory.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        directory.mkdir(mode=0o700)


def install_key(directory: Path) -> bytes:
    """This install's secret, made on first use;

    all processes get the same one. ``OSError`` if it can be neither read nor made.
    """
    file = directory / _KEY_NAME
    with contextlib.suppress(FileNotFoundError):
        key = file.read_bytes()
        if len(key) == KEY_BYTES:
            return key
        file.unlink(missing_ok=True)  # a power cut can leave a short file
    make_private(directory)
    draft = directory / f".{_KEY_NAME}.{secrets.token_hex(8)}"
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as out:
            out.write(secrets.token_bytes(KEY_BYTES))
            out.flush()
            os.fsync(out.fileno())
        try:
            os.link(draft, file)  # unlike rename, link never replaces: the first process wins, whole
        except FileExistsError:
            pass
        except OSError:  # a file system without links, as on many SD cards
            os.replace(draft, file)
    finally:
        draft.unlink(missing_ok=True)
    return file.read_bytes()


@contextlib.contextmanager
def exclusive(file: Path | None) -> Iterator[bool]:
    """Whether this process now holds the lock; never waits. The kernel frees it when its holder dies.

    It saves work, it does not keep anything right: two uploaders would send the same batch ids, and each
    counts once. Where there is no ``flock`` or no file, everybody holds it.
    """
    try:
        import fcntl
    except ImportError:  # Windows
        yield True
        return
    if file is None:
        yield True
        return
    make_private(file.parent)
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    _locks.add(descriptor)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True
    finally:
        if (
            descriptor in _locks
        ):  # not so in a child that was forked meanwhile: the number may be another file's by now
            _locks.discard(descriptor)
            fcntl.flock(
                descriptor, fcntl.LOCK_UN
            )  # closing frees it only when a child that was just forked has closed, too
            os.close(descriptor)


# A forked child has the parent's lock, too, and would hold it for as long as it lives.
_locks: set[int] = set()


def _after_fork_in_child() -> None:
    while _locks:
        os.close(_locks.pop())


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
