"""Which transitions a step is evidence for, counted as the client's own predictor counts them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import pairwise

from mcp_client.errors import ConfigurationError
from mcp_client.prefetch.markov import START
from mcp_client.prefetch.predictor import route_step
from mcp_client.prefetch.profile import SEPARATOR
from mcp_client.prefetch.routes import Params, Route

Step = tuple[str, str]  # path, and the template of its route or ""
# The predictor looks no further back on routes: what is done to parameters repeats soon.
ROUTE_ORDER = 2
# UTF-8 bytes of context and next step together: an index of PostgreSQL takes 2704 a row. Such long contexts are not counted;
# the shorter ones that they end with are.
MAX_KEY_BYTES = 2400


def keys_of(gram: tuple[Step, ...], order: int) -> Iterator[tuple[str, str, str]]:
    """(kind, context, next) for contexts of every length, from nothing to ``order`` steps; the start of a visit is a step, too.

    ``gram``: a step behind the steps of its visit before it, ``order`` of them at most (and ``order`` > ``ROUTE_ORDER``), oldest
    first. The first step of a visit is evidence for nothing: nobody could have predicted it.
    """
    if len(gram) == 1:
        return
    yield from _contexts("path", [path for path, _ in gram], order)
    # What a step does to its route's parameters takes the step before it to say.
    visible = gram[-ROUTE_ORDER - 2 :]
    moves = [move(before, step) for before, step in pairwise(visible)]
    if len(moves) <= ROUTE_ORDER:
        moves.insert(0, move(("", ""), visible[0]))  # the visit began here
    yield from _contexts("route", moves, ROUTE_ORDER)


def _contexts(kind: str, steps: list[str], order: int) -> Iterator[tuple[str, str, str]]:
    *before, step = steps
    if len(before) < order:
        before.insert(0, START)
    for start in range(len(before), -1, -1):
        context = SEPARATOR.join(before[start:])
        if 4 * (len(context) + len(step)) > MAX_KEY_BYTES < len(context.encode()) + len(step.encode()):
            return
        yield kind, context, step


@lru_cache(maxsize=1 << 16)
def move(before: Step, step: Step) -> str:
    """The step as it is counted on routes: what it does to the parameters; ``("", "")`` before the first of a visit."""
    there = _resolved(step)
    return step[0] if there is None else route_step(_resolved(before), there)


def _resolved(step: Step) -> tuple[Route, Params] | None:
    path, template = step
    route = _route(template) if template else None
    params = route.match(path) if route is not None else None
    return (route, params) if route is not None and params is not None else None


@lru_cache(maxsize=1 << 12)
def _route(template: str) -> Route | None:
    try:
        return Route.of(template, _no_builder)
    except ConfigurationError:
        return None  # an event's route is what a client says it is; one that is none is no reason to lose the step


def _no_builder() -> None:
    raise NotImplementedError("the Profile API reads routes; it builds no inputs")
