"""Upkeep: raw events age out, what is learned stays, and an export has every event."""

from __future__ import annotations

import gzip
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest
from typer.testing import CliRunner

from mcp_profile import upkeep
from mcp_profile.cli import app
from mcp_profile.ingest import parse
from mcp_profile.service import Profiles
from mcp_profile.store import DEFAULT_APP, Store

DAY = 86_400.0
NOW = 2e9


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = Store(f"sqlite:///{tmp_path / 'db.sqlite'}", clock=lambda: NOW)
    yield store
    store.close()


def _ingest(store: Store, *times: float, batch_id: str = "b") -> None:
    events: list[dict[str, Any]] = [
        {"seq": n, "t": t, "session": "s", "path": f"/{n}", "source": "server"} for n, t in enumerate(times)
    ]
    store.ingest(DEFAULT_APP, parse(orjson.dumps({"batch_id": batch_id, "client_id": "c", "events": events})))


def test_old_events_go_when_they_are_mined_and_what_is_learned_stays(store: Store) -> None:
    _ingest(store, NOW - 40 * DAY, NOW - 40 * DAY, NOW - DAY)
    assert upkeep.retire(store, 30) == 0  # not mined yet
    profiles = Profiles(store)
    before = profiles.rendered(DEFAULT_APP).profile
    assert upkeep.retire(store, 30) == 2
    assert upkeep.retire(store, 30) == 0
    assert profiles.rendered(DEFAULT_APP).profile == before
    assert store.stats(DEFAULT_APP)["events"] == 3  # the sums by the hour stay, too


def test_an_event_from_the_future_does_not_stay_for_ever(store: Store) -> None:
    _ingest(store, NOW + 2 * DAY, NOW)
    Profiles(store).mine(DEFAULT_APP)
    assert upkeep.retire(store, 30) == 1


def test_a_batch_counts_once_also_when_its_events_are_gone(store: Store) -> None:
    _ingest(store, NOW - 40 * DAY)
    Profiles(store).mine(DEFAULT_APP)
    upkeep.retire(store, 30)
    _ingest(store, NOW - 40 * DAY)
    assert store.stats(DEFAULT_APP)["events"] == 1


def test_more_than_fits_a_transaction_goes_all_the_same(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upkeep, "_CHUNK", 10)
    _ingest(store, *[1e9] * 35)
    Profiles(store).mine(DEFAULT_APP)
    out = io.BytesIO()
    assert upkeep.export(store, DEFAULT_APP, out) == 35
    assert [orjson.loads(line)["seq"] for line in out.getvalue().splitlines()] == list(range(35))
    assert upkeep.retire(store, 1) == 35


def test_the_commands_export_and_retire(store: Store, tmp_path: Path) -> None:
    _ingest(store, 1e9, 1e9)
    db = ["--db", str(tmp_path / "db.sqlite")]
    result = CliRunner().invoke(app, ["export", str(tmp_path / "events.jsonl.gz"), *db])
    assert result.exit_code == 0, result.output
    lines = gzip.decompress((tmp_path / "events.jsonl.gz").read_bytes()).splitlines()
    assert [orjson.loads(line)["path"] for line in lines] == ["/0", "/1"]
    assert "2 events deleted" in CliRunner().invoke(app, ["retention", "--days", "30", *db]).output
