"""Telemetry: what happened, kept on disk until the Profile API has it; never tensor data."""

from .pipe import TelemetryPipe, TelemetryStats
from .uploader import ProfileAPI, Report

__all__ = ["ProfileAPI", "Report", "TelemetryPipe", "TelemetryStats"]
