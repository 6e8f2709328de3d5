"""The Profile API: takes telemetry, mines access paths, serves profiles."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .server import ProfileServer

__all__ = ["ProfileServer"]


def __getattr__(name: str) -> Any:  # FastAPI and SQLAlchemy take a second to import: only for those who serve
    if name == "ProfileServer":
        from .server import ProfileServer

        return ProfileServer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
