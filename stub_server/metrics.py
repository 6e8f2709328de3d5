"""What the server counts: Prometheus metrics, and each model's figures as the Open Inference Protocol's
statistics."""

from __future__ import annotations

import threading
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

import prometheus_client as prometheus

_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)


@dataclass(slots=True)
class _ModelFigures:
    success: int = 0
    success_ns: int = 0
    fail: int = 0
    fail_ns: int = 0
    queue_ns: int = 0
    compute_ns: int = 0
    last_ms: int = 0


class Metrics:
    """Thread-safe. ``received`` counts inferences by purpose: ``demand`` and ``prefetch``, the failed ones
    included."""

    def __init__(self) -> None:
        self.received: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._figures: dict[tuple[str, str], _ModelFigures] = {}
        self._registry = prometheus.CollectorRegistry()
        self._requests = prometheus.Counter(
            "mcp_requests", "HTTP requests", ["endpoint", "status"], registry=self._registry
        )
        self._inferences = prometheus.Counter(
            "mcp_inferences",
            "Inferences by purpose and outcome (ok, or the error's code)",
            ["protocol", "model", "version", "purpose", "outcome"],
            registry=self._registry,
        )
        self._seconds = prometheus.Histogram(
            "mcp_inference_seconds",
            "Time of successful inferences by stage",
            ["model", "version", "stage"],
            buckets=_BUCKETS,
            registry=self._registry,
        )

    def request(self, endpoint: str, status: int) -> None:
        """One HTTP request was answered."""
        self._requests.labels(endpoint, str(status)).inc()

    def arrived(self, purpose: str) -> None:
        """One inference came in."""
        with self._lock:
            self.received[purpose] += 1

    def succeeded(
        self, *, protocol: str, model: str, version: str, purpose: str, queue_s: float, compute_s: float
    ) -> None:
        """One inference was answered; the times are seconds."""
        self._inferences.labels(protocol, model, version, purpose, "ok").inc()
        self._seconds.labels(model, version, "queue").observe(queue_s)
        self._seconds.labels(model, version, "compute").observe(compute_s)
        with self._lock:
            figures = self._figures.setdefault((model, version), _ModelFigures())
            figures.success += 1
            figures.success_ns += int((queue_s + compute_s) * 1e9)
            figures.queue_ns += int(queue_s * 1e9)
            figures.compute_ns += int(compute_s * 1e9)
            figures.last_ms = int(time.time() * 1e3)

    def failed(
        self, *, protocol: str, model: str, version: str, purpose: str, code: str, seconds: float
    ) -> None:
        """One inference failed; ``model`` and ``version`` are "" where it was refused before a model was
        found."""
        self._inferences.labels(protocol, model, version, purpose, code).inc()
        if model:
            with self._lock:
                figures = self._figures.setdefault((model, version), _ModelFigures())
                figures.fail += 1
                figures.fail_ns += int(seconds * 1e9)

    def exposition(self) -> tuple[bytes, str]:
        """The text for ``GET /metrics`` and its content type."""
        return prometheus.generate_latest(self._registry), prometheus.CONTENT_TYPE_LATEST

    def statistics(self, model: str, version: str) -> dict[str, Any]:
        """One entry of the Open Inference Protocol's ``model_stats``."""
        with self._lock:
            f = self._figures.get((model, version), _ModelFigures())
            return {
                "name": model,
                "version": version,
                "last_inference": f.last_ms,
                "inference_count": f.success,
                "execution_count": f.success,
                "inference_stats": {
                    "success": {"count": f.success, "ns": f.success_ns},
                    "fail": {"count": f.fail, "ns": f.fail_ns},
                    "queue": {"count": f.success, "ns": f.queue_ns},
                    "compute_infer": {"count": f.success, "ns": f.compute_ns},
                },
            }
