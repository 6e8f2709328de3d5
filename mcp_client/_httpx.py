"""The one module that imports the HTTP library: ``httpx2``, the maintained continuation, else ``httpx``."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import httpx2 as httpx
else:
    try:
        import httpx2 as httpx
    except ImportError:  # an application may pin the original; both have the same API
        import httpx

__all__ = ["httpx"]
