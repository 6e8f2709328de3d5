"""Tiers behind memory: asked in order, filled on the way back, emptied together, passed over when they fail."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from mcp_client.cache.disk import DiskTier
from mcp_client.cache.memory import Entry
from mcp_client.cache.tiers import TieredCache
from mcp_client.config import Cache
from mcp_client.result import Answer

NOW = 1000.0
KEY = bytes(20)


def entry(model: str = "m") -> Entry:
    array = np.arange(3, dtype=np.float32)
    return Entry(Answer.of({"y": array}, model=model), NOW, NOW + 60, array.nbytes)


@pytest.fixture
def near(tmp_path: Path) -> DiskTier:
    return DiskTier(tmp_path / "near", max_bytes=1 << 22)


@pytest.fixture
def far(tmp_path: Path) -> DiskTier:
    return DiskTier(tmp_path / "far", max_bytes=1 << 22)


@pytest.fixture
def cache(near: DiskTier, far: DiskTier) -> Iterator[TieredCache]:
    store = TieredCache(Cache(), [near, far], clock=lambda: NOW)
    yield store
    store.close()


def test_memory_alone_answers_get_and_peek(cache: TieredCache, near: DiskTier) -> None:
    near.put(KEY, entry(), NOW)
    assert cache.get(KEY, NOW) is None
    assert cache.peek(KEY, NOW) is None
    cache.put(KEY, entry(), NOW)
    near.clear(NOW)
    assert cache.get(KEY, NOW) is not None


def test_what_a_far_tier_has_is_kept_nearer_from_then_on(
    cache: TieredCache, near: DiskTier, far: DiskTier
) -> None:
    assert cache.fetch(KEY, "m", NOW) is None
    far.put(KEY, entry(), NOW)
    found = cache.fetch(KEY, "m", NOW)
    assert found is not None
    assert found.answer.outputs["y"].tolist() == [0, 1, 2]
    assert near.get(KEY, NOW) is not None
    assert KEY not in cache  # that is the caller's to decide


def test_an_answer_is_kept_and_dropped_everywhere(cache: TieredCache, near: DiskTier, far: DiskTier) -> None:
    def there() -> list[bool]:
        return [KEY in cache, near.get(KEY, NOW) is not None, far.get(KEY, NOW) is not None]

    for drop in (
        lambda: cache.invalidate(model="m"),
        lambda: cache.invalidate(key=KEY),
        cache.clear,
    ):
        cache.put(KEY, entry(), NOW)
        cache.keep(KEY, entry(), NOW)
        assert there() == [True, True, True]
        drop()
        assert there() == [False, False, False]


def test_a_tier_that_cannot_work_is_passed_over_and_reported(tmp_path: Path, far: DiskTier) -> None:
    (tmp_path / "file").write_text("in the way")
    broken = DiskTier(tmp_path / "file" / "cache", max_bytes=1 << 20)
    cache = TieredCache(Cache(), [broken, far], clock=lambda: NOW)
    cache.keep(KEY, entry(), NOW)
    assert cache.fetch(KEY, "m", NOW) is not None
    cache.invalidate(model="m")
    assert cache.fetch(KEY, "m", NOW) is None
    cache.clear()
    assert TieredCache(Cache(), [broken]).failures() == {"disk": 1}
    cache.close()
