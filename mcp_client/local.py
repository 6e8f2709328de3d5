"""The edge in the life of a request: who goes first, who comes beside, and whether both would say the same. Flows."""

from __future__ import annotations

import copy
import logging
import math
import random
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Protocol

from .config import Edge, EdgePolicy
from .edge.agreement import difference, tolerance_of
from .edge.limits import Halt
from .effects import Call, Contest, Contested, Flow, Run, Send
from .errors import (
    CircuitOpenError,
    ConnectionFailedError,
    DeadlineExceededError,
    EdgeError,
    MCPError,
    OverloadedError,
    ServerError,
)
from .exchanges import Exchanges
from .request import Request
from .resilience.hedge import Cancellation, LatencyWindow
from .resilience.uplink import Uplink
from .result import Answer, Source
from .tensors import ModelMetadata, read_only

log = logging.getLogger("mcp_client.edge")

Ask = Callable[[Call, float], Flow[Answer]]
Spawn = Callable[[Callable[[], Flow[None]]], None]

# Without a measurement yet: time kept back for the local model where the server is slow.
_RESERVE_S = 0.5
# A server is waited for this many times the 95th percentile of its answers, and not less than the least: beyond it the answer
# is not late but lost.
_PATIENCE = 5.0
_LEAST_PATIENCE_S = 1.0
# Descriptions are a few hundred bytes that no model has to run for.
DESCRIBED_WITHIN_S = 2.0
_PROBE_S = 2.0
_COMPARE_S = 30.0


class EdgeModels(Protocol):
    """What the flow needs of ``edge.runtime.EdgeRuntime``."""

    def holds(self, model: str = "") -> bool: ...
    def metadata(self, model: str = "", version: str = "") -> ModelMetadata: ...
    def run(self, request: Request, *, deadline: float = math.inf, halt: Halt | None = None) -> Answer: ...


