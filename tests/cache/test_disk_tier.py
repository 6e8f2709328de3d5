"""The disk tier: exact, shared between processes, and never an exception, whatever becomes of the disk."""

from __future__ import annotations

import logging
import os
import pickle
import signal
import sqlite3
import stat
import subprocess
import sys
import time
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mcp_client.cache import blob
from mcp_client.cache.blob import DamagedEntryError, decode, encode
from mcp_client.cache.disk import DiskTier
from mcp_client.cache.memory import Entry
from mcp_client.errors import ConfigurationError
from mcp_client.result import Answer

NOW = 1000.0


def entry(number: int = 0, *, size: int = 64, ttl: float = 60.0, model: str = "m") -> Entry:
    array = np.full(size, number, np.float32)
    return Entry(
        Answer.of({"y": array}, model=model, version="3", digest="sha256:x"), NOW, NOW + ttl, array.nbytes
    )


def key(number: int) -> bytes:
    return number.to_bytes(20, "little")


@pytest.fixture
def tier(tmp_path: Path):
    store = DiskTier(tmp_path / "cache", max_bytes=64 << 20)
    yield store
    store.close()


def test_what_is_read_is_what_was_written(tier: DiskTier) -> None:
    outputs = {
        "scalar": np.array(-0.0, np.float64),
        "empty": np.zeros((0, 3), np.int8),
        "nan": np.array([0x7FC00001], np.uint32).view(np.float32),
        "bf16": np.array([1.5, 2.5], ml_dtypes.bfloat16),
        "flags": np.array([[True], [False]]),
        "words": np.array([b"", b"a\0", b"\xff"], object),
        "large": np.arange(300_000, dtype=np.int64).reshape(3, -1),
    }
    answer = Answer.of(outputs, model="m", version="3", id="7", digest="sha256:x", max_age_s=5.0)
    tier.put(key(1), Entry(answer, NOW, NOW + 60, 1), NOW)
    found = tier.get(key(1), NOW + 1)
    assert found is not None
    assert list(found.answer.outputs) == list(outputs)
    for name, array in outputs.items():
        read = found.answer.outputs[name]
        assert (read.dtype, read.shape) == (array.dtype, array.shape)
        assert read.tolist() == array.tolist() if array.dtype == object else read.tobytes() == array.tobytes()
        assert not read.flags.writeable
    rest = found.answer
    assert (rest.model, rest.version, rest.id, rest.digest, rest.max_age_s) == (
        "m",
        "3",
        "7",
        "sha256:x",
        5.0,
    )


def test_an_entry_expires_by_the_wall_clock_wherever_it_is_read(tmp_path: Path) -> None:
    wall = [1e9]
    tier = DiskTier(tmp_path / "c", max_bytes=1 << 20, wall=lambda: wall[0])
    tier.put(key(1), entry(ttl=60), NOW)
    wall[0] += 59
    found = tier.get(key(1), 7.0)  # another process: its monotonic clock started elsewhere
    assert found is not None
    assert (found.stored_at, found.expires_at) == (7.0 - 59, 8.0)
    wall[0] += 1
    assert tier.get(key(1), 8.0) is None
    tier.close()


