"""Mining, kept up with what arrives: a run counts what is new; the sum is what one run over all would give.

Steps are followed in the order of their event id, because the clocks of clients jump; the clock only says
whether a session paused. (sessions.py says the same in SQL, for engines that count all events at once.)
"""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import orjson
import sqlalchemy as sa
from sqlalchemy.engine import Connection

from .schema import events, mined, path_sums, tails, transitions
from .sessions import IDLE_S, LOST
from .steps import Step, keys_of
from .store import Store

# Events counted in one go: what bounds memory, and how long the transaction that adds the counts keeps other
# writers waiting.
_CHUNK = 50_000
# A session that was silent for a day starts anew: the server's time, because a client may be days behind with
# its events.
_FORGET_TAILS_S = 86_400.0


@dataclass(slots=True)
class Sums:
    """Of one path: see ``schema.path_sums``."""

    route: str = ""
    asked: int = 0
    gap_s: float = 0.0
    gaps: int = 0
    latency_ms: float = 0.0
    served: int = 0
    bytes: float = 0.0
    answered: int = 0


@dataclass(slots=True)
class Counts:
    """What a stretch of events adds.

    ``grams``: a step behind up to ``order`` steps of its visit, oldest first → how often.
    """

    order: int
    grams: Counter[tuple[Step, ...]] = field(default_factory=Counter)
    sums: dict[str, Sums] = field(default_factory=dict)
    steps: int = 0
    visits: int = 0

    def follow(self, tail: list[tuple[float, Step]], t: float, step: Step) -> list[tuple[float, Step]]:
        """Count a step that comes after ``tail`` (the visit so far, ``order`` steps at most);

        returns the tail after it.
        """
        if tail and t - tail[-1][0] > IDLE_S:
            tail = []
        if tail:
            before = self.sums.setdefault(tail[-1][1][0], Sums())
            before.gap_s += max(0.0, t - tail[-1][0])
            before.gaps += 1
        else:
            self.visits += 1
        self.steps += 1
        self.grams[(*[one for _, one in tail], step)] += 1
        return [*tail, (t, step)][-self.order :]

    def ask(self, path: str, route: str, source: str, latency_ms: float, nbytes: int) -> None:
        sums = self.sums.setdefault(path, Sums())
        sums.asked += 1
        sums.route = route or sums.route
        if source == "server":
            sums.latency_ms += latency_ms
            sums.served += 1
        if source != "error":
            sums.bytes += nbytes
            sums.answered += 1


