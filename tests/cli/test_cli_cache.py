"""mcp-client cache, on the folder of a real client."""

from __future__ import annotations

import sqlite3
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
