"""The cache's figures, through a real Prometheus registry and a real OpenTelemetry reader."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from prometheus_client import CollectorRegistry, generate_latest

from mcp_client import Cache
from mcp_client.cache.memory import Entry, MemoryCache
from mcp_client.cache.metrics import PrometheusCollector, observe
from mcp_client.cache.tiers import open_cache
from mcp_client.result import Answer


def used_cache(folder: Path) -> object:
    cache = open_cache(Cache(directory=folder), b"")
    now = time.monotonic()
    answer = Answer.of({"y": np.zeros(10, np.float32)}, model="resnet")
    cache.put(b"k" * 20, Entry(answer, now - 5, now + 60, 40), now)
    for _ in range(3):
        cache.get(b"k" * 20, now)
    cache.get(b"x" * 20, now)
    cache.missed("resnet")
    cache.keep(b"k" * 20, Entry(answer, now - 5, now + 60, 40), now)  # type: ignore[attr-defined]
    cache.fetch(b"x" * 20, "resnet", now)  # type: ignore[attr-defined]
    return cache


def test_prometheus_shows_tiers_and_models(tmp_path: Path) -> None:
    registry = CollectorRegistry()
    registry.register(PrometheusCollector(used_cache(tmp_path)))  # type: ignore[arg-type]
    text = generate_latest(registry).decode()
    for line in (
        'mcp_client_cache_hits_total{tier="memory"} 3.0',
        'mcp_client_cache_misses_total{tier="memory"} 1.0',
        'mcp_client_cache_misses_total{tier="disk"} 1.0',
        'mcp_client_cache_failures_total{tier="disk"} 0.0',
        'mcp_client_cache_evictions_total{tier="memory"} 0.0',
        'mcp_client_cache_entries{tier="memory"} 1.0',
        'mcp_client_cache_entries{tier="disk"} 1.0',
        'mcp_client_cache_bytes{tier="memory"} 40.0',
        'mcp_client_cache_model_hits_total{model="resnet"} 3.0',
        'mcp_client_cache_model_misses_total{model="resnet"} 1.0',
        'mcp_client_cache_model_evictions_total{model="resnet"} 0.0',
        'mcp_client_cache_model_bytes{model="resnet"} 40.0',
    ):
        assert line in text
    oldest = next(
        line for line in text.splitlines() if line.startswith("mcp_client_cache_model_oldest_seconds{")
    )
    assert 5.0 <= float(oldest.split()[-1]) < 60.0


def test_opentelemetry_reads_the_same(tmp_path: Path) -> None:
    reader = InMemoryMetricReader()
    provider = MeterProvider([reader])
    observe(used_cache(tmp_path), provider.get_meter("test"))  # type: ignore[arg-type]
    data = reader.get_metrics_data()
    assert data is not None
    metrics = {m.name: m for r in data.resource_metrics for s in r.scope_metrics for m in s.metrics}
    hits = {p.attributes["tier"]: p.value for p in metrics["mcp_client.cache.hits"].data.data_points}
    assert hits == {"memory": 3, "disk": 0}
    entries = {p.attributes["tier"]: p.value for p in metrics["mcp_client.cache.entries"].data.data_points}
    assert entries == {"memory": 1, "disk": 1}
    provider.shutdown()


def test_a_collection_reads_the_entries_once(tmp_path: Path) -> None:
    cache = used_cache(tmp_path)
    reads = 0
    models = cache.models  # type: ignore[attr-defined]

    def counted(now: float) -> object:
        nonlocal reads
        reads += 1
        return models(now)

    cache.models = counted  # type: ignore[attr-defined]
    reader = InMemoryMetricReader()
    provider = MeterProvider([reader])
    observe(cache, provider.get_meter("test"), clock=lambda: 100.0)  # type: ignore[arg-type]
    reader.get_metrics_data()
    provider.shutdown()
    assert reads == 1


def test_evictions_and_misses_are_counted_by_model() -> None:
    cache = MemoryCache(Cache(max_entries=2))
    for n in range(5):
        answer = Answer.of({"y": np.zeros(1, np.float32)}, model="ab"[n % 2])
        cache.put(bytes([n]) * 20, Entry(answer, 0.0, 60.0, 4), float(n))
    found = cache.models(10.0)
    assert found["a"].evictions + found["b"].evictions == cache.stats().evictions == 3
    assert found["a"].entries + found["b"].entries == 2
