"""The scheduler: budget, load and measured precision, with time passed in."""

from __future__ import annotations

import math
from collections.abc import Callable

from hypothesis import given, settings
from hypothesis import strategies as st

from mcp_client import Prefetch
from mcp_client.prefetch.predictor import Candidate, Predictor
from mcp_client.prefetch.scheduler import Scheduler


def make(**options: float) -> Scheduler:
    predictor = Predictor()
    for n in range(20):
        for path in ("/a", "/b", "/c"):
            predictor.observe(f"learned-{n}", path, 0.0)
    return Scheduler(
        Prefetch(**({"max_overfetch": 1.0, "threshold": 0.1, "max_in_flight": 100} | options)), predictor
    )  # type: ignore[arg-type]


def step(
    scheduler: Scheduler,
    session: str = "s",
    path: str = "/a",
    now: float = 0.0,
    **more: Callable[[str], bool],
) -> list[str]:
    return [one.path for one in scheduler.observe(session, path, now, **more)]


def test_likely_paths_are_fetched_and_of_equally_likely_ones_first_what_is_next() -> None:
    scheduler = make(per_step=2, max_overfetch=10.0)
    released = scheduler.observe("s", "/a", 0.0)
    assert [one.path for one in released] == ["/b", "/c"]


def test_what_is_at_hand_or_cannot_be_fetched_is_not() -> None:
    scheduler = make(max_overfetch=10.0)
    assert step(scheduler, wanted=lambda path: path != "/b") == ["/c"]


def test_a_candidate_below_the_threshold_is_left() -> None:
    scheduler = make(threshold=1.0)
    assert step(scheduler) == []
    assert {decision.reason for decision in scheduler.explain()} == {"too unlikely"}


def test_no_more_than_max_in_flight_at_once() -> None:
    scheduler = make(max_in_flight=1, max_overfetch=10.0)
    (first,) = scheduler.observe("s", "/a", 0.0)
    assert step(scheduler, "t") == []
    scheduler.fetched(first)
    assert len(step(scheduler, "u")) == 1


def test_a_server_in_trouble_gets_nothing_for_as_long_as_it_says() -> None:
    scheduler = make(max_overfetch=10.0)
    scheduler.back_off(30.0, now=100.0)
    assert step(scheduler, "s", now=120.0) == []
    assert step(scheduler, "t", now=131.0) != []


def test_demand_goes_first() -> None:
    scheduler = make(max_in_flight=2, max_overfetch=10.0)
    for _ in range(3):
        scheduler.demand_started()
    assert step(scheduler, "s") == []
    for _ in range(3):
        scheduler.demand_finished()
    assert step(scheduler, "t") != []


def test_what_was_not_sent_goes_back_into_the_budget() -> None:
    scheduler = make(max_overfetch=1.0, per_step=5)
    (one,) = scheduler.observe("s", "/a", 0.0)  # the first step allows one prefetch
    scheduler.withdrawn(one)
    assert scheduler.stats().issued == 0
    assert len(step(scheduler, "t")) == 2


def test_candidates_that_do_not_come_true_raise_the_bar() -> None:
    scheduler = make(threshold=0.5, max_overfetch=10.0)
    assert step(scheduler, "first") != []
    candidate = Candidate("/b", 0.9, 0.9, "")
    for _ in range(60):
        scheduler.settled(candidate, used=False)
    assert step(scheduler, "second") == []
    for _ in range(200):
        scheduler.settled(candidate, used=True)
    assert step(scheduler, "third") != []


@given(
    st.floats(0.0, 2.0),
    st.integers(1, 40),
    st.lists(st.sampled_from(["demand", "withdraw", "finish"]), max_size=300),
)
@settings(max_examples=150, deadline=None)
def test_the_cap_holds_in_every_window(share: float, window: int, moves: list[str]) -> None:
    scheduler = make(max_overfetch=share, window=window, per_step=5, threshold=0.0)
    sent: list[int] = []  # the demand after which each prefetch was issued
    open_ones: list[Candidate] = []
    demanded = 0
    for move in moves:
        if move == "demand":
            demanded += 1
            released = scheduler.observe(f"s{demanded}", "/a", 0.0)
            sent += [demanded] * len(released)
            open_ones = released
        elif move == "withdraw" and open_ones:
            scheduler.withdrawn(open_ones.pop())
            sent.pop()
        elif move == "finish" and open_ones:
            scheduler.fetched(open_ones.pop())
    for end in range(1, demanded + 1):
        inside = [at for at in sent if end - window < at <= end]
        assert len(inside) <= share * window
        assert len(inside) <= math.ceil(share * min(window, end))
    assert scheduler.stats().issued == len(sent)


def test_the_first_demand_may_be_followed_by_a_prefetch() -> None:
    assert len(make(max_overfetch=0.1).observe("s", "/a", 0.0)) == 1
    assert make(max_overfetch=0.0).observe("s", "/a", 0.0) == []
