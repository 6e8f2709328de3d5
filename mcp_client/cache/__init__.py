"""The L4 cache."""
