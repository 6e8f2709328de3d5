"""Hit ratios of our replacement policies, of Belady's optimum and of libcachesim's policies, on the same streams.

    python tests/benchmarks/policies.py [--quick] [--json]

The policies are those of the cache itself, driven key by key; every item has size 1 and the cache holds 1, 5 or 10 % of the
distinct items of a stream. Streams:

- ``msnbc``: the sessions of ``../shared/data`` as one stream. Its pages are 17 categories, so few that any cache holds them
  all; the item is therefore the last three categories of the session: a page as a reader finds it who came that way. 50
  sessions are open at a time; each takes its next step after an exponential pause (so that all steps together arrive as
  a Poisson process), and one that ends is followed by the next of the file.
- ``zipf``: independent draws, Zipf 0.9 over 20,000 items.
- ``scans``: the same, and after each 2,000 references a scan of 1,000 items that never come again.
- ``loop``: 20,000 items over and over.

``libcachesim`` (PyPI) is needed; it reads the streams from files in its oracleGeneral format, which Belady needs.
"""

from __future__ import annotations

import argparse
import gzip
import heapq
import json
import random
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import libcachesim
import numpy as np

from mcp_client.cache.adaptive import Adaptive
from mcp_client.cache.lru_k import LRUK
from mcp_client.cache.policy import Policy
from mcp_client.cache.s3_fifo import S3FIFO

DATA = Path(__file__).resolve().parents[3] / "shared" / "data" / "msnbc-sessions.txt.gz"
SHARES = (0.01, 0.05, 0.10)


def lru_2() -> Policy[int]:
    return LRUK(
        2, retained_s=float("inf")
    )  # a time is a number of references here, as in the paper's figures


OURS: dict[str, Callable[[], Policy[int]]] = {
    "lru": lambda: LRUK(1),
    "lru-2": lru_2,
    "s3-fifo": S3FIFO,
    "adaptive": lambda: Adaptive([S3FIFO, lru_2]),
}
THEIRS = {
    "libcachesim lru": libcachesim.LRU,
    "libcachesim arc": libcachesim.ARC,
    "libcachesim s3-fifo": libcachesim.S3FIFO,
    "libcachesim sieve": libcachesim.Sieve,
    "libcachesim w-tinylfu": libcachesim.WTinyLFU,
    "belady": libcachesim.Belady,
}


def msnbc(length: int) -> list[int]:
    rng = random.Random(1)
    with gzip.open(DATA, "rt") as lines:
        sessions: Iterator[list[str]] = (line.split() for line in lines)
        due = [(rng.expovariate(1), slot, next(sessions), 0) for slot in range(50)]
        heapq.heapify(due)
        numbers: dict[tuple[str, ...], int] = {}
        stream: list[int] = []
        while due and len(stream) < length:
            now, slot, session, step = heapq.heappop(due)
            item = tuple(session[max(0, step - 2) : step + 1])
            stream.append(numbers.setdefault(item, len(numbers)))
            step += 1
            if step == len(session):
                session, step = next(sessions, []), 0
            if session:
                heapq.heappush(due, (now + rng.expovariate(1), slot, session, step))
    return stream


def zipf(length: int) -> list[int]:
    rng = np.random.default_rng(2)
    weights = 1 / np.arange(1, 20_001) ** 0.9
    return rng.permutation(20_000)[rng.choice(20_000, length, p=weights / weights.sum())].tolist()


def scans(length: int) -> list[int]:
    drawn, stream = zipf(length), []
    for start in range(0, length, 2000):
        stream += drawn[start : start + 2000]
        stream += range(10**6 + start, 10**6 + start + 1000)
    return stream[:length]


def loop(length: int) -> list[int]:
    return [number % 20_000 for number in range(length)]


def ours(policy: Policy[int], stream: list[int], room: int) -> float:
    hits = 0
    for now, item in enumerate(stream):
        if item in policy:
            policy.record(((item, now),))
            hits += 1
        else:
            if len(policy) >= room:
                policy.evict(now)
            policy.insert(item, now)
    return hits / len(stream)


def theirs(kind: type, path: Path, room: int) -> float:
    reader = libcachesim.TraceReader(
        str(path),
        libcachesim.TraceType.ORACLE_GENERAL_TRACE,
        libcachesim.ReaderInitParam(ignore_obj_size=True),
    )
    misses, _ = kind(room).process_trace(reader)
    return 1 - float(misses)


def write(stream: list[int], path: Path) -> None:
    """u32 time, u64 item, u32 size, i64 the time it is next asked for (-1: never)."""
    rows = np.zeros(
        len(stream), np.dtype([("time", "<u4"), ("item", "<u8"), ("size", "<u4"), ("next", "<i8")])
    )
    rows["time"], rows["item"], rows["size"] = np.arange(len(stream)), stream, 1
    seen: dict[int, int] = {}
    for number in range(len(stream) - 1, -1, -1):
        rows["next"][number] = seen.get(stream[number], -1)
        seen[stream[number]] = number
    rows.tofile(path)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    options.add_argument("--quick", action="store_true", help="50,000 references a stream instead of 400,000")
    options.add_argument("--json", action="store_true", help="the last line is JSON")
    chosen = options.parse_args()
    length = 50_000 if chosen.quick else 400_000
    table: dict[str, dict[str, dict[str, float]]] = {}
    worst = 0.0
    with tempfile.TemporaryDirectory() as folder:
        for make in (msnbc, zipf, scans, loop):
            stream = make(length)
            items = len(set(stream))
            path = Path(folder) / make.__name__
            write(stream, path)
            table[make.__name__] = {}
            for share in SHARES:
                room = max(1, int(items * share))
                row = {name: ours(policy(), stream, room) for name, policy in OURS.items()}
                for name, kind in THEIRS.items():
                    # W-TinyLFU's window, 1 % of the cache, is empty in one of fewer than 100 items: it then stores nothing.
                    if "tinylfu" not in name or room >= 100:
                        row[name] = theirs(kind, path, room)
                table[make.__name__][f"{share:.0%}"] = {name: round(ratio, 4) for name, ratio in row.items()}
                best = max((ratio, name) for name, ratio in row.items() if name != "belady")
                worst = max(worst, best[0] - row["adaptive"])
                shown = "  ".join(
                    f"{name.replace('libcachesim ', '*')} {ratio:.3f}" for name, ratio in row.items()
                )
                print(f"{make.__name__:6} {items:6} items, cache {share:4.0%}: {shown}", file=sys.stderr)
    print(
        f"adaptive is at most {100 * worst:.2f} points under the best (* are libcachesim's)", file=sys.stderr
    )
    if chosen.json:
        print(json.dumps(table))


if __name__ == "__main__":
    main()
