"""The endpoints of a client: which there are (a name with several addresses is several), and which one gets a request."""

from __future__ import annotations

import ipaddress
import random
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from .effects import Endpoint
from .errors import CircuitOpenError, InvalidInputError, listed
from .resilience.load import pick

# getaddrinfo tells no TTL. Headless Kubernetes services and CoreDNS use 5 to 30 s.
_RESOLVE_EVERY_S = 30.0
# After a connection failed the name is asked again at once, but not more often than this.
_RESOLVE_AGAIN_S = 1.0


@dataclass(slots=True)
class Site:
    """One URL as the user gave it. ``make`` gives the endpoint for one of its addresses; ``None``: the name itself."""

    url: str
    make: Callable[[str | None], Endpoint]
    name: str | None = None  # the host name to resolve, if there is one
    port: int = 0
    endpoints: dict[str | None, Endpoint] = field(default_factory=dict)
    resolve_at: float = 0.0
    resolved_at: float = float("-inf")

    @classmethod
    def of(cls, url: str, make: Callable[[str | None], Endpoint], *, resolve: bool) -> Site:
        endpoint = make(None)  # which says what is wrong with the URL, if anything is
        parts = urlsplit(url)
        name = parts.hostname if resolve and parts.scheme in ("http", "https") else None
        if name is not None and not _may_have_replicas(name):
            name = None
        port = parts.port or (443 if parts.scheme == "https" else 80)
        return cls(url, make, name, port, {None: endpoint})


def _may_have_replicas(host: str) -> bool:
    """Not an address, and not this machine: ``localhost`` is one server, whichever of its addresses it listens on."""
    if host == "localhost" or host.endswith(".localhost"):
        return False
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return True
    return False


class Endpoints:
    """All endpoints of a client. Everything in here, and every endpoint's ``load``, is touched under ``lock`` only."""

    def __init__(self, sites: Sequence[Site], rng: random.Random | None = None) -> None:
        self.sites = tuple(sites)
        self._named = [site for site in self.sites if site.name is not None]
        self.lock = threading.Lock()
        self._rng = rng or random.Random()
        self._retired: list[Endpoint] = []
        self._current: tuple[Endpoint, ...] = ()
        self._refresh()

    def __iter__(self) -> Iterator[Endpoint]:
        return iter((*self._current, *self._retired))

    def __len__(self) -> int:
        return len(self._current)

    def _refresh(self) -> None:
        self._current = tuple(e for site in self.sites for e in site.endpoints.values())

    # --- names and addresses ---

    @property
    def may_change(self) -> bool:
        """Whether there are names to resolve or endpoints to close; with an address as the only URL there never are."""
        return bool(self._named or self._retired)

    def due(self, now: float) -> list[Site]:
        """The names to resolve now. Each is handed to one caller; the rest go on with the addresses known."""
        if not self._named:
            return []
        with self.lock:
            due = [site for site in self._named if now >= site.resolve_at]
            for site in due:
                site.resolve_at = now + _RESOLVE_EVERY_S
                site.resolved_at = now
            return due

    def resolved(self, site: Site, addresses: Collection[str]) -> None:
        """What a name stands for now. Endpoints that stay keep their connections, breakers and figures."""
        wanted: list[str | None] = [*addresses] if len(addresses) > 1 else [None]
        with self.lock:
            if set(wanted) == set(site.endpoints):
                return
            old = site.endpoints
            site.endpoints = {key: old.pop(key) if key in old else site.make(key) for key in wanted}
            self._retired += old.values()
            self._refresh()

    def unreachable(self, now: float) -> None:
        """A connection failed: the addresses may have changed."""
        with self.lock:
            for site in self.sites:
                site.resolve_at = min(site.resolve_at, max(now, site.resolved_at + _RESOLVE_AGAIN_S))

    def to_close(self) -> list[Endpoint]:
        """Endpoints that are no more and that nobody uses any longer; the caller closes them."""
        if not self._retired:
            return []
        with self.lock:
            idle = [endpoint for endpoint in self._retired if not endpoint.load.outstanding]
            self._retired = [endpoint for endpoint in self._retired if endpoint.load.outstanding]
            return idle

    # --- the choice ---

    def choose(self, now: float, *, tried: Collection[Endpoint] = (), may_probe: bool = True) -> Endpoint:
        """The endpoint for one request; ``finished`` must follow. Raises ``CircuitOpenError`` where all are left alone.

        Those not ``tried`` yet come first. One whose circuit is half-open gets the request as its probe where the caller can
        go elsewhere if that fails; otherwise two healthy ones are drawn and the less loaded, quicker one is taken.
        """
        with self.lock:
            current = self._current
            if not current:
                raise InvalidInputError(
                    "this client has no server (it was made with 'edge:'); only the edge's models can be used"
                )
            if len(current) == 1:  # the usual case, kept short
                endpoint = current[0]
                if endpoint.breaker.admits(now):
                    endpoint.load.outstanding += 1
                    return endpoint
            else:
                rest = list(current)
                while rest:
                    endpoint = self._best(rest, now, tried, may_probe)
                    if endpoint.breaker.admits(now):
                        endpoint.load.outstanding += 1
                        return endpoint
                    rest.remove(endpoint)
        soonest = min(endpoint.breaker.retry_in(now) for endpoint in current)
        raise CircuitOpenError(
            f"{listed([endpoint.url for endpoint in current])} failed repeatedly and is left alone; "
            f"the next probe goes in {soonest:.1f} s"
        )

    def _best(
        self, rest: list[Endpoint], now: float, tried: Collection[Endpoint], may_probe: bool
    ) -> Endpoint:
        def rank(endpoint: Endpoint) -> tuple[bool, bool, int]:
            state = endpoint.breaker.state(now)
            order = {"closed": 1, "half-open": 0 if may_probe else 2, "open": 3}[state]
            return endpoint in tried, endpoint.aside_until > now, order

        best = min(map(rank, rest))
        return pick([endpoint for endpoint in rest if rank(endpoint) == best], self._rng)

    def other(self, now: float, tried: Collection[Endpoint]) -> bool:
        """Whether a healthy endpoint is there that was not tried yet."""
        return any(
            endpoint not in tried and endpoint.aside_until <= now and endpoint.breaker.state(now) != "open"
            for endpoint in self._current
        )

    def finished(self, endpoint: Endpoint, *, seconds: float | None = None, failed: bool = False) -> None:
        """The request is over; ``seconds``: how long an answer took."""
        with self.lock:
            endpoint.load.outstanding -= 1
            if failed:
                endpoint.load.failed()
            elif seconds is not None:
                endpoint.load.answered(seconds)

    def reset(self) -> None:
        """Nothing is under way: in the child after a fork."""
        for endpoint in self:
            endpoint.load.outstanding = 0
            endpoint.breaker.abandoned()
            endpoint.transport.reset()

    def locks(self) -> list[threading.Lock]:
        """``lock`` is held whenever a breaker's is taken from here, and never the other way round."""
        return [self.lock, *(endpoint.breaker.lock for endpoint in self)]
