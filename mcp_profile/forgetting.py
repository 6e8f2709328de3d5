"""Exponential forgetting: what was seen a half-life ago counts half as much as what is seen today.

Counts are kept growing instead of shrinking ("forward decay"; Cormode, Shkapenyuk, Srivastava, Xu, ICDE 2009): an event adds
2^(days since the first / half-life), and whoever reads divides by today's weight. So a run costs what is new, and counting all
events anew gives the same. To the last bit: a weight has 8 significant bits and what it multiplies is a multiple of 1/1024, so
sums are exact in whatever order, as long as the oldest that still counts is less than some 20 half-lives old.

Days are those on which events arrived, by the server's clock: the clocks of clients jump.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

DAY_S = 86_400.0
HALF_LIFE_DAYS = 30.0
# Shorter, and the weights would outgrow a double within years; 1,000 half-lives fit.
SHORTEST_HALF_LIFE_DAYS = 7.0
_LARGEST_EXPONENT = 1000.0
# What counts less than this of one event is forgotten for good (by ``upkeep.retire``).
FORGOTTEN = 0.01


def day_of(t: float) -> int:
    """The number of the day since 1970, in UTC."""
    return int(t // DAY_S)


def weight(days: int, half_life_days: float) -> float:
    """What an event counts that arrived ``days`` after the first one; a half-life of 0 forgets nothing."""
    if not half_life_days:
        return 1.0
    mantissa, exponent = math.frexp(2.0 ** min(days / half_life_days, _LARGEST_EXPONENT))
    return math.ldexp(round(mantissa * 256), exponent - 8)


def rounded(value: float) -> float:
    """The nearest multiple of 1/1024, as ``rounded_sql`` has it."""
    return math.floor(value * 1024 + 0.5) / 1024


def rounded_sql(value: str) -> str:
    return f"FLOOR(({value}) * 1024 + 0.5) / 1024"


def weights_sql(days: Iterable[int], since: int, half_life_days: float) -> str:
    """The relation (day, weight)."""
    rows = [f"SELECT {day:d} AS day, {weight(day - since, half_life_days):.17e} AS weight" for day in days]
    return " UNION ALL ".join(rows)


def whole(n: float) -> float:
    """A count as it travels: without a fraction where it has none, else with two digits of it."""
    return int(n) if n == int(n) else round(n, 2)
