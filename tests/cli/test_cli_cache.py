"""mcp-client cache, on the folder of a real client."""

from __future__ import annotations

import os
import pickle
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from mcp_client import Cache, MCPClient
from stub_server import StubServer
from tests.cli.test_cli import mcp_client


@pytest.fixture
def folder(affine_model: Path, tmp_path: Path) -> Path:
    with (
        StubServer(affine_model) as server,
        MCPClient(server.url, cache=Cache(directory=tmp_path / "cache")) as client,
    ):
        for n in range(3):
            client.infer([float(n), 0.0, 0.0], session="s", path=f"/page/{n}")
    return tmp_path / "cache"


def test_ls_and_stats_show_what_is_there(folder: Path) -> None:
    listed = mcp_client("cache", "ls", str(folder))
    assert listed.returncode == 0, listed.stderr
    assert [f"/page/{n}" in listed.stdout for n in range(4)] == [True, True, True, False]
    assert "affine" in listed.stdout
    stats = mcp_client("cache", "stats", str(folder))
    assert "3" in stats.stdout


@pytest.mark.parametrize(
    ("option", "left"),
    [
        (("--path", "/page/1"), 2),
        (("--model", "affine"), 0),
        (("--session", "s"), 0),
        (("--model", "other"), 3),
    ],
)
def test_rm_drops_what_fits(folder: Path, option: tuple[str, str], left: int) -> None:
    run = mcp_client("cache", "rm", str(folder), *option)
    assert run.stdout.strip() == f"{3 - left} entries dropped"
    assert mcp_client("cache", "ls", str(folder)).stdout.count("/page/") == left


def test_verify_finds_damage(folder: Path) -> None:
    assert mcp_client("cache", "verify", str(folder)).returncode == 0
    with sqlite3.connect(folder / "cache.db") as db:
        db.execute("UPDATE Cache SET value = x'00' WHERE rowid = 1")
    db.close()
    run = mcp_client("cache", "verify", str(folder))
    assert run.returncode == 1
    assert "1 damaged" in run.stdout


def test_clear_empties_it(folder: Path) -> None:
    assert mcp_client("cache", "clear", str(folder)).returncode == 0
    assert "/page/" not in mcp_client("cache", "ls", str(folder)).stdout


@pytest.mark.parametrize("command", ["ls", "stats", "verify", "clear"])
def test_a_folder_that_is_no_cache_is_told_and_left_alone(tmp_path: Path, command: str) -> None:
    run = mcp_client("cache", command, str(tmp_path / "nothing"))
    assert run.returncode == 1
    assert "is no cache" in run.stderr
    assert not (tmp_path / "nothing").exists()


def snapshot(folder: Path) -> dict[str, bytes]:
    return {
        file.name: file.read_bytes()
        for file in folder.iterdir()
        if file.is_file() and "-shm" not in file.name
    }


def settings(folder: Path) -> dict[str, object]:
    with closing(sqlite3.connect(folder / "cache.db")) as db:
        return dict(db.execute("SELECT key, value FROM Settings").fetchall())


@pytest.mark.parametrize("command", ["ls", "stats", "verify"])
def test_looking_changes_nothing(folder: Path, command: str) -> None:
    before, rules = snapshot(folder), settings(folder)
    assert mcp_client("cache", command, str(folder)).returncode == 0
    assert snapshot(folder)["cache.db"] == before["cache.db"]
    assert settings(folder) == rules


def test_rm_leaves_the_limits_as_they_are(folder: Path) -> None:
    limit = settings(folder)["size_limit"]
    mcp_client("cache", "rm", str(folder), "--path", "/page/1")
    assert settings(folder)["size_limit"] == limit


@pytest.mark.parametrize("harm", ["garbage", "header", "truncated", "empty", "no table"])
@pytest.mark.parametrize(
    "command", [["ls"], ["stats"], ["verify"], ["rm", "--model", "affine"], ["clear"]], ids=lambda c: c[0]
)
def test_a_damaged_database_is_told_and_never_started_over(
    folder: Path, harm: str, command: list[str]
) -> None:
    file = folder / "cache.db"
    for log in folder.glob("cache.db-*"):
        log.unlink()
    raw = file.read_bytes()
    match harm:
        case "garbage":
            file.write_bytes(os.urandom(5000))
        case "header":
            file.write_bytes(b"not SQLite format" + raw[17:])
        case "truncated":
            file.write_bytes(raw[: len(raw) // 3])
        case "empty":
            file.write_bytes(b"")
        case _:
            file.unlink()
            with closing(sqlite3.connect(file)) as db:
                db.execute("CREATE TABLE other (x)")
                db.commit()
    before = file.read_bytes()
    run = mcp_client("cache", command[0], str(folder), *command[1:])
    assert run.returncode == 1
    assert "can't be read as a cache" in run.stderr
    assert "Traceback" not in run.stderr
    assert file.read_bytes() == before


def test_what_another_program_planted_is_damage_not_an_entry(folder: Path) -> None:
    with closing(sqlite3.connect(folder / "cache.db")) as db:
        db.execute("UPDATE Cache SET mode = 4, value = ? WHERE rowid = 1", (pickle.dumps(print),))
        db.commit()
    run = mcp_client("cache", "verify", str(folder))
    assert run.returncode == 1
    assert "1 damaged" in run.stdout


def test_a_cache_in_use_can_be_looked_at(affine_model: Path, tmp_path: Path) -> None:
    with (
        StubServer(affine_model) as server,
        MCPClient(server.url, cache=Cache(directory=tmp_path / "cache")) as client,
    ):
        client.infer([1.0, 0.0, 0.0], path="/one")
        assert "/one" in mcp_client("cache", "ls", str(tmp_path / "cache")).stdout
        client.infer([2.0, 0.0, 0.0], path="/two")
        assert "/two" in mcp_client("cache", "ls", str(tmp_path / "cache")).stdout
        assert mcp_client("cache", "verify", str(tmp_path / "cache")).returncode == 0
