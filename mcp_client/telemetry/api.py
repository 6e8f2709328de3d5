"""The Profile API over HTTP:

reports batches of events, fetches the profile; and what to do with each answer.
"""

from __future__ import annotations

import gzip
import logging
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from typing import TYPE_CHECKING, Any, Protocol

import orjson

from ..errors import (
    ConnectionFailedError,
    DeadlineExceededError,
    MCPError,
    MissingExtraError,
    ProtocolError,
    RequestRejectedError,
    ServerError,
)
from .spool import Batch, Spool

if TYPE_CHECKING:
    import httpx2 as httpx

    from ..cache.ttl import TTLPolicy
    from ..config import Telemetry
    from ..prefetch.profile import Profile
    from .grpc_api import GrpcProfileAPI

log = logging.getLogger("mcp_client.telemetry")

# A server that refuses a whole batch (400, 422) instead of the bad event costs at most so many events for one
# bad one, and at most 2 × 5000 / 64 requests for a batch in which all are bad.
_SMALLEST_REFUSED = 64


@dataclass(frozen=True, slots=True)
class Report:
    """The server's answer to a batch.

    ``rejected``: index in the batch and why; those events are not stored.
    """

    accepted: int
    duplicates: int = 0
    rejected: tuple[tuple[int, str], ...] = ()


class ProfileAPI:
    """A Profile API at ``url``. Safe to share between threads; usable in the child after ``fork``.

    Raises ``ConnectionFailedError``, ``DeadlineExceededError``, a ``ServerError`` that fits the status, or
    ``ProtocolError`` if the answer is not one of a Profile API.
    """

    def __init__(self, url: str, api_key: str | None = None, timeout_s: float = 10.0) -> None:
        self.url = url.rstrip("/")
        self._api_key = api_key
        self._timeout_s = timeout_s
        self._http: httpx.Client | None = None
        self._pid = 0

    def report(self, batch: Mapping[str, Any], *, timeout_s: float | None = None) -> Report:
        """Send a batch as PROTOCOL.md section 4 has it."""
        return self.report_json(orjson.dumps(batch), timeout_s=timeout_s)

    def report_json(self, body: bytes, *, timeout_s: float | None = None) -> Report:
        """Send a batch that is JSON already."""
        headers = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
        response = self._send("POST", "/v1/telemetry", headers, gzip.compress(body, 5, mtime=0), timeout_s)
        try:
            answer = orjson.loads(response.content)
            return Report(
                accepted=int(answer["accepted"]),
                duplicates=int(answer.get("duplicates", 0)),
                rejected=tuple(
                    (int(bad["index"]), str(bad["error"])) for bad in answer.get("rejected") or ()
                ),
            )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ProtocolError(
                f"{self.url} does not answer a batch as a Profile API does; check the telemetry URL: {error}"
            ) from error

    def profile(
        self, etag: str | None = None, *, timeout_s: float | None = None
    ) -> tuple[Profile | None, str]:
        """The profile in service and its ETag; ``None`` if it is still the one that ``etag`` names."""
        from ..prefetch.profile import Profile

        headers = {"Accept": "application/json"} | ({"If-None-Match": etag} if etag else {})
        response = self._send("GET", "/v1/profile", headers, None, timeout_s)
        if response.status_code == 304:
            return None, etag or ""
        return Profile.from_json(response.content), response.headers.get("etag", "")

    def ttl_policy(self, version: int = 0, *, timeout_s: float | None = None) -> TTLPolicy | None:
        """The TTL policy in force; ``None`` if there is none, or none but that of ``version``."""
        from ..cache.ttl import TTLPolicy

        headers = {"If-None-Match": f'"{version}"'}
        response = self._send("GET", "/v1/ttl-policy", headers, None, timeout_s)
        if response.status_code == 304:
            return None
        try:
            policy = TTLPolicy.parse(orjson.loads(response.content))
        except orjson.JSONDecodeError as error:
            raise ProtocolError(f"not a TTL policy: {error}") from error
        return policy if policy.version else None

    def close(self) -> None:
        http, self._http = self._http, None
        if http is not None and self._pid == os.getpid():
            http.close()

    def _send(
        self, method: str, path: str, headers: dict[str, str], body: bytes | None, timeout_s: float | None
    ) -> httpx.Response:
        from .._httpx import httpx

        if self._http is None or self._pid != os.getpid():
            # No connection is kept: by the next batch, 30 s later, the server has closed it.
            limits = httpx.Limits(max_keepalive_connections=0)
            self._http, self._pid = httpx.Client(headers=self._headers(), limits=limits), os.getpid()
        timeout = self._timeout_s if timeout_s is None else min(timeout_s, self._timeout_s)
        try:
            response = self._http.request(
                method, self.url + path, headers=headers, content=body, timeout=timeout
            )
        except httpx.TimeoutException as error:
            raise DeadlineExceededError(f"{self.url}{path} did not answer within {timeout:.1f} s") from error
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise ConnectionFailedError(f"{self.url}{path}: {type(error).__name__}: {error}") from error
        if response.status_code not in (200, 202, 304):
            raise _refused(response, self.url + path)
        return response

    def _headers(self) -> dict[str, str]:
        return {"User-Agent": sdk_name()} | (
            {"Authorization": f"Bearer {self._api_key}"} if self._api_key else {}
        )


