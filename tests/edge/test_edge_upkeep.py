"""Looking after a repository: what is there, what may go, and the commands that do it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from mcp_client.cli.models import app
from mcp_client.edge.repository import ModelRepository
from mcp_client.edge.runtime import EdgeRuntime
from mcp_client.edge.upkeep import remove, survey, trim
from mcp_client.errors import EdgeError
from mcp_client.request import Request
from tests import models


def versions(repository: ModelRepository, model: str = "m") -> list[str]:
    return repository.versions(model)


def test_a_survey_says_what_is_used_pinned_and_damaged(tmp_path: Path) -> None:
    models.repository(tmp_path, m={"1": 1.0, "2": 2.0})
    models.external(tmp_path / "e" / "1" / "model.onnx")
    (tmp_path / "m" / "2" / "model.onnx.sha256").write_text("0" * 64)
    repository = ModelRepository(tmp_path)
    repository.pin("m", "1")
    held = {(each.model, each.version): each for each in survey(repository)}
    assert [(each.current, each.pinned, bool(each.fault)) for each in held.values()] == [
        (True, False, False),
        (True, True, False),
        (False, False, True),
    ]
    files = ("model.onnx", "weights.bin")
    assert held["e", "1"].nbytes == sum((tmp_path / "e" / "1" / name).stat().st_size for name in files)


def test_a_removed_version_is_gone_and_what_is_loaded_of_it_goes_on(tmp_path: Path) -> None:
    models.repository(tmp_path, m={"1": 1.0, "2": 2.0})
    runtime = EdgeRuntime(tmp_path)
    request = Request(model="m", version="1", inputs={"x": np.ones((1, 3), np.float32)})
    before = runtime.run(request).outputs["probs"]
    assert remove(runtime.repository, "m", "1") > 100
    assert versions(runtime.repository) == ["2"]
    runtime.refresh()
    assert np.array_equal(runtime.run(request).outputs["probs"], before)
    runtime.close()


def test_only_what_is_there_and_not_pinned_can_be_removed(tmp_path: Path) -> None:
    models.repository(tmp_path, m={"1": 1.0})
    models.affine(tmp_path / "plain.onnx")
    repository = ModelRepository(tmp_path)
    repository.pin("m", "1")
    with pytest.raises(EdgeError, match="is pinned"):
        remove(repository, "m", "1")
    for model, version in (("m", "2"), ("x", "1"), ("..", "1"), ("m", "../..")):
        with pytest.raises(EdgeError, match="nothing was removed"):
            remove(repository, model, version)
    remove(repository, "plain", "1")
    assert repository.models() == ["m"]


def test_a_budget_takes_what_is_not_used_oldest_first(tmp_path: Path) -> None:
    models.repository(tmp_path, m={"1": 1.0, "2": 2.0, "3": 3.0, "4": 4.0})
    repository = ModelRepository(tmp_path)
    repository.pin("m", "2")
    each = next(iter(survey(repository))).nbytes
    assert trim(repository, 4 * each) == []
    assert [held.version for held in trim(repository, 3 * each)] == ["1"]
    assert [held.version for held in trim(repository, each)] == ["3", "4"]
    with pytest.raises(EdgeError, match="more than the budget"):
        trim(repository, each - 1)
    assert versions(repository) == ["2"]


def run(*arguments: str, folder: Path, status: int = 0) -> str:
    result = CliRunner().invoke(app, [*arguments, "--folder", str(folder)])
    assert result.exit_code == status, (result.output, result.exception)
    return result.stdout


def test_commands_from_sync_to_rollback(tmp_path: Path, stub_server: Callable[..., Any]) -> None:
    server = stub_server(models.repository(tmp_path / "server", m={"1": 1.0}))
    folder = tmp_path / "edge"
    assert run("sync", server.url, folder=folder) == "downloaded m 1\n"
    assert run("sync", server.url, "m", folder=folder) == "unchanged m 1\n"
    assert run("sync", server.url, "other", folder=folder, status=1) == ""
    models.repository(folder, m={"2": 2.0, "3": 3.0})
    run("pin", "m", "3", folder=folder)
    assert run("rollback", "m", folder=folder) == "pinned m 2\n"
    assert "2" in run("ls", folder=folder)
    assert run("unpin", "m", folder=folder) == "in use m 1\n"  # what the server runs
    assert run("rm", "m", "3", folder=folder).startswith("freed ")
    assert run("verify", folder=folder).startswith("intact m 1 sha256:")
    (folder / "m" / "1" / "model.onnx").write_bytes(b"x")
    assert "damaged m 1" in run("verify", folder=folder, status=1)
    assert run("sync", server.url, "--max-bytes", "1000", folder=folder) == "downloaded m 1\n"
    assert run("sync", server.url, "--max-bytes", "400", folder=folder) == "unchanged m 1\nremoved m 2\n"
