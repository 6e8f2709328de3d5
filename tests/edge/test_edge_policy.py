"""Who answers: server or edge, by policy, measured times and the network's state; races leak nothing; agreement checks."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mcp_client import (
    AsyncMCPClient,
    ConfigurationError,
    ConnectionFailedError,
    DeadlineExceededError,
    Edge,
    EdgeError,
    MCPClient,
    NotFoundError,
    Notice,
    Retry,
)
from mcp_client.edge.agreement import difference, tolerance_of
from stub_server import StubServer
from tests import models
from tests.edge.slow_model import slow

Start = Callable[..., StubServer]
X = np.array([[1.0, 2.0, 3.0]], dtype=np.float32)


def scaled(scale: float) -> np.ndarray:
    return scale * (X @ models.WEIGHTS + models.BIAS)


def wait_until(met: Callable[[], bool], timeout_s: float = 20.0) -> None:
    give_up = time.monotonic() + timeout_s
    while not met():
        assert time.monotonic() < give_up, "it did not happen"
        time.sleep(0.01)


@pytest.fixture
def served(tmp_path: Path) -> Path:
    return models.affine(tmp_path / "served" / "affine.onnx")


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """The edge's model is twice the server's, so that an answer tells who computed it."""
    models.affine(tmp_path / "here" / "affine.onnx", scale=2.0)
    return tmp_path / "here"


@pytest.fixture
def nobody() -> str:
    """The URL of a port where nobody listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{taken.getsockname()[1]}"


