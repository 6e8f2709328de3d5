"""How a version of a model gets into a repository whole or not at all, whoever else is at work and
whenever power fails.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import hashlib
import os
import shutil
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from ..errors import EdgeError
from .repository import DIGEST_FILE, ModelRepository

STAGING = ".staging"  # in the repository's root: the same file system, and no model id starts with a dot
_LOCK_WAIT_S = 600.0  # a large model over a slow line, downloaded by another process
_RENAME_EXCHANGE = 2  # linux/fs.h
_AT_FDCWD = -100


@contextlib.contextmanager
def locked(root: Path, *, wait_s: float = _LOCK_WAIT_S) -> Iterator[None]:
    """Only one thread of one process at a time changes a repository; the kernel frees the lock of one that
    died.

    Readers need no lock: what they see is always a whole version. Raises ``EdgeError`` if it takes longer
    than ``wait_s``.
    """
    private_folder(root / STAGING)
    with (root / STAGING / "lock").open("a+b") as file:
        give_up = time.monotonic() + wait_s
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= give_up:
                    raise EdgeError(
                        f"another process has been changing {root} for {wait_s:.0f} s; wait for it, or end it"
                    ) from None
                time.sleep(0.02)
        yield


def private_folder(folder: Path) -> None:
    """Make a folder, and those above it that are missing, for this user alone (0700)."""
    missing = []
    while not folder.is_dir():
        missing.append(folder)
        folder = folder.parent
    for each in reversed(missing):
        with contextlib.suppress(FileExistsError):  # another process was quicker
            each.mkdir(mode=0o700)


class Staging:
    """A folder in which one version of a model is put together. The lock (``locked``) must be held while it
    is used.

    It is named after what it will hold, so that a later attempt finds what an earlier one left.
    """

    def __init__(self, repository: ModelRepository, model: str, version: str, digest: str) -> None:
        self._target = repository.folder(model, version)
        self._root = repository.root
        self._model_key = _short_hash(model)
        self.folder = self._root / STAGING / f"{self._model_key}-{_short_hash(f'{version}/{digest}')}"
        self._clear(keep=self.folder)
        private_folder(self.folder)

    def publish(self, digests: Mapping[str, str]) -> None:
        """Move the finished folder to its place; ``digests``: file name → ``sha256:…`` of everything in it.

        After this returns the version survives a power cut. What was at its place before stays whole until
        the switch.
        """
        lines = [f"{digest.removeprefix('sha256:')}  {name}\n" for name, digest in digests.items()]
        (self.folder / DIGEST_FILE).write_text("".join(lines), "utf-8")
        for folder, _, files in os.walk(self.folder):
            for name in files:
                sync_to_disk(Path(folder, name))
            sync_to_disk(Path(folder))
        private_folder(self._target.parent)
        if self._target.is_dir():
            _exchange(self.folder, self._target)
        else:
            self.folder.rename(self._target)
        sync_to_disk(self._target.parent)
        sync_to_disk(self._root)
        self._clear()

    def discard(self) -> None:
        """Throw away what was gathered."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _clear(self, keep: Path | None = None) -> None:
        """Remove what earlier syncs of this model left; a version that was set aside and never replaced
        goes back first.
        """
        aside = _aside(self._target)
        if aside.is_dir() and not self._target.exists():
            aside.rename(self._target)
        shutil.rmtree(aside, ignore_errors=True)
        for left in (self._root / STAGING).glob(f"{self._model_key}-*"):
            if left != keep:
                shutil.rmtree(left, ignore_errors=True)


def set_aside(repository: ModelRepository, folder: Path) -> Path:
    """Take a version out of use in one step, so that none is ever seen half removed; where it lies now,
    to be deleted.
    """
    aside = repository.root / STAGING / f"removed-{_short_hash(str(folder))}"
    shutil.rmtree(aside, ignore_errors=True)
    folder.rename(aside)
    return aside


def _exchange(new: Path, old: Path) -> None:
    """Swap two folders in one step where the system can (Linux, most file systems); in two renames where
    it can't.
    """
    if sys.platform == "linux":
        rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)  # glibc 2.28, musl 1.2.5
        names = os.fsencode(new), os.fsencode(old)
        if rename is not None and rename(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE) == 0:
            return
        code = errno.ENOSYS if rename is None else ctypes.get_errno()
        if code not in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
            raise OSError(code, os.strerror(code), str(old))
    aside = _aside(old)
    old.rename(aside)
    new.rename(old)
    shutil.rmtree(aside, ignore_errors=True)


def _aside(target: Path) -> Path:
    return target.with_name(f".{_short_hash(target.name)}.old")


def sync_to_disk(path: Path) -> None:
    """fsync a file, or a folder (its names)."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _short_hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
