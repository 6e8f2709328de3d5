"""The profile: what is learned from many clients' events, in the form that travels (PROTOCOL.md section 4)."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson

from ..errors import ProtocolError

FORMAT = 1
# A context is the last paths of a session, oldest first, joined by what no path holds: U+001F, "unit separator".
SEPARATOR = "\x1f"


@dataclass(frozen=True, slots=True)
class KeyStats:
    """What is known of one path: how often it was asked for, the mean gap to the step after it, and what an answer costs."""

    count: float
    gap_s: float = 0.0
    latency_ms: float = 0.0
    bytes: float = 0.0


@dataclass(frozen=True, slots=True)
class Profile:
    """Variable-order transition counts over paths and over routes.

    ``paths`` and ``routes``: context → next → count, where a context is 0 to ``order`` steps joined by ``SEPARATOR`` (the
    empty context holds the popularity of each step). ``routes`` counts route templates (``/doc/{id}/page/{n:int}``) the same way.
    ``horizon``: how many steps ahead a session was looked at. ``ranker``: an ONNX model that ranks candidates, or b"".
    """

    version: str
    order: int
    paths: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    routes: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    keys: Mapping[str, KeyStats] = field(default_factory=dict)
    created_at: float = 0.0
    horizon: int = 1
    ranker: bytes = b""

    def to_dict(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "version": self.version,
            "order": self.order,
            "created_at": self.created_at,
            "horizon": self.horizon,
            "paths": {context: dict(nexts) for context, nexts in self.paths.items()},
            "routes": {context: dict(nexts) for context, nexts in self.routes.items()},
            "keys": {path: [s.count, s.gap_s, s.latency_ms, s.bytes] for path, s in self.keys.items()},
            "ranker": {
                "onnx_b64": base64.b64encode(self.ranker).decode(),
                "sha256": hashlib.sha256(self.ranker).hexdigest(),
            }
            if self.ranker
            else None,
        }

    def to_json(self) -> bytes:
        return orjson.dumps(self.to_dict())

    @classmethod
    def from_dict(cls, data: Any) -> Profile:
        """Check and take apart what came over the wire; ``ProtocolError`` if it is not a profile."""
        try:
            if data["format"] != FORMAT:
                raise ProtocolError(
                    f"profile format {data['format']!r} is not {FORMAT}; update the SDK or the Profile API"
                )
            ranker = b""
            if data.get("ranker"):
                ranker = base64.b64decode(data["ranker"]["onnx_b64"], validate=True)
                if hashlib.sha256(ranker).hexdigest() != data["ranker"]["sha256"]:
                    raise ProtocolError("the profile's ranker does not match its SHA-256; it was not used")
            return cls(
                version=str(data["version"]),
                order=int(data["order"]),
                created_at=float(data["created_at"]),
                horizon=int(data["horizon"]),
                paths=_counts(data["paths"]),
                routes=_counts(data["routes"]),
                keys={str(path): KeyStats(*map(float, stats)) for path, stats in data["keys"].items()},
                ranker=ranker,
            )
        except ProtocolError:
            raise
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ProtocolError(f"not a profile: {type(error).__name__}: {error}") from error

    @classmethod
    def from_json(cls, raw: bytes) -> Profile:
        try:
            data = orjson.loads(raw)
        except orjson.JSONDecodeError as error:
            raise ProtocolError(f"not a profile: {error}") from error
        return cls.from_dict(data)


def _counts(data: Any) -> dict[str, dict[str, float]]:
    return {
        str(context): {str(step): float(count) for step, count in nexts.items()}
        for context, nexts in data.items()
    }