def _refused(response: httpx.Response, url: str) -> MCPError:
    code, message = "", response.text[:500]
    try:
        error = orjson.loads(response.content)["error"]
        code, message = str(error["code"]), str(error["message"])
    except (ValueError, KeyError, TypeError):
        pass  # not one of our error bodies; the text says what there is to say
    wait = response.headers.get("retry-after", "")
    return ServerError.of(
        response.status_code, message, code=code, retry_after_s=float(wait) if wait.isdigit() else None
    ).at(endpoint=url)


def sdk_name() -> str:
    try:
        return f"mcp2026-python/{metadata.version('mcp2026')}"
    except metadata.PackageNotFoundError:  # run from a source tree that is not installed
        return "mcp2026-python/0"


@dataclass(slots=True)
class Counts:
    """What became of the events of this process; one thread at a time changes it."""

    spooled: int = 0
    sent: int = 0
    duplicates: int = 0
    rejected: int = 0
    dropped: int = 0
    batches: int = 0


class Reporter(Protocol):
    """What takes batches: ``ProfileAPI`` or ``GrpcProfileAPI``."""

    def report_json(self, body: bytes, *, timeout_s: float | None = None) -> Report: ...
    def close(self) -> None: ...


def open_api(config: Telemetry) -> ProfileAPI | GrpcProfileAPI:
    """The Profile API that ``config`` names, over the protocol of its URL."""
    if not config.url.startswith(("grpc://", "grpcs://")):
        return ProfileAPI(config.url, config.api_key)
    http = ProfileAPI(config.http_url, config.api_key) if config.http_url else None
    try:
        from .grpc_api import GrpcProfileAPI
    except MissingExtraError as error:
        if http is None:
            raise
        log.warning("%s; %s is used instead", error, config.http_url)
        return http
    return GrpcProfileAPI(config.url, config.api_key, http=http)


def deliver(
    api: Reporter,
    spool: Spool,
    counts: Counts,
    *,
    most: int,
    go_on: Callable[[], bool] = lambda: True,
    deadline: float | None = None,
    monotonic: Callable[[], float] = time.monotonic,
) -> None:
    """Send batch after batch until the spool is empty, ``go_on`` says no, or the deadline passes.

    A batch that the server refuses for what it is (413: halved and sent again; 400, 422: halved, and in the
    end dropped and counted) never blocks those behind it. Any other failure is raised, and the batch stays,
    under its id.
    """
    while go_on():
        left = None if deadline is None else deadline - monotonic()
        if left is not None and left <= 0:
            return
        batch = spool.next_batch(most)
        if batch is None:
            return
        if not batch.bodies:
            spool.settle(batch)
            continue
        try:
            report = api.report_json(_wire(batch, spool.client_id), timeout_s=left)
        except RequestRejectedError as error:
            if error.status not in (400, 413, 422):
                raise
            if len(batch.bodies) > (1 if error.status == 413 else _SMALLEST_REFUSED):
                spool.split(batch)
                continue
            lost = spool.settle(batch)
            counts.rejected += lost
            log.warning("the Profile API refused %d telemetry events, which are dropped: %s", lost, error)
            continue
        settled = spool.settle(batch)
        counts.batches += 1
        if settled:
            refused = len(report.rejected)
            counts.rejected += refused
            counts.sent += settled - refused
            counts.duplicates += report.duplicates
            if refused:
                log.warning(
                    "the Profile API rejected %d telemetry events, first: %s", refused, report.rejected[0][1]
                )


def _wire(batch: Batch, client_id: str) -> bytes:
    head = orjson.dumps(
        {
            "batch_id": batch.id,
            "client_id": client_id,
            "sdk": sdk_name(),
            "sent_at": datetime.now(UTC).isoformat(timespec="milliseconds"),
        }
    )
    return b'%s,"events":[%s]}' % (head[:-1], b",".join(batch.bodies))
