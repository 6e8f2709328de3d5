"""What the predictor learns, as a reader of its predictions sees it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mcp_client.prefetch.markov import Markov
from mcp_client.prefetch.predictor import Predictor
from mcp_client.prefetch.profile import Profile
from mcp_client.prefetch.routes import Route, RouteTable


def learned(sessions: Sequence[Sequence[str]], *templates: str, order: int = 4) -> Predictor:
    table = RouteTable()
    for template in templates:
        table.add(Route.of(template, lambda **params: params))
    predictor = Predictor(order=order, routes=table)
    for number, session in enumerate(sessions):
        walk(predictor, f"learned-{number}", session)
    return predictor


def walk(predictor: Predictor, session: str, paths: Sequence[str], now: float = 0.0) -> None:
    for path in paths:
        predictor.observe(session, path, now)


def guess(predictor: Predictor, *paths: str, limit: int = 10) -> dict[str, float]:
    walk(predictor, "new", paths)
    return {one.path: one.probability for one in predictor.predict("new", limit)}


def test_a_path_taken_a_few_times_is_predicted() -> None:
    predictor = learned([["/a", "/b", "/c"]] * 3)
    guesses = guess(predictor, "/a")
    assert guesses["/b"] > 0.5
    assert guesses["/c"] > 0.5, "two steps ahead counts as well"


def test_a_longer_context_overrules_a_shorter_one() -> None:
    predictor = learned([["/x", "/m", "/after-x"], ["/y", "/m", "/after-y"]] * 5)
    assert guess(predictor, "/x", "/m")["/after-x"] > 0.7
    predictor = learned([["/x", "/m", "/after-x"], ["/y", "/m", "/after-y"]] * 5)
    assert guess(predictor, "/y", "/m")["/after-y"] > 0.7


def test_a_context_never_seen_falls_back_to_the_shorter_one() -> None:
    predictor = learned([["/a", "/b"]] * 10)
    assert guess(predictor, "/never", "/seen", "/a")["/b"] > 0.5


def test_a_page_of_a_document_never_seen_is_predicted_by_stride() -> None:
    predictor = learned([[f"/doc/{d}/page/{n}" for n in range(6)] for d in "abc"], "/doc/{id}/page/{n:int}")
    guesses = guess(predictor, "/doc/new/page/40", "/doc/new/page/41")
    assert max(guesses, key=lambda path: guesses[path]) == "/doc/new/page/42"
    assert guesses["/doc/new/page/42"] > 0.5


@pytest.mark.parametrize("stride", [-1, 2, 10])
def test_other_strides_are_learned_too(stride: int) -> None:
    predictor = learned([[f"/n/{100 + stride * n}" for n in range(8)]] * 3, "/n/{n:int}")
    guesses = guess(predictor, "/n/5000", f"/n/{5000 + stride}")
    assert guesses[f"/n/{5000 + 2 * stride}"] > 0.4


def test_a_jump_from_one_route_to_another_keeps_what_they_share() -> None:
    sessions = [[f"/doc/{d}/cover", f"/doc/{d}/page/1"] for d in "abcd"]
    predictor = learned(sessions, "/doc/{id}/cover", "/doc/{id}/page/{n:int}")
    # the page number does not follow from a cover, so nothing is made up for a document never seen
    assert "/doc/z/page/1" not in guess(predictor, "/doc/z/cover")
    sessions = [[f"/doc/{d}/page/{n}", f"/doc/{d}/notes/{n}"] for d in "abcd" for n in range(3)]
    predictor = learned(sessions, "/doc/{id}/page/{n:int}", "/doc/{id}/notes/{n:int}")
    assert guess(predictor, "/doc/z/page/77")["/doc/z/notes/77"] > 0.5


def test_a_reload_is_no_step() -> None:
    predictor = learned([["/a", "/a", "/a", "/b"]] * 5)
    assert guess(predictor, "/a")["/b"] > 0.7
    assert "/a" not in guess(predictor, "/a")


def test_a_session_that_was_silent_for_long_starts_anew() -> None:
    predictor = learned([["/a", "/b"]] * 5)
    walk(predictor, "s", ["/a"], now=0.0)
    predictor.observe("s", "/z", 10_000.0)
    assert learned_nothing(predictor, "/a", "/z")


def learned_nothing(predictor: Predictor, before: str, path: str) -> bool:
    return path not in predictor.to_profile("v").paths.get(before, {})


PATHS = st.lists(st.sampled_from(["/a", "/b", "/c", "/d/1", "/d/2", "/d/3"]), max_size=30)


@given(st.lists(PATHS, max_size=6), PATHS)
@settings(max_examples=200)
def test_probabilities_are_probabilities(sessions: list[list[str]], last: list[str]) -> None:
    predictor = learned(sessions, "/d/{n:int}")
    walk(predictor, "new", last)
    candidates = predictor.predict("new", 100)
    assert all(0.0 <= one.next_probability <= one.probability + 1e-9 <= 1.0 + 2e-9 for one in candidates)
    assert [one.probability for one in candidates] == sorted(
        (one.probability for one in candidates), reverse=True
    )
    assert len({one.path for one in candidates}) == len(candidates)


@given(st.lists(PATHS, max_size=6), PATHS)
@settings(max_examples=100)
def test_the_next_step_has_one_distribution(sessions: list[list[str]], last: list[str]) -> None:
    markov = Markov(order=3, horizon=4, max_contexts=10_000)
    for session in [*sessions, last]:
        trail = markov.trail()
        for step in session:
            markov.observe(trail, step)
    assert sum(one.next for one in markov.predict(trail, 100)) <= 1.0 + 1e-9 if sessions or last else True


def test_memory_is_bounded() -> None:
    markov = Markov(order=2, horizon=2, max_contexts=100)
    trail = markov.trail()
    for n in range(5000):
        markov.observe(trail, str(n))
    assert len(markov) <= 100


@given(st.lists(PATHS, min_size=1, max_size=6))
@settings(max_examples=50)
def test_a_profile_carries_the_next_steps_to_a_client_that_has_seen_nothing(
    sessions: list[list[str]],
) -> None:
    profile = learned(sessions, "/d/{n:int}").to_profile("v1")
    fresh = learned([], "/d/{n:int}")
    fresh.load(Profile.from_json(profile.to_json()))
    for context, nexts in profile.paths.items():
        steps = context.split("\x1f") if context else []
        if not steps:
            continue
        fresh_guesses = guess(fresh, *steps, limit=100)
        assert set(nexts) - {steps[-1]} <= set(fresh_guesses)


def test_what_is_seen_here_overrules_the_fleet() -> None:
    predictor = learned([])
    predictor.load(Profile(version="v", order=4, paths={"/a": {"/fleet": 1000.0}}))
    assert guess(predictor, "/a")["/fleet"] > 0.8
    for n in range(60):
        walk(predictor, f"here-{n}", ["/a", "/here"])
    predictor.observe("again", "/a", 0.0)
    guesses = {one.path: one.probability for one in predictor.predict("again", 5)}
    assert guesses["/here"] > guesses["/fleet"]
