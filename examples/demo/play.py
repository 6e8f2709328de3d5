"""Readers at work: threads that turn pages through a client, read what comes back, and note how long each answer took."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import cycle

import numpy as np

from mcp_client import MCPClient, MCPError
from mcp_client.tensors import Array

from .library import Document, layout_input, strips
from .ocr import DET, REC, character_errors, read_lines, rows_found
from .readers import Reading, Turn

PAGE_ROUTE = "/doc/{id}/page/{n:int}"
LAYOUT_ROUTE = "/doc/{id}/layout"


@dataclass(frozen=True, slots=True)
class Answered:
    """One turn of a page. ``at``: seconds since the readers began. ``source`` is the client's word, or ``error``.

    ``errors`` of ``characters`` were read wrongly (of a cover: rows of text were found wrongly). ``differs``: how far the answer
    is from the first one that was given for the path.
    """

    at: float
    path: str
    source: str
    latency_ms: float
    characters: int = 0
    errors: int = 0
    differs: float = 0.0


@dataclass(slots=True)
class Desk:
    """What all readers share: the library, the OCR's alphabet, what was read, the first answer to each path, kept short."""

    library: Mapping[str, Document]
    characters: Sequence[str]
    texts: dict[str, list[str]] = field(default_factory=dict)
    first: dict[str, Array] = field(default_factory=dict)

    def register(self, client: MCPClient) -> None:
        """The routes: how the input of any page and any cover is made, so that pages never seen can be fetched."""

        @client.route(PAGE_ROUTE, model=REC)
        def page(id: str, n: int) -> dict[str, Array] | None:
            document = self.library.get(id)
            return strips(document.pictures[n - 1]) if document and 1 <= n <= len(document.pages) else None

        @client.route(LAYOUT_ROUTE, model=DET)
        def layout(id: str) -> dict[str, Array] | None:
            document = self.library.get(id)
            return layout_input(document.cover) if document else None

    def inputs(self, turn: Turn) -> tuple[str, dict[str, Array]]:
        """The model to ask, and what to ask it."""
        document = self.library[turn.document]
        if turn.page == 0:
            return DET, layout_input(document.cover)
        return REC, strips(document.pictures[turn.page - 1])

    def read(self, turn: Turn, output: Array) -> tuple[int, int]:
        """(characters on the page, those read wrongly); of a cover, (rows of text, those too few or too many)."""
        document = self.library[turn.document]
        if turn.page == 0:
            return len(document.cover_lines), abs(len(document.cover_lines) - rows_found(output))
        true = document.pages[turn.page - 1]
        read = self.texts[turn.path] = read_lines(output, self.characters)
        return sum(map(len, true)), character_errors(read, true)

    def differs(self, path: str, output: Array) -> float:
        """The largest difference from the first answer to the same path (of each step's best class: its probability)."""
        short = output.max(axis=2) if output.ndim == 3 else output
        return float(np.abs(self.first.setdefault(path, short) - short).max())


class Play:
    """Some sessions, played by ``readers`` threads at once; each plays every n-th session, one after the other.

    ``think_s`` (least, most): how long a page is looked at. ``on_turn`` is called after each turn, in the reader's thread.
    ``again``: when the sessions are over they begin anew, until ``stop()``.
    """

    def __init__(
        self,
        desk: Desk,
        client: MCPClient,
        readings: Sequence[Reading],
        *,
        readers: int,
        think_s: tuple[float, float],
        on_turn: Callable[[], None],
        again: bool = False,
    ) -> None:
        self.answers: list[Answered] = []
        self._desk = desk
        self._client = client
        self._think_s = think_s
        self._on_turn = on_turn
        self._turned = threading.Condition()
        self._failure: BaseException | None = None
        self._again = again
        self._stopped = False
        self._threads = [
            threading.Thread(target=self._run, args=(readings[first::readers],), name=f"reader-{first}")
            for first in range(readers)
        ]

    def start(self) -> None:
        self.began = time.monotonic()
        for thread in self._threads:
            thread.start()

    def wait(self) -> float:
        """Until all readers are done; seconds since they began. Raises what a reader died of."""
        for thread in self._threads:
            thread.join()
        if self._failure is not None:
            raise self._failure
        return time.monotonic() - self.began

    def wait_until(self, true: Callable[[Sequence[Answered]], bool], timeout_s: float = 120.0) -> None:
        """Until something holds of the answers so far; ``RuntimeError`` if it never does. Raises what a reader died of."""
        with self._turned:
            held = self._turned.wait_for(
                lambda: self._failure is not None or true(self.answers), timeout=timeout_s
            )
        if self._failure is not None:
            raise self._failure
        if not held:
            raise RuntimeError(f"the readers did not get there within {timeout_s:.0f} s")

    def stop(self) -> None:
        """Each reader puts the page down that is being read."""
        self._stopped = True

    def _run(self, readings: Sequence[Reading]) -> None:
        try:
            for reading in cycle(readings) if self._again else readings:
                if self._stopped:
                    return
                self._read(reading)
        except BaseException as failure:
            with self._turned:
                self._failure = failure
                self._turned.notify_all()

    def _read(self, reading: Reading) -> None:
        session = self._client.session(reading.session)
        pace = random.Random(reading.session)  # the same pauses in every run
        for turn in reading.turns:
            if self._stopped:
                return
            model, inputs = self._desk.inputs(turn)
            started = time.monotonic()
            try:
                result = session.infer(inputs, model=model, path=turn.path)
            except MCPError:
                answered = Answered(
                    started - self.began, turn.path, "error", (time.monotonic() - started) * 1e3
                )
            else:
                characters, errors = self._desk.read(turn, result.output)
                answered = Answered(
                    at=started - self.began,
                    path=turn.path,
                    source=result.source,
                    latency_ms=result.latency_ms,
                    characters=characters,
                    errors=errors,
                    differs=self._desk.differs(turn.path, result.output),
                )
            with self._turned:
                self.answers.append(answered)
                self._turned.notify_all()
            self._on_turn()
            if self._think_s[1]:
                time.sleep(pace.uniform(*self._think_s))
