"""The soak: many clients play sessions against a real server and a real Profile API while these are killed, fail and stall.

    make soak ARGS="--minutes 10 --clients 50"        (the exit status is 1 if something does not hold)

Each client is a thread with two ``MCPClient``\\ s, one with prefetch and one without, and plays sessions with the one whose
turn it is: off, on, on, off, in blocks of at most 30 s, so that both meet the same faults and the same machine; before, for a
sixth of the time, both warm up. What happens meanwhile:

- ``mcp-server`` (answers take 20 ms, 2 % of them are 503) is killed (SIGKILL) and started again, and so is ``mcp-profile``;
- a disk that stalls: other processes' locks keep the spool's and the Profile API's database from being written for seconds.

What must hold at the end:

- every event that a client recorded is stored by the Profile API, once;
- no client issued more prefetches than its cap in any window of 1,000 demanded requests, nor, rounded up, in a shorter first one;
- of the demanded requests that were answered, the 95th percentile is no longer with prefetch than without.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import re
import signal
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from mcp_client import MCPClient, MCPError, Prefetch, Retry, Telemetry
from mcp_client._httpx import httpx
from mcp_client.prefetch.prefetcher import Job
from tests import models

CAP, WINDOW = 0.3, 1000
USERS, DOCUMENTS = 200, 400
PAUSE_S = (0.05, 0.35)


class Service:
    """A server in a process of its own, on a port that stays the same; it can be killed and started again."""

    def __init__(self, *command: str) -> None:
        self._command = command
        self._process: subprocess.Popen[str] | None = None
        self._port = "0"
        self.kills = 0
        self.url = ""
        self.start()

    def start(self) -> None:
        command = [sys.executable, "-c", *self._command, "--port", self._port]
        process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
        self._process = process
        assert process.stderr is not None
        for line in process.stderr:
            if found := re.search(r"http://127\.0\.0\.1:(\d+)", line):
                self.url, self._port = found.group(), found.group(1)
                threading.Thread(target=_drain, args=(process.stderr,), daemon=True).start()
                return
        raise RuntimeError(f"{self._command[0]} did not start")

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()
        self.kills += 1

    def close(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)
        self._process.wait()


def _drain(pipe: IO[str]) -> None:
    """Read to the end, so that the writer never blocks."""
    with pipe:
        pipe.read()


def stall(database: Path, seconds: float) -> None:
    """Nobody else can write to an SQLite database for a while, as if its disk stood still."""
    with suppress(sqlite3.Error), closing(sqlite3.connect(database, timeout=1.0)) as db:
        db.execute("BEGIN IMMEDIATE")
        time.sleep(seconds)
        db.rollback()


@dataclass
class Player:
    """One client's thread: what it asked for, and how long it waited."""

    number: int
    clients: dict[str, MCPClient]  # "on" and "off"
    turn: Callable[[], str]
    stopped: threading.Event
    waits: dict[str, list[float]] = field(default_factory=lambda: {"on": [], "off": [], "warm-up": []})
    sources: dict[str, dict[str, int]] = field(default_factory=lambda: {"on": {}, "off": {}, "warm-up": {}})
    issued_after: list[int] = field(default_factory=list)

    def watch(self) -> None:
        """Note after how many demanded requests each prefetch that was sent had been issued."""
        prefetcher = self.clients["on"]._prefetcher
        assert prefetcher is not None
        finished = prefetcher.finished

        def noted(job: Job, error: MCPError | None, *, sent: bool, cancelled: bool = False) -> None:
            if sent:  # the budget has the others back
                self.issued_after.append(job.decision.issued_after)
            finished(job, error, sent=sent, cancelled=cancelled)

        prefetcher.finished = noted  # type: ignore[method-assign]

    def run(self) -> None:
        draw = random.Random(self.number)
        count = 0
        while not self.stopped.is_set():
            turn = self.turn()
            client = self.clients[turn if turn != "warm-up" else ("on", "off")[count % 2]]
            session = client.session(f"{self.number}-{count}")
            count += 1
            for path in steps(draw):
                if self.stopped.is_set():
                    return
                started = time.monotonic()
                try:
                    source = session.infer(path=path).source
                except MCPError:
                    source = "error"
                else:
                    self.waits[turn].append(time.monotonic() - started)
                self.sources[turn][source] = self.sources[turn].get(source, 0) + 1
                self.stopped.wait(draw.uniform(*PAUSE_S))


def steps(draw: random.Random) -> list[str]:
    user = int(draw.paretovariate(0.9)) % USERS
    found = [f"/user/{user}/home", f"/user/{user}/feed"]
    for _ in range(draw.randint(1, 3)):
        document = int(draw.paretovariate(0.5)) % DOCUMENTS
        found += [f"/doc/{document}/page/{page}" for page in range(1, draw.randint(2, 6))]
    return found


def routes(client: MCPClient) -> None:
    for number, what in enumerate(("home", "feed")):
        client.route(f"/user/{{u:int}}/{what}", model="affine")(lambda u, number=number: [u, number, 0.0])
    client.route("/doc/{d:int}/page/{n:int}", model="affine")(lambda d, n: [d, n, 1.0] if n < 7 else None)


