"""The cache as a client's user meets it: tiers, freshness, negative caching, single flight; against real servers."""

from __future__ import annotations

import asyncio
import logging
import os
import pickle
import signal
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mcp_client import (
    AsyncMCPClient,
    Cache,
    ConnectionFailedError,
    InferResult,
    InvalidInputError,
    MCPClient,
    MCPError,
    NotFoundError,
    Retry,
)
from mcp_client.cache.normalise import rounded
from mcp_client.cache.shared import SharedTier
from mcp_client.cache.ttl import Rule, TTLPolicy
from stub_server import StubServer
from tests import models
from tests.cache.test_shared_tier import Server as Redis
from tests.test_promises import sample

X = np.array([[0.1, 0.9, 0.4]], dtype=np.float32)


def expected(x: np.ndarray, scale: float = 1.0) -> np.ndarray:
    return scale * (x @ models.WEIGHTS + models.BIAS)


class Asking:
    """A client of either kind, asked from a test that is not a coroutine."""

    def __init__(self, kind: str, url: str, **options: Any) -> None:
        self.runner = asyncio.Runner() if kind == "async" else None
        options = {"prefetch": None, **options}
        self.client: Any = (AsyncMCPClient if self.runner else MCPClient)(url, **options)

    def infer(self, *args: Any, **options: Any) -> InferResult:
        outcome = self.client.infer(*args, **options)
        result: InferResult = self.runner.run(outcome) if self.runner else outcome
        return result

    def at_once(self, count: int, *args: Any, **options: Any) -> list[InferResult]:
        """``count`` equal calls from as many threads, or tasks."""
        if self.runner:

            async def ask() -> list[InferResult]:
                calls = (self.client.infer(*args, **options) for _ in range(count))
                return list(await asyncio.gather(*calls))

            return self.runner.run(ask())
        barrier = threading.Barrier(count)

        def ask_once(_: int) -> InferResult:
            barrier.wait()
            return self.infer(*args, **options)

        with ThreadPoolExecutor(count) as pool:
            return list(pool.map(ask_once, range(count)))

    def until(self, condition: Callable[[], bool]) -> None:
        """Let the background work until it has come to something."""
        give_up = time.monotonic() + 10
        while not condition():
            assert time.monotonic() < give_up, "it did not happen"
            if self.runner:
                self.runner.run(asyncio.sleep(0.005))
            else:
                time.sleep(0.005)

    def close(self) -> None:
        if self.runner:
            if not self.client._closed:
                self.runner.run(self.client.close())
                self.runner.close()
        else:
            self.client.close()


Open = Callable[..., Asking]


@pytest.fixture(params=["sync", "async"])
def open_client(request: pytest.FixtureRequest) -> Iterator[Open]:
    opened: list[Asking] = []

    def open(url: str, **options: Any) -> Asking:
        opened.append(Asking(request.param, url, **options))
        return opened[-1]

    yield open
    for each in opened:
        each.close()


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("zoo")
    models.affine(folder / "affine.onnx")
    models.affine(folder / "other.onnx", scale=2.0)
    for datatype in models.IDENTITY_TYPES:
        models.identity(folder / f"id_{datatype.lower()}.onnx", datatype, None)
    return folder


@pytest.fixture(scope="module")
def server(zoo: Path) -> Iterator[StubServer]:
    with StubServer(zoo) as running:
        yield running


class Count:
    """How many inferences a server has received since this was made."""

    def __init__(self, server: StubServer) -> None:
        self._server = server
        self._before = self.total()

    def total(self) -> int:
        return sum(self._server.received.values())

    def __call__(self) -> int:
        return self.total() - self._before


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


# --- disk ---


