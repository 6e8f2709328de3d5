"""Sessions in SQL: steps in order, cut into visits, each seen with those before it, for bulk engines.

Plain SQL (WITH, LAG, GROUP BY), its few numbers written in, so that SQLite, PostgreSQL, DuckDB and Spark run the same text
over a relation like ``schema.events``. mining.py counts the same, incrementally; a test holds them equal.
"""

from __future__ import annotations

# Outcomes of prefetches that nobody asked for in the end: such an event is no step of a session.
LOST = ("expired", "evicted", "cancelled")
# A pause longer than this ends a visit (the customary cut; Catledge and Pitkow 1995 measured 25.5 minutes).
IDLE_S = 1800
# Between the path and the route of a step; no path holds a control character.
STEP_SEPARATOR = "\x1f"


def demanded(app: int, weights: str, relation: str = "events") -> str:
    """The demanded requests of sessions: session, id, t, weight, path, and ``step``, which is path and route in one.

    ``weights``: a relation or query of what an event counts by its day (``forgetting.weights_sql``).
    """
    return f"""
        SELECT session, id, t, weight, path, path || '{STEP_SEPARATOR}' || route AS step
        FROM {relation} e JOIN ({weights}) w ON w.day = e.day WHERE {wanted(app)} AND session <> ''"""


def asked(demanded: str) -> str:
    """Of these, each with ``before``, the path asked for before (NULL if none), and ``gap``, the seconds since then.

    By id and not by time: clocks jump, and only say whether a session paused.
    """
    return f"""
        SELECT session, id, t, weight, path, step, LAG(path) OVER v AS before, t - LAG(t) OVER v AS gap
        FROM ({demanded}) AS demanded
        WINDOW v AS (PARTITION BY session ORDER BY id)"""


def steps(asked: str) -> str:
    """Of these, the steps: session, id, weight, step, and ``begins``, 1 where a visit begins.

    A reload of the same path is no step.
    """
    return f"""
        SELECT session, id, weight, step, CASE WHEN before IS NULL OR gap > {IDLE_S} THEN 1 ELSE 0 END AS begins
        FROM ({asked}) AS asked WHERE before IS NULL OR gap > {IDLE_S} OR before <> path"""


def grams(steps: str, order: int = 4) -> str:
    """Every step with up to ``order`` steps of its visit before it, counted.

    Columns: the step (``s0``), the one before (``s1``; NULL before the visit began) and so on back to ``s<order>``; then ``n``,
    how often.
    """
    columns = ", ".join(f"s{back}" for back in range(order + 1))
    lags = ", ".join(
        f"LAG(step, {back}) OVER v AS l{back}, LAG(begins, {back}) OVER v AS b{back}"
        for back in range(1, order + 1)
    )
    # The step ``back`` rows before is of the same visit if none of the rows after it begins one.
    within = ", ".join(
        f"CASE WHEN {' AND '.join(f'b{row} = 0' for row in range(back))} THEN l{back} END AS s{back}"
        for back in range(1, order + 1)
    )
    return f"""
        WITH seen AS (
          SELECT weight, step AS s0, begins AS b0, {lags} FROM ({steps}) AS steps
          WINDOW v AS (PARTITION BY session ORDER BY id)
        ),
        cut AS (SELECT weight, s0, {within} FROM seen)
        SELECT {columns}, SUM(weight) AS n FROM cut GROUP BY {columns}"""


def wanted(app: int) -> str:
    """The condition on events that are demanded requests of a path."""
    lost = ", ".join(f"'{outcome}'" for outcome in LOST)
    return f"app = {app:d} AND path <> '' AND outcome NOT IN ({lost})"
