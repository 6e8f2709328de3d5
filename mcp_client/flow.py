"""The life of a request, written once: cache, in flight, server, edge, then store, record, plan.

Everything that waits is a generator that yields what it needs done (an *effect*) and is sent the outcome; ``drivers.py``
does it, with threads or with asyncio. The generator never blocks, sleeps or opens anything itself, as httpx's ``auth_flow``.

A reader's map, top to bottom: ``Engine.infer`` → ``hit`` → ``_shared`` (single flight) → ``_fetch`` → ``_ask_server``
or the edge (``local.py``) → ``_store`` → ``_finish``.
"""

from __future__ import annotations

import copy
import itertools
import logging
import math
import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal, NamedTuple, Protocol, TypeVar

from .cache import descriptions
from .cache.fingerprint import extended, fingerprint
from .cache.freshness import Freshness
from .cache.memory import Entry, MemoryCache
from .cache.tiers import TieredCache
from .config import Cache, Edge
from .effects import Call, Endpoint, Flight, Flow, Landing, Run, Send, Sleep, Wait
from .endpoints import Endpoints
from .errors import (
    EdgeError,
    InvalidInputError,
    MCPError,
    NotFoundError,
    RequestRejectedError,
    listed,
)
from .exchanges import Exchanges
from .inputs import as_inputs
from .local import EdgeModels, Local, Spawn, no_server_answered
from .prefetch.decisions import Outcome
from .prefetch.prefetcher import Job, Prefetcher
from .protocols import ClientCodec
from .request import NO_CLASSES, NO_HEADERS, Request
from .resilience.retry import RetryPolicy
from .result import Answer, InferResult, Source
from .telemetry.observer import Notice, Observer, trace_headers
from .tensors import ModelMetadata, nbytes_of

log = logging.getLogger("mcp_client")
T = TypeVar("T")


class EventSink(Protocol):
    """What the flow needs of ``telemetry.TelemetryPipe``."""

    def record(
        self,
        session: str,
        path: str,
        route: str,
        fp: bytes,
        model: str,
        source: str,
        latency_ms: float,
        nbytes: int,
        prefetch_id: str = "",
        outcome: str = "",
    ) -> None: ...


class Found(NamedTuple):
    """An answer, where it came from, and how long ago a server gave it."""

    answer: Answer
    source: Source
    age_s: float = 0.0


