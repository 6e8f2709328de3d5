"""mcp-client from the shell, against a running server."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from stub_server import StubServer
from tests import models


@pytest.fixture(scope="module")
def server(affine_model: Path) -> Iterator[StubServer]:
    with StubServer(affine_model) as running:
        yield running


def mcp_client(*arguments: str, text: str | None = None) -> subprocess.CompletedProcess[str]:
    code = "from mcp_client.cli import main; main()"
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, input=text, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("way", ["argument", "stdin", "json file", "npy file"])
def test_infer_prints_the_answer_as_json(server: StubServer, tmp_path: Path, way: str) -> None:
    x = np.array([[0.1, 0.9, 0.4]], np.float32)
    (tmp_path / "x.json").write_text(json.dumps(x.tolist()))
    np.save(tmp_path / "x.npy", x)
    inputs = {
        "argument": "[0.1, 0.9, 0.4]",
        "stdin": "-",
        "json file": f"@{tmp_path}/x.json",
        "npy file": f"@{tmp_path}/x.npy",
    }[way]
    run = mcp_client("infer", server.url, inputs, text="[0.1, 0.9, 0.4]" if way == "stdin" else None)
    assert run.returncode == 0, run.stderr
    answer = json.loads(run.stdout)
    assert answer["source"] == "server"
    probs = answer["outputs"]["probs"]
    assert (probs["shape"], probs["datatype"]) == ([1, 2], "FP32")
    np.testing.assert_allclose(probs["data"], (x @ models.WEIGHTS + models.BIAS).ravel(), rtol=1e-6)


def test_check_shows_the_models(server: StubServer) -> None:
    run = mcp_client("check", server.url)
    assert run.returncode == 0, run.stderr
    assert "affine" in run.stdout
    assert "probs" in run.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("infer", "http://127.0.0.1:9", "[1]"), "is the server running"),
        (("infer", "ftp://x", "[1]"), "http://host:port"),
        (("check", "http://127.0.0.1:9"), "not ready"),
        (("infer", "SERVER", "[1, 2]"), "must have shape"),
        (("infer", "SERVER", "[1, 2"), "not JSON"),
        (("infer", "SERVER", "@nowhere.json"), "nowhere.json"),
    ],
)
def test_errors_are_one_line(server: StubServer, arguments: tuple[str, ...], said: str) -> None:
    run = mcp_client(*(server.url if word == "SERVER" else word for word in arguments))
    assert run.returncode == 1
    assert said in run.stderr
    assert "Traceback" not in run.stderr
