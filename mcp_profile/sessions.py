"""Sessions in SQL: steps in order, cut into visits, each seen with those before it, for bulk engines.

Plain SQL (WITH, LAG, SUM OVER, GROUP BY), its few numbers written in, so that SQLite, PostgreSQL, DuckDB and Spark run the
same text over a relation like ``schema.events``. mining.py counts the same, incrementally; a test holds them equal.
"""

from __future__ import annotations

# Outcomes of prefetches that nobody asked for in the end: such an event is no step of a session.
LOST = ("expired", "evicted", "cancelled")
# A pause longer than this ends a visit (the customary cut; Catledge and Pitkow 1995 measured 25.5 minutes).
IDLE_S = 1800


def grams(app: int, order: int = 4, *, relation: str = "events") -> str:
    """Every step with up to ``order`` steps of its visit before it, counted.

    Columns: path and route of the step (``s0``, ``r0``), of the one before (``s1``, ``r1``; NULL before the visit began) and
    so on back to ``s<order>``; then ``n``, how often.
    """
    columns = ", ".join(f"s{back}, r{back}" for back in range(order + 1))
    lags = ", ".join(
        f"LAG(path, {k}) OVER v AS s{k}, LAG(route, {k}) OVER v AS r{k}" for k in range(1, order + 1)
    )
    lost = ", ".join(f"'{outcome}'" for outcome in LOST)
    # By id and not by time: clocks jump. The clock only says whether a session paused; ``visit`` counts its pauses up.
    return f"""
        WITH gaps AS (
          SELECT session, id, path, route, t - LAG(t) OVER (PARTITION BY session ORDER BY id) AS gap
          FROM {relation}
          WHERE app = {app:d} AND session <> '' AND path <> '' AND outcome NOT IN ({lost})
        ),
        visits AS (
          SELECT session, id, path, route,
                 SUM(CASE WHEN gap > {IDLE_S} THEN 1 ELSE 0 END)
                   OVER (PARTITION BY session ORDER BY id) AS visit
          FROM gaps
        ),
        reloads AS (
          SELECT session, visit, id, path, route,
                 LAG(path) OVER (PARTITION BY session, visit ORDER BY id) AS before
          FROM visits
        ),
        seen AS (
          SELECT path AS s0, route AS r0, {lags} FROM reloads WHERE before IS NULL OR before <> path
          WINDOW v AS (PARTITION BY session, visit ORDER BY id)
        )
        SELECT {columns}, COUNT(*) AS n FROM seen GROUP BY {columns}"""
