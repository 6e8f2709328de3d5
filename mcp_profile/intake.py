"""Takes checked batches in, whichever way they came: how fast they may come, and what became of them."""

from __future__ import annotations

import math

from prometheus_client import CollectorRegistry, Counter

from .errors import APIError
from .ingest import Batch
from .limits import RateLimit
from .store import Store


class Intake:
    """One for the HTTP and the gRPC side of a server, so that limits and figures are those of both. For any thread."""

    def __init__(self, store: Store, limit: RateLimit) -> None:
        self.registry = CollectorRegistry()
        self._store = store
        self._limit = limit
        self._events = Counter(
            "mcp_profile_events", "Events by what became of them", ["result"], registry=self.registry
        )
        self._batches = Counter("mcp_profile_batches", "Batches taken in", registry=self.registry)

    def take(self, app: int, batch: Batch) -> tuple[int, int, list[tuple[int, str]]]:
        """As ``Store.ingest``; 429 if the application sends more than it may."""
        wait = self._limit.take(app, len(batch.rows))
        if wait:
            raise APIError(
                429,
                "too_many_events",
                f"events come faster than this server takes them; try again in {wait:.0f} s",
                headers={"Retry-After": str(math.ceil(wait))},
            )
        accepted, duplicates, rejected = self._store.ingest(app, batch)
        self._batches.inc()
        for result, n in (("accepted", accepted), ("duplicate", duplicates), ("rejected", len(rejected))):
            self._events.labels(result).inc(n)
        return accepted, duplicates, rejected
