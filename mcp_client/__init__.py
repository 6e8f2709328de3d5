"""MCP 2026 client SDK: inference answered from the nearest place that can answer correctly.

``MCPClient(url).infer(…)`` and its async twin. See the README for the five lines to start with.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .classification import Class
from .client import MCPClient, Session
from .config import TLS, Cache, Edge, Prefetch, Retry, Telemetry
from .errors import (
    AuthenticationError,
    CircuitOpenError,
    ClientClosedError,
    ConfigurationError,
    ConnectionFailedError,
    DeadlineExceededError,
    EdgeError,
    IntegrityError,
    InvalidInputError,
    MCPError,
    MissingExtraError,
    NotFoundError,
    NotOfferedError,
    OverloadedError,
    ProtocolError,
    RequestRejectedError,
    ServerError,
    ServerTimeoutError,
)
from .management import Duration, IndexEntry, ModelConfig, ModelStatistics, ServerInfo
from .result import InferResult
from .telemetry.observer import Notice
from .tensors import ModelMetadata, TensorSpec

if TYPE_CHECKING:
    from .aio import AsyncMCPClient, AsyncSession

__all__ = [
    "TLS",
    "AsyncMCPClient",
    "AsyncSession",
    "AuthenticationError",
    "Cache",
    "CircuitOpenError",
    "Class",
    "ClientClosedError",
    "ConfigurationError",
    "ConnectionFailedError",
    "DeadlineExceededError",
    "Duration",
    "Edge",
    "EdgeError",
    "IndexEntry",
    "InferResult",
    "IntegrityError",
    "InvalidInputError",
    "MCPClient",
    "MCPError",
    "MissingExtraError",
    "ModelConfig",
    "ModelMetadata",
    "ModelStatistics",
    "NotFoundError",
    "NotOfferedError",
    "Notice",
    "OverloadedError",
    "Prefetch",
    "ProtocolError",
    "RequestRejectedError",
    "Retry",
    "ServerError",
    "ServerInfo",
    "ServerTimeoutError",
    "Session",
    "Telemetry",
    "TensorSpec",
]


def __getattr__(name: str) -> Any:
    """The asyncio client is imported when it is asked for: asyncio is a sixth of a cold start."""
    if name in ("AsyncMCPClient", "AsyncSession"):
        from . import aio

        return getattr(aio, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
