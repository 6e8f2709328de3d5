"""Calm under failure: deadline, retry, circuit breaker."""
