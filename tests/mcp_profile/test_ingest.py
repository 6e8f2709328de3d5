"""Taking batches apart: limits hold, damage is told, a bad event loses only itself."""

from __future__ import annotations

import contextlib
import gzip
import json
import zlib
from typing import Any

import orjson
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from mcp_profile.errors import APIError
from mcp_profile.ingest import COLUMNS, MAX_EVENTS, MAX_UNPACKED_BYTES, parse, unpack

GOOD: dict[str, Any] = {
    "seq": 17,
    "t": 1767225600.123,
    "session": "hashed",
    "path": "/user/profile",
    "route": "/user/{name}",
    "fp": "aaaqeayeaudaocajbifqydiob4ibceqt",
    "model": "m",
    "source": "cache",
    "latency_ms": 3.2,
    "bytes": 4012,
    "prefetch_id": "p",
    "outcome": "used",
}


def _batch(*events: Any, **changes: Any) -> bytes:
    return json.dumps(
        {"batch_id": "b", "client_id": "c", "sdk": "s", "events": list(events)} | changes
    ).encode()


def test_a_whole_event_becomes_a_row() -> None:
    batch = parse(_batch(GOOD))
    assert (batch.id, batch.client_id, batch.sdk, batch.rejected) == ("b", "c", "s", [])
    assert dict(zip(COLUMNS, batch.rows[0], strict=True)) == GOOD


def test_what_an_event_leaves_out_has_a_default_and_what_is_unknown_is_ignored() -> None:
    (row,) = parse(_batch({"t": 1.0, "source": "server", "new_field": {"of": ["a", "newer", "SDK"]}})).rows
    assert row == (0, 1.0, "", "", "", "", "", "server", 0.0, 0, "", "")


def test_rows_are_in_the_order_of_seq() -> None:
    batch = parse(_batch(*(GOOD | {"seq": seq} for seq in (5, 3, 9))))
    assert [row[0] for row in batch.rows] == [3, 5, 9]


@pytest.mark.parametrize(
    "bad",
    [
        None,
        [],
        "event",
        7,
        {},
        GOOD | {"t": "yesterday"},
        GOOD | {"t": -1},
        GOOD | {"t": 0},
        GOOD | {"t": float("nan")},
        GOOD | {"t": float("inf")},
        GOOD | {"t": True},
        GOOD | {"t": 10**400},
        GOOD | {"source": "moon"},
        GOOD | {"source": None},
        GOOD | {"source": ["cache"]},
        GOOD | {"outcome": "lost"},
        GOOD | {"outcome": {"a": 1}},
        GOOD | {"latency_ms": -1},
        GOOD | {"latency_ms": float("nan")},
        GOOD | {"latency_ms": 10**400},
        GOOD | {"bytes": 1.5},
        GOOD | {"bytes": -1},
        GOOD | {"bytes": 1 << 63},
        GOOD | {"bytes": None},
        GOOD | {"seq": -1},
        GOOD | {"seq": "17"},
        GOOD | {"path": 7},
        GOOD | {"path": ["a"]},
        GOOD | {"path": "/a\u001fb"},
        GOOD | {"path": "/a\x00b"},
        GOOD | {"path": "x" * 513},
        GOOD | {"session": "\ud800"},
        GOOD | {"model": {"name": "m"}},
        GOOD | {"fp": 1},
    ],
)
def test_a_bad_event_is_rejected_by_its_index_and_the_rest_is_kept(bad: Any) -> None:
    batch = parse(_batch(GOOD, bad, GOOD))
    assert len(batch.rows) == 2
    ((index, reason),) = batch.rejected
    assert index == 1
    assert 10 < len(reason) < 300


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"", 400),
        (b"{", 400),
        (b"\xff\xfe", 400),
        (b"[" * 100_000, 400),
        (b"[]", 422),
        (b"7", 422),
        (b"null", 422),
        (_batch(batch_id=""), 422),
        (_batch(batch_id=7), 422),
        (_batch(batch_id="x" * 65), 422),
        (_batch(client_id=None), 422),
        (_batch(client_id="a\u0000"), 422),
        (_batch(events={}), 422),
        (_batch(events=None), 422),
        (_batch(sdk=7), 422),
        (_batch(*[{}] * (MAX_EVENTS + 1)), 413),
    ],
)
def test_what_is_no_batch_is_told_with_the_fitting_status(body: bytes, status: int) -> None:
    with pytest.raises(APIError) as caught:
        parse(body)
    assert caught.value.status == status


def test_an_empty_batch_is_a_batch() -> None:
    assert parse(_batch()).rows == []


def test_every_encoding_gives_the_body_back() -> None:
    body = _batch(GOOD) * 100
    assert unpack(body, "") == unpack(body, "identity") == body
    assert unpack(gzip.compress(body), "gzip") == body
    assert unpack(gzip.compress(body[:50]) + gzip.compress(body[50:]), "GZIP") == body
    assert unpack(zstandard.compress(body), "zstd") == body


@pytest.mark.parametrize(
    ("body", "encoding", "status"),
    [
        (b"plain", "gzip", 400),
        (gzip.compress(b"x" * 1000)[:-9], "gzip", 400),
        (b"", "gzip", 400),
        (gzip.compress(b"") * 100, "gzip", 400),
        (b"plain", "zstd", 400),
        (b"plain", "br", 415),
        (zlib.compress(b"x"), "deflate", 415),
        (gzip.compress(b"\0" * (MAX_UNPACKED_BYTES + 1)), "gzip", 413),
        (zstandard.compress(b"\0" * (MAX_UNPACKED_BYTES + 1)), "zstd", 413),
    ],
)
def test_damage_bombs_and_unknown_encodings_are_told(body: bytes, encoding: str, status: int) -> None:
    with pytest.raises(APIError) as caught:
        unpack(body, encoding)
    assert caught.value.status == status


def test_a_413_states_the_limits() -> None:
    with pytest.raises(APIError) as caught:
        parse(_batch(*[{}] * (MAX_EVENTS + 1)))
    assert caught.value.body("r")["limits"]["events"] == MAX_EVENTS


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=300)
@given(
    st.lists(
        st.fixed_dictionaries({}, optional={name: st.just(value) | _json for name, value in GOOD.items()})
        | _json
    )
)
def test_whatever_the_events_each_is_stored_or_rejected(events: list[Any]) -> None:
    batch = parse(_batch(*events))
    assert len(batch.rows) + len(batch.rejected) == len(events)
    orjson.dumps(batch.rows)  # plain data that a database takes


@settings(max_examples=300)
@given(st.binary(max_size=60), st.sampled_from(["", "gzip", "zstd"]))
def test_whatever_the_bytes_the_answer_is_one_of_ours(body: bytes, encoding: str) -> None:
    with contextlib.suppress(APIError):  # and nothing else
        parse(unpack(body, encoding))
