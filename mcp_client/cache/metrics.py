"""The cache's figures for Prometheus and OpenTelemetry: read when they are asked for, so that a hit costs nothing for them.

``REGISTRY.register(PrometheusCollector(client.cache))`` (package ``prometheus-client``), or ``observe(client.cache, meter)`` with
a meter of ``opentelemetry``. By tier (``memory``, ``disk``, ``shared``) and by model.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import MissingExtraError
from .memory import MemoryCache

if TYPE_CHECKING:
    from opentelemetry.metrics import Meter


class Figure(NamedTuple):
    """One value: its name, what it means, whether it only grows, and what it is of."""

    name: str
    meaning: str
    grows: bool
    labels: dict[str, str]
    value: float


def figures(cache: MemoryCache, now: float) -> Iterator[Figure]:
    """All of a cache's figures at ``now`` (monotonic seconds)."""
    stats = cache.stats()
    models = cache.models(now)
    memory = {"tier": "memory"}
    yield Figure("hits", "answers found", True, memory, stats.hits)
    yield Figure("misses", "answers not found", True, memory, stats.misses)
    yield Figure("evictions", "entries that went to make room", True, memory, stats.evictions)
    yield Figure(
        "expirations", "entries that went because their time was over", True, memory, stats.expirations
    )
    oldest = max((found.oldest_s for found in models.values()), default=0.0)
    yield Figure("oldest_seconds", "age of the oldest entry", False, memory, oldest)
    for tier, of in stats.tiers.items():
        yield Figure("hits", "answers found", True, {"tier": tier}, of.hits)
        yield Figure("misses", "answers not found", True, {"tier": tier}, of.misses)
        yield Figure(
            "failures", "times the tier failed and was passed over", True, {"tier": tier}, of.failures
        )
    for tier, (entries, nbytes) in cache.sizes().items():
        yield Figure("entries", "entries", False, {"tier": tier}, entries)
        yield Figure("bytes", "bytes", False, {"tier": tier}, nbytes)
    for model, found in models.items():
        of_model = {"model": model}
        yield Figure("model_hits", "answers found in memory", True, of_model, found.hits)
        yield Figure("model_misses", "answers not found in memory", True, of_model, found.misses)
        yield Figure(
            "model_evictions", "entries that went from memory to make room", True, of_model, found.evictions
        )
        yield Figure("model_entries", "entries in memory", False, of_model, found.entries)
        yield Figure("model_bytes", "bytes in memory", False, of_model, found.bytes)
        yield Figure(
            "model_oldest_seconds", "age of the oldest entry in memory", False, of_model, found.oldest_s
        )


class PrometheusCollector:
    """A collector for a ``prometheus_client`` registry: ``mcp_client_cache_…``."""

    def __init__(self, cache: MemoryCache, *, clock: Callable[[], float] = time.monotonic) -> None:
        try:
            from prometheus_client import core
        except ImportError as error:
            raise MissingExtraError("server", "prometheus-client", "a Prometheus collector") from error
        self._core = core
        self._cache = cache
        self._clock = clock

    def collect(self) -> Iterator[Any]:
        families: dict[str, Any] = {}
        for figure in figures(self._cache, self._clock()):
            family = families.get(figure.name)
            if family is None:
                kind = self._core.CounterMetricFamily if figure.grows else self._core.GaugeMetricFamily
                family = families[figure.name] = kind(
                    f"mcp_client_cache_{figure.name}", figure.meaning, labels=list(figure.labels)
                )
            family.add_metric(list(figure.labels.values()), figure.value)
        yield from families.values()


def observe(cache: MemoryCache, meter: Meter, *, clock: Callable[[], float] = time.monotonic) -> None:
    """Register observable instruments ``mcp_client.cache.…`` with an OpenTelemetry meter."""
    try:
        from opentelemetry.metrics import CallbackOptions, Observation
    except ImportError as error:
        raise MissingExtraError("otel", "opentelemetry-api", "OpenTelemetry instruments") from error
    latest = _Latest(cache, clock)

    def values(name: str) -> Callable[[CallbackOptions], list[Observation]]:
        return lambda _: [Observation(f.value, f.labels) for f in latest.figures() if f.name == name]

    growing = (
        "hits",
        "misses",
        "failures",
        "evictions",
        "expirations",
        "model_hits",
        "model_misses",
        "model_evictions",
    )
    current = ("entries", "bytes", "oldest_seconds", "model_entries", "model_bytes", "model_oldest_seconds")
    for name in growing:
        meter.create_observable_counter(f"mcp_client.cache.{name}", callbacks=[values(name)])
    for name in current:
        meter.create_observable_gauge(f"mcp_client.cache.{name}", callbacks=[values(name)])


class _Latest:
    """One reading for all instruments of a collection: each asks for itself, and a reading goes through every entry."""

    _GOOD_FOR_S = 0.5

    def __init__(self, cache: MemoryCache, clock: Callable[[], float]) -> None:
        self._cache = cache
        self._clock = clock
        self._read_at = float("-inf")
        self._figures: list[Figure] = []

    def figures(self) -> list[Figure]:
        now = self._clock()
        if now - self._read_at > self._GOOD_FOR_S:
            self._figures = list(figures(self._cache, now))
            self._read_at = now
        return self._figures
