"""The scenario: earlier sessions train the profile, the same sessions run three times, then the servers die and come back."""

from __future__ import annotations

import sqlite3
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from mcp_client import Cache, MCPClient, Prefetch, Telemetry

from .library import STRIP_HEIGHT, Document, open_library
from .ocr import DET, REC, alphabet, copy_models
from .play import Answered, Desk, Play
from .readers import Reading, page_path, readings
from .servers import inference_server, profile_server

BUDGET_SHARE = 1 / 8  # of what the answers to the whole library take: the cache has to choose
READERS = 2
THINK_S = (0.08, 0.20)  # a reader's 12 to 30 s over a page, 150 times as fast
PACE = 150
_SEED = 2026
_TELEMETRY_S = 2.0  # between uploads; 30 s by default, which would be longer than a phase of the demo


@dataclass(frozen=True, slots=True)
class Size:
    """How much is done: documents of so many pages; turns of the training, of each of the three runs, of the
    last phase (at least: it lasts until the servers are back)."""

    documents: int
    pages: int
    training: int
    turns: int
    offline: int

    @property
    def total(self) -> int:
        return self.training + 3 * self.turns + self.offline


FULL = Size(documents=20, pages=16, training=240, turns=260, offline=80)
QUICK = Size(documents=12, pages=10, training=70, turns=80, offline=40)


@dataclass(frozen=True, slots=True)
class Run:
    """One of the three runs. ``overfetch`` and ``precision`` are the client's own count."""

    name: str
    title: str
    answers: tuple[Answered, ...]
    seconds: float
    overfetch: float = 0.0
    precision: float = 0.0

    def latency_ms(self, percentile: float) -> float:
        return float(np.percentile([one.latency_ms for one in self.answers], percentile))

    @property
    def sources(self) -> dict[str, int]:
        return dict(Counter(one.source for one in self.answers))

    @property
    def hit_ratio(self) -> float:
        """Answers that were in the cache, or had been asked for ahead of time."""
        return sum(one.source in ("cache", "prefetch") for one in self.answers) / len(self.answers)


@dataclass(frozen=True, slots=True)
class Offline:
    """The last phase. ``marks``: what was done to the servers, at seconds since it began."""

    answers: tuple[Answered, ...]
    marks: tuple[tuple[float, str], ...]
    synced: tuple[str, ...]

    @property
    def errors(self) -> int:
        return sum(one.source == "error" for one in self.answers)

    @property
    def differs(self) -> float:
        """How far any answer is from the first one that was given for its path."""
        return max((one.differs for one in self.answers), default=0.0)

    @property
    def edge(self) -> list[Answered]:
        return [one for one in self.answers if one.source == "edge"]


@dataclass(frozen=True, slots=True)
class Ledger:
    """Telemetry, counted on both sides: what the clients recorded, what the Profile API has, how much of it is distinct."""

    recorded: int
    stored: int
    distinct: int
    batches: int
    resent: int

    @property
    def lost(self) -> int:
        return self.recorded - self.distinct

    @property
    def double(self) -> int:
        return self.stored - self.distinct


@dataclass(frozen=True, slots=True)
class Outcome:
    """All that the table, the report and the JSON tell."""

    size: Size
    runs: tuple[Run, ...]
    offline: Offline
    ledger: Ledger
    library_bytes: int
    budget_bytes: int
    profile: dict[str, Any]
    seconds: float
    sample: Document = field(repr=False)
    sample_text: tuple[str, ...] = ()  # what the OCR read on its first page

    def run(self, name: str) -> Run:
        return next(run for run in self.runs if run.name == name)

    @property
    def pages(self) -> list[Answered]:
        """Every page that was read, in every phase; covers left out."""
        answers = [one for run in self.runs for one in run.answers] + list(self.offline.answers)
        return [one for one in answers if "/page/" in one.path and one.source != "error"]

    @property
    def accuracy(self) -> float:
        """The share of characters that the OCR read as they were printed."""
        return 1 - sum(one.errors for one in self.pages) / sum(one.characters for one in self.pages)

    def figures(self) -> dict[str, Any]:
        """What ``--json`` prints."""
        return {
            "p50_ms": {run.name: round(run.latency_ms(50), 3) for run in self.runs},
            "p95_ms": {run.name: round(run.latency_ms(95), 3) for run in self.runs},
            "hit_ratio": {run.name: round(run.hit_ratio, 4) for run in self.runs},
            "overfetch": round(self.run("full").overfetch, 4),
            "prefetch_precision": round(self.run("full").precision, 4),
            "offline_errors": self.offline.errors,
            "events_lost": self.ledger.lost,
            "events_double": self.ledger.double,
        }


