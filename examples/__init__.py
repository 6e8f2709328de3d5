"""Examples: ``python -m examples.quickstart`` and ``python -m examples.demo``."""