class Miner:
    """Keeps transition counts of up to ``order`` steps in the database.

    Several processes may mine: one of them counts.
    """

    def __init__(self, store: Store, *, order: int = 4) -> None:
        self.order = order
        self._store = store
        self._lock = threading.Lock()

    def mine(self, app: int) -> int:
        """Count all events that are new; how many that were."""
        total = 0
        with self._lock:
            while (n := self._step(app)) is not None:
                total += n
        return total

    def watermark(self, app: int) -> int:
        """The id of the last event that is counted."""
        with self._store.read() as db:
            return int(db.execute(sa.select(mined.c.watermark).where(mined.c.app == app)).scalar() or 0)

    def _step(self, app: int) -> int | None:
        """Count one chunk; ``None`` if there is nothing new."""
        with self._store.read() as db:
            low = int(db.execute(sa.select(mined.c.watermark).where(mined.c.app == app)).scalar() or 0)
            rows = self._rows(db, app, low)
            if not rows:
                return None
            known = self._tails(db, app, {row.session for row in rows if row.session})
        counts = Counts(self.order)
        touched: dict[str, list[tuple[float, Step]]] = {}
        for _, session, t, path, route, source, outcome, latency_ms, nbytes in rows:
            if outcome in LOST or not path:
                continue
            counts.ask(path, route, source, latency_ms, nbytes)
            if session:
                tail = touched.get(session)
                tail = known.get(session, []) if tail is None else tail
                touched[session] = counts.follow(tail, t, (path, route))
        with self._store.write() as db:
            if not self._advance(db, app, low, rows[-1].id, counts):
                return 0  # another process was here first: look again
            self._add(db, app, counts)
            self._keep_tails(db, app, touched)
        return len(rows)

    def _rows(self, db: Connection, app: int, low: int) -> Any:
        e = events.c
        columns = (e.id, e.session, e.t, e.path, e.route, e.source, e.outcome, e.latency_ms, e.bytes)
        return db.execute(
            sa.select(*columns).where(e.app == app, e.id > low).order_by(e.id).limit(_CHUNK)
        ).fetchall()

    def _tails(self, db: Connection, app: int, sessions: set[str]) -> dict[str, list[tuple[float, Step]]]:
        known: dict[str, list[tuple[float, Step]]] = {}
        names = sorted(sessions)
        for start in range(0, len(names), 500):
            found = db.execute(
                sa.select(tails.c.session, tails.c.steps).where(
                    tails.c.app == app, tails.c.session.in_(names[start : start + 500])
                )
            )
            for session, steps in found:
                known[session] = [(t, (path, route)) for t, path, route in orjson.loads(steps)]
        return known

    def _advance(self, db: Connection, app: int, low: int, high: int, counts: Counts) -> bool:
        now = self._store.clock()
        start = {"app": app, "watermark": 0, "steps": 0, "visits": 0, "mined_at": now}
        db.execute(self._store.insert(mined).values(start).on_conflict_do_nothing())
        statement = mined.update().where(mined.c.app == app, mined.c.watermark == low)
        changed = db.execute(
            statement.values(
                watermark=high,
                steps=mined.c.steps + counts.steps,
                visits=mined.c.visits + counts.visits,
                mined_at=now,
            )
        )
        return changed.rowcount == 1

    def _add(self, db: Connection, app: int, counts: Counts) -> None:
        keys: Counter[tuple[str, str, str]] = Counter()
        for gram, n in counts.grams.items():
            for key in keys_of(gram):
                keys[key] += n
        if keys:
            statement = self._store.insert(transitions)
            statement = statement.on_conflict_do_update(
                index_elements=["app", "kind", "context", "step"],
                set_={"n": transitions.c.n + statement.excluded.n},
            )
            # In the order of the primary key: SQLite then walks the tree once.
            db.execute(
                statement,
                [
                    {"app": app, "kind": kind, "context": context, "step": step, "n": n}
                    for (kind, context, step), n in sorted(keys.items())
                ],
            )
        if counts.sums:
            statement = self._store.insert(path_sums)
            names = ("asked", "gap_s", "gaps", "latency_ms", "served", "bytes", "answered")
            added: dict[str, Any] = {name: path_sums.c[name] + statement.excluded[name] for name in names}
            added["route"] = sa.case(
                (statement.excluded.route != "", statement.excluded.route), else_=path_sums.c.route
            )
            statement = statement.on_conflict_do_update(index_elements=["app", "path"], set_=added)
            db.execute(
                statement,
                [
                    {
                        "app": app,
                        "path": path,
                        "route": sums.route,
                        **{name: getattr(sums, name) for name in names},
                    }
                    for path, sums in sorted(counts.sums.items())
                ],
            )

    def _keep_tails(self, db: Connection, app: int, touched: dict[str, list[tuple[float, Step]]]) -> None:
        now = self._store.clock()
        db.execute(tails.delete().where(tails.c.app == app, tails.c.touched_at < now - _FORGET_TAILS_S))
        if not touched:
            return
        statement = self._store.insert(tails)
        statement = statement.on_conflict_do_update(
            index_elements=["app", "session"],
            set_={"steps": statement.excluded.steps, "touched_at": statement.excluded.touched_at},
        )
        db.execute(
            statement,
            [
                {
                    "app": app,
                    "session": session,
                    "steps": orjson.dumps([[t, *step] for t, step in tail]).decode(),
                    "touched_at": now,
                }
                for session, tail in sorted(touched.items())
            ],
        )
