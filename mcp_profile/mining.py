"""Mining, kept up with what arrives: a run counts what is new; the sum is what one run over all would give.

Steps are followed in the order of their event id, because the clocks of clients jump; the clock only says
whether a session paused. (sessions.py says the same in SQL, for engines that count all events at once.)
"""

from __future__ import annotations

import math
import threading
import time
from collections import defaultdict
from dataclasses import dataclass, field, fields
from operator import attrgetter
from typing import Any

import orjson
import sqlalchemy as sa
from sqlalchemy.engine import Connection

from .forgetting import HALF_LIFE_DAYS, rounded, weight
from .schema import events, mined, path_sums, tails, transitions
from .sessions import IDLE_S, LOST
from .steps import ROUTE_ORDER, Step, keys_of
from .store import Store

# Events counted in one go: what bounds memory, and how long the transaction that adds the counts keeps other
# writers waiting.
_CHUNK = 50_000
# A session that was silent for a day starts anew: the server's time, because a client may be days behind with
# its events.
_FORGET_TAILS_S = 86_400.0


# When a visit's last step was, and its last steps, oldest first.
Tail = tuple[float, tuple[Step, ...]]
_NO_TAIL: Tail = (0.0, ())


@dataclass(slots=True)
class Sums:
    """Of one path: see ``schema.path_sums``."""

    asked: float = 0.0
    gap_s: float = 0.0
    gaps: float = 0.0
    latency_ms: float = 0.0
    served: float = 0.0
    bytes: float = 0.0
    answered: float = 0.0


@dataclass(slots=True)
class Counts:
    """What a stretch of events adds. ``grams``: a step behind up to ``order`` steps of its visit, oldest first → how often.

    How much an event counts is its weight (forgetting.py).
    """

    order: int
    grams: dict[tuple[Step, ...], float] = field(default_factory=dict)
    sums: defaultdict[str, Sums] = field(default_factory=lambda: defaultdict(Sums))
    steps: int = 0
    visits: int = 0

    def follow(self, tail: Tail, t: float, step: Step, weight: float) -> Tail:
        """Count a step that comes after ``tail``; returns the tail after it."""
        last, before = tail
        if before and t - last <= IDLE_S:
            if step[0] == before[-1][0]:
                return t, before  # a reload of the same path is no step
            sums = self.sums[before[-1][0]]
            sums.gap_s += rounded(max(0.0, t - last)) * weight
            sums.gaps += weight
        else:
            before = ()
            self.visits += 1
        self.steps += 1
        gram = (*before, step)
        self.grams[gram] = self.grams.get(gram, 0) + weight
        return t, gram[-self.order :]

    def ask(self, path: str, source: str, latency_ms: float, nbytes: int, weight: float) -> None:
        sums = self.sums[path]
        sums.asked += weight
        if source == "server":
            sums.latency_ms += rounded(latency_ms) * weight
            sums.served += weight
        if source != "error":
            sums.bytes += nbytes * weight
            sums.answered += weight


