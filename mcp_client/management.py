"""What servers say of themselves and their models beside inference, as plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .tensors import TensorSpec


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """What a server is, and the extensions of the Open Inference Protocol that it says it has."""

    name: str
    version: str = ""
    extensions: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class IndexEntry:
    """One model version of a server's repository. ``state``: READY, UNAVAILABLE, LOADING, UNLOADING, or "" where the
    server does not say; ``reason``: why it is not ready."""

    name: str
    version: str = ""
    state: str = ""
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Duration:
    """How often something happened since the server started, and the seconds that it took in all."""

    count: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class ModelStatistics:
    """How one version of a model did on one server (``endpoint``) since that started.

    ``inferences`` counts every element of a batch, ``executions`` the times that the model ran. ``last_inference``: Unix
    seconds; ``None``: never. The rest are Triton's stages (its statistics extension); one that a server lacks is empty.
    """

    name: str
    version: str
    inferences: int = 0
    executions: int = 0
    last_inference: float | None = None
    success: Duration = Duration()
    fail: Duration = Duration()
    queue: Duration = Duration()
    compute_input: Duration = Duration()
    compute_infer: Duration = Duration()
    compute_output: Duration = Duration()
    cache_hit: Duration = Duration()
    cache_miss: Duration = Duration()
    endpoint: str = ""


STAGES = (
    "success",
    "fail",
    "queue",
    "compute_input",
    "compute_infer",
    "compute_output",
    "cache_hit",
    "cache_miss",
)


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """How a server is set up to run a model (Triton's model configuration).

    Shapes are the configuration's: where ``max_batch_size`` > 0 the batch axis in front is not among them. ``decoupled``: the
    model may answer with any number of responses. ``extra``: what else was said, under Triton's own names; over gRPC only
    what ``oip.proto`` knows of it.
    """

    name: str
    platform: str = ""
    backend: str = ""
    max_batch_size: int = 0
    inputs: tuple[TensorSpec, ...] = ()
    outputs: tuple[TensorSpec, ...] = ()
    decoupled: bool = False
    extra: Mapping[str, Any] = field(default_factory=dict)