@pytest.fixture
def black_hole() -> Any:
    """The URL of a server that takes connections and never says anything."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(64)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


# --- policies ---


def test_a_plain_folder_is_a_fallback(stub_server: Start, served: Path, here: Path) -> None:
    server = stub_server(served)
    with MCPClient(server.url, edge=here, cache=None, retry=Retry(attempts=1)) as client:
        assert client.infer(X).source == "server"
        server.close()
        result = client.infer(X)
        assert result.source == "edge"
        assert np.allclose(result.output, scaled(2.0))
        assert client.stats()["edge"]["network"] == "lost"


def test_prefer_answers_here_and_asks_a_server_only_for_what_is_not_here(
    stub_server: Start, tmp_path: Path, here: Path
) -> None:
    models.repository(tmp_path / "both", affine={"1": 1.0}, other={"1": 3.0})
    server = stub_server(tmp_path / "both")
    with MCPClient(server.url, edge=Edge(here, policy="prefer"), cache=None) as client:
        assert client.infer(X, model="affine").source == "edge"
        result = client.infer(X, model="other")
        assert result.source == "server"
        assert np.allclose(result.output, scaled(3.0))
        with pytest.raises(NotFoundError):
            client.infer(X, model="neither")


def test_prefer_needs_no_server_in_reach(nobody: str, here: Path) -> None:
    with MCPClient(nobody, edge=Edge(here, policy="prefer"), cache=None) as client:
        assert client.infer(X).source == "edge"
        with pytest.raises(ConnectionFailedError) as caught:
            client.infer(X, model="other")
        assert caught.value.request_id


def test_only_never_asks_a_server(stub_server: Start, tmp_path: Path, here: Path) -> None:
    models.repository(tmp_path / "both", affine={"1": 1.0}, other={"1": 3.0})
    server = stub_server(tmp_path / "both")
    with MCPClient(server.url, edge=Edge(here, models={"affine": "only"}), cache=None) as client:
        assert client.infer(X, model="affine").source == "edge"
        assert client.infer(X, model="affine", fallback=False).source == "edge"
        assert client.infer(X, model="other").source == "server", "the policy is of one model"
    with (
        MCPClient(server.url, edge=Edge(here, policy="only"), cache=None) as client,
        pytest.raises(EdgeError),
    ):
        client.infer(X, model="other")


def test_no_fallback_means_the_server_whatever_the_policy(
    stub_server: Start, served: Path, here: Path
) -> None:
    server = stub_server(served)
    for policy in ("fallback", "prefer", "race"):
        with MCPClient(server.url, edge=Edge(here, policy=policy), cache=None) as client:  # type: ignore[arg-type]
            assert client.infer(X, fallback=False).source == "server"


def test_answers_of_the_edge_are_kept_where_it_is_no_stand_in(
    stub_server: Start, served: Path, here: Path
) -> None:
    server = stub_server(served)
    with MCPClient(server.url, edge=Edge(here, policy="prefer")) as client:
        assert [client.infer(X).source for _ in range(2)] == ["edge", "cache"]
    with MCPClient(server.url, edge=here) as client:
        client.metadata()
        server.close()
        assert [client.infer(X).source for _ in range(2)] == ["edge", "edge"]


def test_a_swapped_model_ends_the_kept_answers_of_the_old_one(here: Path) -> None:
    with MCPClient(f"edge:{here}") as client:
        assert np.allclose(client.infer(X).output, scaled(2.0))
        models.affine(here / "new", scale=5.0).replace(here / "affine.onnx")
        assert client._edge is not None
        client._edge.refresh()
        client.infer(X + 1)  # which shows that the model is another one
        assert np.allclose(client.infer(X).output, scaled(5.0))


def test_settings_that_make_no_sense_are_refused(here: Path) -> None:
    for wrong in ({"policy": "sometimes"}, {"models": {"m": "never"}}, {"agreement": 2.0}, {"threads": 0}):
        with pytest.raises(ConfigurationError):
            Edge(here, **wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="folder"):
        MCPClient("edge:")
    with pytest.raises(ConfigurationError, match="folder"):
        MCPClient("http://127.0.0.1:9", edge=Edge(policy="prefer"))


def test_an_edge_client_takes_the_settings_too(here: Path) -> None:
    with MCPClient(f"edge:{here}", edge=Edge(threads=1)) as client:
        assert client.infer(X).source == "edge"
    with MCPClient("edge:", edge=Edge(here, device="auto")) as client:
        assert client.infer(X).source == "edge"


# --- the network's state ---


def test_a_silent_network_costs_the_first_call_seconds_and_the_next_ones_nothing(
    black_hole: str, here: Path
) -> None:
    with MCPClient(black_hole, edge=here, cache=None, timeout=30.0, retry=Retry(attempts=1)) as client:
        first = client.infer(X, model="affine")
        assert first.source == "edge"
        assert first.latency_ms < 6000, "a description is not waited for as long as an inference may take"
        assert max(client.infer(X, model="affine").latency_ms for _ in range(20)) < 1000


def test_an_answer_that_is_lost_is_not_waited_for_until_the_deadline(
    stub_server: Start, served: Path, here: Path
) -> None:
    server = stub_server(served)
    with MCPClient(server.url, edge=here, cache=None, timeout=30.0, retry=Retry(attempts=1)) as client:
        for _ in range(25):  # as many as tell a percentile
            assert client.infer(X).source == "server"
        server.latency_ms = 4_000
        result = client.infer(X)
        assert result.source == "edge"
        assert result.latency_ms < 3800


def test_the_network_returns_without_a_caller_waiting_for_a_probe(
    stub_server: Start, served: Path, here: Path
) -> None:
    server = stub_server(served)
    port = int(server.url.rpartition(":")[2])
    with MCPClient(server.url, edge=here, cache=None, retry=Retry(attempts=1)) as client:
        assert client.infer(X).source == "server"
        server.close()
        assert client.infer(X).source == "edge"
        stub_server(served, port=port)
        wait_until(lambda: client.infer(X).source == "server")
        wait_until(lambda: client.infer(X).source == "server" and client.stats()["edge"]["network"] == "up")


async def _returns(
    url: str, here: Path, stop: Callable[[], object], start: Callable[[], object]
) -> list[str]:
    async with AsyncMCPClient(url, edge=here, cache=None, retry=Retry(attempts=1)) as client:
        sources = [(await client.infer(X)).source]
        await asyncio.to_thread(stop)
        sources.append((await client.infer(X)).source)
        await asyncio.to_thread(start)
        give_up = time.monotonic() + 20
        while (await client.infer(X)).source != "server":
            assert time.monotonic() < give_up
            await asyncio.sleep(0.02)
        return sources


def test_the_network_returns_with_asyncio_too(stub_server: Start, served: Path, here: Path) -> None:
    server = stub_server(served)
    port = int(server.url.rpartition(":")[2])
    sources = asyncio.run(_returns(server.url, here, server.close, lambda: stub_server(served, port=port)))
    assert sources == ["server", "edge"]


# --- the race ---


def test_the_edge_wins_a_race_against_a_slow_server(stub_server: Start, served: Path, here: Path) -> None:
    server = stub_server(served, latency_ms=1500.0)
    with MCPClient(server.url, edge=Edge(here, policy="race"), cache=None) as client:
        result = client.infer(X)
        assert result.source == "edge"
        assert np.allclose(result.output, scaled(2.0))
        assert result.latency_ms < 1400
        assert client.stats()["edge"]["network"] == "up", (
            "a loser that was called off says nothing of the network"
        )


def test_the_server_wins_a_race_against_a_slow_model(
    stub_server: Start, served: Path, tmp_path: Path
) -> None:
    slow(tmp_path / "slow" / "affine.onnx")
    server = stub_server(served)
    with MCPClient(server.url, edge=Edge(tmp_path / "slow", policy="race"), cache=None) as client:
        client.infer(X)  # loads and describes
        result = client.infer(X)
        assert result.source == "server"
        assert np.allclose(result.output, scaled(1.0))
        wait_until(lambda: not _contestants(), 5.0)


def test_a_race_with_a_side_that_fails_is_won_by_the_other(
    stub_server: Start, served: Path, here: Path, tmp_path: Path, nobody: str
) -> None:
    server = stub_server(served, error_rate=1.0)
    with MCPClient(server.url, edge=Edge(here, policy="race"), cache=None, retry=Retry(attempts=1)) as client:
        assert client.infer(X).source == "edge"
    server.error_rate = 0.0
    models.affine(tmp_path / "broken" / "affine.onnx").write_bytes(b"no model")
    with MCPClient(server.url, edge=Edge(tmp_path / "broken", policy="race"), cache=None) as client:
        assert client.infer(X).source == "server"
    with MCPClient(nobody, edge=Edge(tmp_path / "broken", policy="race"), cache=None) as client:
        with pytest.raises(ConnectionFailedError) as caught:
            client.infer(X, model="affine")
        assert caught.value.request_id


def _contestants() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("mcp-contest")]


def test_races_leave_nothing_behind(stub_server: Start, served: Path, here: Path) -> None:
    server = stub_server(served)
    with MCPClient(server.url, edge=Edge(here, policy="race"), cache=None) as client:
        sources = {client.infer(X).source for _ in range(100)}
        assert sources <= {"server", "edge"}
        wait_until(lambda: not _contestants(), 10.0)
        endpoint = next(iter(client._engine.endpoints))
        assert endpoint.load.outstanding == 0
        assert endpoint.breaker.state(time.monotonic()) == "closed"
        sums = client.stats()["sources"]
        assert sums["server"] + sums["edge"] == 100


async def _raced(url: str, here: Path) -> tuple[list[str], int]:
    async with AsyncMCPClient(url, edge=Edge(here, policy="race"), cache=None) as client:
        results = [await client.infer(X) for _ in range(30)]
        for result in results:
            assert np.allclose(result.output, scaled(2.0 if result.source == "edge" else 1.0))
        await asyncio.sleep(0)
        return [result.source for result in results], len(asyncio.all_tasks()) - 1


def test_races_with_asyncio(stub_server: Start, served: Path, here: Path) -> None:
    server = stub_server(served)
    sources, tasks = asyncio.run(_raced(server.url, here))
    assert set(sources) <= {"server", "edge"}
    assert tasks == 0
    server.latency_ms = 500.0
    sources, _ = asyncio.run(_raced(server.url, here))
    assert set(sources) == {"edge"}


def test_nobody_in_time_is_a_deadline(black_hole: str, tmp_path: Path) -> None:
    slow(tmp_path / "slow" / "affine.onnx")
    with MCPClient(black_hole, edge=Edge(tmp_path / "slow", policy="race"), cache=None) as client:
        client.metadata("affine")
        started = time.monotonic()
        with pytest.raises(DeadlineExceededError):
            client.infer(X, model="affine", timeout=0.3)
        assert time.monotonic() - started < 5
        wait_until(lambda: not _contestants(), 10.0)


# --- agreement ---


def test_a_sampled_answer_is_computed_both_ways_and_the_difference_reported(
    stub_server: Start, served: Path, here: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server = stub_server(served)
    told: list[Notice] = []
    with (
        caplog.at_level(logging.WARNING, "mcp_client.edge"),
        MCPClient(server.url, edge=Edge(here, agreement=1.0), cache=None, hooks=told.append) as client,
    ):
        assert client.infer(X).source == "server"
        wait_until(lambda: client.stats()["edge"]["agreement"]["checked"] == 1)
        wait_until(lambda: any(notice.kind == "agreement" for notice in told))
        figures = client.stats()["edge"]["agreement"]
    assert figures["disagreed"] == 1
    assert figures["worst"] == pytest.approx(1.0, rel=1e-3), "the edge's model gives twice the server's"
    (notice,) = (notice for notice in told if notice.kind == "agreement")
    assert notice.difference == pytest.approx(1.0, rel=1e-3)
    assert notice.source == "server"
    assert notice.model == "affine"
    assert "differs from the server" in caplog.text


def test_equal_models_agree_and_an_edge_answer_is_checked_against_the_server(
    stub_server: Start, served: Path, tmp_path: Path
) -> None:
    server = stub_server(served)
    with MCPClient(
        server.url, edge=Edge(served.parent, policy="prefer", agreement=1.0), cache=None
    ) as client:
        assert client.infer(X).source == "edge"
        wait_until(lambda: client.stats()["edge"]["agreement"]["checked"] == 1)
        assert client.stats()["edge"]["agreement"] == {
            "checked": 1,
            "disagreed": 0,
            "failed": 0,
            "worst": pytest.approx(0.0, abs=1e-5),
        }
        server.close()
        client.infer(X)
        wait_until(lambda: client.stats()["edge"]["agreement"]["failed"] == 1)


def test_no_share_means_no_checks(stub_server: Start, served: Path, here: Path) -> None:
    server = stub_server(served)
    with MCPClient(server.url, edge=here, cache=None) as client:
        for _ in range(20):
            client.infer(X)
        assert client.stats()["edge"]["agreement"]["checked"] == 0


def test_differences_by_kind() -> None:
    one = {"y": np.array([1.0, -4.0], np.float32)}
    assert difference(one, {"y": np.array([1.0, -3.0], np.float32)}) == pytest.approx(0.25)
    assert difference(one, one) == 0.0
    assert difference(one, {"z": one["y"]}) == np.inf
    assert difference(one, {"y": one["y"].astype(np.float64)}) == np.inf
    assert difference(one, {"y": one["y"][:1]}) == np.inf
    nan = {"y": np.array([np.nan, 1.0], np.float32)}
    assert difference(nan, nan) == 0.0
    assert difference(nan, {"y": np.array([0.0, 1.0], np.float32)}) == np.inf
    words = {"y": np.array([b"a", b"b"], object)}
    assert difference(words, {"y": np.array([b"a", b"c"], object)}) == 0.5
    empty = {"y": np.zeros((0, 3), np.float32)}
    assert difference(empty, empty) == 0.0
    assert tolerance_of({"y": np.zeros(1, np.float16)}, 1e-3) == 0.01
    assert tolerance_of(one, 1e-3) == 1e-3
