"""The prefetcher at work: watches demanded steps off the hot path, asks the scheduler what to fetch, hands out jobs.

The deciding is pure (``scheduler.py``, ``predictor.py``); this is where it meets threads, the cache and the application.
"""

from __future__ import annotations

import contextlib
import logging
import math
import queue
import secrets
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

from ..config import Prefetch
from ..errors import InvalidInputError, MCPError, NotFoundError, RequestRejectedError, ServerError
from ..request import Outputs, Parameter, Request
from .book import RequestBook
from .costs import Costs, Estimate
from .decisions import NO_DECISION, Decision, Decisions, Outcome
from .handle import PrefetchHandle
from .hot import Gaps, HotKeys
from .predictor import Candidate, Predictor
from .profile import Profile
from .routes import Route, RouteTable
from .scheduler import PrefetchStats, Scheduler

log = logging.getLogger("mcp_client.prefetch")

_MAX_WAITING = 10_000  # steps not yet learned from; beyond it new ones are dropped, not queued without end
_MAX_KEYS = 100_000
_PROFILE_EVERY_S = 600.0
_PROFILE_RETRY_S = 30.0
_BACK_OFF_S = 5.0  # for an endpoint that fails without saying for how long to leave it alone
_CLOSE_S = 5.0
# While steps come thick and fast they are learned from in batches: waking a thread for each would take the interpreter's lock
# from the application as often.
_BATCH_S = 0.003
# A prefetch that demanded requests have kept waiting for so long has missed its moment.
_STALE_S = 1.0
# What was fetched ahead and is gone without anyone having asked is looked for this often.
_SWEEP_S = 5.0

FetchProfile = Callable[[str | None], tuple[Profile | None, str]]


class Life(NamedTuple):
    """Of an answer in the cache: when it was stored and until when it is fresh, in seconds of the monotonic clock."""

    stored_at: float
    fresh_until: float


@dataclass(frozen=True, slots=True)
class Job:
    """One prefetch: the arguments of an ``infer``, and the decision that it carries out.

    ``call``: the whole ``infer``, where the application gave it. ``renews``: the fresh answer is to be replaced, which pays off
    once it would have expired, at ``counts_from``.
    """

    value: Any
    model: str | None = None
    version: str | None = None
    outputs: Outputs | None = None
    parameters: Mapping[str, Parameter] | None = None
    session: str = ""
    path: str = ""
    prefetch_id: str = ""
    decision: Decision = NO_DECISION
    call: Any = None
    handle: PrefetchHandle | None = None
    renews: bool = False
    counts_from: float = 0.0


class Step(Protocol):
    """What is learned from: a demanded call that was answered. ``server_s``: how long a server took for it, if it did."""

    session: str
    path: str
    key: bytes
    started: float
    server_s: float
    answer_bytes: int

    def request(self) -> Request: ...


