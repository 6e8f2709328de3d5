"""The uplink: one lost exchange is enough, one probe at a time at jittered times, and a return by degrees."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor

from mcp_client.resilience.uplink import Uplink


def test_one_lost_exchange_closes_it_and_the_first_probe_is_due_at_once() -> None:
    uplink = Uplink()
    assert uplink.admits(10.0)
    assert not uplink.takes_probe(10.0)
    uplink.lost(10.0)
    assert not uplink.admits(10.0)
    assert uplink.takes_probe(10.0)


def test_only_one_of_many_callers_probes() -> None:
    uplink = Uplink()
    uplink.lost(0.0)
    with ThreadPoolExecutor(16) as pool:
        assert sum(pool.map(lambda _: uplink.takes_probe(1.0), range(200))) == 1


def test_pauses_between_probes_double_with_jitter_up_to_five_seconds() -> None:
    drawn: list[list[float]] = []
    for seed in range(40):
        uplink, now, pauses = Uplink(random.Random(seed)), 0.0, []
        uplink.lost(now)
        for _ in range(8):
            started = now
            while not uplink.takes_probe(now):
                now += 0.02
            pauses.append(now - started)
            uplink.probed(now, answered=False)
        drawn.append(pauses[1:])
    for number, wanted in enumerate((0.25, 0.5, 1.0, 2.0, 4.0, 5.0, 5.0)):
        these = [pauses[number] for pauses in drawn]
        assert min(these) >= 0.5 * wanted - 0.03
        assert max(these) <= 1.5 * wanted + 0.03
        assert max(these) - min(these) > 0.5 * wanted, (
            "clients that lost a server together must not probe together"
        )


def test_it_returns_by_degrees() -> None:
    uplink = Uplink(random.Random(1))
    uplink.lost(0.0)
    assert uplink.takes_probe(0.0)
    uplink.probed(0.0, answered=True)
    assert uplink.state() == "returning"
    shares = [sum(uplink.admits(at) for _ in range(500)) / 500 for at in (0.0, 0.1, 0.3, 0.5)]
    assert shares[0] == 0.0
    assert shares == sorted(shares)
    assert 0 < shares[1] < 0.4
    assert uplink.admits(1.5)
    assert uplink.state() == "up"


def test_a_loss_while_it_returns_closes_it_again() -> None:
    uplink = Uplink()
    uplink.lost(0.0)
    uplink.takes_probe(0.0)
    uplink.probed(0.0, answered=True)
    uplink.lost(0.2)
    assert uplink.state() == "lost"
    assert not uplink.admits(5.0)


def test_a_probe_answered_after_nothing_was_lost_changes_nothing() -> None:
    uplink = Uplink()
    uplink.probed(0.0, answered=True)
    assert uplink.state() == "up"
