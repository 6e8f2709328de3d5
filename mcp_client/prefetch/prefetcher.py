"""The prefetcher at work: watches demanded steps off the hot path, asks the scheduler what to fetch, hands out jobs.

The deciding is pure (``scheduler.py``, ``predictor.py``); this is where it meets threads, the cache and the application.
"""

from __future__ import annotations

import logging
import queue
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Protocol

from ..config import Prefetch
from ..errors import InvalidInputError, MCPError, NotFoundError, RequestRejectedError, ServerError
from ..request import Outputs, Parameter, Request
from .book import RequestBook
from .predictor import NO_CANDIDATE, Candidate, Predictor
from .profile import Profile
from .routes import Route, RouteTable
from .scheduler import Decision, PrefetchStats, Scheduler

log = logging.getLogger("mcp_client.prefetch")

_MAX_WAITING = 10_000  # steps not yet learned from; beyond it new ones are dropped, not queued without end
_MAX_KEYS = 100_000
_PROFILE_EVERY_S = 600.0
_PROFILE_RETRY_S = 30.0
_BACK_OFF_S = 5.0  # for an endpoint that fails without saying for how long to leave it alone
_CLOSE_S = 5.0

FetchProfile = Callable[[str | None], tuple[Profile | None, str]]


@dataclass(frozen=True, slots=True)
class Job:
    """One prefetch: the arguments of an ``infer``, and the candidate that it serves."""

    value: Any
    model: str | None = None
    version: str | None = None
    outputs: Outputs | None = None
    parameters: Mapping[str, Parameter] | None = None
    session: str = ""
    path: str = ""
    prefetch_id: str = ""
    candidate: Candidate = NO_CANDIDATE


class Step(Protocol):
    """What is learned from: a demanded call that was answered."""

    session: str
    path: str
    key: bytes

    def request(self) -> Request: ...