def test_the_directory_is_private(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "cache"
    folder.mkdir(parents=True, mode=0o755)
    DiskTier(folder, max_bytes=1 << 20).close()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_the_byte_budget_holds(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path / "c", max_bytes=4 << 20)
    rng = np.random.default_rng(0)
    for number in range(200):
        noise = rng.standard_normal(25_000).astype(np.float32)
        tier.put(key(number), Entry(Answer.of({"y": noise}), NOW, NOW + 60, noise.nbytes), NOW)
    assert (tmp_path / "c" / "cache.db").stat().st_size < 5 << 20
    assert tier.get(key(199), NOW) is not None
    assert tier.get(key(0), NOW) is None
    tier.close()


def test_a_model_is_dropped_for_every_process(tier: DiskTier, tmp_path: Path) -> None:
    other = DiskTier(tmp_path / "cache", max_bytes=64 << 20)
    for number in range(10):
        tier.put(key(number), entry(model="ab"[number % 2]), NOW)
    other.invalidate("a", NOW)
    assert [number for number in range(10) if tier.get(key(number), NOW)] == [1, 3, 5, 7, 9]
    other.clear(NOW)
    assert len(tier) == 0
    other.close()


# --- damage ---


@settings(max_examples=300)
@given(st.data())
def test_any_changed_bit_and_any_cut_is_noticed(data: st.DataObject) -> None:
    whole = encode(key(1), entry(size=400), now=NOW, wall=1e9)
    at = data.draw(st.integers(0, len(whole) - 1))
    bit = 1 << data.draw(st.integers(0, 7))
    broken = whole[:at] + bytes([whole[at] ^ bit]) + whole[at + 1 :]
    for bad in (broken, whole[:at], whole + b"\0"):
        with pytest.raises(DamagedEntryError):
            decode(key(1), bad, now=NOW, wall=1e9)
    with pytest.raises(DamagedEntryError, match="checksum"):
        decode(key(2), whole, now=NOW, wall=1e9)


def test_an_entry_of_another_format_is_a_miss(tier: DiskTier, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blob, "FORMAT", 2)
    tier.put(key(1), entry(), NOW)
    monkeypatch.undo()
    assert tier.get(key(1), NOW) is None


class Planted:
    """Unpickled, it would leave a file behind."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("column", ["value", "file", "key", "tag"])
def test_a_planted_pickle_is_never_loaded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, column: str
) -> None:
    folder = tmp_path / "cache"
    tier = DiskTier(folder, max_bytes=1 << 20)
    tier.put(key(1), entry(), NOW)
    bomb = pickle.dumps(Planted(tmp_path / "loaded"))
    with sqlite3.connect(folder / "cache.db") as db:
        if column == "value":
            db.execute("UPDATE Cache SET mode = 4, value = ?", (bomb,))
        elif column == "file":
            (folder / "bomb.val").write_bytes(bomb)
            db.execute("UPDATE Cache SET mode = 4, value = NULL, filename = 'bomb.val'")
        elif column == "key":
            db.execute("UPDATE Cache SET key = ?, raw = 0", (bomb,))
        else:
            db.execute("UPDATE Cache SET tag = ?", (bomb,))
    db.close()
    found = [tier.get(key(1), NOW) for _ in range(3)]
    if column == "tag":
        assert all(found)
    else:
        assert not any(found)
    tier.put(key(1), entry(5), NOW)
    assert tier.get(key(1), NOW) is not None
    tier.invalidate("m", NOW)
    tier.clear(NOW)
    tier.close()
    assert not (tmp_path / "loaded").exists()
    warnings = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warnings) == (1 if column in ("value", "file") else 0)


def test_a_planted_path_is_neither_read_nor_removed(tmp_path: Path) -> None:
    folder, precious = tmp_path / "cache", tmp_path / "precious"
    precious.write_bytes(b"mine")
    tier = DiskTier(folder, max_bytes=1 << 20)
    tier.put(key(1), entry(), NOW)
    with sqlite3.connect(folder / "cache.db") as db:
        db.execute("UPDATE Cache SET mode = 2, value = NULL, filename = '../precious'")
    db.close()
    assert tier.get(key(1), NOW) is None
    tier.put(key(1), entry(), NOW)
    tier.clear(NOW)
    tier.close()
    assert precious.read_bytes() == b"mine"


def test_settings_in_the_database_are_not_believed(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    DiskTier(folder, max_bytes=1 << 20).close()
    with sqlite3.connect(folder / "cache.db") as db:
        db.execute("UPDATE Settings SET value = 'evil' WHERE key = 'eviction_policy'")
        db.execute("INSERT INTO Settings VALUES ('disk_evil', 1)")
    db.close()
    tier = DiskTier(folder, max_bytes=1 << 20)
    tier.put(key(1), entry(), NOW)
    assert tier.get(key(1), NOW) is not None
    tier.close()


@pytest.mark.parametrize(
    "junk", [b"not a database at all" * 1000, b"", b"SQLite format 3\0" + b"\xff" * 5000]
)
def test_a_damaged_database_starts_over(
    tmp_path: Path, junk: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "cache"
    tier = DiskTier(folder, max_bytes=1 << 20)
    tier.put(key(1), entry(), NOW)
    tier.close()
    for path in folder.glob("cache.db*"):
        path.unlink()
    (folder / "cache.db").write_bytes(junk)
    tier = DiskTier(folder, max_bytes=1 << 20)
    assert tier.get(key(1), NOW) is None
    tier.put(key(1), entry(2), NOW)
    found = tier.get(key(1), NOW)
    assert found is not None
    assert found.answer.outputs["y"][0] == 2
    tier.close()
    assert len(caplog.records) == (1 if junk else 0)


def test_a_database_damaged_while_in_use_is_a_miss(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "cache"
    tier = DiskTier(folder, max_bytes=1 << 20)
    for number in range(50):
        tier.put(key(number), entry(number, size=2000), NOW)
    tier.close()
    size = (folder / "cache.db").stat().st_size
    with (folder / "cache.db").open("r+b") as file:
        file.seek(4096)
        file.write(os.urandom(size - 4096))
    tier = DiskTier(folder, max_bytes=1 << 20)
    for number in range(50):
        found = tier.get(key(number), NOW + 100 * number)
        assert found is None or found.answer.outputs["y"][0] == number
        tier.put(key(number), entry(number), NOW + 100 * number)
    tier.close()
    assert caplog.records


def test_a_folder_that_cannot_be_made_turns_the_tier_off(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("in the way")
    tier = DiskTier(tmp_path / "file" / "cache", max_bytes=1 << 20)
    tier.put(key(1), entry(), NOW)
    assert tier.get(key(1), NOW) is None
    tier.close()
    assert len(caplog.records) == 1
    assert "is off" in caplog.records[0].message


def run(script: str, *args: object, **options: object) -> subprocess.CompletedProcess[str]:
    head = "import sys, time; from tests.cache.test_disk_tier import *; folder = Path(sys.argv[1])\n"
    command = [sys.executable, "-c", head + script, *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, **options)  # type: ignore[call-overload]


def test_a_full_disk_is_one_warning_and_correct_answers(tmp_path: Path) -> None:
    """A limit on the size of files stands for the full disk: to SQLite both are a write that fails."""
    script = """
import resource
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stdout)
tier = DiskTier(folder, max_bytes=1 << 30)
resource.setrlimit(resource.RLIMIT_FSIZE, (2 << 20, 2 << 20))
rng = np.random.default_rng(0)
for number in range(100):
    noise = rng.standard_normal(25_000).astype(np.float32); noise[0] = number
    tier.put(key(number), Entry(Answer.of({"y": noise}), NOW, NOW + 9999, noise.nbytes), NOW + 20 * number)
    found = tier.get(key(number), NOW + 20 * number + 11)
    assert found is None or found.answer.outputs["y"][0] == number
