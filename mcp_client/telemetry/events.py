"""One line of telemetry: which fields it has, how a session id is hidden, and how it becomes bytes."""

from __future__ import annotations

import base64
import math
import time
from collections.abc import Callable
from random import Random, SystemRandom
from typing import Any

import orjson
from blake3 import blake3

# What ``record`` puts on the ring: number, time, session, path, route, fp, model, source, latency_ms, bytes,
# prefetch_id, outcome.
Raw = tuple[int, float, str, str, str, bytes, str, str, float, int, str, str]
Redact = Callable[[dict[str, Any]], dict[str, Any] | None]

# PROTOCOL.md section 4; ``seq`` is the spool's.
FIELDS = frozenset(
    {
        "t",
        "session",
        "path",
        "route",
        "fp",
        "model",
        "source",
        "latency_ms",
        "bytes",
        "prefetch_id",
        "outcome",
    }
)
MAX_EVENT_BYTES = 16 * 1024
# 120 bits: a collision among 10^9 sessions has a probability of 4e-19; 24 characters of base32, no padding.
_SESSION_BYTES = 15
_SAMPLE_BITS = 32
_RANDOM = SystemRandom()  # not seeded state: a forked child must not repeat its parent's ids


def base32(raw: bytes) -> str:
    return base64.b32encode(raw).decode().lower()


class Encoder:
    """Turns what was recorded into one JSON object, without its ``seq``.

    ``key`` (32 bytes, per install) hides session ids: keyed BLAKE3, so nobody can try out ids without it.
    ``sample`` keeps that share of *sessions*, whole, because half a path teaches nothing. ``redact`` sees the
    event as it would leave the machine and returns it changed, or ``None`` to drop it.
    """

    def __init__(self, key: bytes, *, sample: float = 1.0, redact: Redact | None = None) -> None:
        self._key = key
        self._keep_below = round(sample * (1 << _SAMPLE_BITS))
        self._redact = redact

    def session(self, session: str) -> str:
        """The hashed form of a session id; "" stays "" (no session)."""
        return base32(self._digest(session)) if session else ""

    def encode(self, raw: Raw) -> bytes | None:
        """The event's JSON, or ``None`` if sampling or redaction leaves it out.

        Whatever ``redact`` raises is raised; so are ``TypeError`` and ``ValueError`` for what can't be JSON.
        """
        _, t, session, path, route, fp, model, source, latency_ms, nbytes, prefetch_id, outcome = raw
        hidden = self._digest(session or path)
        if int.from_bytes(hidden[:4], "big") >= self._keep_below:
            return None
        event: dict[str, Any] = {
            "t": round(t, 3),
            "session": base32(hidden) if session else "",
            "path": path,
            "fp": base32(fp),
            "model": model,
            "source": source,
            "latency_ms": round(latency_ms, 3) if math.isfinite(latency_ms) else 0.0,
            "bytes": nbytes,
        }
        if route:
            event["route"] = route
        if prefetch_id:
            event["prefetch_id"] = prefetch_id
        if outcome:
            event["outcome"] = outcome
        if self._redact is not None:
            redacted = self._redact(event)
            if redacted is None:
                return None
            event = {name: value for name, value in redacted.items() if name in FIELDS}
        body = orjson.dumps(event)
        if len(body) > MAX_EVENT_BYTES:
            raise ValueError(f"an event of {len(body)} bytes is over the limit of {MAX_EVENT_BYTES}")
        return body

    def _digest(self, text: str) -> bytes:
        return blake3(text.encode("utf-8", "surrogatepass"), key=self._key).digest(length=_SESSION_BYTES)


def uuid7(now: Callable[[], float] = time.time, random: Random | None = None) -> str:
    """A time-ordered unique id (RFC 9562, section 5.7): 48 bits of milliseconds, 74 random bits.

    Unique whatever the clock does: the random bits alone are enough.
    """
    bits = (random or _RANDOM).getrandbits(74)
    value = (
        (int(now() * 1000) & ((1 << 48) - 1)) << 80
        | 0x7 << 76
        | (bits >> 62) << 64
        | 0b10 << 62
        | bits & ((1 << 62) - 1)
    )
    text = f"{value:032x}"
    return f"{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"
