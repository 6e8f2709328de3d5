"""The one module that imports the HTTP library: ``httpx2``, the maintained continuation, else ``httpx``; each with its core."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import httpcore2 as httpcore
    import httpx2 as httpx
else:
    try:
        import httpcore2 as httpcore
        import httpx2 as httpx
    except ImportError:  # an application may pin the original; both have the same API
        import httpcore
        import httpx

__all__ = ["httpcore", "httpx"]
