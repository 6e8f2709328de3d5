"""Telemetry: what happened, kept on disk until the Profile API has it; never tensor data."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .api import ProfileAPI, Report
    from .uploader import TelemetryPipe, TelemetryStats

__all__ = ["ProfileAPI", "Report", "TelemetryPipe", "TelemetryStats"]


def __getattr__(name: str) -> Any:
    """Imported when asked for: a client that sends nothing needs neither SQLite nor gzip."""
    if name in ("ProfileAPI", "Report"):
        from . import api

        return getattr(api, name)
    if name in ("TelemetryPipe", "TelemetryStats"):
        from . import uploader

        return getattr(uploader, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
