"""Whatever kills the client or fills its disk: every event that was spooled is stored, and none twice."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from mcp_client.config import Telemetry
from mcp_client.telemetry import TelemetryPipe
from mcp_profile import ProfileServer

_PREFACE = """
import os, resource, signal, sys, time
from pathlib import Path
from mcp_client.config import Telemetry
from mcp_client.telemetry import TelemetryPipe, spool, uploader

def make(**options):
    return TelemetryPipe(Telemetry(sys.argv[1], spool_dir=Path(sys.argv[2]), **options))

def record(pipe, n=1):
    for number in range(n):
        pipe.record("s", f"/page/{number}", "", bytes(20), "m", "server", 1.0, 10)
"""

# Records and uploads without pause until somebody kills it.
_RESTLESS = """
uploader._DRAIN_S = uploader._POLL_S = 0.005
pipe = make(interval_s=0.02, max_batch=50)
pipe.record("s", "/first", "", bytes(20), "m", "server", 1.0, 10)
print("up", flush=True)
while True:
    record(pipe, 10)
    time.sleep(0.001)
"""

# For each k: a child that dies at its k-th SQL statement: while it stores, names, reads or settles a batch.
_DIES_AT_EACH_STEP = """
def dying(k):
    left = [k]
    connect = spool.Spool._connect

    def traced(self):
        db = connect(self)
        if self.file is not None:
            def count(statement):
                left[0] -= 1
                if left[0] == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
            db.set_trace_callback(count)
        return db

    spool.Spool._connect = traced
    pipe = make(max_batch=2)
    pipe._idle = False  # one thread only, so that step k is the same step each time
    record(pipe, 5)
    pipe.flush(5)
    os._exit(0)

killed = 0
for k in range(1, 200):
    pid = os.fork()
    if pid == 0:
        dying(k)
    if os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0:
        break
    killed += 1
print(killed)
"""

_COUNTS = "SELECT count(*), count(DISTINCT client || '-' || seq) FROM events"


@pytest.fixture
def server() -> Iterator[ProfileServer]:
    with ProfileServer() as running:
        yield running


@contextlib.contextmanager
def _mounted(place: Path, options: str) -> Iterator[Path]:
    """A small file system in memory."""
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(place)]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("this machine lets nobody mount")
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)


def _client(script: str, server: ProfileServer, spool_dir: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", _PREFACE + script, server.url, str(spool_dir)],
        stdout=subprocess.PIPE,
        text=True,
    )


def _delivered(server: ProfileServer, spool_dir: Path) -> tuple[int, list[int]]:
    """Send what is left; how many events were ever spooled, and the seqs that the server has."""
    pipe = TelemetryPipe(Telemetry(server.url, spool_dir=spool_dir))
    assert pipe.flush(30)
    with pipe._disk._transaction() as db:
        spooled = db.execute("SELECT seq FROM sqlite_sequence WHERE name = 'events'").fetchone()[0]
    client = pipe._disk.client_id
    pipe.close()
    with server.store.read() as found:
        rows = found.exec_driver_sql(
            "SELECT seq FROM events WHERE client = (SELECT id FROM clients WHERE client_id = ?) ORDER BY seq",
            (client,),
        )
        return spooled, [seq for (seq,) in rows]


def test_kill_9_in_a_loop_loses_nothing_spooled_and_doubles_nothing(
    server: ProfileServer, tmp_path: Path
) -> None:
    pause = random.Random(5)
    for _ in range(4):
        clients = [_client(_RESTLESS, server, tmp_path) for _ in range(2)]
        for client in clients:
            assert client.stdout is not None
            assert client.stdout.readline() == "up\n"
        time.sleep(pause.uniform(0.02, 0.3))
        for client in clients:
            client.send_signal(signal.SIGKILL)
            client.communicate()
    spooled, stored = _delivered(server, tmp_path)
    assert spooled > 100
    assert stored == list(range(1, spooled + 1))


def test_kill_9_at_every_step_loses_nothing_spooled_and_doubles_nothing(
    server: ProfileServer, tmp_path: Path
) -> None:
    client = _client(_DIES_AT_EACH_STEP, server, tmp_path)
    out, _ = client.communicate(timeout=100)
    assert int(out) > 30
    spooled, stored = _delivered(server, tmp_path)
    assert spooled > 20
    assert stored == list(range(1, spooled + 1))


def test_a_process_that_just_ends_has_sent_its_events(server: ProfileServer, tmp_path: Path) -> None:
    client = _client("record(make(), 25)", server, tmp_path)
    client.communicate(timeout=30)
    assert client.returncode == 0
    with server.store.read() as db:
        assert db.exec_driver_sql("SELECT count(*) FROM events").scalar() == 25


def test_a_process_that_just_ends_does_not_wait_for_a_dead_server(
    server: ProfileServer, tmp_path: Path
) -> None:
    server.stop()
    client = _client("record(make(), 25); print(time.monotonic(), flush=True)", server, tmp_path)
    out, _ = client.communicate(timeout=30)
    assert time.monotonic() - float(out) < 4
    server.start()
    assert _delivered(server, tmp_path) == (25, list(range(1, 26)))


def test_a_full_disk_costs_durability_and_no_event(server: ProfileServer, tmp_path: Path) -> None:
    script = """
