"""What the cache costs: a hit through ``infer``, LRU-K beside ``cachetools.LRUCache``, a million entries, the disk tier.

    python tests/benchmarks/cache.py [--quick] [--json]

Every pair of figures is taken in turn, A B A B, and each figure is the least of its rounds: what the code costs when
nothing else runs.

- ``hit_us_tiny``: ``infer`` answered by the cache, for 1 × 3 FP32, with telemetry and predictor on (session and path given).
- ``hit_over_hash_602k``: the same for 602 KB (1 × 3 × 224 × 224 FP32), over one BLAKE3 pass of these bytes.
- ``lruk_…_over_cachetools_lru``: ``MemoryCache`` with LRU-2, lock and expiry included, over ``LRUCache[key]`` and
  ``LRUCache[key] = …`` of the same keys and size; every put evicts. The worst of a correlated period of 0 and of 0.1 ms.
- ``put_ns_at_1e4``, ``put_ns_at_1e6``: a put that evicts, in a cache of so many entries.
- ``infer_hit_over_hishel``: the tiny hit over one of hishel's ``CacheClient`` (httpx, its SQLite storage) for a GET whose
  answer is as small.
- ``disk_get_over_diskcache``: an answer of 602 KB from the disk tier, over ``diskcache.Cache.get`` of the same arrays
  (which unpickles them).
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import diskcache
import hishel
import hishel.httpx
import numpy as np
from blake3 import blake3
from cachetools import LRUCache

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from mcp_client import MCPClient
from mcp_client.cache.disk import DiskTier
from mcp_client.cache.memory import Entry, MemoryCache
from mcp_client.config import Cache
from mcp_client.result import Answer
from stub_server import StubServer
from tests import models

TINY = np.array([[0.1, 0.9, 0.4]], np.float32)
LARGE = np.random.default_rng(0).standard_normal((1, 3, 224, 224), np.float32)
ENTRY = Entry(Answer(outputs={}, model="m"), 0.0, float("inf"), 100)


def least_s(rounds: int, *works: Callable[[], None]) -> list[float]:
    """The least time of each, in seconds, taken in turn."""
    best = [float("inf")] * len(works)
    gc.collect()
    gc.disable()
    try:
        for _ in range(rounds):
            for number, work in enumerate(works):
                started = time.perf_counter()
                work()
                best[number] = min(best[number], time.perf_counter() - started)
    finally:
        gc.enable()
    return best


def hits(rounds: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        os.environ["MCP_STATE_DIR"] = folder
        models.affine(Path(folder) / "affine.onnx")
        models.identity(Path(folder) / "identity.onnx", "FP32", (1, 3, 224, 224))
        dead = "http://127.0.0.1:9"  # telemetry is recorded and spooled as ever; nobody takes it
        with StubServer(folder) as server, MCPClient(server.url, telemetry=dead) as client:
            session = client.session("user-42")

            def hit(model: str, array: np.ndarray, count: int) -> Callable[[], None]:
                assert session.infer(array, model=model, path="/page/1").source == "server"
                assert session.infer(array, model=model, path="/page/1").source == "cache"

                def work() -> None:
                    for _ in range(count):
                        session.infer(array, model=model, path="/page/1")

                return work

            def hash_it() -> None:
                for _ in range(4):
                    blake3(LARGE.data.cast("B")).digest(20)

            (tiny_s,) = least_s(10 * rounds, hit("affine", TINY, 50))
            large_s, hash_s = least_s(10 * rounds, hit("identity", LARGE, 4), hash_it)
    return {"hit_us_tiny": tiny_s / 50 * 1e6, "hit_over_hash_602k": large_s / hash_s}


class _Fresh(BaseHTTPRequestHandler):
    """A GET that hishel may keep for an hour."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        body = b'{"output": [0.1, 0.2], "shape": [1, 2]}'
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "max-age=3600")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Not on the benchmark's stderr."""