@pytest.mark.parametrize("datatype", list(models.IDENTITY_TYPES))
def test_a_second_client_answers_from_disk_exactly(server: StubServer, tmp_path: Path, datatype: str) -> None:
    shapes = ((), (0, 3), (2, 3))
    settings = Cache(directory=tmp_path / "cache")
    with MCPClient(server.url, cache=settings, model=f"id_{datatype.lower()}") as first:
        for shape in shapes:
            assert first.infer(sample(datatype, shape)).source == "server"
    count = Count(server)
    with MCPClient(server.url, cache=settings, model=f"id_{datatype.lower()}") as second:
        for shape in shapes:
            x = sample(datatype, shape)
            result = second.infer(x)
            assert (result.source, result.output.dtype, result.output.shape) == ("cache", x.dtype, x.shape)
            assert result.output.tolist() == x.tolist()
            assert not result.output.flags.writeable
            assert 0 < result.age_s < 60
        assert second.stats()["cache"].tiers["disk"].hits == len(shapes)
    assert count() == 0


def test_a_hit_on_disk_is_in_memory_from_then_on(
    server: StubServer, tmp_path: Path, open_client: Open
) -> None:
    settings = Cache(directory=tmp_path / "cache")
    count = Count(server)
    assert open_client(server.url, cache=settings).infer(X, model="affine").source == "server"
    second = open_client(server.url, cache=settings)
    for _ in range(3):
        assert second.infer(X, model="affine").source == "cache"
    assert second.client.stats()["cache"].tiers["disk"].hits == 1
    assert count() == 1


def test_an_answer_is_for_those_with_the_same_credential(
    server: StubServer, tmp_path: Path, open_client: Open
) -> None:
    def source(api_key: str, **settings: Any) -> str:
        cache = Cache(directory=tmp_path / "cache", **settings)
        return open_client(server.url, cache=cache, api_key=api_key).infer(X, model="affine").source

    assert [source("one"), source("one"), source("two"), source("two")] == ["server", "cache"] * 2
    assert [source("one", tenant="t"), source("two", tenant="t"), source("two", tenant="u")] == [
        "server",
        "cache",
        "server",
    ]
    public = {"public_models": ["affine"]}
    assert [source("one", **public), source("two", **public)] == ["server", "cache"]


def overwrite(directory: Path) -> None:
    for name in ("cache.db", "cache.db-wal"):
        size = (directory / name).stat().st_size if (directory / name).exists() else 0
        with open(directory / name, "r+b" if size else "wb") as file:
            file.write(os.urandom(max(4096, size)))


def truncate(directory: Path) -> None:
    for name in ("cache.db", "cache.db-wal"):
        if (directory / name).exists():
            os.truncate(directory / name, 5000)


def plant_a_pickle(directory: Path) -> None:
    class Bomb:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(directory / "pwned"),)

    with sqlite3.connect(directory / "cache.db") as database:
        database.execute("UPDATE Cache SET mode = 4, value = ?", (pickle.dumps(Bomb()),))


def flip_bits(directory: Path) -> None:
    with sqlite3.connect(directory / "cache.db") as database:
        (blob,) = database.execute("SELECT value FROM Cache").fetchone()
        database.execute("UPDATE Cache SET value = ?", (blob[:-1] + bytes([blob[-1] ^ 1]),))


@pytest.mark.parametrize("damage", [overwrite, truncate, plant_a_pickle, flip_bits])
def test_a_damaged_disk_is_a_warning_and_a_right_answer(
    server: StubServer,
    tmp_path: Path,
    open_client: Open,
    caplog: pytest.LogCaptureFixture,
    damage: Callable[[Path], None],
) -> None:
    directory = tmp_path / "cache"
    settings = Cache(directory=directory)
    first = open_client(server.url, cache=settings)
    first.infer(X, model="affine")
    first.close()
    damage(directory)
    second = open_client(server.url, cache=settings)
    result = second.infer(X, model="affine")
    assert result.source == "server"
    np.testing.assert_allclose(result.output, expected(X), rtol=1e-6)
    assert len(warnings(caplog)) == 1, warnings(caplog)
    assert not (directory / "pwned").exists()


def test_damage_under_a_running_client_never_fails_a_call(
    server: StubServer, tmp_path: Path, open_client: Open, caplog: pytest.LogCaptureFixture
) -> None:
    directory = tmp_path / "cache"
    asking = open_client(server.url, cache=Cache(directory=directory))
    asking.infer(X, model="affine")
    overwrite(directory)
    for n in range(5):
        x = np.full((1, 3), n, np.float32)
        np.testing.assert_allclose(asking.infer(x, model="affine").output, expected(x), rtol=1e-5)
    assert len(warnings(caplog)) <= 1, warnings(caplog)