class Prefetcher:
    """Learns from demanded steps and fetches what is likely next.

    ``issue`` starts a job in the background, which ends in ``finished``. ``at_hand`` says whether the answer to a
    fingerprint is cached or under way; ``fingerprint`` gives a request's. ``fetch_profile`` (etag → profile or None, etag)
    brings what the fleet has learned: before the first step is planned, and again every 10 minutes.
    """

    def __init__(
        self,
        config: Prefetch,
        *,
        issue: Callable[[Job], None],
        at_hand: Callable[[bytes], bool],
        fingerprint: Callable[[Request], bytes],
        fetch_profile: FetchProfile | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._issue = issue
        self._at_hand = at_hand
        self._fetch_profile = fetch_profile
        self._clock = clock
        self._routes = RouteTable()
        self._predictor = Predictor(order=config.order, routes=self._routes)
        self._scheduler = Scheduler(config, self._predictor)
        self._book = RequestBook(config.book_bytes, fingerprint)
        self._lock = threading.Lock()
        self._held: dict[
            bytes, Job
        ] = {}  # fetched ahead, not yet asked for (single dict operations are atomic)
        self._keys: OrderedDict[str, bytes] = (
            OrderedDict()
        )  # path → the fingerprint it had last (under _lock)
        self._under_way: set[str] = set()  # paths being fetched ahead (under _lock)
        self.route_of = lru_cache(maxsize=10_000)(self._route_of)
        self._closed = False
        self.reset()

    def reset(self) -> None:
        """Threads and queues afresh: for a new client, and for the child after a fork."""
        self._steps: queue.SimpleQueue[Step | None] = queue.SimpleQueue()
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._etag: str | None = None
        self._profile_due = 0.0
        self._under_way.clear()  # what the parent's threads were fetching is not under way in the child
        self._scheduler.forget_in_flight()

    def locks(self) -> list[threading.Lock]:
        """What another thread may hold while this one forks."""
        return [self._lock, self._scheduler.lock, self._predictor.lock, self._book.lock]

    # --- on the hot path: cheap, and never waiting ---

    def observe(self, step: Step) -> None:
        """Learn from a demanded step and plan, soon, in the planner's thread."""
        if self._closed or self._steps.qsize() >= _MAX_WAITING:
            return
        self._steps.put(step)
        if not self._threads:
            self._start()

    def holds(self, key: bytes) -> bool:
        """Whether the answer was fetched ahead and nobody has asked for it yet."""
        return key in self._held

    def used(self, key: bytes) -> str:
        """The first demand for what was fetched ahead; returns its prefetch id ("" if it was not fetched ahead)."""
        job = self._held.pop(key, None)
        if job is None:
            return ""
        self._scheduler.settled(job.candidate, used=True)
        return job.prefetch_id

    def lost(self, key: bytes) -> Job | None:
        """What was fetched ahead left the cache before anyone asked for it."""
        job = self._held.pop(key, None)
        if job is not None:
            self._scheduler.settled(job.candidate, used=False)
        return job

    def demand_started(self) -> None:
        self._scheduler.demand_started()

    def demand_finished(self) -> None:
        self._scheduler.demand_finished()

    def overloaded(self, error: MCPError) -> None:
        """A demanded request met a server in trouble: it gets no extra work for a while."""
        asked = error.retry_after_s if isinstance(error, ServerError) else None
        self._scheduler.back_off(asked or _BACK_OFF_S, self._clock())

    # --- routes ---

    def add_route(self, template: str, builder: Callable[..., Any], **target: Any) -> None:
        self._routes.add(Route.of(template, builder, **target))
        self.route_of.cache_clear()

    def build(self, path: str) -> Job | None:
        """The arguments of an ``infer`` for a path that fits a route; ``None`` if none fits or there is no such page."""
        resolved = self._routes.resolve(path)
        if resolved is None:
            return None
        route, params = resolved
        value = route.build(params)
        if value is None:
            return None
        return Job(value, route.model, route.version, route.outputs, route.parameters, path=path)

    def _route_of(self, path: str) -> str:
        resolved = self._routes.resolve(path)
        return resolved[0].template if resolved is not None else ""

    # --- in the planner's thread ---

    def plan(self, step: Step) -> None:
        """Learn one step, and start the prefetches that it suggests."""
        request = step.request()
        self._remember(step.path, step.key)
        if self._routes.resolve(step.path) is None:
            self._book.remember(step.path, request, step.key)
        candidates = self._scheduler.observe(step.session, step.path, self._clock(), wanted=self._is_wanted)
        for candidate in candidates:
            job = self._job(candidate, step.session)
            if job is None:
                self._scheduler.withdrawn(candidate)
            else:
                self._issue(job)

    def _is_wanted(self, path: str) -> bool:
        with self._lock:
            key = self._keys.get(path)
            if path in self._under_way:
                return False
        if key is not None and self._at_hand(key):
            return False
        return self._book.get(path) is not None or self._routes.resolve(path) is not None

    def _job(self, candidate: Candidate, session: str) -> Job | None:
        try:
            built = self.build(candidate.path)
        except Exception:
            log.exception(
                "the route of %s failed to build its inputs; it is not fetched ahead", candidate.path
            )
            return None
        if built is None:
            request = self._book.get(candidate.path)
            if request is None:
                return None
            built = Job(request.inputs, request.model, request.version, request.wanted, request.parameters)
        with self._lock:
            self._under_way.add(candidate.path)
        return replace(
            built, session=session, path=candidate.path, prefetch_id=secrets.token_hex(8), candidate=candidate
        )

    def _remember(self, path: str, key: bytes) -> None:
        with self._lock:
            self._keys[path] = key
            self._keys.move_to_end(path)
            if len(self._keys) > _MAX_KEYS:
                self._keys.popitem(last=False)

    # --- what becomes of a job ---

    def stored(self, key: bytes, job: Job) -> None:
        """The answer to a job is about to be put into the cache."""
        self._held[key] = job
        self._remember(job.path, key)

    def finished(self, job: Job, error: MCPError | None, *, sent: bool) -> None:
        """A job that was issued has ended. ``sent``: whether it cost the server anything."""
        with self._lock:
            self._under_way.discard(job.path)
        if not sent:
            self._scheduler.withdrawn(job.candidate)
        elif error is None:
            self._scheduler.fetched(job.candidate)
        else:
            log.debug("prefetch of %s failed: %s", job.path, error)
            self._scheduler.failed(job.candidate)
            if not isinstance(error, (RequestRejectedError, NotFoundError, InvalidInputError)):
                self.overloaded(error)

    def stats(self) -> PrefetchStats:
        return self._scheduler.stats()

    def explain(self) -> list[Decision]:
        """The last decisions, oldest first: what was fetched ahead or not, and why."""
        return self._scheduler.explain()

    # --- threads ---

    def in_worker(self, work: Callable[[], None]) -> None:
        """Run ``work`` in one of at most ``max_in_flight`` threads."""
        self._work.put(work)

    def close(self) -> None:
        """Stop learning and fetching; what is under way is waited for, for a while."""
        self._closed = True
        self._steps.put(None)
        for _ in self._threads:
            self._work.put(None)
        deadline = time.monotonic() + _CLOSE_S
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))

    def _start(self) -> None:
        with self._lock:
            if self._threads or self._closed:
                return
            loops = [self._run_planner, *[self._run_worker] * self._config.max_in_flight]
            self._threads = [
                threading.Thread(target=loop, name="mcp-prefetch", daemon=True) for loop in loops
            ]
            for thread in self._threads:
                thread.start()

    def _run_planner(self) -> None:
        steps = self._steps
        while not self._closed:
            self._refresh_profile()
            step = steps.get()
            if step is None:
                return
            try:
                self.plan(step)
            except Exception:
                log.exception("planning after %s failed; nothing is fetched ahead for it", step.path)

    def _run_worker(self) -> None:
        work = self._work
        while (job := work.get()) is not None:
            if self._closed:
                continue
            try:
                job()
            except Exception:
                log.exception("a prefetch failed")

    def _refresh_profile(self) -> None:
        now = self._clock()
        if self._fetch_profile is None or now < self._profile_due:
            return
        self._profile_due = now + _PROFILE_EVERY_S
        try:
            profile, self._etag = self._fetch_profile(self._etag)
        except MCPError as error:
            self._profile_due = now + _PROFILE_RETRY_S
            log.warning("no profile from the Profile API (%s); predicting from what this client sees", error)
            return
        if profile is not None:
            self._predictor.load(profile)
