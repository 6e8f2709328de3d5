"""Telemetry and Profile API: what recording costs, what ingest takes, how large a profile is, how long mining lasts.

make bench NAME=profile ARGS="--quick --json"
"""

from __future__ import annotations

import sys

sys.path.pop(0)  # this folder: it would hide the standard library's ``profile`` from those who import it

import argparse
import gzip
import json
import multiprocessing
import os
import random
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson

_BATCH = 5000


def record_us(rounds: int) -> float:
    """Median time of one ``record`` with positional arguments, as the client calls it; the spool is written meanwhile."""
    from mcp_client.config import Telemetry
    from mcp_client.telemetry import TelemetryPipe

    with tempfile.TemporaryDirectory() as folder:
        pipe = TelemetryPipe(Telemetry("http://127.0.0.1:9", spool_dir=Path(folder)))
        fp = os.urandom(20)
        times = []
        for _ in range(rounds):
            started = time.perf_counter()
            for _ in range(2000):
                pipe.record(
                    "user-42", "/doc/7/page/1", "/doc/{id}/page/{n:int}", fp, "ocr", "cache", 0.01, 4012
                )
            times.append((time.perf_counter() - started) / 2000)
            time.sleep(0.01)
        pipe.close(0.1)
    return statistics.median(times) * 1e6


def traffic(n: int, *, paths: int, seed: int = 1) -> Iterator[tuple[str, str]]:
    """Readers who start somewhere popular and mostly turn to the next page: (session, path), ``paths`` different ones."""
    rng = random.Random(seed)
    pages = 100
    documents = max(1, paths // pages)
    where: dict[int, tuple[int, int]] = {}
    for _ in range(n):
        session = rng.randrange(2000)
        document, page = where.get(session, (0, pages))
        if page + 1 >= pages or rng.random() < 0.1:
            document, page = min(int(rng.paretovariate(0.7)) - 1, documents - 1), rng.randrange(pages)
        else:
            page += 1
        where[session] = (document, page)
        yield f"session-{session:019d}", f"/doc/{document}/page/{page}"


def batches(n: int, *, paths: int) -> list[bytes]:
    """The traffic as a client sends it."""
    packed, chunk = [], []
    for seq, (session, path) in enumerate(traffic(n, paths=paths)):
        event = {
            "seq": seq,
            "t": 1.767e9 + seq * 0.01,
            "session": session,
            "path": path,
            "route": "/doc/{id:int}/page/{n:int}",
            "fp": f"{seq:032d}",
            "model": "ocr",
            "source": "server",
            "latency_ms": 3.2,
            "bytes": 4012,
        }
        chunk.append(event)
        if len(chunk) == _BATCH:
            packed.append(_packed(chunk, len(packed)))
            chunk = []
    return [*packed, _packed(chunk, len(packed))] if chunk else packed


def _packed(events: list[dict[str, Any]], number: int) -> bytes:
    batch = {
        "batch_id": f"batch-{number}",
        "client_id": "bench",
        "sdk": "bench",
        "sent_at": "",
        "events": events,
    }
    return gzip.compress(orjson.dumps(batch), 5)


def serve(db: str, ready: Any) -> None:
    from mcp_profile import ProfileServer

    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    with ProfileServer(db) as server:
        ready.send(server.url)
        ready.recv()


def ingest_and_profile(events: int, *, paths: int) -> dict[str, float]:
    """A server held to one core takes the traffic over HTTP, is asked for its profile, and asked again after some more."""
    from mcp_client._httpx import httpx

    bodies = batches(events, paths=paths)
    headers = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
    spawn = multiprocessing.get_context("spawn")
    here, there = spawn.Pipe()
    with tempfile.TemporaryDirectory() as folder:
        process = spawn.Process(target=serve, args=(f"{folder}/db.sqlite", there), daemon=True)
        process.start()
        with httpx.Client(base_url=here.recv(), timeout=120) as http:
            started = time.perf_counter()
            accepted = sum(
                http.post("/v1/telemetry", content=body, headers=headers).json()["accepted"]
                for body in bodies
            )
            rate = accepted / (time.perf_counter() - started)
            started = time.perf_counter()
            while http.get("/v1/stats").json()["profile"]["waiting"]:  # a request mines for 2 s at most
                http.get("/v1/profile")
            mined = time.perf_counter() - started
            profile = http.get("/v1/profile").content
            distinct = len({path for _, path in traffic(events, paths=paths)})
        here.send("stop")
        process.join(10)
    assert accepted == events
    return {
        "ingest_events_per_s": round(rate),
        "profile_bytes_10k_paths": len(profile),
        "profile_paths": distinct,
        "mine_incremental_events_per_s": round(events / mined),
    }


def mine_rows_s(rows: int) -> dict[str, float]:
    """DuckDB counts all transitions, of paths and of routes, of 50,000 sessions over some 9,400 paths.

    With fewer rows than 10 M, ``mine_10m_rows_s`` is what was measured times 10 M / rows.
    """
    from mcp_profile import bulk

    with bulk.Duck() as duck:
        _visits(duck, rows, sessions=50_000)
        started, cpu = time.perf_counter(), time.process_time()
        bulk.count(duck, 1)
        took, cpu = time.perf_counter() - started, time.process_time() - cpu
        ((found,),) = duck.rows("SELECT count(*) FROM transitions")
    return {
        "mine_10m_rows_s": round(took * 10_000_000 / rows, 1),
        "mine_rows": rows,
        "mine_rows_s": round(took, 2),
        "mine_rows_cpu_s": round(cpu, 2),
        "mined_transitions": found,
    }


def spark_equal(rows: int, *, workers: int) -> dict[str, Any]:
    """Whether a Spark cluster of one master and ``workers`` on this machine counts the same as DuckDB, to the last row."""
    sys.path.insert(0, str(_ROOT))
    from mcp_profile import bulk
    from tests.spark.cluster import missing, spark_cluster

    if reason := missing():
        return {"spark_equal": None, "spark_equal_reason": reason}
    with (
        tempfile.TemporaryDirectory() as folder,
        bulk.Duck() as duck,
        spark_cluster(workers) as (master, environment),
    ):
        _visits(duck, rows, sessions=500)
        duck.write_parquet("FROM events", f"{folder}/events")
        bulk.count(duck, 1)
        command = [sys.executable, "-c", _ON_SPARK, master, folder]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, cwd=_ROOT)
        duck.read_parquet("on_spark", f"{folder}/transitions")
        mine, theirs = "FROM transitions", "SELECT kind, context, step, n FROM on_spark"
        differences = [
            duck.rows(f"{one} EXCEPT ALL {other}") for one, other in ((mine, theirs), (theirs, mine))
        ]
    return {
        "spark_equal": differences == [[], []],
        "spark_rows": rows,
        "spark_workers": workers,
        "spark_mine_s": round(float(done.stdout), 1),
    }


