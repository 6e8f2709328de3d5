"""What a ranker is told of a candidate: the one place where its numbers are made, for training and for the client alike."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

# Contexts of 0 to 5 steps are told apart, whatever the order that is counted.
LEVELS = 6
UNKNOWN = -1.0

NAMES = (
    "soon",  # the blended probability that it is asked for within the horizon …
    "next",  # … and that it is next
    "order",  # the longest context that knows it
    "route_soon",  # the same two of its route, which is where strides are; 0 if no route led to it
    "route_next",
    "position",  # log(1 + steps of the session)
    "gap",  # log(1 + seconds between the last two steps)
    *(f"share_{level}" for level in range(LEVELS)),  # of what followed the context: level 0 is popularity
    *(f"support_{level}" for level in range(LEVELS)),  # log(1 + how often anything followed the context)
    *(f"soon_{level}" for level in range(LEVELS)),  # of the sessions there that had not had it yet
)
# The name of a ranker's input: one that was trained on other features is not used.
INPUT = "mcp_candidates_1"


class Level(NamedTuple):
    """What one context says of a candidate: counts of the fleet and of this client together; ``soon`` is this client's."""

    share: float = UNKNOWN
    support: float = 0.0
    soon: float = UNKNOWN


def row(
    soon: float,
    following: float,
    order: int,
    route: tuple[float, float],
    steps: int,
    gap_s: float,
    levels: Sequence[Level],
) -> list[float]:
    """The features of one candidate, in the order of ``NAMES``."""
    known = [*levels[:LEVELS], *[Level()] * (LEVELS - len(levels))]
    return [
        soon,
        following,
        float(order),
        *route,
        math.log1p(steps),
        math.log1p(max(0.0, gap_s)),
        *(level.share for level in known),
        *(math.log1p(level.support) for level in known),
        *(level.soon for level in known),
    ]


def table(rows: Sequence[Sequence[float]]) -> np.ndarray[Any, np.dtype[np.float32]]:
    """The rows as a ranker takes them: float32, one line a candidate."""
    return np.array(rows, dtype=np.float32).reshape(len(rows), len(NAMES))