@pytest.mark.parametrize("in_the_way", ["a file", "under a file", "/proc", "a folder named cache.db"])
def test_a_folder_that_cannot_be_used_is_a_warning_and_right_answers(
    server: StubServer, tmp_path: Path, open_client: Open, caplog: pytest.LogCaptureFixture, in_the_way: str
) -> None:
    directory = tmp_path / "cache"
    if in_the_way == "a file":
        directory.write_text("a file")
    elif in_the_way == "under a file":
        (tmp_path / "file").write_text("a file")
        directory = tmp_path / "file" / "cache"
    elif in_the_way == "/proc":  # as good as read-only, for root as well
        directory = Path("/proc/cache")
    else:
        (directory / "cache.db").mkdir(parents=True)
    asking = open_client(server.url, cache=Cache(directory=directory))
    for n in range(3):
        x = np.full((1, 3), n, np.float32)
        result = asking.infer(x, model="affine")
        assert result.source == "server"
        np.testing.assert_allclose(result.output, expected(x), rtol=1e-5)
        assert asking.infer(x, model="affine").source == "cache"
    asking.client.cache.invalidate(model="affine")
    asking.client.cache.invalidate(path="/p")
    asking.client.cache.clear()
    assert asking.client.stats()["cache"].tiers["disk"].failures >= 1
    assert len(warnings(caplog)) == 1, warnings(caplog)


def test_a_disk_that_another_process_blocks_costs_a_moment_once(
    server: StubServer, tmp_path: Path, open_client: Open
) -> None:
    directory = tmp_path / "cache"
    asking = open_client(server.url, cache=Cache(directory=directory))
    asking.infer(X, model="affine")
    blocking = sqlite3.connect(directory / "cache.db", isolation_level=None)
    blocking.execute("BEGIN EXCLUSIVE")
    try:
        started = time.monotonic()
        for n in range(50):
            x = np.full((1, 3), n, np.float32)
            assert asking.infer(x, model="affine").source == "server"
        assert time.monotonic() - started < 2
        assert asking.client.stats()["cache"].tiers["disk"].failures == 1
    finally:
        blocking.execute("ROLLBACK")
        blocking.close()


# --- shared ---


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Redis]:
    running = Redis(tmp_path_factory.mktemp("redis"))
    yield running
    running.process.send_signal(signal.SIGCONT)
    running.stop()


def test_a_fleet_shares_answers(server: StubServer, redis: Redis, tmp_path: Path, open_client: Open) -> None:
    SharedTier(redis.url).clear(0.0)
    count = Count(server)
    first = open_client(server.url, cache=Cache(shared_url=redis.url))
    assert first.infer(X, model="affine", path="/a", session="s").source == "server"
    second = open_client(server.url, cache=Cache(shared_url=redis.url, directory=tmp_path / "cache"))
    result = second.infer(X, model="affine")
    assert result.source == "cache"
    np.testing.assert_allclose(result.output, expected(X), rtol=1e-6)
    third = open_client(server.url, cache=Cache(directory=tmp_path / "cache"))
    assert third.infer(X, model="affine").source == "cache"  # kept on disk on the way back
    assert count() == 1
    stranger = open_client(server.url, cache=Cache(shared_url=redis.url), api_key="another")
    assert stranger.infer(X, model="affine").source == "server"


def test_a_store_that_goes_away_or_hangs_costs_a_moment_once(
    server: StubServer, tmp_path: Path, open_client: Open, caplog: pytest.LogCaptureFixture
) -> None:
    for trouble in (signal.SIGSTOP, signal.SIGKILL):
        store = Redis(tmp_path)
        asking = open_client(server.url, cache=Cache(shared_url=store.url))
        asking.infer(X, model="affine")
        store.process.send_signal(trouble)
        caplog.clear()
        started = time.monotonic()
        for n in range(50):
            x = np.full((1, 3), n, np.float32)
            np.testing.assert_allclose(asking.infer(x, model="affine").output, expected(x), rtol=1e-5)
        assert time.monotonic() - started < 2
        assert asking.client.stats()["cache"].tiers["shared"].failures == 1
        assert len(warnings(caplog)) == 1
        store.process.send_signal(signal.SIGCONT)
        store.stop()


