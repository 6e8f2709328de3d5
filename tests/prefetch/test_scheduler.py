"""The scheduler: budget, load and measured precision, with time passed in."""

from __future__ import annotations

import math
from collections.abc import Callable

from hypothesis import given, settings
from hypothesis import strategies as st

from mcp_client import Prefetch
from mcp_client.prefetch.costs import Costs, Estimate
from mcp_client.prefetch.decisions import Decision
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
    **more: Callable[[Candidate], str],
) -> list[str]:
    return [one.path for one in scheduler.observe(session, path, now, **more)]


def test_likely_paths_are_fetched_and_of_equally_likely_ones_first_what_is_next() -> None:
    scheduler = make(per_step=2, max_overfetch=10.0)
    released = scheduler.observe("s", "/a", 0.0)
    assert [one.path for one in released] == ["/b", "/c"]


def test_what_is_at_hand_or_cannot_be_fetched_is_not() -> None:
    scheduler = make(max_overfetch=10.0)
    assert step(scheduler, unwanted=lambda one: "at hand" if one.path == "/b" else "") == ["/c"]


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
    scheduler = make()
    assert not scheduler.goes_first()
    scheduler.demand_started()
    assert scheduler.goes_first()
    scheduler.demand_finished("m", 0.01, 0.0, others=0)
    assert not scheduler.goes_first()


def answers(scheduler: Scheduler, alone_s: float, together_s: float) -> None:
    for _ in range(25):
        assert scheduler.demand_started() == 0
        scheduler.demand_finished("m", alone_s, 0.0, others=0)
        scheduler.demand_started()
        assert scheduler.demand_started() == 1
        for _ in range(2):
            scheduler.demand_finished("m", together_s, 0.0, others=1)


def test_prefetches_go_along_with_demand_where_the_server_is_as_quick_with_several_at_once() -> None:
    roomy, tight = make(), make()
    answers(roomy, 0.010, 0.010)
    answers(tight, 0.010, 0.018)
    for scheduler in (roomy, tight):
        scheduler.demand_started()
    assert not roomy.goes_first()
    assert tight.goes_first()


def test_a_server_slower_than_usual_gets_nothing_until_it_is_as_quick_again() -> None:
    scheduler = make()
    for _ in range(40):
        scheduler.demand_started()
        scheduler.demand_finished("m", 0.010, 10.0, others=0)
    assert step(scheduler, "a", now=10.0) != []
    for _ in range(5):
        scheduler.demand_started()
        scheduler.demand_finished("m", 0.200, 11.0, others=0)
    assert step(scheduler, "b", now=11.5) == []
    assert scheduler.explain()[-1].reason == "the server is slow"
    assert step(scheduler, "c", now=14.0) != []


def test_nothing_is_fetched_ahead_over_a_metered_connection() -> None:
    metered = True
    predictor = make()._predictor
    scheduler = Scheduler(Prefetch(metered=lambda: metered, threshold=0.1), predictor)
    assert step(scheduler, "a") == []
    assert scheduler.explain()[-1].reason == "the connection is metered"
    metered = False
    assert step(scheduler, "b") != []


def test_what_saves_more_goes_first_and_what_costs_more_than_it_saves_is_left() -> None:
    estimates = {"/b": Estimate(10.0, 10.0), "/c": Estimate(100.0, 100.0)}
    scheduler = make(per_step=1, max_overfetch=10.0)
    scheduler = Scheduler(
        scheduler._config, scheduler._predictor, lambda path: estimates.get(path, Estimate())
    )
    assert step(scheduler) == ["/c"]
    estimates["/c"] = Estimate(100.0, 10_000.0)  # many bytes
    assert step(scheduler, "t") == ["/b"]
    (left,) = [one for one in scheduler.explain() if one.path == "/c" and not one.fetched]
    assert left.value_ms < 0
    assert "too unlikely" in str(left)


def test_an_important_path_is_fetched_although_it_is_unlikely() -> None:
    plain = make(threshold=1.0)
    assert step(plain) == []
    important = Scheduler(plain._config, plain._predictor, lambda path: Estimate(importance=3.0))
    assert step(important) == ["/b"]


def test_the_last_of_the_budget_goes_to_what_is_certain() -> None:
    scheduler = make(max_overfetch=0.5, window=100, per_step=1)
    for n in range(20):
        scheduler.learn(f"fork-{n}", "/x", 0.0)
        scheduler.learn(f"fork-{n}", f"/{'yz'[n % 2]}", 0.0)
    scheduler.demanded(100)
    assert step(scheduler, "plenty", "/x") != []
    for n in range(47):  # of 50
        scheduler.fetched(scheduler.by_hand("s", f"/{n}", 0.0))
    assert step(scheduler, "scarce", "/x") == []
    assert step(scheduler, "sure", "/a") == ["/b"]