_ROOT = Path(__file__).resolve().parents[2]
_ON_SPARK = """
import sys, time
from mcp_profile import bulk, engines
master, folder = sys.argv[1:]
with engines.Spark(master) as spark:
    started = time.perf_counter()
    spark.read_parquet("events", f"{folder}/events")
    bulk.count(spark, 1)
    spark.write_parquet("SELECT kind, context, step, n FROM transitions", f"{folder}/transitions")
    print(time.perf_counter() - started)
"""


def _visits(duck: Any, rows: int, *, sessions: int) -> None:
    # Visits of 12 steps: from a page of a document, the popular ones more often, page by page and now and then three on.
    duck.connection.execute(
        f"""
        CREATE TABLE events AS
        WITH steps AS (
          SELECT i AS id, i % {sessions} AS s, i // {sessions} // 12 AS visit, i // {sessions} % 12 AS n,
                 hash(i % {sessions}, i // {sessions} // 12) AS h
          FROM range({rows}) AS r(i)
        )
        SELECT id, 1 AS app, 'session-' || lpad(s::VARCHAR, 16, '0') AS session,
               1.767e9 + visit * 4000.0 + n * 5.0 AS t,
               '/doc/' || floor(100 * pow((h % 1000003) / 1000003.0, 2))::INT || '/page/'
                 || (h // 1000003 % 80 + n + CASE WHEN hash(id) % 10 = 0 THEN 3 ELSE 0 END) AS path,
               '/doc/{{id:int}}/page/{{n:int}}' AS route, 'server' AS source, 3.2 AS latency_ms, 4012 AS bytes, '' AS outcome,
               20000 + visit // 4 AS day
        FROM steps ORDER BY id"""
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--quick", action="store_true", help="under a minute: fewer events, 1 M rows in place of 10 M"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object and nothing else on stdout")
    options = parser.parse_args()
    quick = options.quick
    result: dict[str, Any] = {"record_us": round(record_us(20 if quick else 100), 3)}
    result |= ingest_and_profile(100_000 if quick else 500_000, paths=10_000)
    result |= mine_rows_s(1_000_000 if quick else 10_000_000)
    result |= spark_equal(20_000 if quick else 1_000_000, workers=1 if quick else 2)
    if options.json:
        print(json.dumps(result))
    else:
        for name, value in result.items():
            print(f"{name:32} {value!s:>14}")


if __name__ == "__main__":
    main()
