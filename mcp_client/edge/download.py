"""One file from a server to disk: resumed where it broke off, and checked against its SHA-256 while it
comes in.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

from .._httpx import httpx
from ..errors import ConnectionFailedError, EdgeError, IntegrityError, MCPError, ProtocolError, ServerError

_ATTEMPTS = 5  # as long as each brings something new; a line that breaks more often is left for the next sync
_KEEP_FREE = 16 * 1024 * 1024  # bytes of disk that a download must leave to others


def download(
    http: httpx.Client,
    url: str,
    target: Path,
    *,
    digest: str,
    size: int | None = None,
    params: Mapping[str, str] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> int:
    """Fetch ``url`` into ``target`` and return how many bytes came over the wire.

    ``target`` appears only once its bytes are those of ``digest`` (``sha256:…``); until then they gather in
    ``{target}.part``, which the next call goes on with. The server's ETag is the digest, so ``If-Range``
    makes sure that a resumed file has not become another one meanwhile. ``size``: bytes, if known: more is
    refused. ``progress(done, total)``; ``total`` is 0 while unknown. Raises ``IntegrityError``,
    ``ServerError``, ``ProtocolError``, ``ConnectionFailedError`` when the line broke too often, ``EdgeError``
    when the disk is full.
    """
    part = target.with_name(target.name + ".part")
    transfer = _Transfer(http, url, part, digest=digest, size=size, params=params, progress=progress)
    resumed = part.exists()
    for attempt in range(_ATTEMPTS):
        before = transfer.received
        try:
            found = transfer.run()
        except httpx.HTTPError as error:
            if transfer.received == before or attempt == _ATTEMPTS - 1:
                raise ConnectionFailedError(
                    f"the download of {url} broke off: {error!r}; sync again to resume it"
                ) from error
            resumed = True
            continue
        except OSError as error:
            raise _disk_error(error, part) from error
        if found == digest:
            part.replace(target)
            return transfer.received
        part.unlink()
        if not resumed:
            break
        resumed = False  # what an earlier attempt left may have been damaged by a power cut: once more from the start
    raise IntegrityError(f"{url} was announced as {digest} and came as {found}; it was not used")


class _Transfer:
    """One download over possibly several connections. ``received`` counts the bytes of all of them."""

    def __init__(
        self,
        http: httpx.Client,
        url: str,
        part: Path,
        *,
        digest: str,
        size: int | None,
        params: Mapping[str, str] | None,
        progress: Callable[[int, int], None] | None,
    ) -> None:
        self.received = 0
        self._http = http
        self._url = url
        self._part = part
        self._etag = f'"{digest.removeprefix("sha256:")}"'
        self._size = size
        self._params = dict(params or {})
        self._progress = progress

    def run(self) -> str:
        """Go on from what ``.part`` holds to the end; the digest of the whole, "" if it can't be what was
        left.
        """
        handle = os.open(self._part, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        with os.fdopen(handle, "r+b") as file:
            hasher = hashlib.file_digest(file, "sha256")
            done = file.tell()
            if done and done == self._size:
                return "sha256:" + hasher.hexdigest()
            headers = {"Accept-Encoding": "identity"}
            if done:
                headers |= {"Range": f"bytes={done}-", "If-Range": self._etag}
            with self._http.stream("GET", self._url, params=self._params, headers=headers) as response:
                if done and response.status_code == 416:  # nothing follows what is there: it is not this file
                    return ""
                if done and response.status_code == 200:
                    file.seek(0)
                    file.truncate()
                    hasher, done = hashlib.sha256(), 0
                total = self._total(response, done)
                self._require_space(total - done)
                for chunk in response.iter_raw():
                    done += len(chunk)
                    self.received += len(chunk)
                    if total and done > total:
                        raise IntegrityError(
                            f"{self._url} was announced with {total} bytes and sent more; it was not used"
                        )
                    file.write(chunk)
                    hasher.update(chunk)
                    if self._progress is not None:
                        self._progress(done, total)
        return "sha256:" + hasher.hexdigest()

    def _total(self, response: httpx.Response, done: int) -> int:
        """How long the whole file is; 0 if nobody says."""
        status = response.status_code
        if status not in (200, 206):
            response.read()
            raise ServerError.of(status, f"{self._url} answered {status}: {response.text[:200]}")
        if response.headers.get("content-encoding", "identity") != "identity":
            raise ProtocolError(f"{self._url} came compressed though identity was asked for; it was not used")
        if status == 206:
            stated = re.fullmatch(r"bytes (\d+)-\d+/(\d+|\*)", response.headers.get("content-range", ""))
            if stated is None or int(stated[1]) != done:
                raise ProtocolError(
                    f"{self._url}: bytes from {done} were asked for; got {response.headers.get('content-range')!r}"
                )
            stated_size = int(stated[2]) if stated[2] != "*" else 0
        else:
            length = response.headers.get("content-length", "")
            stated_size = int(length) if length.isdecimal() else 0
        if self._size is not None and stated_size and stated_size != self._size:
            raise IntegrityError(
                f"{self._url} was announced with {self._size} bytes and has {stated_size}; it was not used"
            )
        return self._size or stated_size

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
