"""The Profile API over gRPC: reports batches of events; watches for new profiles and TTL policies."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from ..cache.ttl import TTLPolicy
from ..errors import (
    ConnectionFailedError,
    DeadlineExceededError,
    MissingExtraError,
    ProtocolError,
    ServerError,
)
from ..prefetch.profile import Profile
from ..protocols import WireRequest, WireResponse
from ..protocols.grpc_status import require_success
from ..transports.credential import Credential
from ..transports.grpc import GrpcTransport
from .api import ProfileAPI, Report, sdk_name

try:
    from ..protocols import profile_pb2 as pb
    from ..protocols.protobuf_bytes import parse
except ImportError as missing:
    raise MissingExtraError("grpc", missing.name or "protobuf", "grpc://") from missing

_SERVICE = "/mcp.profile.v1.Profile"
# A stream is ended and resumed so often: the first moment at which a connection that died silently would be noticed.
_STREAM_S = 600.0
_MAX_BYTES = 64 * 1024 * 1024
_UNIMPLEMENTED = 501


@dataclass(frozen=True, slots=True)
class Change:
    """One of the two: a profile with its ETag, or a policy."""

    profile: Profile | None = None
    etag: str = ""
    policy: TTLPolicy | None = None


class GrpcProfileAPI:
    """A Profile API at ``grpc://host:port``. Safe to share between threads; usable in the child after ``fork``.

    ``http``: the same one over HTTP, which takes the events where gRPC does not get through. Raises as ``ProfileAPI`` does.
    """

    def __init__(
        self, url: str, api_key: str | None = None, timeout_s: float = 10.0, *, http: ProfileAPI | None = None
    ) -> None:
        self.url = url
        self.http = http
        self._timeout_s = timeout_s
        self._transport = GrpcTransport(
            url,
            headers={"user-agent": sdk_name()},
            max_response_bytes=_MAX_BYTES,
            credential=Credential(api_key) if api_key else None,
            compression="gzip",
        )
        self._pid = os.getpid()

    def report(self, batch: Mapping[str, Any], *, timeout_s: float | None = None) -> Report:
        """Send a batch as PROTOCOL.md section 4 has it."""
        return self.report_json(orjson.dumps(batch), timeout_s=timeout_s)

    def report_json(self, body: bytes, *, timeout_s: float | None = None) -> Report:
        """Send a batch that is JSON already."""
        timeout = self._timeout_s if timeout_s is None else min(timeout_s, self._timeout_s)
        deadline = time.monotonic() + timeout
        try:
            # On the wire a stream of one message is one message.
            response = self._own().send(_wire("Report", _batch(orjson.loads(body))), deadline)
            self._check(response)
        except (ConnectionFailedError, ServerError) as error:
            if self.http is None or not (
                isinstance(error, ConnectionFailedError) or error.status == _UNIMPLEMENTED
            ):
                raise
            return self.http.report_json(body, timeout_s=max(0.1, deadline - time.monotonic()))
        answer = parse(pb.ReportResponse, bytes(response.body), f"the answer of {self.url} to a batch")
        if len(answer.batches) != 1:
            raise ProtocolError(
                f"{self.url} answered one batch with {len(answer.batches)}; is it a Profile API?"
            )
        (one,) = answer.batches
        rejected = tuple((bad.index, bad.error) for bad in one.rejected)
        return Report(one.accepted, one.duplicates, rejected)

    def profile(
        self, etag: str | None = None, *, timeout_s: float | None = None
    ) -> tuple[Profile | None, str]:
        """The profile in service and its ETag; ``None`` if there is no other than the one that ``etag`` names."""
        if etag is not None and self.http is not None:
            return self.http.profile(etag, timeout_s=timeout_s)
        try:
            for change in self.watch(etag or "", 0, timeout_s=timeout_s or self._timeout_s):
                if change.profile is not None:
                    return change.profile, change.etag
        except DeadlineExceededError:
            pass  # there is nothing new
        return None, etag or ""

    def watch(
        self, etag: str, policy_version: int, *, min_interval_s: float = 0.0, timeout_s: float = _STREAM_S
    ) -> Iterator[Change]:
        """What the caller does not have, now and as it changes, until the time is over (``DeadlineExceededError``)."""
        request = pb.WatchRequest(
            profile_etag=etag, policy_version=policy_version, min_interval_s=min_interval_s
        )
        stream = self._own().stream(_wire("Watch", request), time.monotonic() + timeout_s)
        try:
            for response in stream:
                self._check(response)
                message = parse(pb.WatchResponse, bytes(response.body), f"a change told by {self.url}")
                kind = message.WhichOneof("change")
                if kind == "profile":
                    yield Change(Profile.from_json(message.profile.json), message.profile.etag)
                elif kind == "policy":
                    yield Change(policy=_policy(message.policy.json))
        finally:
            close = getattr(stream, "close", None)
            if close is not None:
                close()

    def close(self) -> None:
        if self._pid == os.getpid():
            self._transport.close()
        if self.http is not None:
            self.http.close()

    def _own(self) -> GrpcTransport:
        if self._pid != os.getpid():
            self._transport.reset()
            self._pid = os.getpid()
        return self._transport

    def _check(self, response: WireResponse) -> None:
        try:
            require_success(response)
        except ServerError as error:
            raise error.at(endpoint=self.url) from None


def _wire(method: str, message: Any) -> WireRequest:
    return WireRequest("POST", f"{_SERVICE}/{method}", body=(message.SerializeToString(),))


def _batch(data: dict[str, Any]) -> pb.ReportRequest:
    head = {name: data.get(name) or "" for name in ("batch_id", "client_id", "sdk", "sent_at")}
    return pb.ReportRequest(**head, events=[pb.Event(**_known(event)) for event in data["events"]])


def _known(event: dict[str, Any]) -> dict[str, Any]:
    """Without what a user's ``redact`` may have added: the server would pass over it, protobuf refuses it."""
    return {name: value for name, value in event.items() if name in _FIELDS}


_FIELDS = frozenset(field.name for field in pb.Event.DESCRIPTOR.fields)


def _policy(raw: bytes) -> TTLPolicy:
    try:
        return TTLPolicy.parse(orjson.loads(raw))
    except orjson.JSONDecodeError as error:
        raise ProtocolError(f"not a TTL policy: {error}") from error