class Engine:
    """A client's state, shared by all its calls, and the flows over it.

    Who may touch what: ``_flights`` and ``_sources`` under ``_lock``; ``_metadata`` and ``_digests`` are dicts whose single
    operations are atomic; everything else guards itself. No lock is ever held across an effect.
    """

    def __init__(
        self,
        *,
        endpoints: Endpoints,
        cache: MemoryCache | None,
        settings: Cache,
        refresh: Callable[[Call], None],
        retry: RetryPolicy,
        prefetcher: Prefetcher | None,
        events: EventSink | None,
        observer: Observer | None,
        edge: EdgeModels | None,
        edge_settings: Edge,
        spawn: Spawn,
        default_model: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.endpoints = endpoints
        self.servers = Exchanges(endpoints, retry, clock, observer)
        self.cache = cache
        self.prefetcher = prefetcher
        self.events = events
        self.observer = observer
        self.clock = clock
        self.freshness = Freshness(settings)
        self._settings = settings
        self._refresh = refresh
        self._default_model = default_model
        self._lock = threading.Lock()
        self._metadata: dict[tuple[str, str], ModelMetadata] = {}
        self._digests: dict[tuple[str, str], str] = {}
        self._missing: dict[
            tuple[str, str], tuple[float, NotFoundError]
        ] = {}  # until when "no such model" is believed
        self.local: Local | None = None
        if edge is not None:
            self.local = Local(
                edge, edge_settings, self.servers, spawn=spawn, compared=self._compared, clock=clock
            )
        self._sources: dict[str, int] = dict.fromkeys((*Source.__args__, "error"), 0)  # type: ignore[attr-defined]
        self.reset()

    def reset(self) -> None:
        """Forget what belongs to this moment of this process: for a new client, and for the child after a fork."""
        self._flights: dict[Any, Flight] = {}
        self._id_prefix = os.urandom(8).hex()
        self._id_count = itertools.count()

    def new_id(self) -> str:
        return f"{self._id_prefix}-{next(self._id_count):x}"

    # --- the life of a request ---

    def infer(self, call: Call) -> Flow[InferResult]:
        """From call to result. Errors carry the request's id, endpoint and number of attempts."""
        observer = self.observer
        if observer is None or call.purpose == "prefetch":
            call.trace = trace_headers()
            return (yield from self._infer(call))
        call.observed = True
        call.span, call.trace = observer.started(self._notice(call, "request"))
        try:
            result = yield from self._infer(call)
        except BaseException as error:
            observer.ended(self._notice(call, "error", error=error), call.span)
            raise
        observer.ended(self._notice(call, "response", result.source), call.span)
        return result

    def _compared(self, call: Call, source: Source, found: float) -> None:
        if self.observer is not None:
            self.observer.compared(replace(self._notice(call, "agreement", source), difference=found))

    def _notice(
        self,
        call: Call,
        kind: Literal["request", "response", "error", "agreement"],
        source: str = "",
        error: BaseException | None = None,
    ) -> Notice:
        return Notice(
            kind,
            call.id,
            call.model_name or call.model or self._default_model,
            call.session,
            call.path,
            call.endpoint,
            call.attempts,
            source,
            (self.clock() - call.started) * 1e3,
            error,
        )

    def _infer(self, call: Call) -> Flow[InferResult]:
        try:
            if call.inputs is None:
                known = self._metadata.get((call.model, call.version))
                self._prepare(call, known or (yield from self.describe(call)))
                hit = self.hit(call)
                if hit is not None:
                    return hit
            if self.cache is None or call.cache is False or not call.cacheable:
                answer, source = yield from self._fetch(call)
                return self._finish(call, answer, source)
            found, flight = yield from self._shared(call.key, call, self._fetch_and_store)
            source = found.source
            if call.purpose == "demand" and self._came_ahead(call, source, flight):
                source = self._use_prefetch(call)
            elif source == "stale" and flight is None:
                self._renew(call)
            return self._finish(call, found.answer, source, found.age_s)
        except MCPError as error:
            self._failed(call, error)
            raise error.at(
                request_id=call.id, endpoint=call.endpoint, attempts=call.attempts
            ) from error.__cause__

    def hit(self, call: Call) -> InferResult | None:
        """The answer that this machine already has, without I/O; ``None`` sends the caller on to ``infer``."""
        if self.cache is None or call.cache is False or call.cache == "refresh":
            return None
        if call.inputs is None:
            metadata = self._metadata.get((call.model, call.version))
            if metadata is None:
                return None
            self._prepare(call, metadata)
        if call.parameters and not call.cacheable:
            return None
        now = self.clock()
        if call.job is not None or call.background:
            # No reference: what nobody asked for must not look popular.
            entry = self.cache.peek(call.key, now)
            if entry is None or now >= entry.fresh_until:
                return None
            return InferResult(entry.answer, source="cache", latency_ms=0.0, request_id=call.id)
        entry = self.cache.get(call.key, now)
        if entry is None:
            if self.prefetcher is not None and self.prefetcher.holds(call.key):
                self.prefetcher.lost(call.key, "expired")
            self.cache.missed(call.model_name)
            return None
        age = now - entry.stored_at
        if type(call.cache) is float and age > call.cache:
            return None
        if now >= entry.fresh_until:
            return self._stale(call, entry, now)
        source: Source = "cache"
        prefetcher = self.prefetcher
        if prefetcher is not None and call.key in prefetcher.held and prefetcher.holds(call.key, now):
            source = self._use_prefetch(call)
        return self._finish(call, entry.answer, source, age, entry.nbytes)

    def _stale(self, call: Call, entry: Entry, now: float) -> InferResult | None:
        """An answer past its time: handed out while a new one is fetched, or kept in case no server answers."""
        if now >= entry.revalidate_until:
            call.stale = entry
            return None
        if not self.in_flight(call.key):
            self._refresh(call)
        return self._finish(call, entry.answer, "stale", now - entry.stored_at)

    def _renew(self, call: Call) -> None:
        """Fetch anew what a farther tier had, if it is stale but still handed out."""
        assert self.cache is not None
        now = self.clock()
        entry = self.cache.peek(call.key, now)
        if entry is not None and entry.fresh_until <= now < entry.revalidate_until:
            self._refresh(call)

    def _came_ahead(self, call: Call, source: Source, flight: Flight | None) -> bool:
        """Whether a demanded answer is one that was fetched ahead, or joined a prefetch under way."""
        if self.prefetcher is None:
            return False
        if flight is not None:
            return flight.purpose == "prefetch"
        return source == "cache" and self.prefetcher.holds(call.key, self.clock())

    def _prepare(self, call: Call, metadata: ModelMetadata) -> None:
        """Check what the user passed against the model, before anything is sent, and give the request its fingerprint."""
        inputs = as_inputs(call.value, metadata.inputs if metadata.described else None)
        if self._settings.normalisers and metadata.name in self._settings.normalisers:
            inputs = dict(self._settings.normalisers[metadata.name](inputs))
        if call.outputs and metadata.outputs:
            known = [spec.name for spec in metadata.outputs]
            if wrong := [name for name in call.outputs if name not in known]:
                raise InvalidInputError(
                    f"unknown output {listed(wrong)}; {metadata.name!r} gives {listed(known)}"
                )
        call.inputs = inputs
        call.model_name = metadata.name
        if (
            self.cache is not None or self.events is not None
        ):  # nobody else asks for it, and it reads every input
            call.key = fingerprint(metadata.name, call.version, inputs, call.outputs, call.parameters)
            if call.classes or call.headers:
                call.key = extended(call.key, call.classes or NO_CLASSES, call.headers or NO_HEADERS)

    def _fetch_and_store(self, call: Call) -> Flow[Found]:
        """What the leader of a flight does: the tiers behind memory, else a server or the edge, else what is stale."""
        tiers = self.cache if isinstance(self.cache, TieredCache) else None
        leads = False
        try:
            if call.cache != "refresh":
                entry = self._landed_meanwhile(call)
                if entry is None and tiers is not None:
                    entry, leads = yield from self._ask_tiers(tiers, call)
                    if entry is not None:
                        self._put(call, entry)
                if entry is not None:
                    now = self.clock()
                    source: Source = "cache" if now < entry.fresh_until else "stale"
                    return Found(entry.answer, source, now - entry.stored_at)
            try:
                answer, source = yield from self._fetch(call)
            except MCPError as error:
                if call.stale is None or not no_server_answered(error):
                    raise
                return Found(call.stale.answer, "stale", self.clock() - call.stale.stored_at)
            fresh = self._store(call, answer, source)
            if tiers is not None and fresh is not None and (source == "server" or not self.endpoints):
                # No deadline: the tiers bound their own time, and an answer that came is not lost to keeping it.
                yield Run(lambda: tiers.keep(call.key, fresh, self.clock()), math.inf)
            return Found(answer, source)
        finally:
            if tiers is not None and leads:
                tiers.land(call.key, call.model_name)

    def _landed_meanwhile(self, call: Call) -> Entry | None:
        """What an equal call has put into memory between this one's look there and its becoming the leader."""
        assert self.cache is not None
        now = self.clock()
        entry = self.cache.peek(call.key, now)
        if entry is None or now >= entry.fresh_until or not _young_enough(call, entry, now):
            return None
        if call.purpose == "demand":
            self.cache.get(call.key, now)  # counts the reference
        return entry

    # Between two looks at the tiers while another process of this machine asks the server: a tenth of a quick inference.
    _LOOK_AGAIN_S = 0.01

    def _ask_tiers(self, tiers: TieredCache, call: Call) -> Flow[tuple[Entry | None, bool]]:
        """What is behind memory and may be handed out, or ``None`` and whether this process is the one to ask the server.

        The lead comes before the look: whoever had it before has kept the answer by then. Another process is waited for
        half of the call's time at most, since it may be stopped.
        """
        patience = call.started + (call.deadline - call.started) / 2
        while True:
            leads = tiers.lead(call.key, call.model_name)
            asks = False
            try:
                entry: Entry | None = yield Run(
                    lambda: tiers.fetch(call.key, call.model_name, self.clock()), call.deadline
                )
                now = self.clock()
                if entry is not None and self._is_of_this_model(call, entry):
                    if _young_enough(call, entry, now) and now < _handed_out_until(call, entry):
                        return entry, False
                    call.stale = entry
                asks = leads
            finally:
                if leads and not asks:
                    tiers.land(call.key, call.model_name)
            if asks:
                return None, True
            if now + self._LOOK_AGAIN_S >= patience:
                return None, False
            yield Sleep(self._LOOK_AGAIN_S)

    def _fetch(self, call: Call) -> Flow[tuple[Answer, Source]]:
        """Ask a server, or run the model here: ``local.py`` says which, where there is an edge."""
        local = self.local
        if local is None or not local.takes_part(call):
            return (yield from self._demand_server(call, call.deadline)), "server"
        try:
            answer, source = yield from local.answer(call, self._demand_server)
        except InvalidInputError:  # the model on this machine may have changed since it was described
            self._metadata.pop((call.model, call.version), None)
            raise
        if source == "edge" and local.stays(call) and self._notice_change(call, answer, "edge"):
            yield from self._forget_answers(answer.model)
        return answer, source

    def _demand_server(self, call: Call, deadline: float) -> Flow[Answer]:
        """Ask a server; prefetches make room meanwhile, and stop where it does not answer."""
        prefetcher = self.prefetcher
        if prefetcher is None:
            return (yield from self._ask_server(call, deadline))
        demanded = call.purpose == "demand"
        others = prefetcher.demand_started() if demanded else 0
        asked_at = self.clock()
        try:
            answer = yield from self._ask_server(call, deadline)
            call.server_s = self.clock() - asked_at
            call.answer_bytes = nbytes_of(answer.outputs)
            return answer
        except MCPError as error:
            if no_server_answered(error):
                prefetcher.overloaded(error)
            raise
        finally:
            if demanded:
                prefetcher.demand_finished(call.model_name, call.server_s or None, others=others)

    def _ask_server(self, call: Call, deadline: float) -> Flow[Answer]:
        metadata = self._metadata.get((call.model, call.version))

        try:
            answer = yield from self.servers.infer(call, metadata, deadline)
        except (NotFoundError, RequestRejectedError):
            # The model may have changed since it was described: ask again next time.
            self._metadata.pop((call.model, call.version), None)
            raise
        if self._notice_change(call, answer):
            yield from self._forget_answers(answer.model)
        return answer

    def _forget_answers(self, model: str) -> Flow[None]:
        cache = self.cache
        if cache is not None:
            yield Run(lambda: cache.invalidate(model=model), math.inf)

    def _store(self, call: Call, answer: Answer, source: Source) -> Entry | None:
        """Keep an answer in memory, as long as ``cache/freshness.py`` says; returns what was kept.

        An edge answer given for a server that was away is not kept: it may differ in the last digits.
        """
        if source == "edge" and self.local is not None and not self.local.stays(call):
            return None
        call_ttl_s = call.cache if type(call.cache) is float else None
        entry = self.freshness.entry(
            answer, call_ttl_s=call_ttl_s, now=self.clock(), path=call.path, session=call.session
        )
        if entry is not None:
            self._put(call, entry)
        return entry

    def _put(self, call: Call, entry: Entry) -> None:
        assert self.cache is not None
        if call.job is not None and self.prefetcher is not None:
            self.prefetcher.stored(call.key, call.job)
        for key, _ in self.cache.put(call.key, entry, self.clock(), reference=call.purpose == "demand"):
            if self.prefetcher is not None and self.prefetcher.holds(key):
                self.prefetcher.lost(key, "evicted")

    def _finish(
        self, call: Call, answer: Answer, source: Source, age_s: float = 0.0, nbytes: int | None = None
    ) -> InferResult:
        """Count it, tell telemetry, let the prefetcher learn and plan; hand out the result."""
        latency_ms = (self.clock() - call.started) * 1e3
        if call.job is not None or call.background:
            return InferResult(answer, source=source, latency_ms=latency_ms, request_id=call.id)
        with self._lock:
            self._sources[source] += 1
        if self.observer is not None and not call.observed:
            self.observer.ended(self._notice(call, "response", source))
        prefetcher = self.prefetcher
        if self.events is not None:
            self.events.record(
                call.session,
                call.path,
                prefetcher.route_of(call.path) if prefetcher is not None else "",
                call.key,
                answer.model,
                source,
                latency_ms,
                nbytes_of(answer.outputs) if nbytes is None else nbytes,
                call.prefetch_id,
                "used" if source == "prefetch" else "",
            )
        # One with headers of its own is not learned from: fetched ahead without them it would be another request.
        if prefetcher is not None and call.session and call.path and not call.headers:
            prefetcher.observe(call)
        return InferResult(answer, source=source, latency_ms=latency_ms, request_id=call.id, age_s=age_s)

    def _failed(self, call: Call, error: MCPError) -> None:
        if call.purpose == "prefetch":
            return
        with self._lock:
            self._sources["error"] += 1
        if self.events is not None and not isinstance(error, InvalidInputError):
            latency_ms = (self.clock() - call.started) * 1e3
            route = self.prefetcher.route_of(call.path) if self.prefetcher is not None else ""
            self.events.record(call.session, call.path, route, call.key, call.model, "error", latency_ms, 0)

    def _use_prefetch(self, call: Call) -> Source:
        """The first demand for what was fetched ahead: the prefetch has paid off."""
        assert self.prefetcher is not None
        call.prefetch_id = self.prefetcher.used(call.key)
        return "prefetch"

    def report_prefetch(self, job: Job, key: bytes, outcome: Outcome) -> None:
        """Tell telemetry that what was fetched ahead came to nothing."""
        if self.events is not None and self.prefetcher is not None:
            route = self.prefetcher.route_of(job.path)
            model = job.model or self._default_model
            self.events.record(
                job.session, job.path, route, key, model, "prefetch", 0.0, 0, job.prefetch_id, outcome
            )

    def _notice_change(self, call: Call, answer: Answer, where: Literal["server", "edge"] = "server") -> bool:
        """Whether the model was replaced there: then its cached answers and its description are of another one."""
        identity = answer.digest or answer.version
        if not identity:
            return False
        # Server and edge may have different files of one model, an optimised one here; each is compared with itself.
        name = answer.model, call.version if where == "server" else f"{call.version}@edge"
        known = self._digests.get(name)
        self._digests[name] = identity
        if known is None or not _differ(known, identity):
            return False
        log.info("model %s changed on the %s (%s → %s)", answer.model, where, known, identity)
        for named in [
            name for name, metadata in tuple(self._metadata.items()) if metadata.name == answer.model
        ]:
            self._metadata.pop(named, None)
        return True

    def _is_of_this_model(self, call: Call, entry: Entry) -> bool:
        """Whether an entry of another process is an answer of the model that the server has now, as far as is known."""
        identity = entry.answer.digest or entry.answer.version
        return not identity or not _differ(
            self._digests.setdefault((entry.answer.model, call.version), identity), identity
        )

    # --- for streaming.py ---

    def prepare(self, call: Call) -> Flow[None]:
        """Check the call's inputs against the model's description."""
        call.trace = trace_headers()
        self._prepare(call, (yield from self.describe(call)))

    def reach(self, call: Call) -> Flow[tuple[Endpoint, ClientCodec]]:
        """An endpoint for a stream, and what it speaks."""
        return (yield from self.servers.reach(call))

    def stream_ended(self, call: Call, endpoint: Endpoint, error: BaseException | None) -> None:
        """Count a stream as one request; one that the caller left early counts as nothing."""
        self.servers.leave(endpoint, error)
        if isinstance(error, MCPError):
            self._failed(call, error)
        elif error is None:
            with self._lock:
                self._sources["server"] += 1

    # --- what a server is and what it serves ---

    def describe(self, call: Call) -> Flow[ModelMetadata]:
        """The model's inputs and outputs: known, else from the server or the edge, whichever the edge's policy puts first."""
        name = (call.model, call.version)
        metadata = self._metadata.get(name)
        if metadata is not None:
            return metadata
        missing = self._missing.get(name)
        if missing is not None and self.clock() < missing[0]:
            raise copy.copy(missing[1])
        model, local = call.model or self._default_model, self.local
        if local is not None:
            described = yield from local.describes(call, model)
            if described is not None:
                if local.policy(model) != "fallback" or not self.endpoints:
                    self._metadata[name] = described
                return described
        asking = call
        if local is not None:
            asking = replace(call, deadline=(yield from local.described_until(call, model)))
        try:
            metadata, _ = yield from self._shared(("metadata", *name), asking, self._ask_metadata)
            self._metadata[name] = metadata
            if metadata.digest:
                self._digests.setdefault((metadata.name, call.version), metadata.digest)
            yield from self._file_description(call, metadata)
            return metadata
        except MCPError as error:
            if isinstance(error, NotFoundError):
                self._believe_missing(name, error)
            if no_server_answered(error):
                filed = yield from self._filed_description(call)
                if filed is not None:
                    return filed
            if local is None or not call.fallback or not no_server_answered(error):
                raise
            local.undescribed(error)
            server_error = error
        finally:
            call.endpoint, call.attempts = asking.endpoint, asking.attempts
        try:
            stand_in: ModelMetadata = yield Run(
                lambda: local.models.metadata(model, call.version), call.deadline
            )
        except EdgeError as error:
            server_error.add_note(f"The edge could not answer either: {error}")
            raise server_error from error
        return stand_in

    def _file_description(self, call: Call, metadata: ModelMetadata) -> Flow[None]:
        """Keep what a server said of a model behind memory, for a process that starts while it is away."""
        tiers, key = self._tiers_for(call)
        if tiers is not None and self.clock() < call.deadline:
            entry = descriptions.pack(metadata, self.clock())
            yield Run(lambda: tiers.keep(key, entry, self.clock()), call.deadline)

    def _filed_description(self, call: Call) -> Flow[ModelMetadata | None]:
        tiers, key = self._tiers_for(call)
        if tiers is None or self.clock() >= call.deadline:
            return None
        entry: Entry | None = yield Run(lambda: tiers.fetch(key, "", self.clock()), call.deadline)
        return descriptions.unpack(entry) if entry is not None else None

    def _tiers_for(self, call: Call) -> tuple[TieredCache | None, bytes]:
        tiers = self.cache if isinstance(self.cache, TieredCache) and call.cache is not False else None
        urls = [site.url for site in self.endpoints.sites] if tiers is not None else []
        return tiers, descriptions.key_of(urls, call.model or self._default_model, call.version)

    _MOST_MISSING = 1000  # names: whoever asks for ever new ones must not fill the memory

    def _believe_missing(self, name: tuple[str, str], error: NotFoundError) -> None:
        if len(self._missing) >= self._MOST_MISSING:
            self._missing.clear()
        # A copy: the error goes on to say which request it was of.
        self._missing[name] = self.clock() + self._settings.not_found_s, copy.copy(error)

    def _ask_metadata(self, call: Call) -> Flow[ModelMetadata]:
        def exchange(endpoint: Endpoint) -> Flow[ModelMetadata]:
            codec = yield from self.servers.codec(endpoint, call.deadline)
            model = call.model or self._default_model
            if not model:
                names = yield from self.servers.list_models(endpoint, codec, call.deadline)
                if len(names) != 1:
                    raise InvalidInputError(
                        f"the server has {len(names)} models: {listed(names)}; pass model=…"
                    )
                model = names[0]
            response = yield Send(endpoint, codec.metadata(model, call.version), call.deadline)
            return codec.decode_metadata(response)

        return (yield from self.servers.with_retries(call, call.deadline, exchange, repeatable=True))

    def models(self, call: Call) -> Flow[list[str]]:
        """The names of the models that the server has."""

        def exchange(endpoint: Endpoint) -> Flow[list[str]]:
            codec = yield from self.servers.codec(endpoint, call.deadline)
            return (yield from self.servers.list_models(endpoint, codec, call.deadline))

        return (yield from self.servers.with_retries(call, call.deadline, exchange, repeatable=True))

    # --- for operations.py ---

    def name_of(self, call: Call) -> Flow[str]:
        """The model that a call is about: the one it names, the client's, or the server's only one."""
        return call.model or self._default_model or (yield from self.describe(call)).name

    def forget(self, model: str) -> Flow[None]:
        """After a load or unload: what is known of the model, its answers included, is of one that is no more."""
        for name, metadata in tuple(self._metadata.items()):
            if model in (name[0], metadata.name):
                self._metadata.pop(name, None)
        for name in tuple(self._missing):
            if name[0] in (model, ""):
                self._missing.pop(name, None)
        if (cache := self.cache) is not None:
            yield Run(lambda: cache.invalidate(model=model), math.inf)

    # --- the one single flight ---

    def _shared(self, key: Any, call: Call, work: Callable[[Call], Flow[T]]) -> Flow[tuple[T, Flight | None]]:
        """Single flight: one call does the work, equal calls meanwhile wait for it and get the same.

        Returns the value, and the flight it came with if this call did not lead. A leader that failed for a reason of
        its own (its deadline, its cancellation, a broken connection) does not fail the rest: the next one leads.
        """
        while True:
            with self._lock:
                flight = self._flights.get(key)
                leads = flight is None
                if flight is None:
                    # A renewal is no prefetch: whoever joins it has not been foreseen.
                    flight = self._flights[key] = Flight("demand" if call.background else call.purpose)
            if not leads:
                landing: Landing = yield Wait(flight, call.deadline)
                if landing.error is not None:
                    raise copy.copy(landing.error)
                if landing.again:
                    continue
                return landing.value, flight
            landing = Landing(again=True)
            try:
                value = yield from work(call)
                landing = Landing(value=value)
                return value, None
            except (RequestRejectedError, NotFoundError, InvalidInputError) as error:
                landing = Landing(error=copy.copy(error))  # the leader's own gets its request's id
                raise
            finally:
                with self._lock:
                    if self._flights.get(key) is flight:
                        del self._flights[key]
                flight.landing.set_result(landing)

    def in_flight(self, key: bytes) -> bool:
        return key in self._flights

    def sources(self) -> dict[str, int]:
        """How many demanded requests were answered by each source since the client was made."""
        with self._lock:
            return dict(self._sources)


def fingerprint_of(request: Request) -> bytes:
    key = fingerprint(request.model, request.version, request.inputs, request.outputs, request.parameters)
    return extended(key, request.classes, request.headers) if request.classes or request.headers else key


def _young_enough(call: Call, entry: Entry, now: float) -> bool:
    """Whether an entry is not older than the call allows."""
    return type(call.cache) is not float or now - entry.stored_at <= call.cache


def _handed_out_until(call: Call, entry: Entry) -> float:
    """A stale entry is no answer to the call that is to renew it."""
    return entry.fresh_until if call.background else max(entry.fresh_until, entry.revalidate_until)


def _differ(known: str, identity: str) -> bool:
    """Whether two names of a model's state are of different ones: a digest and a version can't be compared."""
    return known != identity and known.startswith("sha256:") == identity.startswith("sha256:")