def test_what_the_application_asks_for_counts_but_is_not_refused_for_the_budget() -> None:
    scheduler = make(max_overfetch=0.5, window=10)
    scheduler.demanded(10)
    assert all(scheduler.by_hand("s", f"/{n}", 0.0).fetched for n in range(5))
    assert step(scheduler) == []
    assert scheduler.explain()[-1].reason == "over budget"
    assert scheduler.by_hand("s", "/more", 0.0).fetched
    assert scheduler.stats().by_hand == 6
    scheduler.back_off(5.0, 0.0)
    refused = scheduler.by_hand("s", "/refused", 1.0)
    assert not refused.fetched
    assert "overloaded" in refused.reason


def test_what_was_not_sent_goes_back_into_the_budget() -> None:
    scheduler = make(max_overfetch=1.0, per_step=5)
    (one,) = scheduler.observe("s", "/a", 0.0)  # the first step allows one prefetch
    scheduler.withdrawn(one)
    assert scheduler.stats().issued == 0
    assert len(step(scheduler, "t")) == 2


def test_candidates_that_do_not_come_true_raise_the_bar() -> None:
    scheduler = make(threshold=0.5, max_overfetch=10.0)
    assert step(scheduler, "first", "/b") == ["/c"]
    for n in range(60):
        for released in scheduler.observe(f"unused-{n}", "/a", 0.0):
            scheduler.fetched(released)
    assert step(scheduler, "second", "/b") == []
    assert scheduler.explain()[-1].reason == "too unlikely"
    for n in range(300):  # by hand, as nothing is fetched any more
        released = Decision(0.0, f"used-{n}", "/b", True, "", candidate=Candidate("/b", 0.9, 0.9, ""))
        scheduler._in_flight += 1
        scheduler.fetched(released)
        scheduler.settled(released, used=True)
    assert step(scheduler, "third", "/b") == ["/c"]


@given(
    st.floats(0.0, 2.0),
    st.integers(1, 40),
    st.lists(st.sampled_from(["demand", "withdraw", "finish"]), max_size=300),
)
@settings(max_examples=150, deadline=None)
def test_the_cap_holds_in_every_window(share: float, window: int, moves: list[str]) -> None:
    scheduler = make(max_overfetch=share, window=window, per_step=5, threshold=0.0)
    sent: list[int] = []  # the demand after which each prefetch was issued
    open_ones: list[Decision] = []
    demanded = 0
    for move in moves:
        if move == "demand":
            demanded += 1
            released = scheduler.observe(f"s{demanded}", "/a", 0.0)
            sent += [demanded] * len(released)
            open_ones += released
        elif move == "withdraw" and open_ones:  # any of them, not only the last
            one = open_ones.pop(len(open_ones) // 2)
            scheduler.withdrawn(one)
            sent.remove(one.issued_after)
        elif move == "finish" and open_ones:
            scheduler.fetched(open_ones.pop(0))
    for end in range(1, demanded + 1):
        inside = [at for at in sent if end - window < at <= end]
        assert len(inside) <= share * window
        assert len(inside) <= math.ceil(share * min(window, end))
    assert scheduler.stats().issued == len(sent)


def test_the_first_demand_may_be_followed_by_a_prefetch() -> None:
    assert len(make(max_overfetch=0.1).observe("s", "/a", 0.0)) == 1
    assert make(max_overfetch=0.0).observe("s", "/a", 0.0) == []


def test_costs_are_those_of_the_path_of_its_route_or_of_all() -> None:
    costs = Costs(ms_per_mib=10.0, route_of=lambda path: path[:2])
    assert costs.estimate("/a/1") == Estimate()
    for _ in range(5):
        costs.note("/a/1", 0.1, 1024 * 1024)
        costs.note("/b/1", 0.5, 0)
    assert costs.estimate("/a/1") == costs.estimate("/a/2")
    assert math.isclose(costs.estimate("/a/2").saved_ms, 100.0)
    assert math.isclose(costs.estimate("/a/2").cost_ms, 110.0)
    assert math.isclose(costs.estimate("/b/9", importance=2.0).saved_ms, 500.0)
    assert 100 < costs.estimate("/c/1").saved_ms < 500