# --- freshness ---


def test_the_ttl_is_the_calls_else_the_servers_else_the_policys_and_the_policys_maximum_caps_it(
    zoo: Path, server: StubServer, open_client: Open
) -> None:
    def lasts(running: StubServer, seconds: float, cache: Any = True, **settings: Any) -> bool:
        """Whether an answer is fresh for about that long, and then fetched again."""
        asking = open_client(running.url, cache=Cache(**settings))
        asking.infer(X, model="affine", cache=cache)
        (entry,) = (entry for _, entry in asking.client.cache.entries())
        return bool(abs(entry.fresh_until - entry.stored_at - seconds) < 0.01)

    short = TTLPolicy(rules=(Rule("aff", 7.0, 20.0), Rule("a", 1.0)), default_ttl_s=3.0)
    assert lasts(server, 30.0, ttl_s=30.0)
    assert lasts(server, 7.0, ttl_policy=short)
    assert lasts(server, 3.0, ttl_policy=TTLPolicy(default_ttl_s=3.0))
    assert lasts(server, 9.0, cache=9.0, ttl_policy=short)
    assert lasts(server, 20.0, cache=100.0, ttl_policy=short)
    with StubServer(zoo, cache_control="max-age=11") as running:
        assert lasts(running, 11.0, ttl_policy=short)
        assert lasts(running, 5.0, cache=5.0, ttl_policy=short)


def test_an_expired_entry_is_fetched_again(server: StubServer, tmp_path: Path, open_client: Open) -> None:
    asking = open_client(server.url, cache=Cache(ttl_s=0.15, directory=tmp_path / "cache"))
    count = Count(server)
    assert asking.infer(X, model="affine").source == "server"
    assert asking.infer(X, model="affine").source == "cache"
    time.sleep(0.2)
    assert asking.infer(X, model="affine").source == "server"
    assert count() == 2


def test_a_policy_is_swapped_while_the_client_runs(server: StubServer, open_client: Open) -> None:
    asking = open_client(server.url)
    asking.client.ttl_policy = TTLPolicy.parse(
        {"version": 2, "rules": [{"prefix": "affine", "ttl_s": 0, "max_ttl_s": 0}]}
    )
    assert [asking.infer(X, model="affine").source for _ in range(3)] == ["server"] * 3
    asking.client.ttl_policy = TTLPolicy(version=3)
    assert [asking.infer(X, model="affine").source for _ in range(2)] == ["server", "cache"]


@pytest.mark.parametrize("tiered", [False, True])
def test_a_call_takes_nothing_older_than_its_own_ttl(
    server: StubServer, tmp_path: Path, open_client: Open, tiered: bool
) -> None:
    settings = Cache(directory=tmp_path / "cache" if tiered else None)
    asking = open_client(server.url, cache=settings)
    asking.infer(X, model="affine")
    time.sleep(0.1)
    assert asking.infer(X, model="affine", cache=60.0).source == "cache"
    assert asking.infer(X, model="affine", cache=0.05).source == "server"


def test_a_refresh_asks_the_server_and_keeps_the_answer_in_every_tier(
    server: StubServer, tmp_path: Path, open_client: Open
) -> None:
    settings = Cache(directory=tmp_path / "cache")
    asking = open_client(server.url, cache=settings)
    count = Count(server)
    sources = [asking.infer(X, model="affine", cache="refresh").source for _ in range(2)]
    assert sources == ["server", "server"]
    assert asking.infer(X, model="affine").source == "cache"
    assert open_client(server.url, cache=settings).infer(X, model="affine").source == "cache"
    assert count() == 2