class Miner:
    """Keeps transition counts of up to ``order`` steps in the database.

    Several processes may mine: one of them counts.
    """

    def __init__(self, store: Store, *, order: int = 4) -> None:
        self.order = max(order, ROUTE_ORDER + 1)  # what keys_of needs to see
        self._store = store
        self._lock = threading.Lock()

    def mine(self, app: int, *, within_s: float = math.inf) -> int:
        """Count the events that are new, until all are or the time is over; how many that were."""
        total = 0
        until = time.monotonic() + within_s
        with self._lock:
            while (n := self._step(app)) is not None:
                total += n
                if time.monotonic() > until:
                    break
        return total

    def watermark(self, app: int) -> int:
        """The id of the last event that is counted."""
        with self._store.read() as db:
            return int(db.execute(sa.select(mined.c.watermark).where(mined.c.app == app)).scalar() or 0)

    def _step(self, app: int) -> int | None:
        """Count one chunk; ``None`` if there is nothing new."""
        with self._store.read() as db:
            stand = db.execute(sa.select(mined).where(mined.c.app == app)).first()
            low = int(stand.watermark) if stand else 0
            rows = self._rows(db, app, low)
            if not rows:
                return None
            since = int(stand.since) if stand else rows[0].day
            half_life = float(stand.half_life_days) if stand else HALF_LIFE_DAYS
            weights = {day: weight(day - since, half_life) for day in {row.day for row in rows}}
            known = self._tails(db, app, {row.session for row in rows})
        counts = Counts(self.order)
        touched: dict[str, Tail] = {}
        for _, day, session, t, path, route, source, outcome, latency_ms, nbytes in rows:
            if outcome in LOST or not path:
                continue
            weighs = weights[day]
            counts.ask(path, source, latency_ms, nbytes, weighs)
            if session:
                tail = touched.get(session) or known.get(session, _NO_TAIL)
                touched[session] = counts.follow(tail, t, (path, route), weighs)
        with self._store.write() as db:
            if not self._advance(db, app, low, rows[-1], since, counts):
                return 0  # another process was here first: look again
            self._add(db, app, counts)
            self._keep_tails(db, app, touched)
        return len(rows)

    def _rows(self, db: Connection, app: int, low: int) -> Any:
        e = events.c
        columns = (e.id, e.day, e.session, e.t, e.path, e.route, e.source, e.outcome, e.latency_ms, e.bytes)
        # "+ 0" keeps SQLite from the index by application and session, after which it would have to sort.
        wanted = sa.select(*columns).where(e.app + 0 == app, e.id > low)
        return db.execute(wanted.order_by(e.id).limit(_CHUNK)).fetchall()

    def _tails(self, db: Connection, app: int, sessions: set[str]) -> dict[str, Tail]:
        known: dict[str, Tail] = {}
        names = sorted(sessions)
        for start in range(0, len(names), 500):
            found = db.execute(
                sa.select(tails.c.session, tails.c.state).where(
                    tails.c.app == app, tails.c.session.in_(names[start : start + 500])
                )
            )
            for session, state in found:
                t, steps = orjson.loads(state)
                known[session] = (t, tuple((path, route) for path, route in steps))
        return known

    def _advance(self, db: Connection, app: int, low: int, last: Any, since: int, counts: Counts) -> bool:
        now = self._store.clock()
        start = {
            "app": app,
            "watermark": 0,
            "steps": 0,
            "visits": 0,
            "mined_at": now,
            "since": since,
            "day": since,
            "half_life_days": HALF_LIFE_DAYS,
        }
        db.execute(self._store.insert(mined).values(start).on_conflict_do_nothing())
        statement = mined.update().where(mined.c.app == app, mined.c.watermark == low)
        changed = db.execute(
            statement.values(
                watermark=last.id,
                day=sa.case((mined.c.day < last.day, last.day), else_=mined.c.day),
                steps=mined.c.steps + counts.steps,
                visits=mined.c.visits + counts.visits,
                mined_at=now,
            )
        )
        return changed.rowcount == 1

    def _add(self, db: Connection, app: int, counts: Counts) -> None:
        keys: dict[tuple[str, str, str], float] = {}
        for gram, n in counts.grams.items():
            for key in keys_of(gram, self.order):
                keys[key] = keys.get(key, 0) + n
        # In the order of the primary key: SQLite then walks the tree once.
        self._store.upsert(db, transitions, [(app, *key, n) for key, n in sorted(keys.items())], add=("n",))
        names = [one.name for one in fields(Sums)]
        sums = [(app, path, *attrgetter(*names)(one)) for path, one in sorted(counts.sums.items())]
        self._store.upsert(db, path_sums, sums, add=names)

    def _keep_tails(self, db: Connection, app: int, touched: dict[str, Tail]) -> None:
        now = self._store.clock()
        db.execute(tails.delete().where(tails.c.app == app, tails.c.touched_at < now - _FORGET_TAILS_S))
        rows = [(app, session, orjson.dumps(tail).decode(), now) for session, tail in sorted(touched.items())]
        self._store.upsert(db, tails, rows, replace=("state", "touched_at"))
