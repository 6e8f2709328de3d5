"""Forgetting: a profile follows changing habits, and counting day by day is counting anew, to the last bit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from mcp_profile import bulk, upkeep
from mcp_profile.cli import app
from mcp_profile.forgetting import DAY_S, day_of, rounded, weight
from mcp_profile.ingest import Batch, Row
from mcp_profile.mining import Miner
from mcp_profile.schema import events, mined, path_sums, transitions
from mcp_profile.service import Profiles
from mcp_profile.store import DEFAULT_APP, Store


class Days:
    """A clock that a test moves."""

    now = 20_000 * DAY_S

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def days() -> Days:
    return Days()


@pytest.fixture
def store(tmp_path: Path, days: Days) -> Iterator[Store]:
    store = Store(f"sqlite:///{tmp_path / 'db.sqlite'}", clock=days)
    yield store
    store.close()


def _visit(store: Store, *paths: str, times: int = 1) -> None:
    rows: list[Row] = []
    for visit in range(times):
        session = f"{store.clock()}-{visit}"
        for n, path in enumerate(paths):
            t = store.clock() + 1.3 * n
            rows.append((n, t, session, path, "", "", "m", "server", 0.1 * len(path), 7, "", ""))
    store.ingest(DEFAULT_APP, Batch(f"{store.clock()}-{paths}", "c", "", rows, []))


def _learned(store: Store) -> list[list[object]]:
    # Not the tails: those of sessions that ended long ago are not kept.
    wanted = (transitions, path_sums, sa.select(mined.c.since, mined.c.day))
    with store.read() as db:
        return [
            sorted(map(tuple, db.execute(sa.select(one) if isinstance(one, sa.Table) else one)))
            for one in wanted
        ]


def test_what_was_seen_a_half_life_ago_counts_half(store: Store, days: Days) -> None:
    profiles = Profiles(store)
    _visit(store, "/home", "/old", times=8)
    assert profiles.rendered(DEFAULT_APP).profile.paths["/home"] == {"/old": 8}
    days.now += 30 * DAY_S
    _visit(store, "/home", "/new", times=5)
    profiles.mine(DEFAULT_APP)
    profile = profiles.rendered(DEFAULT_APP).profile
    assert profile.paths["/home"] == {"/old": 4, "/new": 5}
    assert profile.keys["/home"].count == 9
    assert profile.keys["/home"].gap_s == 1.3
    assert [edge["count"] for edge in profiles.graph(DEFAULT_APP, "", 10)["edges"]] == [5, 4]
    assert profiles.frequent_paths(DEFAULT_APP, 5, 10) == [
        {"steps": ["/home"], "support": 9},
        {"steps": ["/home", "/new"], "support": 5},
    ]


def test_a_day_that_brings_nothing_changes_nothing(store: Store, days: Days) -> None:
    _visit(store, "/home", "/old")
    before = Profiles(store).rendered(DEFAULT_APP).json
    days.now += 300 * DAY_S
    assert Profiles(store).rendered(DEFAULT_APP).json == before


_seen = st.lists(
    st.tuples(st.integers(0, 20), st.lists(st.sampled_from("abc"), min_size=1, max_size=5), st.booleans()),
    max_size=8,
)


@settings(max_examples=10, deadline=None)
@given(seen=_seen, half_life=st.sampled_from([7.0, 30.0, 0.0, 11.7]))
def test_counting_day_by_day_is_counting_anew(
    seen: list[tuple[int, list[str], bool]], half_life: float
) -> None:
    days = Days()
    store = Store("sqlite://", clock=days)
    _visit(store, "/home")
    bulk.rebuild(store, DEFAULT_APP, half_life_days=half_life)
    for later, paths, mine in seen:
        days.now += later * DAY_S
        _visit(store, *paths)
        if mine:
            Miner(store).mine(DEFAULT_APP)
    Miner(store).mine(DEFAULT_APP)
    expected = _learned(store)
    bulk.rebuild(store, DEFAULT_APP)  # keeps the half-life
    assert _learned(store) == expected
    store.close()


def test_the_server_s_clock_set_back_breaks_nothing(store: Store, days: Days) -> None:
    _visit(store, "/home", "/a")
    Miner(store).mine(DEFAULT_APP)
    days.now -= 30 * DAY_S
    _visit(store, "/home", "/b")
    Miner(store).mine(DEFAULT_APP)
    assert Profiles(store).rendered(DEFAULT_APP).profile.paths["/home"] == {"/a": 1, "/b": 0.5}


def test_what_has_faded_is_deleted_in_the_end(store: Store, days: Days) -> None:
    _visit(store, "/home", "/old")
    Miner(store).mine(DEFAULT_APP)
    days.now += 8 * 30 * DAY_S  # 1/256
    _visit(store, "/home", "/new")
    Miner(store).mine(DEFAULT_APP)
    assert "/old" not in Profiles(store).rendered(DEFAULT_APP).profile.paths["/home"]
    upkeep.retire(store, 1000)
    with store.read() as db:
        assert "/old" not in set(db.execute(sa.select(transitions.c.step)).scalars())
        assert set(db.execute(sa.select(path_sums.c.path)).scalars()) == {"/home", "/new"}


def test_events_that_come_after_all_others_aged_out_are_mined(store: Store, days: Days) -> None:
    """SQLite would have given their ids out again, below the watermark."""
    _visit(store, "/home", "/old")
    Miner(store).mine(DEFAULT_APP)
    days.now += 40 * DAY_S
    assert upkeep.retire(store, 30) == 2
    _visit(store, "/home", "/new")
    assert Miner(store).mine(DEFAULT_APP) == 2
    with store.read() as db:
        assert list(db.execute(sa.select(events.c.id)).scalars()) == [3, 4]


def test_weights_are_exact_and_close_to_what_they_stand_for() -> None:
    for half_life in (7.0, 30.0, 365.0):
        for day in range(-500, 5000, 7):
            assert weight(day, half_life) == pytest.approx(2 ** (day / half_life), rel=0.004)
            assert (weight(day, half_life) * 2.0 ** (8 - day // half_life)).is_integer()
    assert weight(10**9, 7.0) == 2.0**1000
    assert weight(5, 0.0) == 1.0
    assert rounded(0.1) * 1024 == 102
    assert day_of(DAY_S * 3 - 0.01) == 2


def test_the_command_says_what_goes_together(tmp_path: Path) -> None:
    for arguments in (
        ["--half-life-days", "30"],
        ["--anew", "--half-life-days", "3"],
        ["--engine", "spark"],
        ["--engine", "dask"],
        ["--master", "spark://127.0.0.1:7077"],
    ):
        result = CliRunner().invoke(app, ["mine", "--db", str(tmp_path / "db"), *arguments])
        assert (result.exit_code, result.output.startswith("mcp-profile: --")) == (2, True), result.output
    result = CliRunner().invoke(
        app, ["mine", "--db", str(tmp_path / "db"), "--engine", "duckdb", "--half-life-days", "0"]
    )
    assert result.output == "0 events mined\n"