def hishel_hit_us(rounds: int) -> float:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Fresh)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    url = f"http://127.0.0.1:{server.server_port}/"
    with tempfile.TemporaryDirectory() as folder:
        storage = hishel.SqliteStorage(database_path=str(Path(folder) / "hishel.db"))
        with hishel.httpx.CacheClient(storage=storage) as client:
            client.get(url)
            assert client.get(url).extensions["caching"]["from_cache"]
            (hit_s,) = least_s(20 * rounds, lambda: client.get(url) and None)
    server.shutdown()
    thread.join()
    server.server_close()
    return hit_s * 1e6


class Filled:
    """A cache of ``size`` entries, full."""

    def __init__(self, size: int, correlated_s: float | None) -> None:
        self.theirs = LRUCache(size) if correlated_s is None else None
        settings = Cache(max_entries=size, max_bytes=1 << 60, correlated_s=correlated_s or 0.0)
        self.ours = MemoryCache(settings)
        self.now = 0.0
        self.keys = [os.urandom(20) for _ in range(size)]
        self.put(self.keys)

    def put(self, keys: list[bytes]) -> None:
        if self.theirs is not None:
            theirs = self.theirs
            for key in keys:
                theirs[key] = ENTRY
            return
        put, now = self.ours.put, self.now
        for key in keys:
            now += 1e-6
            put(key, ENTRY, now)
        self.now = now

    def get(self, keys: list[bytes]) -> None:
        if self.theirs is not None:
            theirs = self.theirs
            for key in keys:
                theirs[key]
            return
        get, now = self.ours.get, self.now
        for key in keys:
            now += 1e-6
            get(key, now)
        self.now = now

    def gets(self, count: int) -> Callable[[], None]:
        asked = random.choices(self.keys, k=count)
        return lambda: self.get(asked)

    def puts(self, count: int, rounds: int) -> Callable[[], None]:
        batches = iter([[os.urandom(20) for _ in range(count)] for _ in range(rounds)])
        return lambda: self.put(next(batches))


def lru_k(rounds: int) -> dict[str, float]:
    count = 500  # a round is short, so that some fall between the other work of the machine
    rounds *= 10
    theirs, plain, correlated = (Filled(10_000, period) for period in (None, 0.0, 1e-4))
    got = least_s(rounds, *(each.gets(count) for each in (theirs, plain, correlated)))
    stored = least_s(rounds, *(each.puts(count, rounds) for each in (theirs, plain, correlated)))
    del theirs, correlated
    large = Filled(1_000_000, 0.0)
    small_s, large_s = least_s(rounds, plain.puts(count, rounds), large.puts(count, rounds))
    return {
        "lruk_get_over_cachetools_lru": max(got[1:]) / got[0],
        "lruk_put_over_cachetools_lru": max(stored[1:]) / stored[0],
        "put_ns_at_1e4": small_s / count * 1e9,
        "put_ns_at_1e6": large_s / count * 1e9,
    }


def disk(rounds: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        tier = DiskTier(Path(folder) / "ours", max_bytes=1 << 28)
        with diskcache.Cache(str(Path(folder) / "theirs")) as theirs:
            key = os.urandom(20)
            tier.put(key, Entry(Answer.of({"y": LARGE}), 0.0, 1e6, LARGE.nbytes), 0.0)
            theirs.set(key, {"y": LARGE}, expire=1e6)

            def ours() -> None:
                assert tier.get(key, 0.0) is not None

            def plain() -> None:
                assert theirs.get(key) is not None

            ours_s, theirs_s = least_s(10 * rounds, ours, plain)
        tier.close()
    return {"disk_get_over_diskcache": ours_s / theirs_s}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    options.add_argument("--quick", action="store_true", help="fewer rounds")
    options.add_argument("--json", action="store_true", help="the last line is JSON")
    chosen = options.parse_args()
    rounds = 10 if chosen.quick else 40
    figures: dict[str, float] = {}
    for part in (hits, lru_k, disk):
        figures |= part(rounds)
    figures["infer_hit_over_hishel"] = figures["hit_us_tiny"] / hishel_hit_us(rounds)
    figures = {name: round(figure, 3) for name, figure in figures.items()}
    for name, figure in figures.items():
        print(f"{name:32} {figure:12,.3f}", file=sys.stderr)
    if chosen.json:
        print(json.dumps(figures))


if __name__ == "__main__":
    main()
