"""Mining on a real Spark cluster, one master and two workers: equal to DuckDB's to the last row."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa

from mcp_profile import bulk
from mcp_profile.forgetting import DAY_S
from mcp_profile.ingest import Batch, Row
from mcp_profile.mining import Miner
from mcp_profile.schema import mined, path_sums, tails, transitions
from mcp_profile.store import DEFAULT_APP, Store
from tests.spark.cluster import missing, spark_cluster

pytestmark = pytest.mark.timeout(400)  # it takes 46 s of CPU time


@pytest.fixture(scope="module")
def cluster() -> Iterator[tuple[str, dict[str, str]]]:
    assert not missing(), missing()
    with spark_cluster() as started:
        yield started


def _fill(file: Path) -> None:
    """Readers and shoppers over some weeks, with pauses, reloads, lost prefetches, errors, long and strange paths."""
    rng = random.Random(7)
    now = 20_000 * DAY_S
    store = Store(f"sqlite:///{file}", clock=lambda: now)
    strange = ["/ü", "/it's", "/\\n", "/%", "/" + "💡" * 500, "/a b", '/"q"']
    seq = 0
    for number in range(12):
        rows: list[Row] = []
        for _ in range(300):
            seq += 1
            path = rng.choice([f"/doc/{rng.randrange(3)}/page/{rng.randrange(5)}", *strange])
            route = "/doc/{id}/page/{n:int}" if path.startswith("/doc") else ""
            t = now + seq * rng.choice([0.01, 1.7, 900.3])
            outcome = rng.choice(["", "", "", "used", "evicted"])
            source = rng.choice(["server", "cache", "error"])
            session = f"s{rng.randrange(40)}" if seq % 9 else ""
            rows.append(
                (
                    seq,
                    t,
                    session,
                    path if seq % 13 else "",
                    route,
                    "f",
                    "m",
                    source,
                    rng.random() * 9,
                    seq,
                    "",
                    outcome,
                )
            )
        store.ingest(DEFAULT_APP, Batch(f"b{number}", "c", "", rows, []))
        now += rng.choice([0.2, 1.0, 6.0]) * DAY_S
    store.close()


def _learned(file: Path) -> dict[str, list[tuple[object, ...]]]:
    store = Store(f"sqlite:///{file}")
    queries = {
        "transitions": sa.select(transitions),
        "sums": sa.select(path_sums),
        "tails": sa.select(tails.c.session, tails.c.state),
        "mined": sa.select(*(column for column in mined.columns if column.name != "mined_at")),
    }
    with store.read() as db:
        learned = {name: sorted(map(tuple, db.execute(query))) for name, query in queries.items()}
    store.close()
    return learned


def test_spark_counts_what_duckdb_counts(cluster: tuple[str, dict[str, str]], tmp_path: Path) -> None:
    master, environment = cluster
    file = tmp_path / "db.sqlite"
    _fill(file)
    store = Store(f"sqlite:///{file}")
    Miner(store).mine(DEFAULT_APP)
    step_by_step = _learned(file)
    assert bulk.rebuild(store, DEFAULT_APP) == 3600
    on_duckdb = _learned(file)
    with store.write() as db:  # so that what is found afterwards is Spark's
        for table in (transitions, path_sums, tails):
            db.execute(table.delete())
    store.close()
    command = [
        sys.executable,
        "-c",
        "from mcp_profile.cli import main; main()",
        "mine",
        "--engine",
        "spark",
        "--master",
        master,
    ]
    done = subprocess.run(
        [*command, "--db", str(file), "--folder", str(tmp_path)],
        env=environment,
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=380,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "3600 events mined\n"), done.stderr[-3000:]
    on_spark = _learned(file)
    assert len(on_spark["transitions"]) > 1000
    assert on_spark == on_duckdb
    assert on_duckdb | {"tails": []} == step_by_step | {"tails": []}
    assert [
        entry.name for entry in tmp_path.iterdir() if entry.is_dir()
    ] == []  # nothing is left in the shared folder
