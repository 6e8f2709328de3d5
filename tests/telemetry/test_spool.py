"""The spool: what is stored comes out once, under ids that outlive the process, within its bytes."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import orjson
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from mcp_client.telemetry.install import exclusive, install_key
from mcp_client.telemetry.spool import Batch, Spool


def _bodies(start: int, n: int, size: int = 20) -> list[bytes]:
    return [orjson.dumps({"n": number, "fill": "x" * size}) for number in range(start, start + n)]


def _numbers(batch: Batch) -> list[int]:
    return [orjson.loads(body)["n"] for body in batch.bodies]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "spool" / "events.sqlite"


@pytest.fixture
def spool(file: Path) -> Iterator[Spool]:
    spool = Spool(file, 1 << 20)
    yield spool
    spool.close()


def test_events_come_out_in_order_with_a_seq_that_only_grows(spool: Spool, file: Path) -> None:
    spool.add(_bodies(0, 3))
    first = spool.next_batch(10)
    assert first is not None
    assert [orjson.loads(body)["seq"] for body in first.bodies] == [1, 2, 3]
    spool.settle(first)
    spool.close()
    again = Spool(file, 1 << 20)
    again.add(_bodies(3, 1))
    second = again.next_batch(10)
    assert second is not None
    assert [orjson.loads(body)["seq"] for body in second.bodies] == [4]  # not 1: a seq is never given twice
    assert again.client_id == spool.client_id
    again.close()


def test_a_batch_keeps_its_id_and_its_events_whatever_comes_after(spool: Spool, file: Path) -> None:
    spool.add(_bodies(0, 3))
    named = spool.next_batch(10)
    spool.add(_bodies(3, 3))
    spool.close()  # as a crash would leave it: nothing is written at close
    again = Spool(file, 1 << 20)
    assert again.next_batch(10) == named
    again.close()


def test_of_two_that_settle_a_batch_one_counts_it(spool: Spool, file: Path) -> None:
    other = Spool(file, 1 << 20)
    spool.add(_bodies(0, 5))
    mine, theirs = spool.next_batch(10), other.next_batch(10)
    assert mine is not None
    assert mine == theirs
    assert [spool.settle(mine), other.settle(mine)] == [5, 0]
    other.close()


def test_a_split_batch_loses_nothing_and_takes_new_ids(spool: Spool) -> None:
    spool.add(_bodies(0, 5))
    whole = spool.next_batch(10)
    assert whole is not None
    spool.split(whole)
    ids, numbers = {whole.id}, []
    while (half := spool.next_batch(10)) is not None:
        ids.add(half.id)
        numbers += _numbers(half)
        spool.settle(half)
    assert (len(ids), numbers) == (3, [0, 1, 2, 3, 4])


@pytest.mark.parametrize("max_bytes", [300_000, 1 << 20])
def test_the_directory_stays_within_its_bytes_and_the_oldest_go(file: Path, max_bytes: int) -> None:
    spool = Spool(file, max_bytes)
    dropped = 0
    for start in range(0, 20_000, 400):
        dropped += spool.add(_bodies(start, 400, size=100))
        assert sum(f.stat().st_size for f in file.parent.iterdir() if f.suffix != ".sqlite-shm") <= max_bytes
    kept = spool.pending()
    assert dropped + kept == 20_000
    assert kept * 150 > max_bytes // 3  # a small spool needs half its room for the WAL
    numbers: list[int] = []
    while (batch := spool.next_batch(5000)) is not None:
        numbers += _numbers(batch)
        spool.settle(batch)
    assert numbers == list(range(20_000 - kept, 20_000))
    spool.close()


def test_a_batch_that_may_be_on_its_way_goes_as_a_whole(file: Path) -> None:
    spool = Spool(file, 300_000)
    spool.add(_bodies(0, 500, size=100))
    named = spool.next_batch(500)
    assert named is not None
    for start in range(500, 4000, 500):
        spool.add(_bodies(start, 500, size=100))
    assert spool.settle(named) == 0
    following = spool.next_batch(10)
    assert following is not None
    assert following.first > named.last
    spool.close()


def test_files_are_the_users_alone(spool: Spool, file: Path) -> None:
    spool.add(_bodies(0, 1))
    install_key(file.parent)
    modes = {f.name: f.stat().st_mode & 0o777 for f in file.parent.iterdir()}
    assert set(modes.values()) == {0o600}, modes
    assert file.parent.stat().st_mode & 0o777 == 0o700


def test_the_install_key_is_one_for_all_who_ask_at_once(tmp_path: Path) -> None:
    keys: list[bytes] = []
    threads = [threading.Thread(target=lambda: keys.append(install_key(tmp_path / "d"))) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(keys)) == 1
    assert len(keys[0]) == 32
    assert sorted(f.name for f in (tmp_path / "d").iterdir()) == ["install.key"]


def test_a_key_that_a_power_cut_left_short_is_made_anew(tmp_path: Path) -> None:
    install_key(tmp_path)
    (tmp_path / "install.key").write_bytes(b"short")
    assert len(install_key(tmp_path)) == 32


def test_one_process_at_a_time_holds_the_lock(tmp_path: Path) -> None:
    with exclusive(tmp_path / "lock") as first, exclusive(tmp_path / "lock") as second:
        assert (first, second) == (True, False)
    with exclusive(tmp_path / "lock") as again:
        assert again


def test_a_forked_child_does_not_keep_its_parents_lock(tmp_path: Path) -> None:
    alive, end = os.pipe()
    with exclusive(tmp_path / "lock"):
        pid = os.fork()
        if pid == 0:
            os.close(end)
            os.read(alive, 1)  # until the parent closes its end
            os._exit(0)
    with exclusive(tmp_path / "lock") as again:
        assert again
    os.close(end)
    os.close(alive)
    os.waitpid(pid, 0)


def test_a_file_system_without_links_keeps_a_key_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError("no links here")

    monkeypatch.setattr(os, "link", refuse)
    assert install_key(tmp_path) == install_key(tmp_path)


def test_processes_that_start_at_once_share_the_spool(file: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from mcp_client.telemetry.spool import Spool\n"
        "spool = Spool(Path(sys.argv[1]), 1 << 24)\n"
        "for _ in range(20): spool.add([b'{}'] * 10)\n"
    )
    processes = [subprocess.Popen([sys.executable, "-c", script, str(file)]) for _ in range(3)]
    assert [process.wait(60) for process in processes] == [0, 0, 0]
    spool = Spool(file, 1 << 24)
    assert spool.pending() == 600
    spool.close()


def test_a_damaged_file_is_set_aside(spool: Spool, file: Path) -> None:
    file.parent.mkdir()
    file.write_bytes(b"this is no database" * 1000)
    with pytest.raises(sqlite3.DatabaseError) as caught:
        spool.add(_bodies(0, 1))
    assert spool.set_aside(caught.value)
    spool.add(_bodies(0, 1))
    assert spool.pending() == 1
    assert file.with_suffix(".damaged").exists()


def test_space_comes_back_when_a_long_absence_is_over(file: Path) -> None:
    spool = Spool(file, 1 << 24)
    for start in range(0, 20_000, 2000):
        spool.add(_bodies(start, 2000, size=100))
    full = file.stat().st_size
    while (batch := spool.next_batch(5000)) is not None:
        spool.settle(batch)
    spool.shrink()
    assert file.stat().st_size < full // 10
    spool.close()


class SpoolMachine(RuleBasedStateMachine):
    """In whatever order: every event is delivered once, in order of seq, or is still there."""

    @initialize()
    def start(self) -> None:
        self.file = Path(os.environ["MCP_STATE_DIR"]) / f"machine-{id(self)}.sqlite"
        self.spool = Spool(self.file, 1 << 22)
        self.added = 0
        self.delivered: list[int] = []
        self.ids: dict[str, tuple[bytes, ...]] = {}

    @rule(n=st.integers(1, 7))
    def add(self, n: int) -> None:
        assert self.spool.add(_bodies(self.added, n, size=1)) == 0
        self.added += n

    @rule(most=st.integers(1, 5))
    def send_without_an_answer(self, most: int) -> None:
        batch = self.spool.next_batch(most)
        if batch is not None:
            assert self.ids.setdefault(batch.id, batch.bodies) == batch.bodies

    @rule(most=st.integers(1, 5))
    def deliver(self, most: int) -> None:
        batch = self.spool.next_batch(most)
        if batch is not None:
            assert self.ids.setdefault(batch.id, batch.bodies) == batch.bodies
            self.delivered += _numbers(batch)
            assert self.spool.settle(batch) == len(batch.bodies)

    @rule(most=st.integers(2, 5))
    def refuse(self, most: int) -> None:
        batch = self.spool.next_batch(most)
        if batch is not None and len(batch.bodies) > 1:
            self.spool.split(batch)

    @rule()
    def restart(self) -> None:
        self.spool.close()
        self.spool = Spool(self.file, 1 << 22)

    @invariant()
    def nothing_is_lost_or_doubled(self) -> None:
        if hasattr(self, "spool"):
            assert self.delivered == list(range(len(self.delivered)))
            assert len(self.delivered) + self.spool.pending() == self.added

    def teardown(self) -> None:
        if hasattr(self, "spool"):
            self.spool.close()
            for suffix in ("", "-wal", "-shm"):
                self.file.with_name(self.file.name + suffix).unlink(missing_ok=True)


SpoolMachine.TestCase.settings = settings(max_examples=30, stateful_step_count=20, deadline=None)
TestSpoolMachine = SpoolMachine.TestCase
