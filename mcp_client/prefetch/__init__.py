"""Learned prefetch: what is likely to be asked next, and whether to fetch it now."""