@pytest.mark.parametrize("tiered", [False, True])
def test_a_stale_answer_is_handed_out_while_one_renewal_is_under_way(
    zoo: Path, tmp_path: Path, open_client: Open, tiered: bool
) -> None:
    directory = tmp_path / "cache" if tiered else None
    settings = Cache(ttl_s=0.1, stale_while_revalidate_s=60.0, directory=directory)
    with StubServer(zoo) as running:
        asking = open_client(running.url, cache=settings)
        first = asking.infer(X, model="affine")
        time.sleep(0.12)
        asking.client.ttl_policy = TTLPolicy(default_ttl_s=60.0)
        running.latency_ms = 100
        count = Count(running)
        for result in asking.at_once(50, X, model="affine"):
            assert result.source == "stale"
            assert result.age_s >= 0.1
            assert result.output.tolist() == first.output.tolist()
        asking.until(lambda: asking.infer(X, model="affine").source == "cache")
        assert asking.infer(X, model="affine").age_s < 10
        assert count() == 1


def test_a_stale_answer_of_another_tier_is_handed_out_and_renewed(
    zoo: Path, tmp_path: Path, open_client: Open
) -> None:
    settings = Cache(ttl_s=0.1, stale_while_revalidate_s=60.0, directory=tmp_path / "cache")
    with StubServer(zoo) as running:
        open_client(running.url, cache=settings).infer(X, model="affine")
        time.sleep(0.12)
        count = Count(running)
        second = open_client(running.url, cache=settings)
        second.client.ttl_policy = TTLPolicy(default_ttl_s=60.0)
        assert second.infer(X, model="affine").source == "stale"
        second.until(lambda: second.infer(X, model="affine").source == "cache")
        assert count() == 1


def test_a_renewal_keeps_the_ttl_that_the_call_asked_for(zoo: Path, open_client: Open) -> None:
    with StubServer(zoo) as running:
        asking = open_client(running.url, cache=Cache(stale_while_revalidate_s=60.0))
        asking.infer(X, model="affine", cache=0.1)
        time.sleep(0.12)
        assert asking.infer(X, model="affine", cache=50.0).source == "stale"
        asking.until(lambda: asking.infer(X, model="affine").source == "cache")
        ((_, entry),) = asking.client.cache.entries()
        assert entry.fresh_until - entry.stored_at == pytest.approx(50.0)


def test_a_call_that_joins_a_renewal_gets_its_answer(zoo: Path, open_client: Open) -> None:
    with StubServer(zoo) as running:
        asking = open_client(running.url, cache=Cache(ttl_s=0.1, stale_while_revalidate_s=60.0))
        asking.infer(X, model="affine")
        time.sleep(0.15)
        running.latency_ms = 200
        count = Count(running)
        assert asking.infer(X, model="affine").source == "stale"
        asking.until(lambda: count() == 1)
        assert asking.infer(X, model="affine", cache=0.01).source == "server"  # too old for this one
        assert count() == 1


def test_a_stale_answer_stands_in_for_a_server_that_is_away_but_not_for_ever(
    zoo: Path, tmp_path: Path, open_client: Open
) -> None:
    for directory in (None, tmp_path / "cache"):
        settings = Cache(ttl_s=0.1, stale_if_error_s=0.8, directory=directory)
        with StubServer(zoo) as running:
            asking = open_client(running.url, cache=settings, retry=Retry(attempts=1))
            first = asking.infer(X, model="affine")
            time.sleep(0.12)
            assert asking.infer(X, model="affine").source == "server"
            time.sleep(0.12)
            running.stop()
            result = asking.infer(X, model="affine")
            assert (result.source, result.output.tolist()) == ("stale", first.output.tolist())
            assert result.age_s >= 0.1
            time.sleep(1.0)
            with pytest.raises(MCPError):
                asking.infer(X, model="affine")


def test_must_revalidate_rules_stale_answers_out(zoo: Path, open_client: Open) -> None:
    settings = Cache(stale_while_revalidate_s=60.0, stale_if_error_s=60.0)
    with StubServer(zoo, cache_control="max-age=1, must-revalidate") as running:
        asking = open_client(running.url, cache=settings, retry=Retry(attempts=1))
        asking.infer(X, model="affine", cache=0.1)
        time.sleep(0.12)
        assert asking.infer(X, model="affine", cache=0.1).source == "server"
        running.stop()
        time.sleep(0.12)
        with pytest.raises(MCPError):
            asking.infer(X, model="affine")


