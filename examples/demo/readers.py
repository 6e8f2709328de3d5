"""The readers: which page of which document each session asks for, step by step; the same for the same seed."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

# Of a reader's steps: on to the next page, back to the one before, away to another document. A document ends by itself.
_FORWARD, _BACK = 0.86, 0.06
_TURNS = 24  # pages in a session, on average
_LATER = 0.25  # how often a document is opened at a bookmark and not at its first page


@dataclass(frozen=True, slots=True)
class Turn:
    """One step: page ``page`` of a document; 0 is its cover, for which the layout is asked."""

    document: str
    page: int

    @property
    def path(self) -> str:
        return layout_path(self.document) if self.page == 0 else page_path(self.document, self.page)


@dataclass(frozen=True, slots=True)
class Reading:
    """A session and its steps, in order."""

    session: str
    turns: tuple[Turn, ...]


def page_path(id: str, n: int) -> str:
    return f"/doc/{id}/page/{n}"


def layout_path(id: str) -> str:
    return f"/doc/{id}/layout"


def readings(pages: Mapping[str, int], *, turns: int, seed: int) -> list[Reading]:
    """Sessions of together exactly ``turns`` steps over documents of ``pages`` (id → number of pages).

    Documents are popular by Zipf's law in the order given: the n-th is opened 1/n as often as the first.
    """
    rng = random.Random(seed)
    ids = list(pages)
    popularity = list(accumulate(1 / rank for rank in range(1, len(ids) + 1)))
    sessions: list[Reading] = []
    left = turns
    while left > 0:
        length = min(left, 2 + int(rng.expovariate(1 / (_TURNS - 2))))
        sessions.append(
            Reading(f"reader-{seed}-{len(sessions)}", _session(rng, pages, ids, popularity, length))
        )
        left -= length
    return sessions


def _session(
    rng: random.Random, pages: Mapping[str, int], ids: Sequence[str], popularity: list[float], length: int
) -> tuple[Turn, ...]:
    steps: list[Turn] = []
    at: Turn | None = None
    while len(steps) < length:
        draw = rng.random()
        if at is None:
            id = rng.choices(ids, cum_weights=popularity)[0]
            steps.append(Turn(id, 0))
            at = Turn(id, rng.randint(2, pages[id]) if rng.random() < _LATER else 1)
        elif draw < _FORWARD:
            at = Turn(at.document, at.page + 1) if at.page < pages[at.document] else None
        elif draw < _FORWARD + _BACK and at.page > 1:
            at = Turn(at.document, at.page - 1)
        else:
            at = None
        if at is not None:
            steps.append(at)
    return tuple(steps[:length])
