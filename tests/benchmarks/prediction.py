"""How well the production predictor and scheduler foresee sessions, next to simple predictors, in one harness.

    python tests/benchmarks/prediction.py [--quick] [--json]

Traces, each split by time (the first part is learned from, the last part is tested on; predictors keep learning there):

- ``msnbc``: ``../shared/data``, as its README says: 100,000 sessions to learn from, the last 20,000 to test on.
- ``shop``: made here, so that nothing is tuned to one trace: 40,000 and 10,000 sessions of 1 to 10 steps (2.5 on average)
  over 4,000 items of Zipf popularity (0.8), each linked to six near it; one request in seven returns to an item of the session.

A page that repeats the one before is dropped in both. ``top1`` and ``top3``: how often the next path, where there is one, is
among the 1 or 3 likeliest. ``frontier``: for each threshold, [server requests per demanded request, hit ratio] of a client
whose cache is empty when a session starts and whose prefetches are done before the next request.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol

from mcp_client import Prefetch
from mcp_client.prefetch.predictor import Candidate, Predictor
from mcp_client.prefetch.scheduler import Scheduler

DATA = Path(__file__).resolve().parents[3] / "shared" / "data" / "msnbc-sessions.txt.gz"
THRESHOLDS = (0.3, 0.2, 0.14, 0.11, 0.09, 0.08, 0.07, 0.06, 0.05)
# Test sessions in --quick, where learning stays whole: fewer sessions to learn from would measure another predictor.
QUICK = 1_500

Session = list[str]


class Foresight(Protocol):
    def observe(self, session: str, path: str, now: float) -> None: ...
    def predict(self, session: str, limit: int) -> Sequence[Any]: ...


@dataclass(frozen=True, slots=True)
class _Ranked:
    path: str


class PlainPPM:
    """PPM-C as in the textbook, the figures to beat: order 1 without blending is first-order Markov.

    It backs off only until it has as many paths as it is asked for: the empty context has them all.
    """

    def __init__(self, order: int, *, blended: bool = True) -> None:
        self._order = order
        self._lowest = 0 if blended else order
        self._counts: dict[tuple[str, ...], Counter[str]] = {}
        self._last: dict[str, Session] = {}

    def observe(self, session: str, path: str, now: float) -> None:
        steps = self._last.setdefault(session, [])
        for order in range(self._lowest, min(self._order, len(steps)) + 1):
            context = tuple(steps[len(steps) - order :])
            self._counts.setdefault(context, Counter())[path] += 1
        steps.append(path)

    def predict(self, session: str, limit: int) -> list[_Ranked]:
        steps = self._last[session]
        scores: dict[str, float] = {}
        rest = 1.0
        for order in range(min(self._order, len(steps)), self._lowest - 1, -1):
            counts = self._counts.get(tuple(steps[len(steps) - order :]))
            if counts and len(scores) <= limit:
                total, distinct = sum(counts.values()), len(counts)
                for path, count in counts.items():
                    scores[path] = scores.get(path, 0.0) + rest * count / (total + distinct)
                rest *= distinct / (total + distinct)
        scores.pop(steps[-1], None)
        return [_Ranked(path) for path in sorted(scores, key=lambda path: (-scores[path], path))[:limit]]


def ranking(model: Foresight, sessions: Sequence[Session], clients: Sequence[Client] = ()) -> dict[str, Any]:
    """How often the next path is in the top 1 and the top 3, and what a prediction takes."""
    top1 = top3 = asked = 0
    seconds = 0.0
    for number, session in enumerate(sessions):
        name = f"test-{number}"
        for at, path in enumerate(session):
            model.observe(name, path, 0.0)
            for client in clients:
                client.step(name, path)
            if at + 1 == len(session):
                continue
            started = time.perf_counter()
            best = [one.path for one in next_first(model.predict(name, 20))]
            seconds += time.perf_counter() - started
            asked += 1
            top1 += session[at + 1] in best[:1]
            top3 += session[at + 1] in best[:3]
        for client in clients:
            client.end()
    return {
        "top1": round(top1 / asked, 4),
        "top3": round(top3 / asked, 4),
        "us_per_prediction": round(1e6 * seconds / asked, 1),
    }


def next_first(candidates: Sequence[Any]) -> list[Any]:
    """Candidates come in the order of what is worth fetching; here the question is what comes next."""
    return sorted(candidates, key=lambda one: -one.next_probability if isinstance(one, Candidate) else 0.0)


def served(predictor: Predictor, sessions: Sequence[Session]) -> tuple[list[list[float]], dict[str, Any]]:
    """The frontier, with one production scheduler for each threshold, and the ranking, in one pass over the sessions.

    All share the predictor: the ranking's observation teaches it a step, and to the schedulers the same step is a reload.
    """
    clients = [Client(predictor, threshold) for threshold in THRESHOLDS]
    figures = ranking(predictor, sessions, clients)
    demanded = sum(map(len, sessions))
    points = [
        [round((demanded - one.hits + one.issued) / demanded, 4), round(one.hits / demanded, 4)]
        for one in clients
    ]
    return points, figures


class Client:
    """A client whose cache is empty when a session starts and whose prefetches are done before the next request."""

    def __init__(self, predictor: Predictor, threshold: float) -> None:
        self._scheduler = Scheduler(
            Prefetch(max_overfetch=10.0, threshold=threshold, per_step=20, max_in_flight=1000), predictor
        )
        self._cache: set[str] = set()
        self._waiting: dict[str, Candidate] = {}
        self.hits = self.issued = 0

    def step(self, session: str, path: str) -> None:
        self.hits += path in self._cache
        self._cache.add(path)
        if path in self._waiting:
            self._scheduler.settled(self._waiting.pop(path), used=True)
        for candidate in self._scheduler.observe(
            session, path, 0.0, unwanted=lambda one: "at hand" if one.path in self._cache else ""
        ):
            self._scheduler.fetched(candidate)
            self._cache.add(candidate.path)
            self._waiting[candidate.path] = candidate
            self.issued += 1

    def end(self) -> None:
        for candidate in self._waiting.values():
            self._scheduler.settled(candidate, used=False)
        self._cache.clear()
        self._waiting.clear()


def msnbc() -> tuple[list[Session], list[Session]]:
    with gzip.open(DATA, "rt") as lines:
        sessions = [without_reloads(line.split()) for line in lines]
    return sessions[:100_000], sessions[-20_000:]


def shop(seed: int = 7) -> tuple[list[Session], list[Session]]:
    draw = random.Random(seed)
    items = [f"/item/{n}" for n in range(4_000)]
    popular = list(accumulate((rank + 1) ** -0.8 for rank in range(len(items))))
    links = {item: links_of(draw, number, items) for number, item in enumerate(items)}
    sessions: list[Session] = []
    for _ in range(50_000):
        session = draw.choices(items, cum_weights=popular)
        while len(session) < 10 and draw.random() < 0.62:
            what = draw.random()
            if what < 0.40 and len(session) > 1:
                session.append(session[-2] if draw.random() < 0.7 else draw.choice(session))
            elif what < 0.8:
                session.append(draw.choices(links[session[-1]], weights=(8, 4, 2, 1, 1, 1))[0])
            else:
                session += draw.choices(items, cum_weights=popular)
        sessions.append(without_reloads(session))
    return sessions[:40_000], sessions[-10_000:]


def links_of(draw: random.Random, number: int, items: Sequence[str]) -> list[str]:
    """Six items that readers of one go to: near it, so that groups form."""
    near = range(max(0, number - 30), min(len(items), number + 31))
    return [items[one] for one in draw.sample([one for one in near if one != number], 6)]


def without_reloads(session: Session) -> Session:
    return [path for at, path in enumerate(session) if at == 0 or path != session[at - 1]]


TRACES = {"msnbc": msnbc, "shop": shop}


def measure(quick: bool) -> Iterator[tuple[str, dict[str, Any]]]:
    for name, make in TRACES.items():
        learned, tested = make()
        if quick:
            tested = tested[:QUICK]
        simple: dict[str, Foresight] = {
            "first-order Markov": PlainPPM(1, blended=False),
            "PPM-3": PlainPPM(3),
            "PPM-4": PlainPPM(4),
        }
        others = {}
        for label, model in simple.items():
            teach(model, learned)
            others[label] = ranking(model, tested)
        ours = Predictor()
        us_per_observation = teach(ours, learned)
        reached, figures = served(ours, tested)
        figures["us_per_observation"] = round(us_per_observation, 1)
        figures["frontier"] = reached
        figures["others"] = others
        yield name, figures


def teach(model: Foresight, sessions: Sequence[Session]) -> float:
    """Show all sessions to a predictor; returns the microseconds that a step took."""
    started = time.perf_counter()
    for number, session in enumerate(sessions):
        for path in session:
            model.observe(f"learned-{number}", path, 0.0)
    return 1e6 * (time.perf_counter() - started) / sum(map(len, sessions))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--quick", action="store_true", help=f"test on {QUICK} sessions of each trace")
    parser.add_argument("--json", action="store_true", help="the figures as one line of JSON, last on stdout")
    options = parser.parse_args()
    result = dict(measure(options.quick))
    out = sys.stderr if options.json else sys.stdout
    for name, figures in result.items():
        print(f"{name}\n  {'':20} top 1   top 3   µs a prediction", file=out)
        for label, row in {"ours": figures, **figures["others"]}.items():
            print(
                f"  {label:20} {row['top1']:.3f}   {row['top3']:.3f}   {row['us_per_prediction']:.0f}",
                file=out,
            )
        print("  server requests per demanded request → hit ratio", file=out)
        for requests, hit_ratio in figures["frontier"]:
            print(f"    {requests:.3f} → {hit_ratio:.3f}", file=out)
    if options.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
