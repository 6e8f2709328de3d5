"""The memory tier keeps its budgets, forgets what has expired, counts truly, and is safe to share between threads."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mcp_client.cache.memory import Entry, MemoryCache
from mcp_client.config import Cache
from mcp_client.errors import InvalidInputError
from mcp_client.result import Answer


def entry(nbytes: int = 100, *, model: str = "m", now: float = 0.0, ttl: float = 1000.0) -> Entry:
    return Entry(answer=Answer(outputs={}, model=model), stored_at=now, expires_at=now + ttl, nbytes=nbytes)


def cache(entries: int = 1000, *, nbytes: int = 100_000, k: int = 2, **rest: float) -> MemoryCache:
    return MemoryCache(Cache(max_bytes=nbytes, max_entries=entries, k=k, **rest))  # type: ignore[arg-type]


def key(number: int) -> bytes:
    return number.to_bytes(20, "little")


def test_a_hit_hands_out_the_entry_itself() -> None:
    store = cache()
    array = np.ones(3)
    array.flags.writeable = False
    kept = Entry(Answer.of({"y": array}, model="m"), 0.0, 10.0, array.nbytes)
    assert store.put(key(1), kept, 0.0) == []
    found = store.get(key(1), 1.0)
    assert found is kept
    assert found.answer.outputs["y"] is array


def test_an_entry_is_fresh_until_its_time_and_not_at_it() -> None:
    store = cache()
    store.put(key(1), entry(ttl=10), 0.0)
    assert store.get(key(1), 9.99) is not None
    assert store.peek(key(1), 10.0) is None
    assert store.get(key(1), 10.0) is None
    assert key(1) not in store
    stats = store.stats()
    assert (stats.hits, stats.misses, stats.expirations, stats.entries, stats.bytes) == (1, 1, 1, 0, 0)


def test_peek_counts_nothing() -> None:
    store = cache(2)
    store.put(key(1), entry(), 0.0)
    store.put(key(2), entry(), 1.0)
    assert store.peek(key(1), 2.0) is not None
    assert store.peek(key(3), 2.0) is None
    assert (store.stats().hits, store.stats().misses) == (0, 0)
    assert [gone for gone, _ in store.put(key(3), entry(), 3.0)] == [key(1)]


def test_what_is_asked_for_again_outlives_a_scan() -> None:
    store = cache(100)
    for number in range(10):
        store.put(key(number), entry(), 0.0)
        assert store.get(key(number), 1.0) is not None
    for number in range(100, 2000):
        store.put(key(number), entry(), float(number))
    assert all(store.get(key(number), 3000.0) is None for number in range(100, 1000))
    assert all(store.get(key(number), 900.0) is not None for number in range(10))


def test_an_entry_larger_than_the_budget_is_not_stored_and_evicts_nothing() -> None:
    store = cache(nbytes=1000)
    for number in range(10):
        store.put(key(number), entry(100), 0.0)
    large = entry(1001)
    assert store.put(key(99), large, 1.0) == [(key(99), large)]
    assert len(store) == 10
    assert store.put(key(3), large, 2.0) == [(key(3), large)]  # nor does an old answer stay under its key
    assert key(3) not in store


def test_a_new_answer_takes_the_place_of_the_old_and_of_its_bytes() -> None:
    store = cache(nbytes=1000)
    for number in range(5):
        store.put(key(number), entry(100), 0.0)
    assert store.put(key(2), entry(600), 1.0) == []
    assert store.stats().bytes == 1000
    assert len(store.put(key(2), entry(700), 2.0)) == 1
    assert store.stats().bytes == 1000
    assert key(2) in store


def test_invalidate_by_model_and_by_key() -> None:
    store = cache()
    for number in range(10):
        store.put(key(number), entry(model="ab"[number % 2]), 0.0)
    assert store.invalidate(model="a") == 5
    assert store.invalidate(model="a") == 0
    assert store.invalidate(model="never seen") == 0
    assert store.invalidate(key=key(1)) == 1
    assert store.invalidate(key=key(1)) == 0
    assert (len(store), store.stats().bytes) == (4, 400)
    with pytest.raises(InvalidInputError, match=r"clear\(\)"):
        store.invalidate()
    store.clear()
    assert (len(store), store.stats().bytes) == (0, 0)
    assert store.put(key(1), entry(), 1.0) == []


class TestPrefetched:
    """Promise 4: a prefetch never evicts what is more likely to be asked for."""

    def test_it_uses_free_room(self) -> None:
        store = cache(100)
        for number in range(100):
            assert store.put(key(number), entry(), 0.0, reference=False) == []

    def test_it_never_takes_the_place_of_what_was_asked_for_twice(self) -> None:
        store = cache(100)
        for number in range(100):
            store.put(key(number), entry(), 0.0)
            store.get(key(number), 1.0)
        ahead = entry()
        assert store.put(key(500), ahead, 2.0, reference=False) == [(key(500), ahead)]
        assert all(store.peek(key(number), 3.0) for number in range(100))

    @pytest.mark.parametrize("k", [1, 2])
    def test_a_flood_of_it_takes_a_quarter_of_what_nobody_came_back_to_at_most(self, k: int) -> None:
        store = cache(100, k=k)
        for number in range(100):
            store.put(key(number), entry(), float(number))
        for number in range(1000, 2000):
            store.put(key(number), entry(), 200.0, reference=False)
        assert len(store) == 100
        kept = [number for number in range(100) if store.peek(key(number), 201.0)]
        assert kept == list(range(25, 100))  # the least recently used went

    def test_it_makes_room_for_demand_when_it_has_more_than_its_share(self) -> None:
        store = cache(100)
        for number in range(100):
            store.put(key(number), entry(), 0.0, reference=False)
        for number in range(200, 275):
            ((gone, _),) = store.put(key(number), entry(), 1.0)
            assert gone < key(100)
        assert [gone for gone, _ in store.put(key(300), entry(), 2.0)] == [key(200)]

    def test_it_goes_after_a_whole_turnover_unasked(self) -> None:
        store = cache(100)
        store.put(key(0), entry(), 0.0, reference=False)
        for number in range(1, 300):
            store.put(key(number), entry(), float(number))
        assert key(0) not in store

    def test_its_first_use_is_its_first_reference(self) -> None:
        store = cache(3)
        store.put(key(0), entry(), 0.0, reference=False)
        store.put(key(1), entry(), 1.0)
        store.put(key(2), entry(), 2.0)
        assert store.get(key(0), 3.0) is not None
        assert [gone for gone, _ in store.put(key(3), entry(), 4.0)] == [key(1)]
        assert [gone for gone, _ in store.put(key(4), entry(), 5.0)] == [key(2)]
        assert [gone for gone, _ in store.put(key(5), entry(), 6.0)] == [key(0)]

    def test_a_refresh_keeps_the_place_that_demand_earned(self) -> None:
        store = cache(2)
        store.put(key(0), entry(), 0.0)
        store.get(key(0), 1.0)
        newer = entry(50)
        assert store.put(key(0), newer, 2.0, reference=False) == []
        for number in range(1, 10):
            store.put(key(number), entry(), 2.0 + number)
        assert store.get(key(0), 20.0) is newer


OPS = st.lists(
    st.tuples(
        st.sampled_from(["get", "put", "prefetch", "peek", "invalidate"]),
        st.integers(0, 15),
        st.integers(0, 400),
        st.sampled_from([0.0, 1.0, 30.0]),
    ),
    max_size=120,
)


@settings(deadline=None, max_examples=200)
@given(ops=OPS, k=st.integers(1, 3), entries=st.integers(1, 8), correlated=st.sampled_from([0.0, 5.0]))
def test_the_budgets_hold_and_nothing_is_lost_without_a_word(
    ops: list[tuple[str, int, int, float]], k: int, entries: int, correlated: float
) -> None:
    store = cache(entries, nbytes=1000, k=k, correlated_s=correlated)
    now = 0.0
    held: dict[bytes, Entry] = {}
    hits = misses = 0
    for op, number, size, later in ops:
        now += later
        if op in ("put", "prefetch"):
            new = held[key(number)] = entry(size, now=now, ttl=20.0)
            for gone, what in store.put(key(number), new, now, reference=op == "put"):
                assert held.pop(gone) is what
        elif op == "get":
            expected = held.get(key(number))
            if expected is not None and expected.expires_at <= now:
                expected = None
                del held[key(number)]
            assert store.get(key(number), now) is expected
            hits += expected is not None
            misses += expected is None
        elif op == "peek":
            found = store.peek(key(number), now)
            assert found is None or found is held[key(number)]
        else:
            assert store.invalidate(key=key(number)) == (held.pop(key(number), None) is not None)
        stats = store.stats()
        assert stats.bytes == sum(each.nbytes for each in held.values()) <= 1000
        assert stats.entries == len(store) == len(held) <= entries
        assert (stats.hits, stats.misses) == (hits, misses)
        assert len(store._policy) + len(store._ahead) == len(held)


def run_in_threads(count: int, work: Callable[[int], None]) -> None:
    failures: list[BaseException] = []

    def guarded(number: int) -> None:
        try:
            work(number)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=guarded, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


@pytest.mark.timeout(300)
def test_eight_threads_lose_no_update() -> None:
    store = cache(500, nbytes=40_000)
    gets = 1_000_000
    lost: list[int] = [0] * 8
    put: list[int] = [0] * 8
    hits: list[int] = [0] * 8

    def work(number: int) -> None:
        rng = random.Random(number)
        for step in range(gets):
            which = int(rng.paretovariate(0.5)) % 2000
            found = store.get(key(which), float(step))
            if found is None:
                lost[number] += len(store.put(key(which), entry(100 + which % 7, ttl=1e9), float(step)))
                put[number] += 1
            else:
                assert found.nbytes == 100 + which % 7  # never another key's answer
                hits[number] += 1

    run_in_threads(8, work)
    stats = store.stats()
    assert stats.hits == sum(hits)
    assert stats.hits + stats.misses == 8 * gets
    assert stats.evictions == sum(lost)
    assert stats.bytes == sum(each.nbytes for each in store._entries.values()) <= 40_000
    assert len(store._policy) == len(store) <= 500
    assert sum(put) == stats.misses


def test_operations_of_every_kind_from_many_threads_leave_it_whole() -> None:
    store = cache(50, nbytes=5000)

    def work(number: int) -> None:
        rng = random.Random(number)
        for step in range(4000):
            which = key(rng.randrange(100))
            match rng.randrange(8):
                case 0:
                    store.invalidate(key=which)
                case 1 if step % 100 == 0:
                    store.invalidate(model="b")
                case 2 | 3:
                    model = rng.choice("ab")
                    store.put(which, entry(rng.randrange(300), model=model), step, reference=step % 3 > 0)
                case _:
                    store.get(which, step)

    run_in_threads(8, work)
    stats = store.stats()
    assert stats.bytes == sum(each.nbytes for each in store._entries.values()) <= 5000
    assert len(store._policy) + len(store._ahead) == len(store) == stats.entries
    assert store._ahead_bytes == sum(store._entries[each].nbytes for each in store._ahead)
