"""The profile in service: mined when there is something new, cut to a size, rendered once for all who ask."""

from __future__ import annotations

import hashlib
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any

import msgpack
import sqlalchemy as sa

from mcp_client.prefetch.profile import SEPARATOR, Profile

from .building import build, frequent_paths, today
from .forgetting import whole
from .mining import Miner
from .rankers import version_in_service
from .schema import events, mined, path_sums, transitions
from .sessions import LOST
from .store import Store

DEFAULT_PROFILE_BYTES = 1 << 20
MAX_PROFILE_BYTES = 16 << 20
# Mining takes at most this share of a thread's time, so that many requests with few new events each cost little; but a profile
# is never older than a few seconds.
_SHARE = 0.1
_LONGEST_REST_S = 5.0
# How long a request may wait for mining; after a long absence of both, what is behind is caught up with over several requests.
_WITHIN_S = 2.0
_LONGEST_SESSION = 10_000


@dataclass
class Rendered:
    """A profile as bytes, with an ETag for each form."""

    profile: Profile
    json: bytes = field(init=False)
    json_etag: str = field(init=False)

    def __post_init__(self) -> None:
        self.json = self.profile.to_json()
        self.json_etag = _etag(self.json)

    @cached_property
    def msgpack(self) -> bytes:
        packed = msgpack.packb(self.profile.to_dict())
        assert isinstance(packed, bytes)
        return packed

    @cached_property
    def msgpack_etag(self) -> str:
        return _etag(self.msgpack)


class Profiles:
    """Answers what has been learned, for one application at a time."""

    def __init__(self, store: Store, *, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self._miner = Miner(store)
        self._monotonic = monotonic
        self._lock = threading.Lock()  # guards what follows
        self._rest_until: dict[int, float] = {}
        self._cache: dict[tuple[int, int], tuple[tuple[Any, ...], Rendered]] = {}

    def mine(self, app: int, *, within_s: float = math.inf) -> int:
        """Count what is new now; how many events that were."""
        started = self._monotonic()
        counted = self._miner.mine(app, within_s=within_s)
        took = self._monotonic() - started
        if took < within_s:  # else there is more to do
            self._rest_until[app] = self._monotonic() + min(took / _SHARE, _LONGEST_REST_S)
        return counted

    def rendered(self, app: int, max_bytes: int = DEFAULT_PROFILE_BYTES) -> Rendered:
        """The profile, at most ``max_bytes`` of JSON."""
        with self._lock:
            self._keep_up(app)
            state = self.state(app)
            cached = self._cache.get((app, max_bytes))
            if cached is None or cached[0] != state:
                with self._store.read() as db:
                    profile = build(
                        db,
                        app,
                        version=str(state[0] if state else 0),
                        order=self._miner.order,
                        max_bytes=max_bytes,
                    )
                cached = (state, Rendered(profile))
                self._cache[app, max_bytes] = cached
                while len(self._cache) > 64:
                    self._cache.pop(next(iter(self._cache)))
            return cached[1]

    def frequent_paths(self, app: int, min_support: int, limit: int) -> list[dict[str, object]]:
        with self._lock:
            self._keep_up(app)
        with self._store.read() as db:
            return frequent_paths(db, app, min_support, limit)

    def graph(self, app: int, session: str, limit: int) -> dict[str, Any]:
        """Nodes and edges with their counts, the heaviest ``limit`` edges:

        of one session, or of all that is learned.
        """
        if session:
            return self._session_graph(app, session, limit)
        with self._lock:
            self._keep_up(app)
        t, s = transitions.c, path_sums.c
        with self._store.read() as db:
            edges = db.execute(
                sa.select(t.context, t.step, t.n)
                .where(t.app == app, t.kind == "path", t.context != "", t.context.not_like(f"%{SEPARATOR}%"))
                .order_by(t.n.desc(), t.context, t.step)
                .limit(limit)
            ).all()
            names = sorted({name for edge in edges for name in edge[:2]})
            asked = dict(db.execute(sa.select(s.path, s.asked).where(s.app == app, s.path.in_(names))).all())
            one = today(db.execute(sa.select(mined).where(mined.c.app == app)).first())
        counts = {name: asked.get(name, 0.0) / one for name in names}
        return _graph("", counts, {edge[:2]: edge[2] / one for edge in edges}, limit)

    def _session_graph(self, app: int, session: str, limit: int) -> dict[str, Any]:
        e = events.c
        with self._store.read() as db:
            steps = db.execute(
                sa.select(e.path, e.t, e.source, e.latency_ms)
                .where(e.app == app, e.session == session, e.path != "", e.outcome.not_in(LOST))
                .order_by(e.id)
                .limit(_LONGEST_SESSION)
            ).all()
        paths = [step.path for step in steps]
        graph = _graph(session, Counter(paths), Counter(pairwise(paths)), limit)
        graph["steps"] = [
            {"path": path, "t": t, "source": source, "latency_ms": latency_ms}
            for path, t, source, latency_ms in steps
        ]
        return graph

    def state(self, app: int) -> tuple[Any, ...]:
        """Something that differs once what is learned does."""
        with self._store.read() as db:
            row = db.execute(
                sa.select(mined.c.watermark, mined.c.mined_at, mined.c.half_life_days).where(
                    mined.c.app == app
                )
            ).first()
            ranker = version_in_service(db, app)
        return (*row, ranker) if row else ()

    def behind(self, app: int) -> bool:
        """Whether there are events that are not mined yet."""
        return self._store.last_event(app) > self._miner.watermark(app)

    def status(self, app: int) -> dict[str, Any]:
        """Where mining stands: its last event, steps and visits counted, and how many events wait."""
        with self._store.read() as db:
            row = db.execute(sa.select(mined).where(mined.c.app == app)).first()
            low = row.watermark if row else 0
            waiting = db.execute(
                sa.select(sa.func.count()).where(events.c.app == app, events.c.id > low)
            ).scalar_one()
        return {
            "version": str(low),
            "mined_at": row.mined_at if row else None,
            "steps": row.steps if row else 0,
            "visits": row.visits if row else 0,
            "waiting": waiting,
        }

    def _keep_up(self, app: int) -> None:
        """Mine if there is something new and the last time is long enough ago. Call with the lock held."""
        if self._monotonic() >= self._rest_until.get(app, 0.0) and self.behind(app):
            self.mine(app, within_s=_WITHIN_S)


def _graph(
    session: str, nodes: Mapping[str, float], edges: Mapping[tuple[str, str], float], limit: int
) -> dict[str, Any]:
    heaviest = sorted(edges.items(), key=lambda edge: (-edge[1], edge[0]))[:limit]
    return {
        "session": session,
        "nodes": [{"path": path, "count": whole(n)} for path, n in sorted(nodes.items())],
        "edges": [{"from": one, "to": other, "count": whole(n)} for (one, other), n in heaviest],
    }


def _etag(body: bytes) -> str:
    return f'"{hashlib.sha256(body).hexdigest()[:32]}"'
