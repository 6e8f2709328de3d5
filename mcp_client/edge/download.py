"""One file from elsewhere to disk: resumed where it broke off, and checked against its SHA-256 while it comes in."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from .._httpx import httpx
from ..errors import ConnectionFailedError, EdgeError, IntegrityError, MCPError, ProtocolError, ServerError

_ATTEMPTS = 5  # as long as each brings something new; a line that breaks more often is left for the next sync
_KEEP_FREE = 16 * 1024 * 1024  # bytes of disk that a download must leave to others
_CHUNK = 1024 * 1024


class BrokenOffError(Exception):
    """What is read from broke off; another attempt may go on."""


@dataclass(frozen=True, slots=True)
class Stream:
    """Bytes of a file from ``start`` on. ``total``: how many the whole file has; 0 if nobody says."""

    start: int
    total: int
    chunks: Iterator[bytes]


class Origin(Protocol):
    """Where a file comes from. ``where`` is for messages."""

    where: str

    def read(self, start: int) -> AbstractContextManager[Stream | None]:
        """The file from ``start`` on (or from 0, if that is not possible); ``None``: nothing follows ``start``.

        Raises ``BrokenOffError`` where another attempt may help, also while the chunks are read; else errors of ours.
        """


class FileOrigin:
    """A file on this machine, or on one that is mounted here."""

    def __init__(self, path: Path) -> None:
        self.where = str(path)
        self._path = path

    @contextlib.contextmanager
    def read(self, start: int) -> Iterator[Stream | None]:
        try:
            file = self._path.open("rb")
        except OSError as error:
            raise EdgeError(f"{self._path} can't be read: {error}") from error
        with file:
            total = os.fstat(file.fileno()).st_size
            file.seek(start)
            yield Stream(start, total, self._chunks(file.read)) if start < total or not start else None

    def _chunks(self, read: Callable[[int], bytes]) -> Iterator[bytes]:
        try:
            while chunk := read(_CHUNK):
                yield chunk
        except OSError as error:  # a stick that was pulled out, a mount that went away
            raise BrokenOffError(repr(error)) from error


class HttpOrigin:
    """A file at a URL. ``etag``: the server's ETag is known to be this (RFC 9110 13.1.5: what is resumed is then the same
    file; without it the digest shows that in the end). ``redirects`` are followed where a server is not one of ours, but
    never from https to http.
    """

    def __init__(
        self,
        http: httpx.Client,
        url: str,
        *,
        params: Mapping[str, str] | None = None,
        etag: str = "",
        redirects: bool = False,
    ) -> None:
        self.where = url
        self._http = http
        self._params = dict(params) if params else None
        self._etag = etag
        self._redirects = redirects

    @contextlib.contextmanager
    def read(self, start: int) -> Iterator[Stream | None]:
        headers = {"Accept-Encoding": "identity"}
        if start:
            headers["Range"] = f"bytes={start}-"
            if self._etag:
                headers["If-Range"] = self._etag
        try:
            with self._http.stream(
                "GET", self.where, params=self._params, headers=headers, follow_redirects=self._redirects
            ) as response:
                require_no_downgrade(self.where, response)
                if start and response.status_code == 416:  # nothing follows what is there
                    yield None
                    return
                yield self._stream(response, start)
        except httpx.HTTPError as error:
            raise BrokenOffError(repr(error)) from error

    def _stream(self, response: httpx.Response, start: int) -> Stream:
        status = response.status_code
        if status not in (200, 206):
            response.read()
            raise ServerError.of(status, f"{self.where} answered {status}: {response.text[:200]}")
        if response.headers.get("content-encoding", "identity") != "identity":
            raise ProtocolError(
                f"{self.where} came compressed though identity was asked for; it was not used"
            )
        if status == 200:
            length = response.headers.get("content-length", "")
            return Stream(0, int(length) if length.isdecimal() else 0, response.iter_raw())
        stated = re.fullmatch(r"bytes (\d+)-\d+/(\d+|\*)", response.headers.get("content-range", ""))
        if stated is None or int(stated[1]) != start:
            raise ProtocolError(
                f"{self.where}: bytes from {start} were asked for; got {response.headers.get('content-range')!r}"
            )
        return Stream(start, int(stated[2]) if stated[2] != "*" else 0, response.iter_raw())


def require_no_downgrade(url: str, response: httpx.Response) -> None:
    """Raises ``ProtocolError`` if an https URL was redirected to one that anybody on the way can change."""
    if url.startswith("https:") and response.url.scheme != "https":
        raise ProtocolError(f"{url} leads to {response.url}, which is not https; it was not used")


def download(
    origin: Origin,
    target: Path,
    *,
    digest: str,
    size: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> int:
    """Fetch ``origin`` into ``target`` and return how many bytes came.

    ``target`` appears only once its bytes are those of ``digest`` (``sha256:…``); until then they gather in
    ``{target}.part``, which the next call goes on with. ``size``: bytes, if known: more is refused.
    ``progress(done, total)``; ``total`` is 0 while unknown. Raises ``IntegrityError``, ``ServerError``, ``ProtocolError``,
    ``ConnectionFailedError`` when it broke off too often, ``EdgeError`` when the disk is full.
    """
    part = target.with_name(target.name + ".part")
    transfer = _Transfer(origin, part, size=size, progress=progress)
    resumed = part.exists()
    for attempt in range(_ATTEMPTS):
        before = transfer.received
        try:
            found = transfer.run()
        except BrokenOffError as error:
            if transfer.received == before or attempt == _ATTEMPTS - 1:
                raise ConnectionFailedError(
                    f"the download of {origin.where} broke off: {error}; sync again to resume it"
                ) from error
            resumed = True
            continue
        except OSError as error:
            if isinstance(error, MCPError):
                raise
            raise _disk_error(error, part) from error
        if found == digest:
            part.replace(target)
            return transfer.received
        part.unlink()
        if not resumed:
            break
        resumed = False  # what an earlier attempt left may have been damaged by a power cut: once more from the start
    raise IntegrityError(f"{origin.where} was announced as {digest} and came as {found}; it was not used")


class _Transfer:
    """One download in possibly several attempts. ``received`` counts the bytes of all of them."""

    def __init__(
        self, origin: Origin, part: Path, *, size: int | None, progress: Callable[[int, int], None] | None
    ) -> None:
        self.received = 0
        self._origin = origin
        self._part = part
        self._size = size
        self._progress = progress

    def run(self) -> str:
        """Go on from what ``.part`` holds to the end; the digest of the whole."""
        handle = os.open(self._part, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        with os.fdopen(handle, "r+b") as file:
            hasher = hashlib.file_digest(file, "sha256")
            done = file.tell()
            if done and done == self._size:
                return "sha256:" + hasher.hexdigest()
            with self._origin.read(done) as stream:
                if stream is None:  # nothing follows what is there: it is the whole, or not this file
                    return "sha256:" + hasher.hexdigest()
                if stream.start != done:
                    file.seek(0)
                    file.truncate()
                    hasher, done = hashlib.sha256(), 0
                total = self._total(stream)
                self._require_space(total - done)
                for chunk in stream.chunks:
                    done += len(chunk)
                    self.received += len(chunk)
                    if total and done > total:
                        raise IntegrityError(
                            f"{self._origin.where} was announced with {total} bytes and sent more; it was not used"
                        )
                    file.write(chunk)
                    hasher.update(chunk)
                    if self._progress is not None:
                        self._progress(done, total)
        return "sha256:" + hasher.hexdigest()

    def _total(self, stream: Stream) -> int:
        if self._size is not None and stream.total and stream.total != self._size:
            raise IntegrityError(
                f"{self._origin.where} was announced with {self._size} bytes and has {stream.total}; it was not used"
            )
        return self._size or stream.total

    def _require_space(self, wanted: int) -> None:
        free = shutil.disk_usage(self._part.parent).free
        if wanted + _KEEP_FREE > free:
            raise OSError(errno.ENOSPC, f"{wanted} bytes are needed and {free} are free")


def _disk_error(error: OSError, part: Path) -> MCPError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        with contextlib.suppress(OSError):
            part.unlink()  # a full disk hurts more than downloading again
        return EdgeError(
            f"no room for {part.with_suffix('').name} in {part.parent}: {error}; free some and sync again"
        )
    return EdgeError(f"{part} can't be written: {error}")
