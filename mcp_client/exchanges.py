"""From a request to a server's answer: which endpoint, what it speaks, the one retry loop. Flows, as in ``flow.py``."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

from .effects import Call, Close, Endpoint, Flow, Race, Resolve, Send, Sleep
from .endpoints import Endpoints
from .errors import (
    CircuitOpenError,
    ConnectionFailedError,
    DeadlineExceededError,
    MCPError,
    OverloadedError,
    ProtocolError,
    ServerError,
)
from .protocols import ClientCodec
from .protocols.http_common import require_success
from .protocols.mcp_v1 import McpV1Codec
from .protocols.oip_http import OipHttpCodec
from .resilience.hedge import LatencyWindow
from .resilience.retry import RetryPolicy, says_unhealthy
from .result import Answer
from .sharing import ask_once
from .telemetry.observer import Attempt, Observer
from .tensors import ModelMetadata

log = logging.getLogger("mcp_client")
T = TypeVar("T")

# Of several endpoints each is asked this often whether it is ready, before a request that goes to it: one round trip more.
_CHECK_EVERY_S = 5.0
# One that is not ready is asked again after this.
_ASIDE_S = 1.0
# A readiness check that takes longer is a no.
_CHECK_S = 1.0


class Exchanges:
    """What the engine knows of its servers, and the ways to ask them."""

    def __init__(
        self,
        endpoints: Endpoints,
        retry: RetryPolicy,
        clock: Callable[[], float],
        observer: Observer | None = None,
    ) -> None:
        self._observer = observer
        self.endpoints = endpoints
        self._retry = retry
        self._clock = clock
        self._latencies = LatencyWindow() if retry.hedge else None
        self.hedges = {"sent": 0, "won": 0}

    def locks(self) -> list[threading.Lock]:
        latencies = [self._latencies.lock] if self._latencies is not None else []
        return [*self.endpoints.locks(), self._retry.lock, *latencies]

    def infer(self, call: Call, metadata: ModelMetadata | None, deadline: float) -> Flow[Answer]:
        """Ask for an inference, and again where that can help."""

        def exchange(endpoint: Endpoint) -> Flow[Answer]:
            codec = endpoint.codec or (yield from self.codec(endpoint, deadline))
            if self._latencies is None or not call.cacheable or call.purpose == "prefetch":
                return (yield from ask_once(endpoint, codec, call.request(), metadata, deadline))
            return (yield from self._hedged(call, endpoint, codec, metadata, deadline))

        return (
            yield from self.with_retries(call, deadline, exchange, repeatable=call.cacheable, infers=True)
        )

    def _hedged(
        self,
        call: Call,
        endpoint: Endpoint,
        codec: ClientCodec,
        metadata: ModelMetadata | None,
        deadline: float,
    ) -> Flow[Answer]:
        """Ask, and after the 95th percentile ask a second time; the first answer counts."""
        assert self._latencies is not None
        request = call.request()
        after = self._latencies.p95(request.model)
        started = self._clock()
        second: list[tuple[Send, float, Attempt | None]] = []

        def another() -> Send | None:
            now = self._clock()
            if after is None or now >= deadline or not self._retry.take():
                return None
            try:
                other = self.endpoints.choose(now, tried=[endpoint], may_probe=False)
            except CircuitOpenError:
                return None
            if other.codec is None:  # there is no time to find out what it speaks
                self.endpoints.finished(other)
                other.breaker.abandoned()
                return None
            again, attempt = request, None
            if self._observer is not None:
                attempt = self._observer.attempt(
                    call.span, other.url, call.attempts + 1, infers=True, hedges=True
                )
                again = replace(request, trace=attempt.headers) if attempt is not None else request
            send = Send(other, other.codec.infer(again, metadata), deadline)
            second.append((send, now, attempt))
            self.hedges["sent"] += 1
            return send

        first = Send(endpoint, codec.infer(request, metadata), deadline)
        try:
            raced = yield Race(first, another, deadline - started if after is None else after)
        except BaseException as error:
            for send, _, attempt in second:
                self.leave(send.endpoint, error)
                _ended(attempt, error)
            raise
        for send, sent_at, attempt in second:
            won = raced.by is send
            if won:
                self.hedges["won"] += 1
                call.endpoint = send.endpoint.url
                self.leave(send.endpoint, None, sent_at)
            else:
                self.leave(send.endpoint, _CalledOff())
            _ended(attempt, None if won else _CalledOff())
            _ended(call.attempt, _CalledOff() if won else None)
        winner = codec if raced.by is first else raced.by.endpoint.codec
        answer: Answer = winner.decode_infer(raced.response, request)
        self._latencies.add(request.model, self._clock() - started)
        return answer

    def with_retries(
        self,
        call: Call,
        deadline: float,
        exchange: Callable[[Endpoint], Flow[T]],
        *,
        repeatable: bool,
        infers: bool = False,
    ) -> Flow[T]:
        """Run ``exchange`` against an endpoint until it answers, under one deadline. A prefetch is tried once.

        A retry goes to an endpoint that was not tried yet, at once, if there is a healthy one; that costs neither an attempt
        nor the budget where the failed one was not even connected to.
        """
        self._retry.call_started()
        attempt = 1
        before = call.attempts  # a call may have asked for the model's description as well
        tried: list[Endpoint] = []
        while True:
            if self.endpoints.may_change:
                yield from self._look_around(deadline)
            endpoint = self.endpoints.choose(
                self._clock(), tried=tried, may_probe=repeatable and call.purpose == "demand"
            )
            call.attempts += 1
            call.endpoint = endpoint.url
            if call.span is not None and self._observer is not None:
                call.attempt = self._observer.attempt(
                    call.span, endpoint.url, call.attempts - before, infers=infers
                )
                call.trace = call.attempt.headers if call.attempt is not None else call.trace
            started = self._clock()
            try:
                if len(self.endpoints) > 1 and started >= endpoint.check_at:
                    yield from self._check(endpoint, started, deadline)
                    started = self._clock()
                outcome = yield from exchange(endpoint)
            except MCPError as error:
                self.leave(endpoint, error)
                _ended(call.attempt, error)
                if call.purpose == "prefetch":
                    raise
                now = self._clock()
                tried.append(endpoint)
                elsewhere = self.endpoints.other(now, tried)
                pause: float | None
                if elsewhere and getattr(error, "nothing_sent", False):
                    pause = 0.0
                else:
                    attempt += 1
                    pause = self._retry.pause_before(attempt, error, repeatable=repeatable)
                    if elsewhere and pause is not None:
                        pause = 0.0
                if pause is None or now + pause >= deadline:
                    raise
                if not elsewhere:
                    tried.clear()
                log.debug(
                    "request %s: attempt %d failed (%s); next in %.3f s", call.id, call.attempts, error, pause
                )
                if pause:
                    yield Sleep(pause)
            except BaseException as error:
                self.leave(endpoint, error)
                _ended(call.attempt, error)
                raise
            else:
                self.leave(endpoint, None, started)
                _ended(call.attempt, None)
                return outcome

    def reach(self, call: Call) -> Flow[tuple[Endpoint, ClientCodec]]:
        """An endpoint that the breaker admits, and what it speaks; ``leave`` must follow."""
        yield from self._look_around(call.deadline)
        endpoint = self.endpoints.choose(self._clock(), may_probe=False)
        try:
            return endpoint, (yield from self.codec(endpoint, call.deadline))
        except BaseException as error:
            self.leave(endpoint, error)
            raise

    def list_models(self, endpoint: Endpoint, codec: ClientCodec, deadline: float) -> Flow[list[str]]:
        """The names of an endpoint's models, from the protocol's index or what else the server has."""
        response = yield Send(endpoint, codec.models(), deadline)
        other = codec.models_otherwise(response)
        if other is None:
            return codec.decode_models(response)
        return codec.decode_models_otherwise((yield Send(endpoint, other, deadline)))

    def leave(self, endpoint: Endpoint, error: BaseException | None, started: float | None = None) -> None:
        """Tell breaker, load and readiness how an exchange went; ``started`` (a clock's time): count how long it took."""
        now = self._clock()
        if error is None:
            endpoint.breaker.succeeded()
            self.endpoints.finished(endpoint, seconds=None if started is None else now - started)
            return
        unhealthy = isinstance(error, MCPError) and says_unhealthy(error)
        self.endpoints.finished(endpoint, failed=unhealthy)
        if unhealthy:
            endpoint.breaker.failed(now)
            endpoint.check_at = now
        elif isinstance(error, ServerError):
            endpoint.breaker.succeeded()
        else:
            endpoint.breaker.abandoned()
        if isinstance(error, ConnectionFailedError):
            self.endpoints.unreachable(now)
        if isinstance(error, OverloadedError) and error.retry_after_s is not None:
            endpoint.aside_until = now + error.retry_after_s

    def _look_around(self, deadline: float) -> Flow[None]:
        """Resolve the names whose time has come, and close what is no more."""
        for site in self.endpoints.due(self._clock()):
            assert site.name is not None
            try:
                addresses = yield Resolve(site.name, site.port, deadline)
            except (
                ConnectionFailedError
            ) as error:  # go on with the addresses known; the transport tells what is wrong
                log.debug("%s", error)
                self.endpoints.unreachable(self._clock())
                continue
            self.endpoints.resolved(site, addresses)
        for endpoint in self.endpoints.to_close():
            yield Close(endpoint)

    def _check(self, endpoint: Endpoint, now: float, deadline: float) -> Flow[None]:
        """Raise unless the endpoint is ready. A server that has no such route is taken to be."""
        endpoint.check_at = now + _CHECK_EVERY_S
        until = min(deadline, now + _CHECK_S)
        try:
            codec = yield from self.codec(endpoint, until)
            response = yield Send(endpoint, codec.ready(), until)
        except DeadlineExceededError as error:
            if until == deadline:
                raise
            endpoint.aside_until = endpoint.check_at = self._clock() + _ASIDE_S
            silent = ConnectionFailedError(
                f"{endpoint.url} did not say within {_CHECK_S} s whether it is ready"
            )
            silent.nothing_sent = True
            raise silent from error
        if response.status >= 500 or (response.status == 200 and not codec.decode_ready(response)):
            endpoint.aside_until = endpoint.check_at = self._clock() + _ASIDE_S
            raise NotReadyError(f"{endpoint.url} is not ready", status=503, code="not_ready")

    def codec(self, endpoint: Endpoint, deadline: float) -> Flow[ClientCodec]:
        """What the endpoint speaks, found out on first use.

        A server may speak both. The Open Inference Protocol with binary tensors comes first, since JSON costs ten
        times the bytes and time; then MCP's own protocol; then OIP in JSON.
        """
        if endpoint.codec is not None:
            return endpoint.codec
        mcp = McpV1Codec()
        if endpoint.protocol == "mcp":
            endpoint.codec = mcp
            return mcp
        oip = yield Send(endpoint, OipHttpCodec().server(), deadline)
        _require_attention(oip)
        binary = OipHttpCodec.offers_binary(oip)
        if endpoint.protocol == "oip" or binary:
            endpoint.codec = OipHttpCodec(binary=binary)
            return endpoint.codec
        answer = yield Send(endpoint, mcp.models(), deadline)
        _require_attention(answer)
        if answer.status == 200 and _holds(mcp.decode_models, answer):
            endpoint.codec = mcp
        elif oip.status == 200:
            endpoint.codec = OipHttpCodec(binary=False)
        else:
            raise ProtocolError(
                f"{endpoint.url} speaks neither the Open Inference Protocol (/v2: status {oip.status}) nor MCP "
                f"(/v1/models: status {answer.status}); check the URL, or say which with protocol='oip' or protocol='mcp'"
            )
        return endpoint.codec


def placed(call: Call, flow: Flow[T]) -> Flow[T]:
    """A flow whose errors say which request, endpoint and attempt they are of."""
    try:
        return (yield from flow)
    except MCPError as error:
        raise error.at(
            request_id=call.id, endpoint=call.endpoint, attempts=call.attempts
        ) from error.__cause__


class NotReadyError(OverloadedError):
    """The endpoint said that it is not ready; the request itself was not sent."""

    nothing_sent = True


def _ended(attempt: Attempt | None, error: BaseException | None) -> None:
    if attempt is not None:
        attempt.ended(error)


class _CalledOff(Exception):
    """The request was not needed any more; that says nothing of its endpoint."""


def _require_attention(response: Any) -> None:
    """Raise where a status says that asking about another protocol would be no use now."""
    if response.status in (401, 403, 408, 429) or 300 <= response.status < 400 or response.status >= 500:
        require_success(response)


def _holds(decode: Callable[[Any], Any], response: Any) -> bool:
    try:
        decode(response)
    except MCPError:
        return False
    return True