class Prefetcher:
    """Learns from demanded steps and fetches what is likely next.

    ``issue`` starts a job in the background, which ends in ``finished``. ``life`` tells of the answer to a fingerprint that is
    cached (of one under way: until infinity); ``fingerprint`` gives a request's. ``report`` is told how each prefetch ended.
    ``fetch_profile`` (etag → profile or None, etag) brings what the fleet has learned: before the first step is planned, and
    again every 10 minutes.
    """

    def __init__(
        self,
        config: Prefetch,
        *,
        issue: Callable[[Job], None],
        life: Callable[[bytes], Life | None],
        fingerprint: Callable[[Request], bytes],
        report: Callable[[Job, bytes, Outcome], None] = lambda job, key, outcome: None,
        fetch_profile: FetchProfile | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._issue = issue
        self._life = life
        self._report = report
        self._fetch_profile = fetch_profile
        self._clock = clock
        self._routes = RouteTable()
        self._predictor = Predictor(order=config.order, routes=self._routes)
        self.route_of = lru_cache(maxsize=10_000)(self._route_of)
        self._costs = Costs(config.ms_per_mib, self.route_of)
        self._scheduler = Scheduler(config, self._predictor, self._estimate)
        self._book = RequestBook(config.book_bytes, fingerprint)
        self._lock = threading.Lock()
        # Fetched ahead, not yet asked for (single dict operations are atomic).
        self.held: dict[bytes, Job] = {}
        self._keys: OrderedDict[str, bytes] = OrderedDict()  # path → its last fingerprint (under _lock)
        self._under_way: set[str] = set()  # paths being fetched ahead (under _lock)
        self._hot = HotKeys()
        self._gaps = Gaps()
        self._before: Step | None = None  # the last step learned from
        self._closed = False
        self.reset()

    def reset(self) -> None:
        """Threads and queues afresh: for a new client, and for the child after a fork."""
        self._steps: deque[Step] = deque()
        self._waiting: deque[Job] = deque()  # for a moment without demanded requests under way
        self._idle = True  # the planner waits to be woken, or does not run yet
        self._wake: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._etag: str | None = None
        self._profile_due = 0.0
        self._sweep_due = 0.0
        self._under_way.clear()  # what the parent's threads were fetching is not under way in the child
        self._scheduler.forget_in_flight()

    def locks(self) -> list[threading.Lock]:
        """What another thread may hold while this one forks."""
        return [self._lock, self._scheduler.lock, self._predictor.lock, self._book.lock]

    # --- on the hot path: cheap, and never waiting ---

    def observe(self, step: Step) -> None:
        """Learn from a demanded step and plan, soon, in the planner's thread."""
        steps = self._steps
        if self._closed or len(steps) >= _MAX_WAITING:
            return
        # After the append, as the planner looks at the steps after it has said that it is idle: one sees the other.
        steps.append(step)
        if self._idle:
            self._rouse()

    def holds(self, key: bytes, now: float = math.inf) -> bool:
        """Whether the answer was fetched ahead and nobody has asked for it yet; at ``now``, whether asking would count."""
        job = self.held.get(key)
        return job is not None and now >= job.counts_from

    def used(self, key: bytes) -> str:
        """The first demand for what was fetched ahead; returns its prefetch id ("" if it was not fetched ahead)."""
        job = self.held.pop(key, None)
        if job is None:
            return ""
        self._scheduler.settled(job.decision, used=True)
        return job.prefetch_id

    def lost(self, key: bytes, outcome: Outcome) -> None:
        """What was fetched ahead left the cache before anyone asked for it."""
        job = self.held.pop(key, None)
        if job is not None:
            self._scheduler.settled(job.decision, used=False, outcome=outcome)
            self._report(job, key, outcome)

    def demand_started(self) -> int:
        """A demanded request goes to a server; how many others of this client are under way. ``demand_finished`` must follow."""
        return self._scheduler.demand_started(len(self._waiting))

    def demand_finished(self, model: str, seconds: float | None, *, others: int) -> None:
        """``seconds``: how long the server took to answer, if it did."""
        self._scheduler.demand_finished(model, seconds, self._clock(), others=others)
        if self._waiting:
            self._start_waiting()

    def overloaded(self, error: MCPError) -> None:
        """A demanded request met a server in trouble: it gets no extra work for a while."""
        asked = error.retry_after_s if isinstance(error, ServerError) else None
        self._scheduler.back_off(asked or _BACK_OFF_S, self._clock())

    def load(self, profile: Profile) -> None:
        """Predict from what the fleet has learned, too, from now on. For any thread."""
        self._predictor.load(profile)

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

    def _estimate(self, path: str) -> Estimate:
        template = self.route_of(path)
        route = self._routes.named(template) if template else None
        return self._costs.estimate(path, route.importance if route is not None else 1.0)

    # --- in the planner's thread ---

    def plan(self, steps: Sequence[Step]) -> None:
        """Learn some steps, and start the prefetches that the last one of each session suggests."""
        last: dict[str, Step] = {}
        reloads = 0
        before = self._before
        for step in steps:
            if (
                before is not None
                and step.key == before.key
                and step.path == before.path
                and step.session == before.session
            ):
                self._hot.seen(step.path, step.key, step.started)
                reloads += 1
            else:
                self._learn(step)
                last[step.session] = step
            before = step
        self._before = before
        if reloads:
            self._scheduler.demanded(reloads)
        for session in last:
            self._plan(session)

    def _learn(self, step: Step) -> None:
        self._hot.seen(step.path, step.key, step.started)
        self._gaps.step(step.session, step.started)
        if step.server_s:
            self._costs.note(step.path, step.server_s, step.answer_bytes)
        self._remember(step.path, step.key)
        if not self.route_of(step.path):
            self._book.remember(step.path, step.request(), step.key)
        self._scheduler.learn(step.session, step.path, self._clock())

    def _plan(self, session: str) -> None:
        for decision in self._scheduler.plan(session, self._clock(), unwanted=self._unwanted):
            job = self._job(decision)
            if job is None:
                self._scheduler.withdrawn(decision, "nothing makes its inputs")
            else:
                self._send(job)

    def _unwanted(self, candidate: Candidate) -> str:
        """Why a candidate need not or can't be fetched, or ""."""
        path = candidate.path
        with self._lock:
            key = self._keys.get(path)
            if path in self._under_way:
                return "under way"
        life = self._life(key) if key is not None else None
        if life is not None and not self._expires_before_need(life):
            return "at hand"
        if self._book.get(path) is None and not self.route_of(path):
            return "nothing makes its inputs"
        return ""

    def _expires_before_need(self, life: Life) -> bool:
        """Whether a fresh answer will be gone when it is needed, and a new one would not be."""
        needed_in = self._gaps.to_next_step()
        return life.fresh_until - self._clock() < needed_in < life.fresh_until - life.stored_at

    def _job(self, decision: Decision) -> Job | None:
        path = decision.path
        try:
            built = self.build(path)
        except Exception:
            log.exception("the route of %s failed to build its inputs; it is not fetched ahead", path)
            return None
        if built is None:
            request = self._book.get(path)
            if request is None:
                return None
            built = Job(request.inputs, request.model, request.version, request.wanted, request.parameters)
        with self._lock:
            key = self._keys.get(path)
            self._under_way.add(path)
        life = self._life(key) if key is not None else None
        return replace(
            built,
            session=decision.session,
            path=path,
            prefetch_id=secrets.token_hex(8),
            decision=decision,
            renews=life is not None,
            counts_from=life.fresh_until if life is not None else 0.0,
        )

    def _remember(self, path: str, key: bytes) -> None:
        with self._lock:
            self._keys[path] = key
            self._keys.move_to_end(path)
            if len(self._keys) > _MAX_KEYS:
                self._keys.popitem(last=False)

    def _refresh_hot(self, now: float) -> None:
        """Fetch anew the hot keys whose answers are about to expire."""
        for path in self._hot.due(now, self._life, self._costs.seconds):
            with self._lock:
                if path in self._under_way:
                    continue
            if self._book.get(path) is None and not self.route_of(path):
                continue
            decision = self._scheduler.refresh(path, now, reason="hot, and about to expire")
            if decision is not None:
                job = self._job(decision)
                if job is None:
                    self._scheduler.withdrawn(decision, "nothing makes its inputs")
                else:
                    self._send(job)

    def _sweep(self, now: float) -> None:
        """Settle what was fetched ahead and is in the cache no more, which nobody may ever ask for."""
        self._sweep_due = now + _SWEEP_S
        for key, job in tuple(self.held.items()):
            life = self._life(key)
            if life is None and now >= job.counts_from:
                self.lost(key, "expired")

    # --- starting a job, and what becomes of it ---

    def by_hand(self, job: Job, handle: PrefetchHandle) -> None:
        """Fetch what the application asks for, at the next moment without demanded requests under way."""
        decision = self._scheduler.by_hand(job.session, job.path, self._clock())
        if not decision.fetched:
            handle.end("refused")
            return
        if not self._threads:
            self._start()
        self._send(replace(job, prefetch_id=secrets.token_hex(8), decision=decision, handle=handle))

    def _send(self, job: Job) -> None:
        self._waiting.append(job)
        self._start_waiting()

    def _start_waiting(self) -> None:
        """Start what waits, if nobody who was asked for is kept waiting by it."""
        while self._waiting and not self._scheduler.goes_first():
            try:
                job = self._waiting.popleft()
            except IndexError:  # another thread was quicker
                return
            self._issue(job)

    def hold_back(self, job: Job) -> bool:
        """Whether demanded requests came first after all; the job then waits for the next moment without."""
        if not self._scheduler.goes_first():
            return False
        self._waiting.append(job)
        if not self._scheduler.goes_first():  # they ended meanwhile, and did not see this one wait
            self._start_waiting()
        return True

    def _drop_stale(self, now: float) -> None:
        for job in tuple(self._waiting):
            limit = job.call.deadline if job.call is not None else job.decision.at + _STALE_S
            if now >= limit:
                try:
                    self._waiting.remove(job)
                except ValueError:  # it was started meanwhile
                    continue
                self.finished(job, None, sent=False, cancelled=True)

    def stored(self, key: bytes, job: Job) -> None:
        """The answer to a job is about to be put into the cache."""
        replaced = self.held.get(key)
        if replaced is not None:
            self.lost(key, "expired")
        self.held[key] = job
        if job.path:
            self._remember(job.path, key)

    def finished(self, job: Job, error: MCPError | None, *, sent: bool, cancelled: bool = False) -> None:
        """A job that was issued has ended. ``sent``: whether it cost the server anything."""
        decision = job.decision
        with self._lock:
            self._under_way.discard(job.path)
        if not sent:
            if error is None and not cancelled:
                self._scheduler.withdrawn(decision, "at hand")
            else:
                self._scheduler.withdrawn(decision)
        elif error is None and not cancelled:
            self._scheduler.fetched(decision)
        else:
            self._scheduler.failed(decision, "cancelled" if cancelled else "failed")
        if cancelled or error is not None:  # the protocol knows one word for both: it brought nothing
            self._report(job, b"", "cancelled")
        if error is not None:
            log.debug("prefetch of %s failed: %s", job.path, error)
            if not isinstance(error, (RequestRejectedError, NotFoundError, InvalidInputError)):
                self.overloaded(error)
        if job.handle is not None:
            ending = "cancelled" if cancelled else "failed" if error else "fetched" if sent else "at hand"
            job.handle.end(ending, error)  # type: ignore[arg-type]

    def stats(self) -> PrefetchStats:
        return self._scheduler.stats()

    def explain(self) -> Decisions:
        """The last decisions, oldest first: what was fetched ahead or not, and why."""
        return self._scheduler.explain()

    # --- threads ---

    def in_worker(self, work: Callable[[], None]) -> None:
        """Run ``work`` in one of at most ``max_in_flight`` threads."""
        self._work.put(work)

    def close(self) -> None:
        """Stop learning and fetching; what is under way is waited for, for a while. What was not asked for is settled."""
        self._closed = True
        self._wake.put(None)
        for _ in self._threads:
            self._work.put(None)
        deadline = time.monotonic() + _CLOSE_S
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))
        while self._waiting:
            self.finished(self._waiting.popleft(), None, sent=False, cancelled=True)
        for key in tuple(self.held):
            self.lost(key, "evicted")

    def _rouse(self) -> None:
        self._idle = False
        if not self._threads:
            self._start()
        self._wake.put(None)

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
        self._refresh_profile()
        while not self._closed:
            if not steps:
                self._idle = True
                if not steps:
                    self._sleep()
                self._idle = False
            batch = [steps.popleft() for _ in range(len(steps))]
            try:
                self.plan(batch)
                now = self._clock()
                self._refresh_hot(now)
                self._drop_stale(now)
                if now >= self._sweep_due:
                    self._sweep(now)
                self._refresh_profile()
            except Exception:
                log.exception("planning after %d steps failed; nothing is fetched ahead for them", len(batch))
            if len(batch) > 1:
                time.sleep(_BATCH_S)

    def _sleep(self) -> None:
        """Until there is a step, or something falls due."""
        now = self._clock()
        due = self._hot.next_due
        if self._waiting:
            due = min(due, now + _STALE_S / 4)
        if self.held:
            due = min(due, self._sweep_due)
        with contextlib.suppress(queue.Empty):
            self._wake.get(timeout=max(0.0, due - now) if due < now + 3600 else None)

    def _run_worker(self) -> None:
        work = self._work
        while (job := work.get()) is not None:
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