assert tier.failures > 0
tier.close()
"""
    done = run(script, tmp_path / "cache")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("failed, which is a miss") == 1


# --- several processes ---

WRITER = """
tier = DiskTier(folder, max_bytes=1 << 26)
print("ready", flush=True)
number = 0
while True:
    tier.put(key(number % 50), entry(number % 50, size=20_000, ttl=1e9), NOW)
    found = tier.get(key((number * 7) % 50), NOW)
    assert found is None or found.answer.outputs["y"][0] == (number * 7) % 50
    number += 1
"""


def test_kill_9_in_a_loop_leaves_every_answer_right(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    tier = DiskTier(folder, max_bytes=1 << 26)
    head = "import sys; from tests.cache.test_disk_tier import *; folder = Path(sys.argv[1])\n"
    seen = 0
    for round_ in range(3):
        writer = subprocess.Popen(
            [sys.executable, "-c", head + WRITER, str(folder)], stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        assert writer.stdout is not None
        assert writer.stderr is not None
        assert writer.stdout.readline() == b"ready\n"
        until = time.monotonic() + 0.15 + 0.05 * round_
        while time.monotonic() < until:
            for number in range(50):
                found = tier.get(key(number), NOW)
                if found is not None:
                    seen += 1
                    assert (found.answer.outputs["y"] == number).all()
        os.kill(writer.pid, signal.SIGKILL)
        writer.wait()
        assert writer.stderr.read() == b""
        writer.stdout.close()
        writer.stderr.close()
    assert seen > 0
    fresh = DiskTier(folder, max_bytes=1 << 26)
    assert sum(fresh.get(key(number), NOW) is not None for number in range(50)) > 0
    for each in (fresh, tier):
        assert each.failures == 0
        each.close()


def test_one_process_leads_until_it_lands_or_dies(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    tier = DiskTier(folder, max_bytes=1 << 20)
    head = "import sys; from tests.cache.test_disk_tier import *; folder = Path(sys.argv[1])\n"
    script = head + (
        "tier = DiskTier(folder, max_bytes=1 << 20)\n"
        "for line in sys.stdin: print(getattr(tier, line.split()[0])(key(int(line.split()[1]))), flush=True)"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", script, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert other.stdin is not None
    assert other.stdout is not None

    def tell(line: str) -> str:
        print(line, file=other.stdin, flush=True)
        return other.stdout.readline().strip()  # type: ignore[union-attr]

    assert tier.lead(key(1))
    assert tell("lead 1") == "False"
    assert tell("lead 2") == "True"
    assert not tier.lead(key(2))
    tier.land(key(1))
    assert tell("lead 1") == "True"
    assert not tier.lead(key(1))
    other.kill()
    other.wait()
    assert tier.lead(key(1))
    assert tier.lead(key(2))
    other.stdin.close()
    other.stdout.close()
    tier.close()


def test_another_users_directory_is_refused(tmp_path: Path) -> None:
    if os.getuid() == 0:
        folder = tmp_path / "theirs"
        folder.mkdir()
        os.chown(folder, 12345, 12345)
        with pytest.raises(ConfigurationError, match="another user"):
            DiskTier(folder, max_bytes=1 << 20)


def test_a_read_only_cache_is_a_miss_and_a_warning(tmp_path: Path) -> None:
    """Where the tests run as root, whom no permission stops, it is looked at by another user."""
    script = """
tier = DiskTier(folder, max_bytes=1 << 20)
tier.put(key(1), entry(ttl=1e9), NOW)
tier.close()
for path in [folder, *folder.iterdir()]:
    if os.getuid() == 0:
        os.chown(path, 12345, 12345)
    path.chmod(0o500 if path == folder else 0o400)
Path.chmod = lambda *_: None  # as on a file system that is mounted read-only
if os.getuid() == 0:
    os.setuid(12345)
logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stdout)
tier = DiskTier(folder, max_bytes=1 << 20)
for _ in range(3):
    assert tier.get(key(2), NOW) is None
    tier.put(key(2), entry(), NOW)
tier.close()
"""
    for parent in (tmp_path, *tmp_path.parents):
        if "pytest" in parent.name:
            parent.chmod(0o755)
    done = run(script, tmp_path / "cache")
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.strip().splitlines()) == 1, done.stdout
