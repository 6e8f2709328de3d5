"""The same server on a real PostgreSQL: counted once, mined alike, keys and retention work."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from mcp_client.telemetry import ProfileAPI
from mcp_client.telemetry.events import uuid7
from mcp_profile import ProfileServer, upkeep
from mcp_profile.access import Access
from mcp_profile.mining import Miner
from mcp_profile.schema import path_sums, tails, transitions
from mcp_profile.store import DEFAULT_APP, Store
from tests.mcp_profile.test_migrations import check_upgraded, old_database

pytest.importorskip("psycopg", reason="the PostgreSQL driver is not installed")
_BIN = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
if not _BIN:
    pytest.skip("PostgreSQL is not installed", allow_module_level=True)


def _as_postgres(*command: str) -> list[str]:
    """PostgreSQL refuses to run as root."""
    return [*(["runuser", "-u", "postgres", "--"] if os.getuid() == 0 else []), *command]


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """The URL of a server of this module's own."""
    folder = Path(tempfile.mkdtemp(prefix="mcp-pg-"))
    if os.getuid() == 0:
        shutil.chown(folder, "postgres")
    tools = _BIN[-1].parent
    subprocess.run(
        _as_postgres(str(tools / "initdb"), "-D", f"{folder}/data", "-A", "trust", "-U", "mcp", "--no-sync"),
        check=True,
        capture_output=True,
        cwd="/",
    )
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    options = (
        "-h",
        "127.0.0.1",
        "-p",
        str(port),
        "-k",
        str(folder),
        "-c",
        "fsync=off",
        "-c",
        "max_connections=60",
    )
    process = subprocess.Popen(
        _as_postgres(str(tools / "postgres"), "-D", f"{folder}/data", *options),
        cwd="/",
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    url = f"postgresql+psycopg://mcp@127.0.0.1:{port}/postgres"
    try:
        _wait_for(url)
        yield url
    finally:
        subprocess.run(
            _as_postgres(str(tools / "pg_ctl"), "-D", f"{folder}/data", "-m", "immediate", "stop"),
            check=False,
            capture_output=True,
            cwd="/",
        )
        process.wait(20)
        shutil.rmtree(folder, ignore_errors=True)


def _wait_for(url: str) -> None:
    engine = sa.create_engine(url)
    for _ in range(200):
        try:
            engine.connect().close()
            break
        except sa.exc.OperationalError:
            time.sleep(0.1)
    engine.dispose()


@pytest.fixture
def database(cluster: str) -> Iterator[str]:
    """A database that is new for each test."""
    name = f"test_{time.monotonic_ns()}"
    engine = sa.create_engine(cluster, isolation_level="AUTOCOMMIT")
    with engine.connect() as db:
        db.exec_driver_sql(f"CREATE DATABASE {name}")
    yield cluster.rsplit("/", 1)[0] + f"/{name}"
    with engine.connect() as db:
        db.exec_driver_sql(f"DROP DATABASE {name} WITH (FORCE)")
    engine.dispose()


def _batch(*paths: str, session: str = "s", batch_id: str = "") -> dict[str, Any]:
    events = [
        {
            "seq": n,
            "t": 1.7e9 + n,
            "session": session,
            "path": path,
            "route": "/{name}",
            "source": "server",
            "latency_ms": 2.0,
        }
        for n, path in enumerate(paths)
    ]
    return {"batch_id": batch_id or uuid7(), "client_id": "c", "sdk": "t", "events": events}


def test_the_server_works_on_it_as_on_sqlite(database: str) -> None:
    learned = []
    for db in (database, None):
        with ProfileServer(db) as server:
            api = ProfileAPI(server.url)
            batch = _batch("/a", "/b", "/c", "/a", "/b")
            assert [api.report(batch).accepted for _ in range(2)] == [5, 0]
            first, etag = api.profile()
            assert first is not None
            api.report(_batch("/d", "/b", batch_id="later"))
            server.stop()
            server.start()
            second, _ = api.profile(etag)
            assert second is not None
            learned.append((first.paths, first.routes, first.keys, second.paths, second.routes, second.keys))
            assert server.store.stats(DEFAULT_APP)["events"] == 7
    assert learned[0] == learned[1]


def test_of_many_that_bring_a_batch_at_once_one_counts(database: str) -> None:
    with ProfileServer(database) as one, ProfileServer(database) as other:
        batches = [_batch("/a", "/b", session=f"s{n}") for n in range(4)]

        def bring(number: int) -> int:
            return ProfileAPI((one, other)[number % 2].url).report(batches[number % 4]).accepted

        with ThreadPoolExecutor(8) as pool:
            accepted = list(pool.map(bring, range(16)))
        assert sorted(accepted) == [0] * 12 + [2] * 4
        assert one.store.stats(DEFAULT_APP)["events"] == 8


def test_several_miners_count_each_event_once(database: str) -> None:
    stores = [Store(database) for _ in range(3)]
    with ProfileServer(database) as server:
        for n in range(10):
            ProfileAPI(server.url).report(_batch("/a", "/b", "/c", session=f"s{n}"))
    with ThreadPoolExecutor(3) as pool:
        counted = list(pool.map(lambda store: Miner(store).mine(DEFAULT_APP), stores))
    assert sum(counted) == 30
    with stores[0].read() as db:
        where = (transitions.c.kind == "path", transitions.c.context == "/a", transitions.c.step == "/b")
        assert db.execute(sa.select(transitions.c.n).where(*where)).scalar_one() == 10
        assert db.execute(sa.select(sa.func.sum(path_sums.c.asked))).scalar_one() == 30
        assert db.execute(sa.select(sa.func.count()).select_from(tails)).scalar_one() == 10
    for store in stores:
        store.close()


def test_the_longest_paths_fit_its_indexes(database: str) -> None:
    with ProfileServer(database) as server:
        api = ProfileAPI(server.url)
        assert api.report(_batch(*(letter + "💡" * 511 for letter in "abcdef"))).accepted == 6
        profile, _ = api.profile()
        assert profile is not None
        assert len(profile.keys) == 6


def test_keys_and_retention_work_on_it(database: str) -> None:
    store = Store(database)
    access = Access(store)
    secret = access.create(application="shop")
    app = access.application(f"Bearer {secret}", "ingest")
    assert app != DEFAULT_APP
    store.close()
    with ProfileServer(database) as server:
        assert ProfileAPI(server.url, secret).report(_batch("/a", "/b")).accepted == 2
        Miner(server.store).mine(app)
        assert upkeep.retire(server.store, 30) == 2


def test_an_older_database_is_upgraded_once_by_many_that_start_at_once(database: str) -> None:
    old_database(database)
    with ThreadPoolExecutor(4) as pool:
        for store in pool.map(Store, [database] * 4):
            store.close()
    check_upgraded(database)
