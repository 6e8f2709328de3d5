"""``mcp-profile train`` on a real event store: into the profile, versioned, promoted only if better."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import orjson
import pytest
import sqlalchemy as sa
from typer.testing import CliRunner

from mcp_client.prefetch.profile import Profile
from mcp_client.prefetch.ranker import Ranker
from mcp_profile.cli import app
from mcp_profile.ingest import Batch, Row
from mcp_profile.rankers import sessions_of
from mcp_profile.schema import rankers
from mcp_profile.service import Profiles
from mcp_profile.store import DEFAULT_APP, Store


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with_events = Store(f"sqlite:///{tmp_path / 'profile.sqlite'}")
    yield with_events
    with_events.close()


def _fill(store: Store, count: int) -> None:
    draw = random.Random(3)
    rows: list[Row] = []
    for number in range(count):
        at = draw.randrange(40)
        for step in range(draw.randrange(2, 6)):
            t, session = 1e9 + 100 * number + step, f"s{number}"
            rows.append((len(rows), t, session, f"/p/{at}", "", "", "m", "server", 1.0, 1, "", ""))
            at = (at + draw.choice((1, 1, 1, 7, 11))) % 40
    store.ingest(DEFAULT_APP, Batch("b", "c", "sdk", rows, []))


def _train(store: Store) -> str:
    result = CliRunner().invoke(app, ["train", "--db", str(store.url)])
    assert result.exit_code == 0, result.output
    return result.output


def test_a_trained_ranker_travels_in_the_profile_and_the_same_again_is_not_promoted(store: Store) -> None:
    _fill(store, 900)
    profiles = Profiles(store)
    before = profiles.rendered(DEFAULT_APP)
    assert before.profile.ranker == b""
    assert "ranker 1 promoted" in _train(store)
    after = profiles.rendered(DEFAULT_APP)
    assert after.json_etag != before.json_etag
    ranker = Profile.from_json(after.json).ranker
    Ranker(ranker)
    assert len(after.json) <= 1 << 20
    assert "ranker 2 not promoted" in _train(store)
    assert profiles.rendered(DEFAULT_APP).profile.ranker == ranker
    with store.read() as db:
        rows = db.execute(sa.select(rankers.c.version, rankers.c.promoted, rankers.c.metrics)).all()
    assert [(row.version, row.promoted) for row in rows] == [(1, 1), (2, 0)]
    assert orjson.loads(rows[0].metrics)["ranker"]["reliability"]


def test_a_profile_too_small_for_the_ranker_goes_without(store: Store) -> None:
    _fill(store, 900)
    _train(store)
    small = Profiles(store).rendered(DEFAULT_APP, 50_000)
    assert small.profile.ranker == b""
    assert 0 < len(small.json) <= 50_000


def test_sessions_come_in_the_order_of_their_ends(store: Store) -> None:
    _fill(store, 20)
    sessions = sessions_of(store, DEFAULT_APP)
    assert [session[-1][0] for session in sessions] == sorted(session[-1][0] for session in sessions)
    assert all(session == sorted(session) for session in sessions)


def test_too_few_events_are_told(store: Store) -> None:
    _fill(store, 3)
    result = CliRunner().invoke(app, ["train", "--db", str(store.url)])
    assert result.exit_code == 2
    assert "collect more sessions" in result.output
