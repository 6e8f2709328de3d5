"""Prefetch as an application sees it, against a real server: by hand, explained, held back, refreshed, reported."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mcp_client import (
    AsyncMCPClient,
    ClientClosedError,
    ConfigurationError,
    DeadlineExceededError,
    InvalidInputError,
    MCPClient,
    OverloadedError,
    Prefetch,
    Retry,
    Telemetry,
)
from stub_server import StubServer
from tests import models

QUIET = Prefetch(max_overfetch=0.0)  # nothing of its own accord
X = [[1.0, 2.0, 3.0]]


@pytest.fixture
def server(affine_model: Path) -> Iterator[StubServer]:
    with StubServer(affine_model) as running:
        yield running


def until(true: Callable[[], bool], seconds: float = 10.0, *, of: MCPClient | None = None) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, (
            str(of.prefetcher.explain()) if of is not None else "it did not happen"
        )
        time.sleep(0.005)


def pages(client: MCPClient | AsyncMCPClient) -> None:
    @client.route("/page/{n:int}", model="affine")
    def page(n: int) -> list[list[float]] | None:
        return [[float(n), 0.0, 0.0]] if n < 100 else None


def teach(client: MCPClient, *steps: int, times: int = 6) -> None:
    for reader in range(times):
        for step in steps:
            client.infer(session=f"reader-{reader}", path=f"/page/{step}")


# --- by hand ---


def test_what_was_prefetched_by_hand_is_there_when_it_is_asked_for(server: StubServer) -> None:
    with MCPClient(server.url, prefetch=QUIET) as client:
        inputs = np.array(X, np.float32)
        handle = client.prefetch(inputs, model="affine")
        inputs[:] = 9  # the caller's again at once
        assert handle.wait(10) == "fetched"
        result = client.infer(X, model="affine")
        assert result.source == "prefetch"
        np.testing.assert_allclose(
            result.output, np.array(X, np.float32) @ models.WEIGHTS + models.BIAS, 1e-5
        )
        assert client.infer(X, model="affine").source == "cache"
        assert client.prefetch(X, model="affine").wait(10) == "at hand"
        assert server.received == {"demand": 0, "prefetch": 1}
        stats = client.prefetcher.stats()
        assert (stats.issued, stats.by_hand, stats.used) == (1, 1, 1)


def test_a_path_of_a_route_is_enough(server: StubServer) -> None:
    with MCPClient(server.url, prefetch=QUIET) as client:
        pages(client)
        assert client.prefetch(path="/page/7").wait(10) == "fetched"
        assert client.session("s").prefetch(path="/page/8").wait(10) == "fetched"
        assert client.infer(path="/page/7").source == "prefetch"
        assert client.infer(path="/page/8", session="s").source == "prefetch"
        with pytest.raises(InvalidInputError, match="/page/100"):
            client.prefetch(path="/page/100")


def test_a_prefetch_by_hand_returns_at_once_and_demand_waits_for_it(server: StubServer) -> None:
    with MCPClient(server.url, prefetch=QUIET) as client:
        client.infer([[0.0, 0.0, 0.0]], model="affine")
        server.latency_ms = 300
        started = time.monotonic()
        handle = client.prefetch(X, model="affine")
        assert time.monotonic() - started < 0.1
        with pytest.raises(DeadlineExceededError):
            handle.wait(0.01)
        until(lambda: server.received["prefetch"] == 1)
        assert client.infer(X, model="affine").source == "prefetch"
        assert server.received == {"demand": 1, "prefetch": 1}


def test_what_is_wrong_with_it_is_in_the_handle(server: StubServer) -> None:
    with MCPClient(server.url, prefetch=QUIET) as client:
        handle = client.prefetch([1.0] * 7, model="affine")
        assert handle.wait(10) == "failed"
        assert isinstance(handle.error, InvalidInputError)
        with pytest.raises(InvalidInputError, match="sequence"):
            client.prefetch(X, model="affine", parameters={"sequence_id": 1})
    with pytest.raises(ClientClosedError):
        client.prefetch(X, model="affine")
    for options in ({"prefetch": None}, {"cache": None}):
        with MCPClient(server.url, **options) as without:  # type: ignore[arg-type]
            with pytest.raises(ConfigurationError):
                without.prefetch(X)
            with pytest.raises(ConfigurationError):
                _ = without.prefetcher


def test_by_hand_is_refused_while_the_server_asks_for_less(server: StubServer) -> None:
    with MCPClient(server.url, prefetch=QUIET, retry=Retry(attempts=1)) as client:
        client.infer(X, model="affine")
        server.error_rate = 1.0
        with pytest.raises(OverloadedError):
            client.infer([[5.0, 5.0, 5.0]], model="affine")
        server.error_rate = 0.0
        assert client.prefetch([[6.0, 6.0, 6.0]], model="affine").wait(10) == "refused"
        assert "overloaded" in str(client.prefetcher.explain())


def test_the_async_client_prefetches_by_hand(server: StubServer) -> None:
    async def play() -> None:
        async with AsyncMCPClient(server.url, prefetch=QUIET) as client:
            pages(client)
            handle = client.prefetch(path="/page/7")
            assert await handle.wait(10) == "fetched"
            assert (await client.infer(path="/page/7")).source == "prefetch"
            server.latency_ms = 400
            slow = client.session("s").prefetch(path="/page/8")
            with pytest.raises(DeadlineExceededError):
                await slow.wait(0.01)
            await asyncio.sleep(0.1)
        assert await slow.wait(5) == "cancelled"

    asyncio.run(play())


# --- demand goes first ---


def test_a_prefetch_waits_until_no_demanded_request_is_under_way(server: StubServer) -> None:
    with MCPClient(server.url, prefetch=QUIET) as client:
        client.infer(X, model="affine")
        server.latency_ms = 300
        demand = threading.Thread(target=client.infer, args=([[4.0, 4.0, 4.0]],), kwargs={"model": "affine"})
        demand.start()
        until(lambda: server.received["demand"] == 2)
        time.sleep(0.05)
        server.latency_ms = 0  # for what comes from now on
        handle = client.prefetch([[5.0, 5.0, 5.0]], model="affine")
        time.sleep(0.1)
        assert server.received["prefetch"] == 0
        demand.join()
        assert handle.wait(10) == "fetched"


def test_a_prefetch_that_demand_left_no_moment_for_is_dropped(server: StubServer) -> None:
    with MCPClient(server.url) as client:
        pages(client)
        teach(client, 1, 2, 3)
        client.cache.clear()
        before = client.prefetcher.stats().cancelled
        server.latency_ms = 2500
        demanded = server.received["demand"]
        demand = threading.Thread(target=client.infer, args=(X,), kwargs={"model": "affine"})
        demand.start()
        until(lambda: server.received["demand"] > demanded)
        time.sleep(0.05)
        server.latency_ms = 0
        received = server.received["prefetch"]
        client.infer(path="/page/1", session="new")
        until(lambda: client.prefetcher.stats().cancelled > before, 4.0)
        assert server.received["prefetch"] == received
        assert "cancelled" in {one.outcome for one in client.prefetcher.explain()}
        demand.join()


# --- explain ---


def test_explain_says_why_each_was_fetched_or_left(server: StubServer) -> None:
    with MCPClient(server.url, prefetch=Prefetch(max_overfetch=1.0, threshold=0.05)) as client:
        pages(client)
        teach(client, 1, 2, 3)
        client.cache.clear()
        client.infer(path="/page/1", session="new")
        until(
            lambda: any(one.fetched and one.session == "new" for one in client.prefetcher.explain("/page/2")),
            of=client,
        )
        (fetched,) = [one for one in client.prefetcher.explain("/page/2") if one.session == "new"]
        assert fetched.probability > 0.2
        assert fetched.value_ms > 0
        assert fetched.cost_ms > 0
        assert "order" in fetched.reason
        until(lambda: client.prefetcher.stats().issued > 0 and len(client.cache) >= 2)
        assert client.infer(path="/page/2", session="new").source == "prefetch"
        assert fetched.outcome == "used"
        assert "/page/2: fetched (used); p " in str(client.prefetcher.explain())
        client.infer(path="/page/1", session="newer")
        until(lambda: "at hand" in {one.reason for one in client.prefetcher.explain()}, of=client)


# --- hot keys, and refreshing ahead ---


def test_a_hot_key_is_refreshed_before_it_expires_as_long_as_it_is_asked_for(affine_model: Path) -> None:
    with (
        StubServer(affine_model, cache_control="max-age=1") as server,
        MCPClient(server.url, prefetch=Prefetch(max_overfetch=1.0)) as client,
    ):
        pages(client)
        sources = []
        end = time.monotonic() + 3.2
        while time.monotonic() < end:
            sources.append(client.infer(path="/page/1", session="s").source)
            time.sleep(0.1)
        assert sources[0] == "server"
        assert "server" not in sources[1:], "somebody had to wait for an answer of a hot key"
        assert sources.count("prefetch") >= 2
        refreshed = [one for one in client.prefetcher.explain("/page/1") if one.fetched]
        assert {one.reason for one in refreshed} == {"hot, and about to expire"}
        received = server.received["prefetch"]
        time.sleep(2.5)  # nobody asks
        assert server.received["prefetch"] <= received + 1


def test_a_key_that_is_not_hot_is_not_refreshed(affine_model: Path) -> None:
    with StubServer(affine_model, cache_control="max-age=1") as server, MCPClient(server.url) as client:
        pages(client)
        client.infer(path="/page/1", session="s")
        time.sleep(0.85)
        client.infer(path="/page/1", session="s")
        time.sleep(0.4)
        assert server.received == {"demand": 1, "prefetch": 0}


def test_what_expires_before_it_is_predicted_to_be_needed_is_refreshed_ahead(affine_model: Path) -> None:
    with (
        StubServer(affine_model, cache_control="max-age=3") as server,
        MCPClient(server.url, prefetch=Prefetch(max_overfetch=1.0)) as client,
    ):
        pages(client)
        client._prefetcher._hot.due = lambda *_: []  # type: ignore[union-attr,method-assign]  # that would do it, too
        for reader in range(4):  # steps of a session are a second apart
            for step in (1, 2):
                client.infer(path=f"/page/{step}", session=f"reader-{reader}")
                time.sleep(0.9 if step == 1 and reader == 0 else 0.0)
        gaps = client._prefetcher._gaps  # type: ignore[union-attr]
        gaps._mean = 0.9
        time.sleep(2.0)  # page 2 has one second left, and the next step will come in about as much
        client.infer(path="/page/1", session="new")
        until(
            lambda: any(one.fetched and one.session == "new" for one in client.prefetcher.explain("/page/2")),
            of=client,
        )
        time.sleep(1.2)
        assert client.infer(path="/page/2", session="new").source == "prefetch"


# --- outcomes ---


def test_every_prefetch_that_came_to_nothing_is_reported_once(affine_model: Path) -> None:
    events: list[dict[str, Any]] = []
    telemetry = Telemetry("http://127.0.0.1:9", redact=lambda event: events.append(event) or event)
    with (
        StubServer(affine_model, cache_control="max-age=1") as server,
        MCPClient(server.url, prefetch=QUIET, telemetry=telemetry) as client,
    ):
        pages(client)
        for n in (1, 2, 3, 4):
            assert client.prefetch(path=f"/page/{n}", session="s").wait(10) == "fetched"
        assert client.infer(path="/page/1", session="s").source == "prefetch"
        time.sleep(1.1)
        assert client.infer(path="/page/2", session="s").source == "server"  # it came too late
        assert (
            client.prefetch(path="/page/3", session="s").wait(10) == "fetched"
        )  # in place of the expired one
        server.error_rate = 1.0
        assert client.prefetch(path="/page/5", session="s").wait(10) == "failed"
    found = Counter((event["path"], event["outcome"]) for event in events if event.get("outcome"))
    assert found == {
        ("/page/1", "used"): 1,
        ("/page/2", "expired"): 1,
        ("/page/3", "expired"): 1,
        ("/page/3", "evicted"): 1,
        ("/page/4", "evicted"): 1,
        ("/page/5", "cancelled"): 1,
    }
    ids = [event["prefetch_id"] for event in events if event.get("outcome")]
    assert len(set(ids)) == len(ids) == 6
    stats = client.stats()["prefetch"]
    assert (stats.issued, stats.used, stats.wasted, stats.failed) == (6, 1, 4, 1)


def test_what_expires_unasked_is_noticed_although_nobody_asks(affine_model: Path) -> None:
    with (
        StubServer(affine_model, cache_control="max-age=1") as server,
        MCPClient(server.url, prefetch=QUIET) as client,
    ):
        pages(client)
        assert client.prefetch(path="/page/1", session="s").wait(10) == "fetched"
        client.infer(path="/page/2", session="s")
        until(lambda: client.prefetcher.stats().wasted == 1)
        assert client.prefetcher.explain("/page/1")[-1].outcome == "expired"


# --- what may be learned from a burst ---


def test_a_burst_of_steps_is_learned_from_whole(server: StubServer) -> None:
    with MCPClient(server.url) as client:
        pages(client)
        for _ in range(500):
            for step in (1, 1, 2):
                client.infer(path=f"/page/{step}", session="s")
        until(lambda: client.prefetcher.stats().demanded == 1500)