pipe = make()
record(pipe, 10)
pipe.flush()
resource.setrlimit(resource.RLIMIT_FSIZE, (8192, resource.RLIM_INFINITY))  # every write that makes a file longer fails
record(pipe, 3000)
print(pipe.flush(), pipe.stats().sent, pipe.stats().dropped, flush=True)
"""
    out, _ = _client(script, server, tmp_path).communicate(timeout=30)
    assert out == "True 3010 0\n"
    with server.store.read() as db:
        assert db.exec_driver_sql(_COUNTS).one() == (3010, 3010)


def test_a_full_disk_and_no_server_keep_what_memory_holds(server: ProfileServer, tmp_path: Path) -> None:
    server.stop()
    script = """
resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
pipe = make()
record(pipe, 500)
print(pipe.flush(1), pipe.stats().pending, pipe.stats().dropped, flush=True)
"""
    out, _ = _client(script, server, tmp_path).communicate(timeout=30)
    assert out == "False 500 0\n"
    server.start()


@pytest.mark.skipif(os.getuid() != 0, reason="mounting a file system needs root")
def test_a_file_system_without_room_fills_and_recovers(server: ProfileServer, tmp_path: Path) -> None:
    with _mounted(tmp_path / "small", "size=300k") as place:
        pipe = TelemetryPipe(Telemetry(server.url, spool_dir=place))
        server.stop()
        for number in range(5000):
            pipe.record("s", f"/page/{number}", "", bytes(20), "m", "server", 1.0, 10)
        assert not pipe.flush(2)
        assert (pipe.stats().pending, pipe.stats().dropped) == (5000, 0)
        server.start()
        pipe._disk_down_until = 0.0
        for number in range(10):
            pipe.record("s", f"/page/{number}", "", bytes(20), "m", "server", 1.0, 10)
        pipe.flush(10)
        pipe.close()
        with server.store.read() as db:
            assert db.exec_driver_sql(_COUNTS).one() == (5010, 5010)


@pytest.mark.skipif(os.getuid() != 0, reason="mounting a file system needs root")
def test_a_read_only_directory_keeps_events_in_memory(server: ProfileServer, tmp_path: Path) -> None:
    with _mounted(tmp_path / "ro", "ro") as place:
        pipe = TelemetryPipe(Telemetry(server.url, spool_dir=place / "telemetry"))
        pipe.record("s", "/", "", bytes(20), "m", "server", 1.0, 10)
        assert pipe.flush(5)
        assert pipe.stats().sent == 1
        pipe.close()