# --- another model under the same name ---


@pytest.mark.parametrize("tiered", [False, True])
def test_a_new_model_drops_the_answers_of_the_old_one(
    tmp_path: Path, open_client: Open, tiered: bool
) -> None:
    settings = Cache(directory=tmp_path / "cache" if tiered else None)
    y = np.array([[1.0, 2.0, 3.0]], np.float32)
    old, new = (
        models.affine(tmp_path / "old" / "m.onnx"),
        models.affine(tmp_path / "new" / "m.onnx", scale=3.0),
    )
    with StubServer(old) as running:
        port = int(running.url.rpartition(":")[2])
        asking = open_client(running.url, cache=settings)
        asking.infer(X)
        asking.infer(y)
    with StubServer(new, port=port) as running:
        asking.infer([[0.0, 0.0, 0.0]])
        result = asking.infer(X)
        assert result.source == "server"
        np.testing.assert_allclose(result.output, expected(X, 3.0), rtol=1e-6)
        second = open_client(running.url, cache=settings)
        np.testing.assert_allclose(second.infer(y).output, expected(y, 3.0), rtol=1e-6)


def test_a_new_client_takes_no_old_models_answers_from_disk(tmp_path: Path, open_client: Open) -> None:
    settings = Cache(directory=tmp_path / "cache")
    old, new = (
        models.affine(tmp_path / "old" / "m.onnx"),
        models.affine(tmp_path / "new" / "m.onnx", scale=3.0),
    )
    with StubServer(old) as running:
        open_client(running.url, cache=settings).infer(X)
    for protocol in ("mcp", "oip"):
        with StubServer(new) as running:
            second = open_client(running.url, cache=settings, protocol=protocol)
            np.testing.assert_allclose(second.infer(X).output, expected(X, 3.0), rtol=1e-6)


# --- no such model ---


def test_an_unknown_model_costs_one_look_and_is_found_soon_after_it_appears(
    tmp_path: Path, open_client: Open
) -> None:
    folder = tmp_path / "models"
    models.affine(folder / "there.onnx")
    with StubServer(folder) as running:
        asking = open_client(running.url, cache=Cache(not_found_s=1.0), protocol="mcp")
        attempts, ids = [], set()
        for _ in range(100):
            with pytest.raises(NotFoundError) as raised:
                asking.infer(X, model="late")
            ids.add(raised.value.request_id)
            attempts.append(raised.value.attempts)
        assert sum(attempts) <= 3, "the server was asked again and again"
        assert len(ids) == 100, "an error names its own request"
        port = int(running.url.rpartition(":")[2])
    models.affine(folder / "late.onnx")
    with StubServer(folder, port=port):
        asking.until(lambda: answers(asking, "late"))


def answers(asking: Asking, model: str) -> bool:
    try:
        return asking.infer(X, model=model).source == "server"
    except NotFoundError:
        return False


# --- invalidation ---


@pytest.mark.parametrize("by", ["path", "session", "model", "clear"])
def test_what_is_invalidated_is_gone_from_every_tier(
    server: StubServer, redis: Redis, tmp_path: Path, open_client: Open, by: str
) -> None:
    SharedTier(redis.url).clear(0.0)
    settings = Cache(directory=tmp_path / "cache", shared_url=redis.url)
    asking = open_client(server.url, cache=settings)
    asking.infer(X, model="affine", path="/a", session="s")
    asking.infer(X, model="other", path="/b", session="t")
    cache = asking.client.cache
    if by == "clear":
        cache.clear()
    else:
        what = {"path": "/a", "session": "s", "model": "affine"}[by]
        assert cache.invalidate(**{by: what}) == 1
    count = Count(server)
    assert asking.infer(X, model="affine").source == "server"
    assert asking.infer(X, model="other").source == ("server" if by == "clear" else "cache")
    assert count() == (2 if by == "clear" else 1)


