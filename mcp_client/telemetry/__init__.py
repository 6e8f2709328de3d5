"""Telemetry: what happened, kept on disk until the Profile API has it; never tensor data."""
