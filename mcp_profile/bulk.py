"""Mining in bulk: all events of an application counted at once, with the SQL of sessions.py, on DuckDB or on Spark.

For what incremental mining can't do or takes long to do: the first run over millions of events, and counting anew.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from pathlib import Path

import orjson
import sqlalchemy as sa

from mcp_client.prefetch.markov import START
from mcp_client.prefetch.profile import SEPARATOR

from .engines import Duck, Engine, Spark
from .forgetting import HALF_LIFE_DAYS, rounded_sql, weights_sql
from .schema import mined, path_sums, tails, transitions
from .sessions import IDLE_S, STEP_SEPARATOR, asked, demanded, grams, steps, wanted
from .steps import MAX_KEY_BYTES, ROUTE_ORDER, Step, move
from .store import Store
from .upkeep import export

_NO_STEP: Step = ("", "")
_START = f"'{START}'"
# What a run makes, and ``_replace`` puts into the database.
_RESULTS = {
    "transitions": "SELECT kind, context, step, n FROM transitions",
    "sums": "SELECT * FROM sums",
    "recent": "SELECT session, number, step, begins FROM recent",
    "last": "SELECT session, t FROM last",
    "totals": "SELECT * FROM totals",
}


def count(engine: Engine, app: int, order: int = 4, *, half_life_days: float = HALF_LIFE_DAYS) -> None:
    """Make the table ``transitions`` (kind, context, step, n) from the relation ``events`` of the engine."""
    engine.table("weights", _weights(engine, half_life_days))
    engine.table("texts", demanded(app, "SELECT day, weight FROM weights"))
    if engine.numbers:
        _count_numbers(engine, order)
    else:
        engine.table("grams", grams(steps(asked("SELECT * FROM texts")), order))
    # Of two steps that follow one another a client says what happened to the route's parameters: Python's part, once a pair.
    pairs = engine.rows("SELECT DISTINCT s1, s0 FROM grams")
    engine.texts(
        "moves", ("s1", "s0", "move"), ((s1 or "", s0, move(_step(s1), _step(s0))) for s1, s0 in pairs)
    )
    joins = " ".join(
        f"LEFT JOIN moves m{back} ON m{back}.s0 = g.s{back} AND m{back}.s1 = coalesce(g.s{back + 1}, '')"
        for back in range(ROUTE_ORDER + 1)
    )
    names = ", ".join(f"m{back}.move AS m{back}" for back in range(ROUTE_ORDER + 1))
    engine.table("moved", f"SELECT {names}, n FROM grams g {joins} WHERE g.s1 IS NOT NULL")
    counted = " UNION ALL ".join(_transitions(order))
    fits = f"{engine.octets}(context) + {engine.octets}(step) <= {MAX_KEY_BYTES}"
    engine.table(
        "transitions",
        f"SELECT kind, context, step, SUM(n) AS n FROM ({counted}) AS counted WHERE {fits} GROUP BY kind, context, step",
    )


def rebuild(
    store: Store,
    app: int,
    order: int = 4,
    *,
    half_life_days: float | None = None,
    master: str = "",
    folder: str | None = None,
) -> int:
    """Count all events in the database anew, in place of what was counted before; how many events.

    Events that have aged out are no longer counted: what was learned from them goes. ``half_life_days``: from now on; as before
    if it is not given. ``master``: of a Spark cluster, that works instead of DuckDB; ``folder``: where it can read and write
    what we can, by the same path.
    """
    if half_life_days is None:
        with store.read() as db:
            found = db.execute(sa.select(mined.c.half_life_days).where(mined.c.app == app)).scalar()
        half_life_days = HALF_LIFE_DAYS if found is None else float(found)
    with Duck() as duck, tempfile.TemporaryDirectory(dir=folder) as scratch:
        file = Path(scratch) / "events.jsonl"
        with file.open("wb") as out:
            total = export(store, app, out)
        if not total:
            return 0
        _load(duck, app, file)
        file.unlink()
        if master:
            duck.write_parquet("FROM events", f"{scratch}/events")
            with Spark(master) as spark:
                spark.read_parquet("events", f"{scratch}/events")
                mine(spark, app, order, half_life_days=half_life_days)
                for name, query in _RESULTS.items():
                    spark.write_parquet(query, f"{scratch}/{name}")
            for name in _RESULTS:
                duck.read_parquet(name, f"{scratch}/{name}")
        else:
            mine(duck, app, order, half_life_days=half_life_days)
        _replace(store, duck, app, half_life_days)
    return total


def mine(engine: Engine, app: int, order: int, *, half_life_days: float) -> None:
    """Make all that a run makes: the tables of ``_RESULTS``."""
    count(engine, app, order, half_life_days=half_life_days)
    engine.table("sums", _sums(app))
    visits = f"({steps(asked('SELECT * FROM texts'))})"
    engine.table(
        "recent",
        f"SELECT * FROM (SELECT session, step, begins, ROW_NUMBER() OVER (PARTITION BY session ORDER BY id DESC) AS number "
        f"FROM {visits} AS visits) AS numbered WHERE number <= {order:d}",
    )
    engine.table("last", "SELECT session, max_by(t, id) AS t FROM texts GROUP BY session")
    engine.table(
        "totals",
        "SELECT v.steps, v.visits, e.watermark, e.since, e.day FROM "
        f"(SELECT COUNT(*) AS steps, coalesce(SUM(begins), 0) AS visits FROM {visits} AS visits) AS v CROSS JOIN "
        f"(SELECT MAX(id) AS watermark, MIN_BY(day, id) AS since, MAX(day) AS day FROM events WHERE app = {app:d}) AS e",
    )


def _weights(engine: Engine, half_life_days: float) -> str:
    days = [day for (day,) in engine.rows("SELECT DISTINCT day FROM events ORDER BY day")]
    first = engine.rows("SELECT min_by(day, id) FROM events")
    if not days:
        return "SELECT 0 AS day, 1e0 AS weight"
    return weights_sql(days, first[0][0], half_life_days)


def _count_numbers(engine: Engine, order: int) -> None:
    """``grams`` from ``texts`` by way of numbers in place of texts: sorting and grouping 10 M rows takes half the time."""
    engine.table(
        "names",
        "SELECT step, ROW_NUMBER() OVER () AS nr, DENSE_RANK() OVER (ORDER BY path) AS place "
        "FROM (SELECT DISTINCT path, step FROM texts)",
    )
    engine.table(
        "visitors", "SELECT session, ROW_NUMBER() OVER () AS nr FROM (SELECT DISTINCT session FROM texts)"
    )
    numbered = (
        "SELECT v.nr AS session, t.id, t.t, t.weight, n.place AS path, n.nr AS step "
        "FROM texts t JOIN names n ON n.step = t.step JOIN visitors v ON v.session = t.session"
    )
    engine.table("numbers", grams(steps(asked(numbered)), order))
    texts = ", ".join(f"n{back}.step AS s{back}" for back in range(order + 1))
    joins = " ".join(f"LEFT JOIN names n{back} ON n{back}.nr = g.s{back}" for back in range(order + 1))
    engine.table("grams", f"SELECT {texts}, g.n FROM numbers g {joins}")


def _transitions(order: int) -> Iterable[str]:
    """Queries that together give (kind, context, step, n), not yet summed: from contexts of no step to those of ``order``."""
    paths = [f"split_part(s{back}, '{STEP_SEPARATOR}', 1)" for back in range(order + 1)]
    for length in range(order + 1):
        yield _counted("path", paths[: length + 1], f"FROM grams WHERE s{max(length, 1)} IS NOT NULL")
        if 0 < length < order:
            began = f"FROM grams WHERE s{length} IS NOT NULL AND s{length + 1} IS NULL"
            yield _counted("path", [*paths[: length + 1], _START], began)
    for length in range(ROUTE_ORDER + 1):
        names = [f"m{back}" for back in range(length + 1)]
        yield _counted("route", names, f"FROM moved WHERE m{length} IS NOT NULL")
        if 0 < length < ROUTE_ORDER:
            began = f"FROM moved WHERE m{length} IS NOT NULL AND m{length + 1} IS NULL"
            yield _counted("route", [*names, _START], began)


def _counted(kind: str, newest_first: list[str], source: str) -> str:
    step, *before = newest_first
    context = f" || '{SEPARATOR}' || ".join(reversed(before)) or "''"
    return f"SELECT '{kind}' AS kind, {context} AS context, {step} AS step, n {source}"


def _sums(app: int) -> str:
    """As ``schema.path_sums`` has it, without ``app``."""
    return f"""
        WITH costs AS (
          SELECT path, SUM(weight) AS asked,
                 SUM(CASE WHEN source = 'server' THEN {rounded_sql("latency_ms")} * weight ELSE 0 END) AS latency_ms,
                 SUM(CASE WHEN source = 'server' THEN weight ELSE 0 END) AS served,
                 SUM(CASE WHEN source <> 'error' THEN bytes * weight ELSE 0 END) AS bytes,
                 SUM(CASE WHEN source <> 'error' THEN weight ELSE 0 END) AS answered
          FROM events e JOIN weights w ON w.day = e.day WHERE {wanted(app)} GROUP BY path
        ),
        pauses AS (
          SELECT before AS path, SUM(CASE WHEN gap > 0 THEN {rounded_sql("gap")} * weight ELSE 0 END) AS gap_s,
                 SUM(weight) AS gaps
          FROM ({asked("SELECT * FROM texts")}) AS asked WHERE gap <= {IDLE_S} AND before <> path GROUP BY before
        )
        SELECT costs.path, asked, coalesce(gap_s, 0) AS gap_s, coalesce(gaps, 0) AS gaps, latency_ms, served, bytes, answered
        FROM costs LEFT JOIN pauses ON pauses.path = costs.path"""


def _load(duck: Duck, app: int, file: Path) -> None:
    columns = (
        "{id: 'BIGINT', day: 'INTEGER', t: 'DOUBLE', session: 'VARCHAR', path: 'VARCHAR', route: 'VARCHAR', "
        "source: 'VARCHAR', latency_ms: 'DOUBLE', bytes: 'BIGINT', outcome: 'VARCHAR'}"
    )
    duck.connection.execute(
        f"CREATE TABLE events AS SELECT {app:d} AS app, * FROM read_json(?, format = 'newline_delimited', columns = {columns})",
        [str(file)],
    )


def _replace(store: Store, duck: Duck, app: int, half_life_days: float) -> None:
    """Put the tables of ``_RESULTS`` in place of what the database has of the application."""
    counted = duck.rows("SELECT kind, context, step, n FROM transitions ORDER BY ALL")
    sums = duck.rows("SELECT * FROM sums ORDER BY 1")
    ((step_count, visits, watermark, since, day),) = duck.rows("SELECT * FROM totals")
    now = store.clock()
    with store.write() as db:
        for table in (transitions, path_sums, tails, mined):
            db.execute(table.delete().where(table.c.app == app))
        store.upsert(db, transitions, [(app, *row) for row in counted], add=("n",))
        store.upsert(db, path_sums, [(app, *row) for row in sums], add=("asked",))
        store.upsert(db, tails, [(app, *row, now) for row in _tails(duck)], replace=("state",))
        db.execute(
            mined.insert().values(
                app=app,
                watermark=watermark,
                steps=step_count,
                visits=visits,
                mined_at=now,
                since=since,
                day=day,
                half_life_days=half_life_days,
            )
        )


def _tails(duck: Duck) -> Iterable[tuple[str, str]]:
    """(session, state) as ``schema.tails`` has it."""
    last = dict(duck.rows("SELECT session, t FROM last"))
    found: dict[str, list[Step]] = {}
    begun: set[str] = set()
    for session, step, begins in duck.rows(
        "SELECT session, step, begins FROM recent ORDER BY session, number"
    ):
        if session not in begun:
            found.setdefault(session, []).insert(0, _step(step))
        if begins:
            begun.add(session)
    for session, visit in sorted(found.items()):
        yield session, orjson.dumps([last[session], visit]).decode()


def _step(text: str | None) -> Step:
    if text is None:
        return _NO_STEP
    path, _, route = text.partition(STEP_SEPARATOR)
    return path, route
