"""mcp-server: an inference server good enough to develop and test against, and to run on one box."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .server import StubServer

__all__ = ["StubServer"]


def __getattr__(name: str) -> Any:
    if name == "StubServer":  # late: it brings the web server
        from .server import StubServer

        return StubServer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
