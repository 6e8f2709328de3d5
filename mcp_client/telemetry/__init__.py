"""Telemetry: what happened, kept on disk until the Profile API has it; never tensor data."""

from .api import ProfileAPI, Report
from .uploader import TelemetryPipe, TelemetryStats

__all__ = ["ProfileAPI", "Report", "TelemetryPipe", "TelemetryStats"]
