"""Calm under failure: what may be retried, how long to pause, and when to leave an endpoint alone. No I/O, no clock."""
