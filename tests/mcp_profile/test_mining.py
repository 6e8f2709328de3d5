"""Mining: what is counted, that it does not matter when, and that the SQL for bulk engines counts the same."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import duckdb
import pytest
import sqlalchemy as sa
from hypothesis import given, settings
from hypothesis import strategies as st

from mcp_client.prefetch.markov import START
from mcp_client.prefetch.predictor import Predictor
from mcp_client.prefetch.profile import SEPARATOR, Profile
from mcp_client.prefetch.routes import Route, RouteTable
from mcp_profile import bulk, sessions
from mcp_profile.forgetting import DAY_S, weights_sql
from mcp_profile.ingest import Batch, Row
from mcp_profile.mining import Counts, Miner
from mcp_profile.schema import events, path_sums, tails, transitions
from mcp_profile.service import Profiles
from mcp_profile.sessions import IDLE_S
from mcp_profile.store import DEFAULT_APP, Store

_TODAY = 20_000


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = Store(f"sqlite:///{tmp_path / 'db.sqlite'}")
    yield store
    store.close()


def _row(seq: int, path: str, session: str = "s", t: float = -1.0, **more: Any) -> Row:
    values = {"route": "", "source": "server", "latency_ms": 2.0, "bytes": 10, "outcome": ""} | more
    return (
        seq,
        1.7e9 + seq if t < 0 else t,
        session,
        path,
        values["route"],
        "fp",
        "m",
        values["source"],
        values["latency_ms"],
        values["bytes"],
        "",
        values["outcome"],
    )


def _ingest(store: Store, rows: list[Row], batch_id: str = "b", app: int = DEFAULT_APP) -> None:
    store.ingest(app, Batch(batch_id, "client", "", rows, []))


def _counts(store: Store, kind: str = "path", *, starts: bool = False) -> dict[tuple[str, str], float]:
    """What is counted; with ``starts`` also the contexts that reach back to the start of the visit, which "^" stands for."""
    with store.read() as db:
        rows = db.execute(sa.select(transitions).where(transitions.c.kind == kind)).all()
    counts = {(row.context.replace(SEPARATOR, " ").replace(START, "^"), row.step): row.n for row in rows}
    return {key: n for key, n in counts.items() if starts or not key[0].startswith("^")}


def _learned(store: Store) -> Any:
    with store.read() as db:
        return [
            sorted(db.execute(sa.select(transitions)).all()),
            sorted(db.execute(sa.select(path_sums)).all()),
            sorted(db.execute(sa.select(tails.c.session, tails.c.state)).all()),
        ]


def test_a_step_is_counted_behind_every_context_that_it_followed(store: Store) -> None:
    _ingest(store, [_row(n, path) for n, path in enumerate("abcbd")])
    assert Miner(store).mine(DEFAULT_APP) == 5
    counts = _counts(store, starts=True)
    assert [step for context, step in counts if context == ""] == [
        "b",
        "c",
        "d",
    ]  # the first step of a visit follows nothing
    assert {key: n for key, n in counts.items() if key[1] == "b"} == {
        ("", "b"): 2,
        ("a", "b"): 1,
        ("^ a", "b"): 1,
        ("c", "b"): 1,
        ("b c", "b"): 1,
        ("a b c", "b"): 1,
        ("^ a b c", "b"): 1,
    }


def test_a_reload_is_no_step(store: Store) -> None:
    _ingest(store, [_row(n, path) for n, path in enumerate("aabbbc")])
    Miner(store).mine(DEFAULT_APP)
    assert set(_counts(store)) == {("", "b"), ("a", "b"), ("", "c"), ("b", "c"), ("a b", "c")}


def test_a_step_on_a_route_is_counted_by_what_it_does_to_the_parameters(store: Store) -> None:
    route = "/doc/{id}/page/{n:int}"
    pages = ["/doc/x/page/1", "/doc/x/page/2", "/doc/x/page/3", "/doc/y/page/1"]
    _ingest(store, [_row(n, path, route=route) for n, path in enumerate(pages)])
    Miner(store).mine(DEFAULT_APP)
    counts = _counts(store, "route")
    assert counts["", f"{route}|id=|n=1"] == 2
    assert counts[f"{route}|id=?|n=?", f"{route}|id=|n=1"] == 1
    assert counts[f"{route}|id=|n=1", f"{route}|id=?|n=-2"] == 1


@pytest.mark.parametrize("route", ["no template", "/{", "/other/{id}", "/{id:float}"])
def test_a_route_that_is_none_costs_no_step(route: str, store: Store) -> None:
    _ingest(store, [_row(1, "/a", route=route), _row(2, "/b", route=route)])
    Miner(store).mine(DEFAULT_APP)
    assert _counts(store, "route") == _counts(store)


def test_nothing_new_costs_nothing_and_changes_nothing(store: Store) -> None:
    _ingest(store, [_row(1, "a"), _row(2, "b")])
    miner = Miner(store)
    assert miner.mine(DEFAULT_APP) == 2
    before = _learned(store)
    assert miner.mine(DEFAULT_APP) == 0
    assert _learned(store) == before


def test_a_pause_ends_a_visit_and_a_clock_set_back_does_not(store: Store) -> None:
    times = [0.0, 10.0, 10.0 + IDLE_S, 11.0 + 2 * IDLE_S, 5.0]
    _ingest(store, [_row(n, path, t=1e9 + t) for n, (path, t) in enumerate(zip("abcde", times, strict=True))])
    Miner(store).mine(DEFAULT_APP)
    assert {key for key in _counts(store) if key[0] and " " not in key[0]} == {
        ("a", "b"),
        ("b", "c"),
        ("d", "e"),
    }
    with store.read() as db:
        gaps = dict(db.execute(sa.select(path_sums.c.path, path_sums.c.gap_s)).all())
    assert gaps == {"a": 10.0, "b": IDLE_S, "c": 0.0, "d": 0.0, "e": 0.0}


def test_contexts_too_long_for_an_index_are_left_out_and_shorter_ones_are_not(store: Store) -> None:
    paths = [letter + "ü" * 500 for letter in "abcd"]
    _ingest(store, [_row(n, path) for n, path in enumerate(paths)])
    Miner(store).mine(DEFAULT_APP)
    lengths = {(len(context.split()), step[0]) for context, step in _counts(store)}
    assert lengths == {(0, "b"), (1, "b"), (0, "c"), (1, "c"), (0, "d"), (1, "d")}
    before = _learned(store)
    bulk.rebuild(store, DEFAULT_APP)
    assert _learned(store) == before


def test_lost_prefetches_and_requests_without_a_path_are_no_steps(store: Store) -> None:
    rows = [
        _row(1, "a"),
        _row(2, "x", outcome="expired", source="prefetch"),
        _row(3, ""),
        _row(4, "b", outcome="used"),
    ]
    _ingest(store, rows)
    Miner(store).mine(DEFAULT_APP)
    assert _counts(store) == {("", "b"): 1, ("a", "b"): 1}


def test_a_request_without_a_session_counts_for_its_path_and_follows_nothing(store: Store) -> None:
    _ingest(store, [_row(1, "a", session=""), _row(2, "b", session="")])
    Miner(store).mine(DEFAULT_APP)
    assert _counts(store) == {}
    with store.read() as db:
        assert dict(db.execute(sa.select(path_sums.c.path, path_sums.c.asked)).all()) == {"a": 1, "b": 1}


def test_costs_are_those_of_servers_and_sizes_those_of_answers(store: Store) -> None:
    rows = [
        _row(1, "a", latency_ms=30.0, bytes=100),
        _row(2, "a", latency_ms=0.1, bytes=100, source="cache"),
        _row(3, "a", latency_ms=900.0, bytes=0, source="error"),
    ]
    _ingest(store, rows)
    Miner(store).mine(DEFAULT_APP)
    with store.read() as db:
        row = db.execute(sa.select(path_sums)).one()
    assert (row.asked, row.latency_ms, row.served, row.bytes, row.answered) == (3, 30.0, 1, 200, 2)


def test_applications_are_kept_apart(store: Store) -> None:
    _ingest(store, [_row(1, "a"), _row(2, "b")], "one", app=1)
    _ingest(store, [_row(3, "c")], "two", app=2)
    Miner(store).mine(1)
    assert set(_counts(store)) == {("", "b"), ("a", "b")}
    Miner(store).mine(2)
    assert ("b", "c") not in _counts(store)


def test_of_two_miners_at_once_one_counts(store: Store, tmp_path: Path) -> None:
    other = Store(str(store.url))
    _ingest(store, [_row(n, "ab"[n % 2]) for n in range(10)])
    mine, theirs = Miner(store), Miner(other, order=1)
    with store.write() as db:
        last = db.execute(sa.select(events).order_by(events.c.id.desc()).limit(1)).one()
        assert mine._advance(db, DEFAULT_APP, 0, last, last.day, Counts(1))
    with other.write() as db:
        assert not theirs._advance(db, DEFAULT_APP, 0, last, last.day, Counts(1))
    assert theirs.mine(DEFAULT_APP) == 0
    other.close()


_steps = st.lists(
    st.tuples(
        st.sampled_from("stu"),
        st.sampled_from(["/a", "/b", "/c"]),
        st.sampled_from([0.0, 1.0, -5.0, IDLE_S + 1.0]),
    ),
    max_size=40,
)


def _rows(steps: list[tuple[str, str, float]]) -> list[Row]:
    rows = []
    clock = 1e9
    for seq, (session, path, pause) in enumerate(steps):
        clock += pause
        rows.append(_row(seq, path, session, t=clock, route=f"{path}/{{n}}"))
    return rows


@settings(max_examples=40, deadline=None)
@given(steps=_steps, cuts=st.sets(st.integers(0, 40)))
def test_mining_bit_by_bit_is_mining_at_once(steps: list[tuple[str, str, float]], cuts: set[int]) -> None:
    rows = _rows(steps)
    bit_by_bit, at_once = Store("sqlite://"), Store("sqlite://")
    bounds = [0, *sorted(cut for cut in cuts if 0 < cut < len(rows)), len(rows)]
    for number, (start, end) in enumerate(itertools.pairwise(bounds)):
        _ingest(bit_by_bit, rows[start:end], str(number))
        Miner(bit_by_bit, order=4).mine(DEFAULT_APP)
    _ingest(at_once, rows)
    Miner(at_once, order=4).mine(DEFAULT_APP)
    assert _learned(bit_by_bit) == _learned(at_once)
    bit_by_bit.close()
    at_once.close()


_ROUTE = "/doc/{id}/page/{n:int}"
_reading = st.lists(
    st.tuples(
        st.sampled_from("st"),
        st.sampled_from(
            ["/home", "/doc/x/page/1", "/doc/x/page/2", "/doc/x/page/3", "/doc/y/page/1", "/doc/y/page/2"]
        ),
        st.sampled_from([0.0, 1.0, IDLE_S, IDLE_S + 1.0]),
    ),
    max_size=60,
)


@settings(max_examples=60, deadline=None)
@given(reading=_reading)
def test_the_server_counts_what_a_predictor_counts_that_saw_it_all(
    reading: list[tuple[str, str, float]],
) -> None:
    route = Route.of(_ROUTE, lambda id, n: None)
    table = RouteTable()
    table.add(route)
    predictor = Predictor(order=4, routes=table)
    rows: list[Row] = []
    clock = 1e9
    for seq, (session, path, pause) in enumerate(reading):
        clock += pause
        predictor.observe(session, path, clock)
        rows.append(_row(seq, path, session, t=clock, route=_ROUTE if route.match(path) else ""))
    store = Store("sqlite://")
    _ingest(store, rows)
    mined = Profiles(store).rendered(DEFAULT_APP).profile
    store.close()
    seen = predictor.to_profile("1")
    assert mined.paths == seen.paths
    assert mined.routes == seen.routes


def test_a_profile_makes_a_new_client_predict_what_was_in_the_events(store: Store) -> None:
    pages = [f"/doc/x/page/{n}" for n in range(1, 20)]
    rows = [_row(n, path, route=_ROUTE) for n, path in enumerate(pages)]
    rows += [_row(100 + n, path, session="t") for n, path in enumerate(["/home", "/cart", "/pay"] * 3)]
    _ingest(store, rows)
    profile = Profile.from_json(Profiles(store).rendered(DEFAULT_APP).json)
    table = RouteTable()
    table.add(Route.of(_ROUTE, lambda id, n: None))
    predictor = Predictor(routes=table)
    predictor.load(profile)
    predictor.observe("new", "/home", 0.0)
    assert predictor.predict("new", 1)[0].path == "/cart"
    predictor.observe("reader", "/doc/never-seen/page/7", 0.0)
    assert "/doc/never-seen/page/8" in [found.path for found in predictor.predict("reader", 3)]


def test_chunks_are_only_a_matter_of_memory(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = _rows([(f"s{n % 3}", f"/{n * n % 7}", float(n % 5)) for n in range(100)])
    _ingest(store, rows)
    monkeypatch.setattr("mcp_profile.mining._CHUNK", 7)
    Miner(store).mine(DEFAULT_APP)
    monkeypatch.undo()
    whole = Store("sqlite://")
    _ingest(whole, rows)
    Miner(whole).mine(DEFAULT_APP)
    assert _learned(store) == _learned(whole)
    whole.close()


@settings(max_examples=12, deadline=None)
@given(reading=_reading)
def test_counting_in_bulk_is_counting_as_events_come(reading: list[tuple[str, str, float]]) -> None:
    route = Route.of(_ROUTE, lambda id, n: None)
    clock = 1e9
    rows: list[Row] = []
    for seq, (session, path, pause) in enumerate(reading):
        clock += pause
        outcome = "evicted" if seq % 11 == 5 else ""
        more = {
            "route": _ROUTE if route.match(path) else "",
            "outcome": outcome,
            "source": ["server", "cache", "error"][seq % 3],
        }
        rows.append(_row(seq, path, session if seq % 7 else "", t=clock, **more))
    store = Store("sqlite://")
    _ingest(store, rows)
    Miner(store).mine(DEFAULT_APP)
    expected = _learned(store)
    assert bulk.rebuild(store, DEFAULT_APP) == len(rows)
    assert _learned(store) == expected
    assert Miner(store).mine(DEFAULT_APP) == 0  # and mining goes on from there
    store.close()


@settings(max_examples=30, deadline=None)
@given(steps=_steps)
def test_the_sql_says_the_same_on_sqlite_and_duckdb(steps: list[tuple[str, str, float]]) -> None:
    store = Store("sqlite://", clock=lambda: _TODAY * DAY_S)
    _ingest(store, _rows(steps))
    weights = weights_sql([_TODAY], _TODAY - 45, 30.0)  # of no round number
    text = sessions.grams(sessions.steps(sessions.asked(sessions.demanded(DEFAULT_APP, weights))), 3)
    with store.read() as db:
        on_sqlite = {tuple(row) for row in db.exec_driver_sql(text).all()}
        stored = [tuple(row) for row in db.execute(sa.select(events)).all()]
    store.close()
    with duckdb.connect() as duck:
        duck.execute(
            "CREATE TABLE events (id BIGINT, app INT, client BIGINT, day INT, seq BIGINT, t DOUBLE, session TEXT, path TEXT, "
            "route TEXT, fp TEXT, model TEXT, source TEXT, latency_ms DOUBLE, bytes BIGINT, prefetch_id TEXT, outcome TEXT)"
        )
        if stored:
            duck.executemany(f"INSERT INTO events VALUES ({', '.join('?' * 16)})", stored)
        assert set(duck.execute(text).fetchall()) == on_sqlite


def test_the_first_frequent_paths_are_those_of_all(store: Store) -> None:
    """Few of many: what is cut off must not make a sequence look closed that is not."""
    rows = [
        _row(100 * v + n, path, f"s{v}")
        for v in range(300)
        for n, path in enumerate([f"/a{v}", f"/b{v}", f"/c{v}"])
    ]
    rows += [_row(10**6 + n, path, "twice") for n, path in enumerate(["/x", "/y", "/z", "/x", "/y", "/z"])]
    _ingest(store, rows)
    profiles = Profiles(store)
    every = profiles.frequent_paths(DEFAULT_APP, 1, 10_000)
    assert len(every) > 300
    assert every[0] == {"steps": ["/x", "/y", "/z"], "support": 2}
    assert [found["support"] for found in every[1:]] == [1] * (len(every) - 1)
    for limit in (1, 2, 5):
        assert profiles.frequent_paths(DEFAULT_APP, 1, limit) == every[:limit]
