"""export() and warm(): exact, whole, and only as much as fits."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from mcp_client import Cache, ConfigurationError, MCPClient
from mcp_client.cache.memory import Entry, MemoryCache
from mcp_client.result import Answer
from stub_server import StubServer


def key(n: int) -> bytes:
    return n.to_bytes(20, "big")


def filled(count: int, *, ttl: float = 60.0, size: int = 100) -> MemoryCache:
    cache = MemoryCache(Cache())
    now = time.monotonic()
    for n in range(count):
        answer = Answer.of({"y": np.full(size, n, np.float32)}, model="m")
        cache.put(key(n), Entry(answer, now, now + ttl, 4 * size, fresh_until=now + ttl, path=f"/{n}"), now)
    return cache


def test_what_was_exported_comes_back_exactly(tmp_path: Path) -> None:
    file = tmp_path / "answers"
    assert filled(50).export(file) == 50
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    warm = MemoryCache(Cache())
    assert warm.warm(file) == 50
    for n in range(50):
        entry = warm.get(key(n), time.monotonic())
        assert entry is not None
        assert entry.answer.outputs["y"].tolist() == [n] * 100
        assert entry.path == f"/{n}"
        assert not entry.answer.outputs["y"].flags.writeable


def test_a_client_starts_warm(affine_model: Path, tmp_path: Path) -> None:
    with StubServer(affine_model) as server:
        with MCPClient(server.url) as client:
            client.infer([1.0, 2.0, 3.0])
            client.cache.export(tmp_path / "answers")
        with MCPClient(server.url) as client:
            assert client.cache.warm(tmp_path / "answers") == 1
            assert client.infer([1.0, 2.0, 3.0]).source == "cache"


def test_expired_entries_are_left_out_on_both_sides(tmp_path: Path) -> None:
    cache = filled(3, ttl=0.05)
    assert cache.export(tmp_path / "fresh") == 3
    time.sleep(0.06)
    assert cache.export(tmp_path / "expired") == 0
    assert MemoryCache(Cache()).warm(tmp_path / "fresh") == 0


def test_a_younger_entry_is_not_replaced_and_budgets_hold(tmp_path: Path) -> None:
    filled(20).export(tmp_path / "answers")
    younger = filled(5)
    assert younger.warm(tmp_path / "answers") == 15
    small = MemoryCache(Cache(max_bytes=4000))
    small.warm(tmp_path / "answers")
    assert small.stats().bytes <= 4000


@pytest.mark.parametrize("harm", ["flip", "cut", "grow"])
def test_a_damaged_archive_gives_what_is_whole_and_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, harm: str
) -> None:
    file = tmp_path / "answers"
    filled(10).export(file)
    raw = bytearray(file.read_bytes())
    if harm == "flip":
        raw[len(raw) // 2] ^= 1
    elif harm == "cut":
        del raw[-10:]
    else:
        raw += os.urandom(100)
    file.write_bytes(raw)
    cache = MemoryCache(Cache())
    assert 0 < cache.warm(file) <= 10
    assert len([record for record in caplog.records if record.levelname == "WARNING"]) == 1
    for each, entry in cache.entries():
        assert entry.answer.outputs["y"].tolist() == [int.from_bytes(each, "big")] * 100


def test_a_damaged_length_costs_what_comes_after_it_and_gives_nothing_wrong(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "answers"
    filled(10).export(file)
    whole = file.read_bytes()
    for at in range(5 + 20, 5 + 24):  # the first record's length
        for bit in (1, 0x40, 0xFF):
            raw = bytearray(whole)
            raw[at] ^= bit
            file.write_bytes(raw)
            cache = MemoryCache(Cache())
            caplog.clear()
            cache.warm(file)
            assert len([record for record in caplog.records if record.levelname == "WARNING"]) == 1
            for each, entry in cache.entries():
                assert entry.answer.outputs["y"].tolist() == [int.from_bytes(each, "big")] * 100


def test_what_a_killed_export_left_is_swept_and_a_running_one_is_not(tmp_path: Path) -> None:
    old, young = tmp_path / ".answers.00.draft", tmp_path / ".answers.11.draft"
    for draft in (old, young):
        draft.write_bytes(b"half")
    os.utime(old, (1, 1))
    filled(1).export(tmp_path / "answers")
    assert {file.name for file in tmp_path.iterdir()} == {"answers", young.name}


def test_warming_never_replaces_what_other_threads_store_meanwhile(tmp_path: Path) -> None:
    filled(300).export(tmp_path / "answers")
    for _ in range(5):
        cache = MemoryCache(Cache())
        younger = Answer.of({"y": np.full(1, -1, np.float32)}, model="m")

        def store(cache: MemoryCache = cache, younger: Answer = younger) -> None:
            for n in range(300):
                now = time.monotonic()
                cache.put(key(n), Entry(younger, now, now + 60, 4), now)

        thread = threading.Thread(target=store)
        thread.start()
        cache.warm(tmp_path / "answers")
        thread.join()
        assert all(entry.answer is younger for _, entry in cache.entries())
        assert len(cache) == 300


def test_a_file_that_is_no_archive_is_told(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"PK\x03\x04 something else")
    with pytest.raises(ConfigurationError, match=r"not an archive.*client\.cache\.export"):
        MemoryCache(Cache()).warm(tmp_path / "x")
    with pytest.raises(FileNotFoundError):
        MemoryCache(Cache()).warm(tmp_path / "nowhere")


def test_kill_9_while_exporting_leaves_the_old_file_or_the_new_one(tmp_path: Path) -> None:
    file = tmp_path / "answers"
    filled(3).export(file)
    code = (
        "import sys; from tests.cache.test_archive import filled\n"
        "cache = filled(2000, size=1000); print('ready', flush=True)\n"
        "while True: cache.export(sys.argv[1])"
    )
    for turn in range(4):
        child = subprocess.Popen([sys.executable, "-c", code, str(file)], stdout=subprocess.PIPE)
        assert child.stdout is not None
        child.stdout.readline()
        time.sleep(0.02 + 0.03 * turn)
        child.kill()
        child.communicate()
        assert MemoryCache(Cache()).warm(file) in (3, 2000)
