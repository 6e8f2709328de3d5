"""Mining in bulk with DuckDB: all events of an application counted at once, with the SQL of sessions.py.

For what incremental mining can't do or takes long to do: the first run over millions of events, and counting anew.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from mcp_client.errors import MissingExtraError
from mcp_client.prefetch.markov import START
from mcp_client.prefetch.profile import SEPARATOR

from .schema import mined, path_sums, tails, transitions
from .sessions import IDLE_S, STEP_SEPARATOR, asked, demanded, grams, steps, wanted
from .steps import MAX_KEY_BYTES, ROUTE_ORDER, Step, move
from .store import Store
from .upkeep import export

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

_NO_STEP: Step = ("", "")
_START = f"'{START}'"


def connect() -> DuckDBPyConnection:
    """A DuckDB in memory; ``MissingExtraError`` if DuckDB is not installed."""
    try:
        import duckdb
    except ImportError as error:
        raise MissingExtraError("profile", "duckdb", "mining in bulk") from error
    duck = duckdb.connect()
    duck.execute("SET enable_progress_bar = false")  # it would go to stdout
    return duck


def count(duck: DuckDBPyConnection, app: int, order: int = 4) -> None:
    """Make the table ``transitions`` (kind, context, step, n) from the relation ``events`` of ``duck``."""
    # Numbers in place of texts: sorting and grouping 10 M rows takes half the time.
    duck.execute(f"CREATE OR REPLACE TABLE texts AS {demanded(app)}")
    duck.execute(
        "CREATE OR REPLACE TABLE names AS SELECT step, row_number() OVER () AS nr, dense_rank() OVER (ORDER BY path) AS place "
        "FROM (SELECT DISTINCT path, step FROM texts)"
    )
    duck.execute(
        "CREATE OR REPLACE TABLE visitors AS SELECT session, row_number() OVER () AS nr FROM (SELECT DISTINCT session FROM texts)"
    )
    numbered = (
        "SELECT v.nr AS session, t.id, t.t, n.place AS path, n.nr AS step "
        "FROM texts t JOIN names n ON n.step = t.step JOIN visitors v ON v.session = t.session"
    )
    duck.execute(f"CREATE OR REPLACE TABLE numbers AS {grams(steps(asked(numbered)), order)}")
    texts = ", ".join(f"n{back}.step AS s{back}" for back in range(order + 1))
    joins = " ".join(f"LEFT JOIN names n{back} ON n{back}.nr = g.s{back}" for back in range(order + 1))
    duck.execute(f"CREATE OR REPLACE TABLE grams AS SELECT {texts}, g.n FROM numbers g {joins}")
    # Of two steps that follow one another a client says what happened to the route's parameters: Python's part, once a pair.
    pairs = duck.execute("SELECT DISTINCT s1, s0 FROM grams").fetchall()
    duck.execute("CREATE OR REPLACE TABLE moves (s1 TEXT, s0 TEXT, move TEXT)")
    _insert(duck, "moves", ((s1, s0, move(_step(s1), _step(s0))) for s1, s0 in pairs))
    duck.execute("CREATE OR REPLACE TABLE transitions (kind TEXT, context TEXT, step TEXT, n DOUBLE)")
    paths = [f"split_part(s{back}, '{STEP_SEPARATOR}', 1)" for back in range(order + 1)]
    for length in range(order + 1):
        _add(duck, "path", paths[: length + 1], f"FROM grams WHERE s{max(length, 1)} IS NOT NULL")
        if 0 < length < order:
            began = f"FROM grams WHERE s{length} IS NOT NULL AND s{length + 1} IS NULL"
            _add(duck, "path", [*paths[: length + 1], _START], began)
    joins = " ".join(
        f"LEFT JOIN moves m{back} ON m{back}.s0 = g.s{back} AND m{back}.s1 IS NOT DISTINCT FROM g.s{back + 1}"
        for back in range(ROUTE_ORDER + 1)
    )
    duck.execute(
        f"CREATE OR REPLACE TABLE moved AS SELECT {', '.join(f'm{back}.move AS m{back}' for back in range(ROUTE_ORDER + 1))}, n "
        f"FROM grams g {joins} WHERE g.s1 IS NOT NULL"
    )
    for length in range(ROUTE_ORDER + 1):
        names = [f"m{back}" for back in range(length + 1)]
        _add(duck, "route", names, f"FROM moved WHERE m{length} IS NOT NULL")
        if 0 < length < ROUTE_ORDER:
            began = f"FROM moved WHERE m{length} IS NOT NULL AND m{length + 1} IS NULL"
            _add(duck, "route", [*names, _START], began)


def rebuild(store: Store, app: int, order: int = 4) -> int:
    """Count all events in the database anew, in place of what was counted before; how many events.

    Events that have aged out are no longer counted: what was learned from them goes.
    """
    with connect() as duck, tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "events.jsonl"
        with file.open("wb") as out:
            total = export(store, app, out)
        if not total:
            return 0
        _load(duck, app, file)
        file.unlink()
        count(duck, app, order)
        _replace(store, duck, app, order)
    return total


def _load(duck: DuckDBPyConnection, app: int, file: Path) -> None:
    columns = (
        "{id: 'BIGINT', t: 'DOUBLE', session: 'VARCHAR', path: 'VARCHAR', route: 'VARCHAR', source: 'VARCHAR', "
        "latency_ms: 'DOUBLE', bytes: 'BIGINT', outcome: 'VARCHAR'}"
    )
    duck.execute(
        f"CREATE TABLE events AS SELECT {app:d} AS app, * FROM read_json(?, format = 'newline_delimited', columns = {columns})",
        [str(file)],
    )


def _replace(store: Store, duck: DuckDBPyConnection, app: int, order: int) -> None:
    counted = duck.execute("SELECT kind, context, step, n FROM transitions ORDER BY ALL").fetchall()
    sums = duck.execute(_sums(app)).fetchall()
    totals = duck.execute(
        f"SELECT count(*), coalesce(sum(begins), 0) FROM ({steps(asked(demanded(app)))})"
    ).fetchone() or (0, 0)
    watermark = (duck.execute("SELECT max(id) FROM events").fetchone() or (0,))[0]
    now = store.clock()
    with store.write() as db:
        for table in (transitions, path_sums, tails, mined):
            db.execute(table.delete().where(table.c.app == app))
        store.upsert(db, transitions, [(app, *row) for row in counted], add=("n",))
        store.upsert(db, path_sums, [(app, *row) for row in sums], add=("asked",))
        store.upsert(db, tails, [(app, *row, now) for row in _tails(duck, app, order)], replace=("state",))
        db.execute(
            mined.insert().values(
                app=app, watermark=watermark, steps=totals[0], visits=totals[1], mined_at=now
            )
        )


def _sums(app: int) -> str:
    """As ``schema.path_sums`` has it, without ``app``."""
    return f"""
        WITH costs AS (
          SELECT path, COUNT(*) AS asked,
                 SUM(CASE WHEN source = 'server' THEN latency_ms ELSE 0 END) AS latency_ms,
                 SUM(CASE WHEN source = 'server' THEN 1 ELSE 0 END) AS served,
                 SUM(CASE WHEN source <> 'error' THEN bytes ELSE 0 END) AS bytes,
                 SUM(CASE WHEN source <> 'error' THEN 1 ELSE 0 END) AS answered
          FROM events WHERE {wanted(app)} GROUP BY path
        ),
        pauses AS (
          SELECT before AS path, SUM(CASE WHEN gap > 0 THEN gap ELSE 0 END) AS gap_s, COUNT(*) AS gaps
          FROM ({asked(demanded(app))}) AS asked WHERE gap <= {IDLE_S} AND before <> path GROUP BY before
        )
        SELECT costs.path, asked, coalesce(gap_s, 0), coalesce(gaps, 0), latency_ms, served, bytes, answered
        FROM costs LEFT JOIN pauses ON pauses.path = costs.path ORDER BY 1"""


def _tails(duck: DuckDBPyConnection, app: int, order: int) -> Iterable[tuple[str, str]]:
    """(session, state) as ``schema.tails`` has it."""
    last = dict(
        duck.execute(
            f"SELECT session, max_by(t, id) FROM ({asked(demanded(app))}) AS asked GROUP BY session"
        ).fetchall()
    )
    found: dict[str, list[Step]] = {}
    begun: set[str] = set()
    for session, step, begins in duck.execute(
        f"""SELECT session, step, begins FROM ({steps(asked(demanded(app)))}) AS steps
            QUALIFY ROW_NUMBER() OVER (PARTITION BY session ORDER BY id DESC) <= {order:d} ORDER BY session, id DESC"""
    ).fetchall():
        if session not in begun:
            found.setdefault(session, []).insert(0, _step(step))
        if begins:
            begun.add(session)
    for session, visit in sorted(found.items()):
        yield session, orjson.dumps([last[session], visit]).decode()


def _add(duck: DuckDBPyConnection, kind: str, newest_first: list[str], source: str) -> None:
    step, *before = newest_first
    context = f" || '{SEPARATOR}' || ".join(reversed(before)) or "''"
    duck.execute(
        f"INSERT INTO transitions SELECT '{kind}', {context} AS context, {step} AS step, SUM(n) {source} "
        f"AND strlen({context}) + strlen({step}) <= {MAX_KEY_BYTES} GROUP BY ALL"
    )


def _insert(duck: DuckDBPyConnection, table: str, rows: Iterable[tuple[Any, ...]]) -> None:
    """Many rows at once; DuckDB's own executemany takes a millisecond for each."""
    with tempfile.NamedTemporaryFile(suffix=".jsonl") as file:
        file.writelines(orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE) for row in rows)
        file.flush()
        duck.execute(
            f"INSERT INTO {table} SELECT json->>0, json->>1, json->>2 FROM read_json(?, format = 'newline_delimited', "
            "records = false, columns = {json: 'JSON'})",
            [file.name],
        )


def _step(text: str | None) -> Step:
    if text is None:
        return _NO_STEP
    path, _, route = text.partition(STEP_SEPARATOR)
    return path, route
