"""Migrations: an older database is upgraded without loss to what schema.py says, a later one is refused, starts don't collide."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import orjson
import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from typer.testing import CliRunner

from mcp_client.errors import ConfigurationError
from mcp_profile import migrations
from mcp_profile.access import Access, _digest
from mcp_profile.cli import app
from mcp_profile.ingest import parse
from mcp_profile.schema import metadata
from mcp_profile.service import Profiles
from mcp_profile.store import DEFAULT_APP, Store

_SECRET = "mcp_of-the-first-days"
# What the first release had stored, table by table.
_DATA = """
INSERT INTO applications (id, name) VALUES (1, 'default');
INSERT INTO applications (id, name) VALUES (2, 'shop');
INSERT INTO clients (id, app, client_id, sdk, first_seen, last_seen) VALUES (1, 1, 'c', 'sdk', 1.7e9, 1.7e9);
INSERT INTO batches (app, batch_id, client, received_at, events, rejected) VALUES (1, 'b', 1, 1.7e9, 2, '');
INSERT INTO events (id, app, client, seq, t, session, path, route, fp, model, source, latency_ms, bytes, prefetch_id, outcome)
  VALUES (7, 1, 1, 1, 1.7e9, 's', '/a', '', 'f', 'm', 'server', 2.5, 10, '', '');
INSERT INTO events (id, app, client, seq, t, session, path, route, fp, model, source, latency_ms, bytes, prefetch_id, outcome)
  VALUES (8, 1, 1, 2, 1.7e9, 's', '/b', '', 'f', 'm', 'server', 2.5, 10, '', '');
INSERT INTO hourly (app, hour, source, outcome, events, latency_ms, bytes) VALUES (1, 472222, 'server', '', 2, 5.0, 20);
INSERT INTO keys (id, app, name, digest, scopes, created_at, revoked_at)
  VALUES (1, 2, 'k', '{digest}', 'ingest read', 1.7e9, NULL);
INSERT INTO mined (app, watermark, steps, visits, mined_at) VALUES (1, 8, 2, 1, 1.7e9);
INSERT INTO tails (app, session, state, touched_at) VALUES (1, 's', '[1.7e9,[["/a",""],["/b",""]]]', 1.7e9);
INSERT INTO transitions (app, kind, context, step, n) VALUES (1, 'path', '/a', '/b', 5.0);
INSERT INTO path_sums (app, path, asked, gap_s, gaps, latency_ms, served, bytes, answered)
  VALUES (1, '/a', 6, 3.0, 5, 15.0, 6, 60.0, 6);
