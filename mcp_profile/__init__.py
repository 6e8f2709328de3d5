"""The Profile API: takes telemetry, mines access paths, serves profiles."""
