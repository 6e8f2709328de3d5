"""S3-FIFO and the adaptive policy: the paper's rules, the common interface, and the better of two on any stream."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mcp_client.cache.adaptive import Adaptive
from mcp_client.cache.lru_k import LRUK
from mcp_client.cache.memory import MemoryCache
from mcp_client.cache.policy import Policy
from mcp_client.cache.s3_fifo import S3FIFO
from mcp_client.config import Cache
from mcp_client.errors import ConfigurationError


def lru_2() -> Policy[int]:
    return LRUK(2, retained_s=float("inf"))


def adaptive() -> Policy[int]:
    return Adaptive([S3FIFO, lru_2])


def hit_ratio(policy: Policy[int], stream: list[int], room: int) -> float:
    hits = 0
    for now, item in enumerate(stream):
        if item in policy:
            policy.record(((item, now),))
            hits += 1
        else:
            if len(policy) >= room:
                assert policy.evict(now) is not None
            policy.insert(item, now)
    return hits / len(stream)


@settings(deadline=None, max_examples=150)
@given(
    make=st.sampled_from([lru_2, S3FIFO, adaptive]),
    ops=st.lists(
        st.tuples(st.sampled_from(["ask", "ask", "ask", "evict", "spare", "remove"]), st.integers(0, 30))
    ),
    room=st.integers(1, 12),
)
def test_every_policy_holds_what_it_was_given_and_not_let_go(
    make: Callable[[], Policy[int]], ops: list[tuple[str, int]], room: int
) -> None:
    policy = make()
    held: set[int] = set()
    asked_again: set[int] = set()
    for now, (op, item) in enumerate(ops):
        if op == "ask" and item in held:
            policy.record([(item, now), (999, now)])
            asked_again.add(item)
        elif op == "ask":
            if len(held) == room:
                held.remove(policy.evict(now))  # type: ignore[arg-type]
            asked_again.discard(item)
            policy.insert(item, now)
            held.add(item)
        elif op == "remove" and item in held:
            policy.remove(item)
            held.remove(item)
        elif op in ("evict", "spare"):
            victim = policy.evict(now, spare_proven=op == "spare")
            if op == "evict":
                assert (victim is None) == (not held)
            elif victim is not None:
                assert victim not in asked_again
            held.discard(victim)  # type: ignore[arg-type]
        assert len(policy) == len(held)
        assert all((each in policy) == (each in held) for each in range(31))
    policy.clear()
    assert (len(policy), policy.evict(1e9)) == (0, None)


def test_what_is_asked_for_twice_more_moves_to_the_main_queue() -> None:
    policy: S3FIFO[int] = S3FIFO()
    hit_ratio(policy, list(range(1000, 1200)), 100)
    hit_ratio(policy, [1, 2, 1, 2, 1], 100)  # 1 once and twice more, 2 once and once more
    hit_ratio(policy, list(range(2000, 2030)), 100)
    assert 1 in policy
    assert 2 not in policy


def test_what_comes_back_while_its_name_is_kept_enters_the_main_queue() -> None:
    policy: S3FIFO[int] = S3FIFO()
    for item in range(20):
        policy.insert(item, 0)
    first = policy.evict(1)
    assert first is not None
    policy.insert(first, 2)
    assert policy._pages[first].main


def test_names_are_kept_in_proportion() -> None:
    policy: S3FIFO[int] = S3FIFO()
    hit_ratio(policy, list(range(10_000)), 100)
    assert len(policy._pages) <= 100 + 92
    assert len(policy._small) + len(policy._main) <= 101


def streams() -> dict[str, list[int]]:
    rng = random.Random(3)
    zipf = [min(5000, int(rng.paretovariate(0.6))) for _ in range(40_000)]
    scans: list[int] = []
    for start in range(0, 40_000, 1000):
        scans += zipf[start : start + 1000]
        scans += range(10**6 + start, 10**6 + start + 500)
    two_pools = [rng.randrange(100) if n % 2 else 1000 + rng.randrange(10_000) for n in range(40_000)]
    return {"zipf": zipf, "scans": scans, "loop": list(range(1000)) * 40, "two pools": two_pools}


@pytest.mark.parametrize("name", ["zipf", "scans", "loop", "two pools"])
@pytest.mark.parametrize("room", [60, 120])
def test_adaptive_is_at_most_a_point_under_the_better_of_its_two(name: str, room: int) -> None:
    stream = streams()[name]
    best = max(hit_ratio(make(), stream, room) for make in (lru_2, S3FIFO))
    assert hit_ratio(adaptive(), stream, room) > best - 0.01


def test_adaptive_turns_when_the_stream_does() -> None:
    """From a loop, where LRU-2 hits nothing, to two pools, where it is the better."""
    policy = Adaptive([lru_2, S3FIFO])
    assert hit_ratio(policy, list(range(200)) * 100, 100) > 0.3
    assert policy._leader == 1
    pools = streams()["two pools"]
    best = hit_ratio(lru_2(), pools, 100)
    assert best > hit_ratio(S3FIFO(), pools, 100)
    assert hit_ratio(policy, pools, 100) > best - 0.02  # the turn included
    assert policy._leader == 0


def test_the_shadows_of_a_large_cache_are_small() -> None:
    policy = Adaptive([S3FIFO, lru_2])
    hit_ratio(policy, list(range(40_000)), 16_000)
    assert policy._one_in == 16
    assert all(len(shadow) <= 1000 for shadow in policy._shadows)


@pytest.mark.parametrize("policy", ["lru-k", "s3-fifo", "adaptive"])
def test_the_settings_choose_the_policy(policy: str) -> None:
    assert len(MemoryCache(Cache(policy=policy))) == 0  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="adaptive"):
        Cache(policy="clock")  # type: ignore[arg-type]
