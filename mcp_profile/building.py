"""From counts in the database to a profile that is small enough to travel."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, NamedTuple

import orjson
import sqlalchemy as sa
from sqlalchemy.engine import Connection

from mcp_client.prefetch.markov import START
from mcp_client.prefetch.profile import SEPARATOR, KeyStats, Profile

from .forgetting import weight, whole
from .rankers import in_service
from .schema import mined, path_sums, transitions

# What popularity alone (the empty context) and the statistics of paths may take of a profile: they are what a
# predictor falls back on; the transitions, which take the rest, are what it is for.
_POPULARITY_SHARE = 0.15
_KEYS_SHARE = 0.3
# A ranker that would take more of a (small) profile is left out of it.
_RANKER_SHARE = 0.4


class Transition(NamedTuple):
    kind: str
    context: str
    step: str
    n: float


def build(db: Connection, app: int, *, version: str, order: int, max_bytes: int) -> Profile:
    """The ranker in service and the most frequent of what is counted, as much as fits ``max_bytes`` of JSON."""
    ranker = in_service(db, app)
    if 4 * len(ranker) // 3 > _RANKER_SHARE * max_bytes:
        ranker = b""
    budget = max_bytes - 4 * len(ranker) // 3
    while True:
        profile = replace(_build(db, app, version, order, budget), ranker=ranker)
        size = len(profile.to_json())
        if size <= max_bytes:
            return profile
        budget = min(budget * 9 // 10, budget * max_bytes // size)


def _build(db: Connection, app: int, version: str, order: int, budget: int) -> Profile:
    t, s = transitions.c, path_sums.c
    stand = db.execute(sa.select(mined).where(mined.c.app == app)).first()
    one = today(stand)
    # The shortest transition takes 12 bytes: more than these can't fit. A context comes before those it is
    # the end of, as it was counted at least as often: what is cut off leaves no context whose shorter one is
    # missing.
    rows = db.execute(
        sa.select(t.kind, t.context, t.step, t.n)
        .where(t.app == app)
        .order_by(t.n.desc(), sa.func.length(t.context), t.kind, t.context, t.step)
        .limit(budget // 12)
    )
    kept = _fitting((Transition(*row) for row in rows), one, budget)
    sums = db.execute(
        sa.select(s.path, s.asked, s.gap_s, s.gaps, s.latency_ms, s.served, s.bytes, s.answered)
        .where(s.app == app)
        .order_by(s.asked.desc(), s.path)
        .limit(budget // 12)
    )
    keys: dict[str, KeyStats] = {}
    left = budget * _KEYS_SHARE
    for path, asked, gap_s, gaps, latency_ms, served, nbytes, answered in sums:
        stats = KeyStats(
            whole(asked / one),
            gap_s=round(gap_s / gaps, 2) if gaps else 0.0,
            latency_ms=round(latency_ms / served, 2) if served else 0.0,
            bytes=round(nbytes / answered) if answered else 0,
        )
        left -= _length(path) + len(f"[{stats.count},{stats.gap_s},{stats.latency_ms},{stats.bytes}],") + 1
        if left < 0:
            break
        keys[path] = stats
    return Profile(
        version=version,
        order=order,
        paths=kept["path"],
        routes=kept["route"],
        keys=keys,
        created_at=round(stand.mined_at, 3) if stand else 0.0,
    )


def today(stand: Any) -> float:
    """What an event of the last day that is counted weighs (``stand``: the row of ``schema.mined``, or ``None``).

    Not of this day: a profile changes when there is something new, and not because time passes.
    """
    return weight(stand.day - stand.since, stand.half_life_days) if stand is not None else 1.0


def _fitting(rows: Iterable[Transition], one: float, budget: int) -> dict[str, dict[str, dict[str, float]]]:
    kept: dict[str, dict[str, dict[str, float]]] = {"path": {}, "route": {}}
    left = {True: budget * _POPULARITY_SHARE, False: budget * (1 - _POPULARITY_SHARE - _KEYS_SHARE)}
    for kind, context, step, n in rows:
        steps = kept[kind].get(context)
        count = whole(n / one)
        if not count:
            break  # forgotten, as are all that follow
        cost = _length(step) + len(str(count)) + 2 + (_length(context) + 4 if steps is None else 0)
        popularity = context == ""
        if left[popularity] < cost:
            left[popularity] = 0.0  # nothing smaller after it: that would be out of order
            continue
        left[popularity] -= cost
        if steps is None:
            steps = kept[kind][context] = {}
        steps[step] = count
    return kept


def _length(text: str) -> int:
    return len(orjson.dumps(text))


def frequent_paths(db: Connection, app: int, min_support: int, limit: int) -> list[dict[str, object]]:
    """Closed sequences, most frequent first: none is part of a longer one that was seen as often."""
    t, s = transitions.c, path_sums.c
    one = today(db.execute(sa.select(mined).where(mined.c.app == app)).first())
    longer = sa.select(t.context, t.step, t.n).where(
        t.app == app, t.kind == "path", t.context != "", t.context.not_like(f"{START}%")
    )
    single = sa.select(s.path, s.asked).where(s.app == app)
    # Whether a sequence is part of a longer one as frequent can only be said where all as frequent are at hand: many times what
    # is asked for, and those that tie with the last of them.
    least = min_support * one
    for query, n in ((longer, t.n), (single, s.asked)):
        last = db.execute(query.with_only_columns(n).order_by(n.desc()).offset(100 * limit).limit(1)).scalar()
        least = max(least, last or 0.0)
    rows = db.execute(longer.where(t.n >= least))
    support = {(*context.split(SEPARATOR), step): n for context, step, n in rows}
    support |= {(path,): n for path, n in db.execute(single.where(s.asked >= least))}
    closed = dict(support)
    for steps, n in support.items():
        for part in (steps[:-1], steps[1:]):
            if closed.get(part) == n:
                del closed[part]
    ordered = sorted(closed.items(), key=lambda found: (-found[1], -len(found[0]), found[0]))
    return [{"steps": list(steps), "support": whole(n / one)} for steps, n in ordered[:limit]]