class Scenario:
    """Plays it in ``folder``, which takes the models, the database and the logs.

    ``say(phase)`` is told what begins, ``turned()`` of every page turned; the second comes from several threads.
    """

    def __init__(
        self, size: Size, folder: Path, *, say: Callable[[str], None], turned: Callable[[], None]
    ) -> None:
        self._size = size
        self._folder = folder
        self._say = say
        self._turned = turned
        self._recorded = self._resent = 0

    def play(self) -> Outcome:
        began = time.monotonic()
        size = self._size
        self._say("setting pages")
        models = self._folder / "models"
        copy_models(models)
        library = open_library(size.documents, size.pages)
        self._desk = Desk(library, alphabet(models / f"{REC}.onnx"))
        shapes = {id: len(document.pages) for id, document in library.items()}
        earlier = readings(shapes, turns=size.training, seed=_SEED - 1)
        sessions = readings(shapes, turns=size.turns, seed=_SEED)
        page_bytes = _answer_bytes(library, len(self._desk.characters))
        library_bytes = page_bytes * sum(shapes.values())
        self._budget = int(library_bytes * BUDGET_SHARE)

        database = self._folder / "profile.sqlite"
        with ExitStack() as stack:
            self._say("starting mcp-server and mcp-profile")
            server = stack.enter_context(inference_server(models, self._folder / "mcp-server.log"))
            profile = stack.enter_context(profile_server(database, self._folder / "mcp-profile.log"))
            self._server, self._profile = server, profile
            self._start_servers()
            self._train(earlier)
            runs = (
                self._run("none", "no cache", sessions, cache=None),
                self._run("lru", "LRU", sessions, cache=Cache(max_bytes=self._budget, k=1)),
                self._run(
                    "full",
                    "LRU-K + prefetch",
                    sessions,
                    cache=Cache(max_bytes=self._budget),
                    prefetch=Prefetch(),
                ),
            )
            offline = self._lose_the_servers(sessions)
            self._say("counting events")
            stats = profile.get("/v1/stats")
            stored, distinct = _count_events(database)
            assert stored == stats["events"], "the Profile API's own sum differs from its table of events"
        sample = next(library[id] for id in library if page_path(id, 1) in self._desk.texts)
        return Outcome(
            size=size,
            runs=runs,
            offline=offline,
            ledger=Ledger(self._recorded, stored, distinct, stats["batches"], self._resent),
            library_bytes=library_bytes,
            budget_bytes=self._budget,
            profile=stats["profile"],
            seconds=time.monotonic() - began,
            sample=sample,
            sample_text=tuple(self._desk.texts[page_path(sample.id, 1)]),
        )

    def _start_servers(self) -> None:
        for server in (self._server, self._profile):
            server.start()
        for server in (self._server, self._profile):
            server.wait()

    def _train(self, earlier: Sequence[Reading]) -> None:
        """Other sessions, on another day: their telemetry is all that is kept of them."""
        self._say("earlier sessions train the profile")
        # Prefetch(max_overfetch=0) watches and fetches nothing; pages are turned without pause, to save the viewer's time.
        client = MCPClient(self._server.url, telemetry=self._telemetry(), prefetch=Prefetch(max_overfetch=0))
        with client:
            self._desk.register(client)
            self._play(client, earlier, think_s=(0.0, 0.0)).wait()
            self._flush(client)
        self._count(client)

    def _run(
        self,
        name: str,
        title: str,
        sessions: Sequence[Reading],
        *,
        cache: Cache | None,
        prefetch: Prefetch | None = None,
    ) -> Run:
        self._say(title)
        telemetry = (
            self._telemetry() if prefetch is not None else None
        )  # where the learned profile comes from
        with MCPClient(self._server.url, cache=cache, prefetch=prefetch, telemetry=telemetry) as client:
            if prefetch is not None:
                self._desk.register(client)
            # What every client asks once, the models' descriptions, belongs to none of the runs.
            for model in (REC, DET):
                client.metadata(model)
            play = self._play(client, sessions)
            seconds = play.wait()
            learned = client.stats().get("prefetch")
            self._flush(client)
        self._count(client)
        return Run(
            name=name,
            title=title,
            answers=tuple(play.answers),
            seconds=seconds,
            overfetch=learned.overfetch if learned is not None else 0.0,
            precision=learned.precision if learned is not None else 0.0,
        )

    def _lose_the_servers(self, sessions: Sequence[Reading]) -> Offline:
        """The models are synced, then both servers are killed under the readers, and started again while they read on."""
        self._say("servers die, readers go on")
        step = self._size.offline // 4
        marks: list[tuple[float, str]] = []
        client = MCPClient(
            self._server.url,
            cache=Cache(max_bytes=self._budget),
            telemetry=self._telemetry(),
            edge=self._folder / "edge",
        )
        with client:
            self._desk.register(client)
            report = client.edge.sync()
            play = self._play(client, sessions, again=True)
            for what, act in (
                ("mcp-server killed", self._server.kill),
                ("mcp-profile killed", self._profile.kill),
                ("servers back", self._start_servers),
            ):
                play.wait_until(_at_least(len(play.answers) + step))
                act()
                marks.append((time.monotonic() - play.began, what))
            back = marks[-1][
                0
            ]  # the client probes a server that was dead now and then, and returns to it by itself
            play.wait_until(
                lambda answers: sum(one.source == "server" for one in answers if one.at > back) >= step
            )
            play.stop()
            play.wait()
            self._flush(client)
        self._count(client)
        return Offline(tuple(play.answers), tuple(marks), tuple(report.downloaded))

    def _play(
        self,
        client: MCPClient,
        sessions: Sequence[Reading],
        think_s: tuple[float, float] = THINK_S,
        *,
        again: bool = False,
    ) -> Play:
        # How many pages a phase takes that waits for servers is not known before: the progress bar counts the planned ones.
        planned = iter(range(self._size.offline)) if again else None

        def on_turn() -> None:
            if planned is None or next(planned, None) is not None:
                self._turned()

        play = Play(
            self._desk,
            client,
            sessions,
            readers=READERS,
            think_s=think_s,
            on_turn=on_turn,
            again=again,
        )
        play.start()
        return play

    def _telemetry(self) -> Telemetry:
        return Telemetry(self._profile.url, interval_s=_TELEMETRY_S, spool_dir=self._folder / "telemetry")

    def _flush(self, client: MCPClient) -> None:
        if not client.flush(30.0):
            raise RuntimeError(f"the Profile API did not take the events: {client.stats()['telemetry']}")

    def _count(self, client: MCPClient) -> None:
        """What a closed client has recorded."""
        told = client.stats().get("telemetry")
        if told is not None:
            self._recorded += told.recorded
            self._resent += told.duplicates


def _at_least(turns: int) -> Callable[[Sequence[Answered]], bool]:
    return lambda answers: len(answers) >= turns


def _answer_bytes(library: dict[str, Document], classes: int) -> int:
    """What the answer to one page takes: a probability for each class at each step, FP32, 8 pixels to a step."""
    document = next(iter(library.values()))
    height, width = map(int, document.pictures[0].shape)
    return height // STRIP_HEIGHT * (width // 8) * classes * 4


def _count_events(database: Path) -> tuple[int, int]:
    """(events, events with a number of their own) in the Profile API's table: client and sequence number name an event."""
    with closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True)) as db:
        stored, distinct = db.execute(
            "SELECT count(*), count(DISTINCT client || ':' || seq) FROM events"
        ).fetchone()
    return int(stored), int(distinct)
