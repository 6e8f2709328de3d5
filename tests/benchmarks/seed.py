"""The seed article's claim on a workload with stated parameters: hit ratio 72.3 % → ≥ 89.6 %, first screen 412 → ≤ 287 ms.

    python tests/benchmarks/seed.py [--quick] [--json]

The production client against a real ``mcp-server`` in a process of its own, whose answers take a set time. The same sessions are
played twice, by as many readers at once: with plain LRU (``Cache(k=1)``, ``prefetch=None``), and with LRU-2 and learned prefetch
in a cache of the same size. Both have played other sessions before, which fill the cache and are learned from; only those after
them are measured. All times are a fifth of what they stand for (``SCALE``), and are reported as what they stand for.

The sessions: one of 300 users (Zipf 1) opens the application. The *first screen* is five requests, each made when the one
before is answered: ``/user/{u}/home``, ``…/feed``, ``…/mail``, ``…/calendar``, ``…/weather``. Then documents are read, 2 on
average of 600 (Zipf 1), page after page of their 2 to 6; after each page a reader goes on with a probability of 0.9; between two
pages lies 1 s on average (0.5 to 1.5). The cache has as many entries as LRU needs for 72.3 %. The server's latency is set so
that the mean first screen with LRU takes 412 ms, with what a request takes beside it on this machine.

``lru``, ``ours``: hit ratios; a hit is an answer that was there. One that joins a prefetch still under way counts as a hit only
if it took less than half of the server's time. ``overfetch``: prefetches sent per demanded request.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[2])  # this folder has a profile.py

from mcp_client import Cache, MCPClient, Prefetch  # noqa: E402
from tests import models  # noqa: E402

SCALE = 0.2
USERS, DOCUMENTS = 300, 600
LRU_HITS = 0.723
READERS = 20
FIRST_SCREEN_MS = 412.0
LEARNED = 400  # sessions before those that are measured
QUICK, FULL = 120, 600
PREFETCH = Prefetch(max_overfetch=0.5, per_step=4, max_in_flight=8)

Session = list[str]
SCREEN = ("home", "feed", "mail", "calendar", "weather")
FIRST_SCREEN = len(SCREEN)


def sessions(count: int, seed: int = 3) -> Iterator[Session]:
    draw = random.Random(seed)
    users = list(accumulate((rank + 1) ** -1.0 for rank in range(USERS)))
    documents = list(accumulate((rank + 1) ** -1.0 for rank in range(DOCUMENTS)))
    for _ in range(count):
        (user,) = draw.choices(range(USERS), cum_weights=users)
        session = [f"/user/{user}/{what}" for what in SCREEN]
        while draw.random() < 2 / 3:
            (document,) = draw.choices(range(DOCUMENTS), cum_weights=documents)
            for page in range(1, pages_of(document) + 1):
                session.append(f"/doc/{document}/page/{page}")
                if draw.random() >= 0.9:
                    break
        yield session


def pages_of(document: int) -> int:
    return 2 + document * 7919 % 5


def routes(client: MCPClient) -> None:
    for number, what in enumerate(SCREEN):
        client.route(f"/user/{{u:int}}/{what}", model="affine")(lambda u, number=number: [u, number, 0.0])
    client.route("/doc/{d:int}/page/{n:int}", model="affine")(
        lambda d, n: [d, n, 2.0] if 1 <= n <= pages_of(d) else None
    )


@dataclass
class Run:
    """What the measured sessions saw."""

    hits: int = 0
    joined: int = 0
    requests: int = 0
    overfetch: float = 0.0
    precision: float = 0.0
    first_screens: list[float] = field(default_factory=list)

    @property
    def hit_ratio(self) -> float:
        return self.hits / self.requests

    @property
    def first_screen_ms(self) -> float:
        return 1e3 * sum(self.first_screens) / len(self.first_screens) / SCALE


def play(client: MCPClient, todo: Sequence[Session], latency_s: float, *, pauses: bool, name: str) -> Run:
    """All sessions, by ``READERS`` threads: each takes the next one when it is done with one."""
    run = Run()
    numbers = iter(range(len(todo)))
    lock = threading.Lock()

    def reader() -> None:
        while True:
            with lock:
                number = next(numbers, None)
            if number is None:
                return
            session = client.session(f"{name}-{number}")
            pace = random.Random(number)
            opened = time.monotonic()
            for at, path in enumerate(todo[number]):
                if pauses and at >= FIRST_SCREEN:
                    time.sleep(pace.uniform(0.5, 1.5) * SCALE)
                result = session.infer(path=path)
                there = result.source != "server"
                with lock:
                    run.requests += 1
                    run.hits += there and result.latency_ms < 500 * latency_s
                    run.joined += there and result.latency_ms >= 500 * latency_s
                    if at == FIRST_SCREEN - 1:
                        run.first_screens.append(time.monotonic() - opened)

    threads = [threading.Thread(target=reader) for _ in range(READERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return run


@contextmanager
def server(folder: str, latency_s: float) -> Iterator[str]:
    """``mcp-server`` in a process of its own."""
    command = [sys.executable, "-c", "from stub_server.cli import main; main()", "--model-path", folder]
    command += ["--port", "0", "--latency-ms", str(latency_s * 1e3), "--cache-control", "max-age=86400"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=sys.path[0]) as process:
        try:
            assert process.stderr is not None
            for line in process.stderr:
                if found := re.search(r"http://\S+?:\d+", line):
                    yield found.group()
                    break
            else:
                raise RuntimeError("mcp-server did not start")
        finally:
            process.terminate()


def overhead_s(folder: str) -> float:
    """What a request takes beside the latency that is set, with as many of them at once as in the sessions."""
    latency_s = 0.06
    taken: list[float] = []

    def reader(number: int) -> None:
        for n in range(6):
            time.sleep(0.25)
            started = time.monotonic()
            client.infer([float(number), float(n), 3.0], model="affine")
            taken.append(time.monotonic() - started - latency_s)

    with server(folder, latency_s) as url, MCPClient(url, cache=None, prefetch=None) as client:
        client.infer([0.0, 0.0, 0.0], model="affine")
        threads = [threading.Thread(target=reader, args=(number,)) for number in range(READERS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return sum(taken) / len(taken)


def entries_for(ratio: float, learned: Sequence[Session], measured: Sequence[Session]) -> int:
    """How many entries plain LRU needs for a hit ratio."""
    low, high = 1, 10_000
    while low < high:
        middle = (low + high) // 2
        if misses_of_lru(middle, learned, measured)[0] < ratio:
            low = middle + 1
        else:
            high = middle
    return low


def misses_of_lru(
    entries: int, learned: Sequence[Session], measured: Sequence[Session]
) -> tuple[float, float]:
    """Plain LRU without time: the hit ratio, and the misses in a first screen. Readers take turns, a page each."""
    cache: OrderedDict[str, None] = OrderedDict()
    hits = requests = screens = 0
    everything = [(session, False) for session in learned] + [(session, True) for session in measured]
    todo = iter(everything)
    reading: list[tuple[Iterator[tuple[int, str]], bool]] = []
    while True:
        while len(reading) < READERS and (one := next(todo, None)) is not None:
            reading.append((iter(enumerate(one[0])), one[1]))
        if not reading:
            break
        for each in tuple(reading):
            step = next(each[0], None)
            if step is None:
                reading.remove(each)
                continue
            at, path = step
            hit = path in cache
            cache[path] = None
            cache.move_to_end(path)
            if len(cache) > entries:
                cache.popitem(last=False)
            if each[1]:
                requests += 1
                hits += hit
                screens += not hit and at < FIRST_SCREEN
    return hits / requests, screens / len(measured)


def measure(quick: bool) -> dict[str, float]:
    everything = list(sessions(LEARNED + (QUICK if quick else FULL)))
    learned, measured = everything[:LEARNED], everything[LEARNED:]
    entries = entries_for(LRU_HITS, learned, measured)
    expected, misses = misses_of_lru(entries, learned, measured)
    runs: dict[str, Run] = {}
    with tempfile.TemporaryDirectory() as folder:
        models.affine(Path(folder) / "affine.onnx")
        latency_s = FIRST_SCREEN_MS / 1e3 * SCALE / misses - overhead_s(folder)
        print(
            f"{entries} entries; LRU without time: {expected:.4f}, {misses:.2f} misses in a first screen; "
            f"the server's latency is {latency_s / SCALE * 1e3:.0f} ms, for which it takes {latency_s * 1e3:.1f} ms",
            file=sys.stderr,
        )
        for name in ("lru", "ours"):
            cache = Cache(max_entries=entries, k=1 if name == "lru" else 2)
            # A client needs the prefetcher to have routes; with LRU it may not fetch anything.
            prefetch = Prefetch(max_overfetch=0.0) if name == "lru" else PREFETCH
            with (
                server(folder, latency_s) as url,
                MCPClient(url, cache=cache, prefetch=prefetch) as client,
            ):
                routes(client)
                play(client, learned, latency_s, pauses=False, name="learned")
                before = client.prefetcher.stats()
                run = runs[name] = play(client, measured, latency_s, pauses=True, name="measured")
                after = client.prefetcher.stats()
            run.overfetch = (after.issued - before.issued) / run.requests
            run.precision = (after.used - before.used) / max(1, after.issued - before.issued)
            print(
                f"{name}: hit ratio {run.hit_ratio:.4f} of {run.requests} requests ({run.joined} more joined a prefetch "
                f"under way), overfetch {run.overfetch:.3f}, precision {run.precision:.2f}, "
                f"first screen {run.first_screen_ms:.0f} ms on average",
                file=sys.stderr,
            )
    lru, ours = runs["lru"], runs["ours"]
    return {
        "lru": round(lru.hit_ratio, 4),
        "ours": round(ours.hit_ratio, 4),
        "overfetch": round(ours.overfetch, 4),
        "first_screen_ms_lru": round(lru.first_screen_ms, 1),
        "first_screen_ms": round(ours.first_screen_ms, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--quick", action="store_true", help=f"{QUICK} sessions instead of {FULL}")
    parser.add_argument("--json", action="store_true", help="the figures as one line of JSON, last on stdout")
    options = parser.parse_args()
    figures = measure(options.quick)
    if options.json:
        print(json.dumps(figures))


if __name__ == "__main__":
    main()