"""


def old_database(url: str, *, recorded: bool = True) -> None:
    """A database as the first release left it; ``recorded``: with its revision, which the very first ones did not have."""
    engine = sa.create_engine(url)
    with engine.begin() as db:
        migrations.upgrade(db, "", "0001")
        data = _DATA.replace("{digest}", _digest(_SECRET)).replace("1.7e9", repr(time.time() - 86_400))
        for statement in data.split(";\n"):
            if statement.strip():
                db.exec_driver_sql(statement)
        if db.dialect.name == "postgresql":  # ids that were given do not count there
            for table in ("applications", "clients", "events", "keys"):
                db.exec_driver_sql(
                    f"SELECT setval(pg_get_serial_sequence('{table}', 'id'), max(id)) FROM {table}"
                )
        if not recorded:
            db.exec_driver_sql("DROP TABLE alembic_version")
    engine.dispose()


def check_upgraded(url: str) -> None:
    """Everything that was there is there, and it is what an empty database would have become."""
    store = Store(url)
    with store.read() as db:
        assert migrations.revision(db) == migrations.HEAD
        known = MigrationContext.configure(
            db, opts={"include_name": lambda name, kind, _: name != "alembic_version"}
        )
        assert compare_metadata(known, metadata) == []
        counts = {
            name: db.execute(sa.select(sa.func.count()).select_from(table)).scalar_one()
            for name, table in metadata.tables.items()
        }
        assert {name: n for name, n in counts.items() if n} == {
            "applications": 2,
            "clients": 1,
            "batches": 1,
            "events": 2,
            "hourly": 1,
            "keys": 1,
            "mined": 1,
            "tails": 1,
            "transitions": 1,
            "path_sums": 1,
        }
    assert Access(store).application(f"Bearer {_SECRET}", "ingest") == 2
    more = {
        "batch_id": "b2",
        "client_id": "c",
        "events": [{"seq": 3, "t": 1.7e9, "session": "s", "path": "/c", "source": "server"}],
    }
    assert store.ingest(DEFAULT_APP, parse(orjson.dumps(more)))[0] == 1
    profiles = Profiles(store)
    assert profiles.mine(DEFAULT_APP) == 1  # what is new, and goes on from where it stood
    counted = profiles.rendered(DEFAULT_APP).profile.paths
    assert counted["/b"]["/c"] > 0
    assert counted["/a"]["/b"] > 0
    store.close()


@pytest.mark.parametrize("recorded", [True, False])
def test_an_older_database_is_upgraded_without_loss(recorded: bool, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'db.sqlite'}"
    old_database(url, recorded=recorded)
    check_upgraded(url)


def test_an_empty_database_becomes_what_the_migrations_make(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'db.sqlite'}"
    Store(url).close()
    engine = sa.create_engine(url)
    with engine.connect() as db:
        assert migrations.revision(db) == migrations.HEAD
        made = {
            row.name: row.sql
            for row in db.exec_driver_sql("SELECT name, sql FROM sqlite_master WHERE sql <> ''")
        }
    engine.dispose()
    engine = sa.create_engine("sqlite://")
    with engine.begin() as db:
        migrations.upgrade(db, "")
        stepwise = {
            row.name for row in db.exec_driver_sql("SELECT name, sql FROM sqlite_master WHERE sql <> ''")
        }
    engine.dispose()
    assert set(made) == stepwise


def test_head_is_the_last_of_the_migrations() -> None:
    folder = Path(migrations.__file__).parent
    assert ScriptDirectory(str(folder)).get_heads() == [migrations.HEAD]


def test_a_database_of_a_later_release_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    file = tmp_path / "db.sqlite"
    Store(f"sqlite:///{file}").close()
    engine = sa.create_engine(f"sqlite:///{file}")
    with engine.begin() as db:
        db.exec_driver_sql("UPDATE alembic_version SET version_num = '9999'")
    engine.dispose()  # the last connection writes SQLite's log into the file
    before = file.read_bytes()
    with pytest.raises(ConfigurationError, match=r"9999.*a later release has upgraded it"):
        Store(f"sqlite:///{file}")
    result = CliRunner().invoke(app, ["serve", "--port", "0", "--db", str(file)])
    assert result.exit_code == 2
    assert "9999" in result.output
    assert CliRunner().invoke(app, ["keys", "ls", "--db", str(file)]).exit_code == 2
    assert file.read_bytes() == before


def test_a_migration_that_fails_leaves_the_database_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"sqlite:///{tmp_path / 'db.sqlite'}"
    old_database(url, recorded=False)
    real = migrations.upgrade

    def fails(*arguments: object) -> None:
        real(*arguments)  # type: ignore[arg-type]
        raise OSError("the disk is full")

    monkeypatch.setattr(migrations, "upgrade", fails)
    with pytest.raises(OSError, match="full"):
        Store(url)
    monkeypatch.undo()
    check_upgraded(url)


@pytest.mark.parametrize("old", [True, False])
def test_many_that_start_at_once_upgrade_once(old: bool, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'db.sqlite'}"
    if old:
        old_database(url)
    program = "import sys; from mcp_profile.store import Store; Store(sys.argv[1]).close()"
    starts = [
        subprocess.Popen([sys.executable, "-c", program, url], stderr=subprocess.PIPE) for _ in range(4)
    ]
    assert [(start.wait(60), start.communicate()[1]) for start in starts] == [(0, b"")] * 4
    if old:
        check_upgraded(url)
