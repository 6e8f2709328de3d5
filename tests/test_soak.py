"""A minute of the soak (``tests/soak.py``); the full one is ``make soak``."""

from __future__ import annotations

from tests.soak import CAP, WINDOW, most_in_a_window, soak


def test_under_faults_no_event_is_lost_and_no_cap_is_broken() -> None:
    """How quick demand is, with prefetch and without, is measured (docs/benchmarks.md), not asserted."""
    outcome = soak(minutes=1.0, clients=12, say=lambda line: None)
    held = outcome["held"]
    assert isinstance(held, dict)
    assert held["events"], outcome
    assert held["cap"], outcome
    assert int(str(outcome["server_kills"])) + int(str(outcome["profile_kills"])) > 0
    assert int(str(outcome["most_in_a_window"])) > 10


def test_the_soak_notices_a_broken_cap() -> None:
    cap = int(CAP * WINDOW)
    assert most_in_a_window([WINDOW] * cap) == (cap, True)
    assert most_in_a_window([WINDOW] * (cap + 1)) == (cap + 1, False)
    assert most_in_a_window([WINDOW] * cap + [WINDOW + 1]) == (cap + 1, False)
    assert most_in_a_window([WINDOW] * cap + [2 * WINDOW] * cap) == (cap, True)
    assert most_in_a_window([1, 2]) == (2, False)  # after two demanded requests, one
