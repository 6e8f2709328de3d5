"""What a session is likely to ask for next: statistics over exact paths and over routes, blended to one list.

Exact paths tell what readers of *this* document do; routes tell what readers of *any* document do, so that a page nobody
has seen can be predicted: ``/doc/7/page/2`` after ``/doc/7/page/1`` is, on the route, "the same id, n one higher".
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from dataclasses import dataclass, replace

from ..errors import ProtocolError
from . import features
from .markov import Guess, Markov, Trail
from .profile import Profile
from .ranker import Ranker
from .routes import Params, Route, RouteTable

log = logging.getLogger("mcp_client.prefetch")

# Steps ahead that count as "soon".
HORIZON = 8
_MAX_CONTEXTS = 200_000
_MAX_SESSIONS = 10_000
# A session silent for so long starts anew; the usual cut of web sessions (Catledge and Pitkow 1995 give 25.5 minutes).
_IDLE_S = 1800.0


@dataclass(frozen=True, slots=True)
class Candidate:
    """A path that may be asked for: the probability that it is next, that it comes within the horizon, and why we think so."""

    path: str
    probability: float
    next_probability: float
    reason: str


NO_CANDIDATE = Candidate("", 0.0, 0.0, "")


@dataclass(slots=True)
class _Session:
    paths: Trail
    routes: Trail
    path: str = ""
    last_seen: float = 0.0
    gap_s: float = 0.0
    count: int = 0


class Predictor:
    """Learns from the steps of sessions as they come. Safe to share between threads. Times are seconds, passed in."""

    def __init__(self, order: int = 5, routes: RouteTable | None = None) -> None:
        self._order = order
        self._table = routes if routes is not None else RouteTable()
        self._paths = Markov(order, HORIZON, _MAX_CONTEXTS)
        self._routes = Markov(min(order, 2), HORIZON, _MAX_CONTEXTS // 10)
        self._sessions: OrderedDict[str, _Session] = OrderedDict()
        self._ranker: Ranker | None = None
        self.lock = threading.Lock()

    def observe(self, session: str, path: str, now: float) -> None:
        """The session asks for ``path``. A reload of the same path is no step."""
        with self.lock:
            state = self._sessions.get(session)
            if state is None or now - state.last_seen > _IDLE_S:
                state = self._sessions[session] = _Session(self._paths.trail(), self._routes.trail())
                if len(self._sessions) > _MAX_SESSIONS:
                    self._sessions.popitem(last=False)
            self._sessions.move_to_end(session)
            gap_s, state.last_seen = (now - state.last_seen if state.count else 0.0), now
            if path == state.path:
                return
            route_step = self._route_step(state.path, path)
            state.path, state.gap_s = path, gap_s
            state.count += 1
            self._paths.observe(state.paths, path)
            if self._table:  # without routes it would learn the same as the paths
                self._routes.observe(state.routes, route_step)

    def predict(self, session: str, limit: int) -> list[Candidate]:
        """The likeliest paths within the horizon, best first; never the one the session is on."""
        with self.lock:
            state = self._sessions.get(session)
            if state is None:
                return []
            found, routed = self._found(state, limit)
            if self._ranker is not None and (fresh := self._fresh(state, found)):
                rows = features.table([self._row(state, one, routed) for one in fresh])
                for one, score in zip(fresh, self._ranker.score(rows).tolist(), strict=True):
                    found[one.path] = replace(
                        one, probability=max(score, one.next_probability), reason=f"{one.reason}, ranked"
                    )
        return _best(found)[:limit]

    def candidates(self, session: str, limit: int) -> list[tuple[str, list[float]]]:
        """The candidates that a ranker is asked about, each with its features: what training learns from."""
        with self.lock:
            state = self._sessions.get(session)
            if state is None:
                return []
            found, routed = self._found(state, limit)
            return [(one.path, self._row(state, one, routed)) for one in self._fresh(state, found)]

    def _found(self, state: _Session, limit: int) -> tuple[dict[str, Candidate], dict[str, Guess]]:
        """What statistics alone say, by path; and what routes say, by the path that they lead to."""
        found = {
            guess.step: Candidate(guess.step, guess.soon, guess.next, f"order {guess.order} of paths")
            for guess in self._paths.predict(state.paths, limit + 1)
        }
        routed: dict[str, Guess] = {}
        here = self._table.resolve(state.path)
        for guess in self._routes.predict(state.routes, limit) if self._table else ():
            path = self._path_of(guess.step, here)
            if path is None:
                continue
            routed.setdefault(path, guess)
            known = found.get(path)
            if known is None or guess.soon > known.probability:
                found[path] = Candidate(path, guess.soon, guess.next, f"order {guess.order} of routes")
        found.pop(state.path, None)
        return found, routed

    @staticmethod
    def _fresh(state: _Session, found: dict[str, Candidate]) -> list[Candidate]:
        """Those that the session has not had yet: what it had is at hand, or as likely as it is next."""
        return [one for one in found.values() if one.path not in state.paths.visited]

    def _row(self, state: _Session, one: Candidate, routed: dict[str, Guess]) -> list[float]:
        levels = self._paths.evidence(state.paths, one.path)
        order = max((at for at, level in enumerate(levels) if level.share > 0), default=-1)
        guess = routed.get(one.path)
        route = (guess.soon, guess.next) if guess is not None else (0.0, 0.0)
        return features.row(
            one.probability, one.next_probability, order, route, state.count, state.gap_s, levels
        )

    def load(self, profile: Profile) -> None:
        """Start from what the fleet has learned; a profile loaded before is replaced."""
        with self.lock:
            self._paths.load(profile.paths)
            self._routes.load(profile.routes)
            self._ranker = _ranker_of(profile)

    def to_profile(self, version: str, now: float = 0.0) -> Profile:
        """What was learned here, in the form that travels."""
        with self.lock:
            return Profile(
                version=version,
                order=self._order,
                paths=self._paths.counts(),
                routes=self._routes.counts(),
                created_at=now,
                horizon=HORIZON,
            )

    def _route_step(self, before: str, path: str) -> str:
        there = self._table.resolve(path)
        return route_step(self._table.resolve(before), there) if there is not None else path

    def _path_of(self, step: str, here: tuple[Route, Params] | None) -> str | None:
        template, *relations = step.split("|")
        route = self._table.named(template)
        if route is None:
            return template if "{" not in template else None
        params: Params = {}
        for relation in relations:
            name, _, how = relation.partition("=")
            before = here[1].get(name) if here is not None else None
            if how == "?" or before is None:
                return None
            params[name] = before + int(how) if isinstance(before, int) else before
        path = route.path_for(params)
        return path if route.match(path) == params else None


def _best(found: dict[str, Candidate]) -> list[Candidate]:
    return sorted(found.values(), key=lambda one: (-one.probability, -one.next_probability, one.path))


def _ranker_of(profile: Profile) -> Ranker | None:
    """The profile's ranker; a bad one costs a warning and the ranking, never the prediction."""
    if not profile.ranker:
        return None
    try:
        return Ranker(profile.ranker)
    except ProtocolError as error:
        log.warning("%s; candidates are ranked by statistics alone", error)
        return None


def route_step(before: tuple[Route, Params] | None, there: tuple[Route, Params]) -> str:
    """A step on a route, by what it does to the parameters: ``/doc/{id}/page/{n:int}|id=|n=1`` for "same id, n one higher".

    ``name=`` is the same text, ``name=2`` two higher, ``name=?`` a value that doesn't follow from the step before.
    """
    route, params = there
    parts = [route.template]
    for name, value in params.items():
        was = before[1].get(name) if before is not None else None
        if isinstance(value, int) and isinstance(was, int):
            parts.append(f"{name}={value - was}")
        else:
            parts.append(f"{name}=" if was == value else f"{name}=?")
    return "|".join(parts)