class Local:
    """The edge of one client: its models, the policy, what was measured. Everything in here guards itself.

    ``spawn`` runs a flow in the background; ``compared`` is told of every agreement check: the call, the source of its answer,
    the largest difference as a share of the largest value.
    """

    def __init__(
        self,
        models: EdgeModels,
        settings: Edge,
        servers: Exchanges,
        *,
        spawn: Spawn,
        compared: Callable[[Call, Source, float], None],
        clock: Callable[[], float],
        rng: random.Random | None = None,
    ) -> None:
        self.models = models
        self.uplink = Uplink(rng)
        self._settings = settings
        self._servers = servers
        self._spawn = spawn
        self._compared = compared
        self._clock = clock
        self._rng = rng or random.Random()
        self._server_s = LatencyWindow()
        self._edge_s: dict[str, float] = {}  # moving averages; single operations are atomic
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._worst = 0.0
        self._comparing = False

    def locks(self) -> list[threading.Lock]:
        return [self.uplink.lock, self._server_s.lock, self._lock]

    def reset(self) -> None:
        self.uplink.reset()
        self._comparing = False

    def stats(self) -> dict[str, Any]:
        """The network's state, and the agreement checks: how many, how many over the tolerance, the worst difference."""
        with self._lock:
            counts, worst = dict(self._counts), self._worst
        agreement = {name: counts.get(name, 0) for name in ("checked", "disagreed", "failed")}
        return {"network": self.uplink.state(), "agreement": {**agreement, "worst": worst}}

    def policy(self, model: str) -> EdgePolicy:
        return self._settings.models.get(model, self._settings.policy)

    # --- the answer ---

    def takes_part(self, call: Call) -> bool:
        """Whether the edge may answer a call: not a step of a server's sequence, nor a prefetch of what a server has."""
        if not self._servers.endpoints:
            return True
        policy = self.policy(call.model_name)
        if policy == "only":
            return True
        return call.fallback and call.cacheable and (call.purpose == "demand" or policy == "prefer")

    def stays(self, call: Call) -> bool:
        """Whether to keep an answer of the edge. A stand-in for a server's is not: it may differ in the last digits."""
        return not self._servers.endpoints or self.policy(call.model_name) != "fallback"

    def answer(self, call: Call, ask: Ask) -> Flow[tuple[Answer, Source]]:
        """By the policy of the call's model; ``ask`` asks a server by a deadline."""
        policy = self.policy(call.model_name)
        if not self._servers.endpoints or policy == "only":
            return (yield from self._run(call)), "edge"
        up = self._is_up()
        if policy == "race" and up:
            answer, source = yield from self._race(call, ask)
        elif (policy == "prefer" and (not up or self._in_time(call))) or not up:
            answer, source = yield from self._edge_first(call, ask)
        else:
            answer, source = yield from self._server_first(call, ask)
        self._sample(call, answer, source, ask)
        return answer, source

    def _server_first(self, call: Call, ask: Ask) -> Flow[tuple[Answer, Source]]:
        try:
            return (yield from self._ask(call, ask, self._patience(call))), "server"
        except MCPError as error:
            if not no_server_answered(error):
                raise
            server_error = error
        try:
            return (yield from self._run(call)), "edge"
        except (EdgeError, DeadlineExceededError) as error:
            server_error.add_note(f"The edge could not answer either: {error}")
            raise server_error from error

    def _edge_first(self, call: Call, ask: Ask) -> Flow[tuple[Answer, Source]]:
        try:
            return (yield from self._run(call)), "edge"
        except EdgeError as error:
            edge_error = error
        try:
            return (yield from self._ask(call, ask, call.deadline)), "server"
        except MCPError as error:
            error.add_note(f"The edge could not answer: {edge_error}")
            raise

    def _race(self, call: Call, ask: Ask) -> Flow[tuple[Answer, Source]]:
        mine = copy.copy(call)  # the loser may still be at work on it when the call is over
        request = call.request()
        contest = Contest(
            self._ask(mine, ask, call.deadline),
            lambda halt: self._measured(request, call.deadline, halt),
            call.deadline,
        )
        try:
            contested: Contested = yield contest
        finally:
            call.attempts, call.endpoint = mine.attempts, mine.endpoint
        return contested.value, "server" if contested.by == "flow" else "edge"

    def _ask(self, call: Call, ask: Ask, deadline: float) -> Flow[Answer]:
        started = self._clock()
        try:
            answer = yield from ask(call, deadline)
        except MCPError as error:
            if self._means_lost(error):
                self.uplink.lost(self._clock())
            raise
        self._server_s.add(call.model_name, self._clock() - started)
        return answer

    def _means_lost(self, error: MCPError) -> bool:
        return isinstance(error, (ConnectionFailedError, DeadlineExceededError, CircuitOpenError))

    def _run(self, call: Call) -> Flow[Answer]:
        halt = Cancellation()
        request = call.request()
        answer: Answer = yield Run(lambda: self._measured(request, call.deadline, halt), call.deadline, halt)
        return answer

    def _measured(self, request: Request, deadline: float, halt: Cancellation) -> Answer:
        started = self._clock()
        answer = self.models.run(request, deadline=deadline, halt=halt)
        seconds = self._clock() - started
        known = self._edge_s.get(request.model)
        self._edge_s[request.model] = seconds if known is None else 0.8 * known + 0.2 * seconds
        return answer

    # --- what is decided by measurements ---

    def _patience(self, call: Call) -> float:
        """Until when the server is waited for: the time that the edge needs is kept back, at most half of the call's."""
        needed = 2 * self._edge_s.get(call.model_name, _RESERVE_S)
        until = call.deadline - min((call.deadline - call.started) / 2, needed)
        usual = self._server_s.p95(call.model_name)
        if usual is None:
            return until
        return min(until, self._clock() + max(_LEAST_PATIENCE_S, _PATIENCE * usual))

    def _in_time(self, call: Call) -> bool:
        return self._clock() + self._edge_s.get(call.model_name, 0.0) < call.deadline

    def _is_up(self) -> bool:
        """Whether servers can be reached, as far as is known; where they can't, a probe is sent beside the call if one is due."""
        now = self._clock()
        if self.uplink.admits(now):
            return True
        if self.uplink.takes_probe(now):
            self._spawn(self._probe)
        return False

    def _probe(self) -> Flow[None]:
        answered = False
        until = self._clock() + _PROBE_S
        try:
            for endpoint in tuple(self._servers.endpoints):
                try:
                    codec = yield from self._servers.codec(endpoint, until)
                    ready = codec.decode_ready((yield Send(endpoint, codec.ready(), until)))
                except MCPError as error:
                    log.debug("%s can't be reached: %s", endpoint.url, error)
                    continue
                if ready:
                    endpoint.breaker.succeeded()
                    answered = True
        finally:
            self.uplink.probed(self._clock(), answered)

    # --- descriptions ---

    def describes(self, call: Call, model: str) -> Flow[ModelMetadata | None]:
        """The edge's own description, where the policy or a lost network has the edge go first and it has the model."""
        policy = self.policy(model)
        servers = bool(self._servers.endpoints)
        if servers and policy != "only" and (not call.fallback or (policy == "fallback" and self._is_up())):
            return None
        try:
            described: ModelMetadata = yield Run(
                lambda: self.models.metadata(model, call.version), call.deadline
            )
        except EdgeError:
            if not servers or policy == "only":
                raise
            return None
        return described

    def described_until(self, call: Call, model: str) -> Flow[float]:
        """By when a server has to have described a model that the edge could describe as well."""
        if not call.fallback or not (yield Run(lambda: self.models.holds(model), call.deadline)):
            return call.deadline
        return min(call.started + (call.deadline - call.started) / 2, self._clock() + DESCRIBED_WITHIN_S)

    def undescribed(self, error: MCPError) -> None:
        if self._means_lost(error):
            self.uplink.lost(self._clock())

    # --- agreement ---

    def _sample(self, call: Call, answer: Answer, source: Source, ask: Ask) -> None:
        """Compute a share of the answers both ways, one at a time and in the background."""
        if not self._settings.agreement or call.purpose != "demand" or not call.cacheable:
            return
        if self._rng.random() >= self._settings.agreement or (source == "edge" and not self._is_up()):
            return
        with self._lock:
            if self._comparing:
                return
            self._comparing = True
        assert call.inputs is not None
        now = self._clock()
        other = replace(  # the inputs are the caller's again when it returns
            call,
            inputs={name: read_only(array) for name, array in call.inputs.items()},
            background=True,
            started=now,
            deadline=now + _COMPARE_S,
        )
        self._spawn(lambda: self._compare(other, answer.outputs, source, ask))

    def _compare(self, call: Call, given: Mapping[str, Any], source: Source, ask: Ask) -> Flow[None]:
        found: float | None = None
        try:
            if source == "edge":
                outputs = (yield from ask(call, call.deadline)).outputs
                found = difference(outputs, given)
            else:
                outputs = (yield from self._run(call)).outputs
                found = difference(given, outputs)
        except MCPError as error:
            log.debug("agreement of %r could not be checked: %s", call.model_name, error)
        finally:
            with self._lock:
                self._comparing = False
                self._counts["failed" if found is None else "checked"] += 1
        if found is None:
            return
        disagrees = found > tolerance_of(given, self._settings.tolerance)
        with self._lock:
            self._worst = max(self._worst, found)
            self._counts["disagreed"] += disagrees
        if disagrees:
            log.warning(
                "edge: %r differs from the server by %.3g of the largest output", call.model_name, found
            )
        self._compared(call, source, found)


def no_server_answered(error: MCPError) -> bool:
    """Whether an error means that no server could answer in time, as opposed to one that answered no."""
    if isinstance(error, (ConnectionFailedError, DeadlineExceededError, OverloadedError)):
        return True
    return isinstance(error, ServerError) and error.status >= 500