# --- single flight ---


def test_a_thousand_callers_for_one_cold_key_cost_one_request(
    zoo: Path, tmp_path: Path, open_client: Open
) -> None:
    for directory in (None, tmp_path / "cache"):
        with StubServer(zoo, latency_ms=20) as running:
            asking = open_client(running.url, cache=Cache(directory=directory))
            results = asking.at_once(1000, X, model="affine")
            assert sum(running.received.values()) == 1
            assert {tuple(result.output.ravel().tolist()) for result in results} == {
                tuple(results[0].output.ravel().tolist())
            }


def test_a_leader_that_runs_out_of_time_fails_nobody_else(zoo: Path) -> None:
    with StubServer(zoo, latency_ms=300) as running, MCPClient(running.url, prefetch=None) as client:
        client.metadata("affine")
        with ThreadPoolExecutor(20) as pool:
            leader = pool.submit(client.infer, X, model="affine", timeout=0.1)
            time.sleep(0.03)
            rest = [pool.submit(client.infer, X, model="affine") for _ in range(19)]
            with pytest.raises(MCPError):
                leader.result()
            for each in rest:
                np.testing.assert_allclose(each.result().output, expected(X), rtol=1e-6)
        assert running.received["demand"] == 2


def test_a_leader_that_is_cancelled_fails_nobody_else(zoo: Path, tmp_path: Path) -> None:
    async def main(url: str, directory: Path | None) -> None:
        async with AsyncMCPClient(url, prefetch=None, cache=Cache(directory=directory)) as client:
            await client.metadata("affine")
            tasks = [asyncio.create_task(client.infer(X, model="affine")) for _ in range(20)]
            await asyncio.sleep(0.05)
            tasks[0].cancel()
            outcomes = await asyncio.gather(*tasks, return_exceptions=True)
            assert isinstance(outcomes[0], asyncio.CancelledError)
            for each in outcomes[1:]:
                assert isinstance(each, InferResult)

    for directory in (None, tmp_path / "cache"):
        with StubServer(zoo, latency_ms=150) as running:
            asyncio.run(main(running.url, directory))
            assert running.received["demand"] == 2


# --- normalisers ---


def test_inputs_that_are_equal_after_rounding_share_the_answer_of_the_rounded_one(
    server: StubServer, open_client: Open
) -> None:
    asking = open_client(server.url, cache=Cache(normalisers={"affine": rounded(1)}))
    first = asking.infer([[0.11, 0.52, 0.28]], model="affine")
    np.testing.assert_allclose(first.output, expected(np.array([[0.1, 0.5, 0.3]])), rtol=1e-5)
    second = asking.infer([[0.09, 0.48, 0.31]], model="affine")
    assert second.source == "cache"
    assert asking.infer([[0.2, 0.5, 0.3]], model="affine").source == "server"
    assert asking.infer([[0.11, 0.52, 0.28]], model="other").source == "server"
    assert asking.infer([[0.09, 0.48, 0.31]], model="other").source == "server", "the other has no normaliser"


def test_a_client_that_starts_while_the_server_is_away_answers_from_disk(
    zoo: Path, tmp_path: Path, open_client: Open
) -> None:
    settings = Cache(directory=tmp_path / "cache", stale_if_error_s=60.0)
    x = np.array([[1, 2, 3]], np.float32)
    with StubServer(zoo) as server:
        open_client(server.url, cache=settings).infer(x, model="affine")
        open_client(server.url, cache=settings).infer(x + 1, model="affine", cache=0.05)
        server.stop()
        time.sleep(0.1)
        client = open_client(server.url, cache=settings)
        assert client.infer(x, model="affine").source == "cache"
        late = client.infer(x + 1, model="affine")
        assert late.source == "stale"
        np.testing.assert_allclose(late.output, expected(x + 1), rtol=1e-6)
        with pytest.raises(InvalidInputError):
            client.infer(x[:, :2], model="affine")
        with pytest.raises(ConnectionFailedError):
            client.infer(x + 2, model="affine")