def most_in_a_window(issued_after: Sequence[int]) -> tuple[int, bool]:
    """The most prefetches in a window of ``WINDOW`` demanded requests; whether the cap held in all, short first ones included."""
    numbers = sorted(issued_after)
    most, held, first = 0, True, 0
    for at, number in enumerate(numbers):
        while numbers[first] <= number - WINDOW:
            first += 1
        inside = at - first + 1
        most = max(most, inside)
        held = held and inside <= math.ceil(CAP * min(number, WINDOW))
    return most, held


def faults(
    minutes: float, server: Service, profile: Service, spool: Path, store: Path, stopped: threading.Event
) -> None:
    """Something goes wrong about every tenth of the time, one after the other."""
    draw = random.Random(5)
    pause_s = max(4.0, min(20.0, minutes * 60 / 12))
    while not stopped.wait(pause_s):
        what = draw.choice(["server", "profile", "spool", "store"])
        if what == "server":
            server.kill()
            server.start()
        elif what == "profile":
            profile.kill()
            stopped.wait(draw.uniform(0.0, 5.0))
            profile.start()
        else:
            for database in spool.glob("spool-*.sqlite") if what == "spool" else [store]:
                stall(database, draw.uniform(1.0, 4.0))


def soak(minutes: float, clients: int, say: Callable[[str], None]) -> dict[str, object]:
    """Play, and say what came of it: ``{"held": …, …}``."""
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        os.environ["MCP_STATE_DIR"] = name
        models.affine(folder / "models" / "affine.onnx")
        store, spool = folder / "profile.db", folder / "spool"
        server = Service(
            "from stub_server.cli import main; main()",
            *("--model-path", str(folder / "models"), "--latency-ms", "20"),
            *("--error-rate", "0.02", "--seed", "1", "--cache-control", "max-age=60"),
        )
        stack.callback(server.close)
        profile = Service("from mcp_profile.cli import main; main()", "serve", "--db", str(store))
        stack.callback(profile.close)
        telemetry = Telemetry(profile.url, interval_s=2.0, spool_dir=spool)

        began = time.monotonic()
        length = minutes * 60
        block_s = max(5.0, min(30.0, length / 12))
        warm_up_s = length / 6

        def turn() -> str:
            """Off on on off off on on …, after a warm-up for both."""
            at = time.monotonic() - began - warm_up_s
            return "warm-up" if at < 0 else ("off", "on", "on", "off")[int(at / block_s) % 4]

        stopped = threading.Event()
        players = [
            Player(
                number,
                {
                    turn: MCPClient(
                        server.url,
                        telemetry=telemetry,
                        prefetch=Prefetch(max_overfetch=CAP if turn == "on" else 0.0, window=WINDOW),
                        retry=Retry(attempts=5),
                    )
                    for turn in ("on", "off")
                },
                turn,
                stopped,
            )
            for number in range(clients)
        ]
        for player in players:
            player.watch()
            for client in player.clients.values():
                routes(client)
        threads = [threading.Thread(target=player.run) for player in players]
        wrong = threading.Thread(
            target=faults, args=(minutes, server, profile, spool, store, stopped), name="faults"
        )
        for thread in (*threads, wrong):
            thread.start()
        while (left := began + length - time.monotonic()) > 0:
            time.sleep(min(left, 30.0))
            say(
                f"{(time.monotonic() - began) / 60:.1f} min, killed: server {server.kills} ×, Profile API {profile.kills} ×"
            )
        stopped.set()
        for thread in (*threads, wrong):
            thread.join()
        recorded = dropped = prefetches = demanded = 0
        for player in players:
            for client in player.clients.values():
                client.close()
                sent = client.stats()["telemetry"]
                recorded, dropped = recorded + sent.recorded, dropped + sent.dropped + sent.rejected
                prefetches += client.stats()["prefetch"].issued
                demanded += client.stats()["prefetch"].demanded
        with MCPClient(server.url, telemetry=telemetry) as last:
            delivered = last.flush(120.0)
        stored = httpx.get(profile.url + "/v1/stats").json()["events"]
        windows = [most_in_a_window(player.issued_after) for player in players]
        waits = {on: sorted(one for player in players for one in player.waits[on]) for on in ("on", "off")}
        p95 = {on: 1e3 * found[int(0.95 * len(found))] for on, found in waits.items()}
        total = {
            on: {
                source: sum(player.sources[on].get(source, 0) for player in players)
                for source in ("cache", "prefetch", "server", "error")
            }
            for on in ("on", "off")
        }
        outcome: dict[str, object] = {
            "events_recorded": recorded,
            "events_stored": stored,
            "events_dropped": dropped,
            "most_in_a_window": max(most for most, _ in windows),
            "cap_per_window": CAP * WINDOW,
            "overfetch": round(prefetches / max(1, demanded), 4),
            "p95_ms_on": round(p95["on"], 2),
            "p95_ms_off": round(p95["off"], 2),
            "requests_on": len(waits["on"]),
            "requests_off": len(waits["off"]),
            "sources": total,
            "server_kills": server.kills,
            "profile_kills": profile.kills,
        }
        held = {
            "events": delivered and recorded == stored and not dropped,
            "cap": all(within for _, within in windows),
            "p95": p95["on"] <= p95["off"],
        }
        return {"held": held, **outcome}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--clients", type=int, default=50)
    options = parser.parse_args()
    outcome = soak(options.minutes, options.clients, lambda line: print(line, file=sys.stderr, flush=True))
    print(json.dumps(outcome))
    held = outcome["held"]
    assert isinstance(held, dict)
    return 0 if all(held.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
