"""A batch of telemetry from bytes to rows: unpacked within limits, checked event by event, without I/O."""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from operator import itemgetter, le
from typing import Any

import orjson

from .errors import APIError

# Limits of one request; PROTOCOL.md section 4: they are stated in the 413 answer.
MAX_BODY_BYTES = 8 * 1024 * 1024
MAX_UNPACKED_BYTES = 16 * 1024 * 1024
MAX_EVENTS = 20_000
_MAX_MEMBERS = 16  # each copies the rest of the body: thousands of empty ones would be work for nothing
LIMITS = {"body_bytes": MAX_BODY_BYTES, "unpacked_bytes": MAX_UNPACKED_BYTES, "events": MAX_EVENTS}

SOURCES = frozenset({"cache", "prefetch", "server", "edge", "stale", "error"})
OUTCOMES = frozenset({"", "used", "expired", "evicted", "cancelled"})
# Lengths in characters. A path longer than this is an application's mistake (data in the path), and one such
# path repeated in contexts of four steps would fill a profile.
_LENGTHS = {"session": 128, "path": 512, "route": 512, "fp": 64, "model": 256, "prefetch_id": 64}
# Control characters: U+001F separates the steps of a context, PostgreSQL can't store U+0000, none belongs in
# a name. Surrogates are no text: they reach us only through JSON escapes.
_unfit = re.compile(r"[\x00-\x1f\x7f\ud800-\udfff]").search
_MAX_BIGINT = (1 << 63) - 1

# One event, its values in the order of COLUMNS: a tuple, because 20,000 of them a second pass here.
Row = tuple[int, float, str, str, str, str, str, str, float, int, str, str]
COLUMNS = (
    "seq",
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
)


@dataclass(frozen=True, slots=True)
class Batch:
    """What is fit to store, in the order of ``seq``, and what is not: index in the batch and why."""

    id: str
    client_id: str
    sdk: str
    rows: list[Row]
    rejected: list[tuple[int, str]]


def unpack(body: bytes, encoding: str) -> bytes:
    """Undo ``Content-Encoding``;

    never makes more than ``MAX_UNPACKED_BYTES``. 400 damaged, 413 too large, 415 unknown.
    """
    name = encoding.strip().lower()
    if name in ("", "identity"):
        return body
    if name in ("gzip", "x-gzip"):
        return _gunzip(body)
    if name == "zstd":
        return _unzstd(body)
    raise APIError(
        415, "unsupported_encoding", f"Content-Encoding {encoding!r} is not taken; send gzip, zstd or none"
    )


def _gunzip(body: bytes) -> bytes:
    parts: list[bytes] = []
    left = MAX_UNPACKED_BYTES + 1
    for _ in range(_MAX_MEMBERS):  # RFC 1952, section 2.2: a file is a series of members
        member = zlib.decompressobj(wbits=31)
        try:
            parts.append(member.decompress(body, left))
        except zlib.error as error:
            raise APIError(400, "damaged_body", f"the body is not gzip: {error}") from error
        left -= len(parts[-1])
        if left <= 0:
            raise too_large(f"the body unpacks to more than {MAX_UNPACKED_BYTES} bytes")
        if not member.eof:
            raise APIError(400, "damaged_body", "the gzip body is cut short")
        body = member.unused_data
        if not body:
            return b"".join(parts)
    raise APIError(400, "damaged_body", f"the gzip body has more than {_MAX_MEMBERS} members")


def _unzstd(body: bytes) -> bytes:
    try:
        import zstandard
    except ImportError:
        raise APIError(
            415,
            "unsupported_encoding",
            "zstd is not installed on this server (pip install zstandard); send gzip",
        ) from None
    try:
        with zstandard.ZstdDecompressor(max_window_size=1 << 27).stream_reader(body) as reader:
            unpacked = reader.read(MAX_UNPACKED_BYTES + 1)
    except zstandard.ZstdError as error:
        raise APIError(400, "damaged_body", f"the body is not zstd: {error}") from error
    if len(unpacked) > MAX_UNPACKED_BYTES:
        raise too_large(f"the body unpacks to more than {MAX_UNPACKED_BYTES} bytes")
    return unpacked


def parse(body: bytes) -> Batch:
    """Check a batch. 400 or 422 if it is none at all; a bad event only loses itself."""
    return check(_json(body))


