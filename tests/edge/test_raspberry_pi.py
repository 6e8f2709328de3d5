"""The Raspberry Pi example, run as systemd would run it: ready, alive, an alarm where there is one, a clean end."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "raspberry_pi"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the example's model, a sensor that reads 40 °C, and a socket for systemd's part."""
    subprocess.run(
        [sys.executable, EXAMPLE / "make_model.py", tmp_path / "models" / "anomaly.onnx"], check=True
    )
    (tmp_path / "temp").write_text("40000\n")
    return tmp_path


def start(folder: Path, *arguments: str) -> tuple[subprocess.Popen[str], socket.socket]:
    systemd = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    systemd.bind(str(folder / "notify"))
    systemd.settimeout(30)
    process = subprocess.Popen(
        [
            sys.executable, EXAMPLE / "sensor_loop.py", "--models", folder / "models", "--sensor", folder / "temp",
            "--period", "0.01", "--window", "20", *arguments,
        ],
        env=os.environ | {"NOTIFY_SOCKET": str(folder / "notify")},
        stderr=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    return process, systemd


def test_it_is_ready_alive_and_ends_when_told(folder: Path) -> None:
    process, systemd = start(folder)
    with systemd, process:
        assert systemd.recv(100) == b"READY=1"
        for _ in range(40):
            assert systemd.recv(100) == b"WATCHDOG=1"
        (folder / "temp").write_text("95000\n")
        for _ in range(20):
            systemd.recv(100)
        process.send_signal(signal.SIGTERM)
        said = process.stderr.read() if process.stderr else ""
        assert process.wait(20) == 0
    assert re.search(r"alarm: reading 95\.00, score \d", said)


def test_without_an_answer_the_watchdog_is_not_fed_and_it_goes_on_trying(folder: Path) -> None:
    model = folder / "models" / "anomaly.onnx"
    hidden = model.rename(folder / "hidden")
    process, systemd = start(folder, "--window", "1")
    with systemd, process:
        assert systemd.recv(100) == b"READY=1"
        systemd.settimeout(0.5)
        with pytest.raises(TimeoutError):
            systemd.recv(100)
        hidden.rename(model)
        systemd.settimeout(20)
        assert systemd.recv(100) == b"WATCHDOG=1"
        process.terminate()
        said = process.stderr.read() if process.stderr else ""
        assert process.wait(20) == 0
    assert "no answer" in said


def test_its_score_is_how_far_the_last_reading_is_out(folder: Path) -> None:
    from mcp_client.edge.model import OnnxModel

    x = np.random.default_rng(3).standard_normal((1, 60)).astype(np.float32)
    score = OnnxModel(folder / "models" / "anomaly.onnx").run({"x": x})["score"]
    assert np.allclose(score, abs(x[0, -1] - x.mean()) / (x.std() + 0.1), rtol=1e-4)
