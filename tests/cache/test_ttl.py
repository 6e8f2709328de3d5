"""Which TTL counts, by the rules of PROTOCOL.md section 4."""

from __future__ import annotations

from typing import Any

import pytest

from mcp_client.cache.ttl import TTLPolicy
from mcp_client.errors import ProtocolError

POLICY = TTLPolicy.parse(
    {
        "version": 12,
        "rules": [
            {"prefix": "llama3", "ttl_s": 30, "max_ttl_s": 60},
            {"prefix": "llama3-70b", "ttl_s": 300, "max_ttl_s": 1800},
            {"prefix": "gemma2-27b", "ttl_s": 120},
        ],
        "default_ttl_s": 60,
    }
)


@pytest.mark.parametrize(
    ("model", "call", "server", "expected"),
    [
        ("llama3-70b", None, None, 300),
        ("llama3-70b-instruct", None, None, 300),
        ("llama3-8b", None, None, 30),
        ("gemma2-27b", None, None, 120),
        ("other", None, None, 60),
        ("llama3-70b", 5, 100, 5),
        ("llama3-70b", None, 100, 100),
        ("llama3-70b", 9999, None, 1800),
        ("llama3-70b", None, 9999, 1800),
        ("llama3-8b", 300, None, 60),
        ("gemma2-27b", 9999, None, 9999),
        ("other", 9999, None, 9999),
        ("other", None, 0, 0),
        ("other", 0, 100, 0),
    ],
)
def test_the_call_then_the_server_then_the_policy_and_its_maximum_caps_them(
    model: str, call: float | None, server: float | None, expected: float
) -> None:
    assert POLICY.ttl_s(model, call=call, server=server, default=1.0) == expected


def test_without_a_policy_the_clients_default_counts() -> None:
    assert TTLPolicy().ttl_s("m", call=None, server=None, default=300) == 300
    assert TTLPolicy.parse({"version": 1}).ttl_s("m", call=None, server=None, default=300) == 300


@pytest.mark.parametrize(
    "bad",
    [
        {},
        {"version": "1"},
        {"version": True},
        {"version": 1, "rules": [{"prefix": "a"}]},
        {"version": 1, "rules": [{"prefix": 3, "ttl_s": 1}]},
        {"version": 1, "rules": [{"prefix": "a", "ttl_s": -1}]},
        {"version": 1, "rules": [{"prefix": "a", "ttl_s": "1"}]},
        {"version": 1, "rules": 7},
        {"version": 1, "rules": ["a"]},
        {"version": 1, "default_ttl_s": float("nan")},
        [],
    ],
)
def test_a_policy_that_is_not_understood_is_refused_whole(bad: Any) -> None:
    with pytest.raises(ProtocolError):
        TTLPolicy.parse(bad)