def check(data: Any) -> Batch:
    """Check a batch that is taken apart already. 422 if it is none at all; a bad event only loses itself."""
    if not isinstance(data, dict):
        raise APIError(
            422,
            "not_a_batch",
            f"expected a JSON object with batch_id, client_id and events; got {_kind(data)}",
        )
    batch_id = _name(data, "batch_id")
    client_id = _name(data, "client_id")
    sdk, sent_at = (data.get(name) for name in ("sdk", "sent_at"))
    if not isinstance(sdk, str | None) or _unfit(sdk or ""):
        raise APIError(422, "not_a_batch", "sdk must be a short text such as 'mcp2026-python/0.1.0'")
    if not isinstance(sent_at, str | None):
        raise APIError(422, "not_a_batch", f"sent_at must be a text; got {_shown(sent_at)}")
    events = data.get("events")
    if not isinstance(events, list):
        raise APIError(422, "not_a_batch", f"events must be a list; got {_kind(events)}")
    if len(events) > MAX_EVENTS:
        raise too_large(f"the batch has {len(events)} events; at most {MAX_EVENTS} are taken at once")
    rows: list[Row] = []
    rejected: list[tuple[int, str]] = []
    for index, event in enumerate(events):
        try:
            rows.append(_row(event, index))
        except ValueError as error:
            rejected.append((index, str(error)))
    rows.sort(key=itemgetter(0))
    return Batch(batch_id, client_id, (sdk or "")[:100], rows, rejected)


def too_large(message: str) -> APIError:
    return APIError(413, "too_large", message, extra={"limits": LIMITS})


def _row(event: Any, index: int) -> Row:
    """One event as a row; ``ValueError`` says what is wrong with it."""
    if not isinstance(event, dict):
        raise ValueError(f"expected an object; got {_kind(event)}")
    get: Any = event.get
    t = get("t")
    if type(t) not in (float, int) or not 0 < t < 1e11:  # NaN fails both comparisons
        raise ValueError(f"t must be Unix time in seconds; got {_shown(t)}")
    source = get("source")
    if source not in SOURCES if isinstance(source, str) else True:
        raise ValueError(f"source must be one of {', '.join(sorted(SOURCES))}; got {_shown(source)}")
    outcome = get("outcome") or ""
    if outcome not in OUTCOMES if isinstance(outcome, str) else True:
        raise ValueError(
            f"outcome must be one of {', '.join(sorted(OUTCOMES - {''}))}; got {_shown(outcome)}"
        )
    latency_ms = get("latency_ms", 0.0)
    if type(latency_ms) not in (float, int) or not 0 <= latency_ms < 1e12:
        raise ValueError(f"latency_ms must be a number from 0 to 1e12; got {_shown(latency_ms)}")
    nbytes = get("bytes", 0)
    if type(nbytes) is not int or not 0 <= nbytes <= _MAX_BIGINT:
        raise ValueError(f"bytes must be a whole number ≥ 0; got {_shown(nbytes)}")
    seq = get("seq", index)
    if type(seq) is not int or not 0 <= seq <= _MAX_BIGINT:
        raise ValueError(f"seq must be a whole number ≥ 0; got {_shown(seq)}")
    texts = [get(name) or "" for name in _LENGTHS]
    try:
        fit = not _unfit("".join(texts)) and all(map(le, map(len, texts), _LENGTHS.values()))
    except TypeError:
        fit = False
    if not fit:
        raise ValueError(_unfit_text(texts))
    session, path, route, fp, model, prefetch_id = texts
    return (seq, t, session, path, route, fp, model, source, latency_ms, nbytes, prefetch_id, outcome)


def _unfit_text(texts: list[Any]) -> str:
    for (name, longest), text in zip(_LENGTHS.items(), texts, strict=True):
        if not isinstance(text, str):
            return f"{name} must be text; got {_shown(text)}"
        if len(text) > longest:
            return f"{name} has {len(text)} characters; at most {longest} are taken"
        if _unfit(text):
            return f"{name} must not hold control characters or surrogates; got {_shown(text)}"
    raise AssertionError("a text was found unfit and is not")


def _json(body: bytes) -> Any:
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError:
        pass
    # The standard library takes what orjson refuses (NaN, escaped surrogates, huge integers): such an event
    # is rejected by its index and the rest of its batch is kept.
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise APIError(400, "not_json", f"the body is not JSON: {error}") from error


def _name(data: Mapping[str, Any], field: str) -> str:
    value = data.get(field)
    if not isinstance(value, str) or not 0 < len(value) <= 64 or _unfit(value):
        raise APIError(
            422, "not_a_batch", f"{field} must be a text of 1 to 64 characters; got {_shown(value)}"
        )
    return value


def _kind(value: Any) -> str:
    return {dict: "an object", list: "a list", str: "a text", type(None): "nothing"}.get(
        type(value), "a number or boolean"
    )


def _shown(value: Any) -> str:
    text = ascii(value)
    return text if len(text) <= 60 else text[:60] + "…"
