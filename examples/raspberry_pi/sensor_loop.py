"""A sensor watched by a model on the spot: no network needed, survives power cuts, and telemetry waits for
the network.

    python sensor_loop.py --models /var/lib/mcp/models --sensor /sys/class/thermal/thermal_zone0/temp

Model: ``x`` FP32 [1, n], the last n readings → ``score`` FP32 [1]; ``make_model.py`` makes one. New versions
come in through ``mcp-client models sync`` (mcp-models.timer) and are switched to while this runs.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import signal
import socket
import threading
import time
from collections import deque
from pathlib import Path

import numpy as np

from mcp_client import MCPClient
from mcp_client.config import Telemetry
from mcp_client.errors import MCPError

log = logging.getLogger("sensor")


def main() -> None:
    options = _options()
    logging.basicConfig(level=logging.INFO, format="%(message)s")  # journald adds the time
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    # Ten minutes between uploads: each transaction of the spool costs the SD card a few pages.
    telemetry = Telemetry(options.telemetry, interval_s=600.0) if options.telemetry else None
    # Every window is a new one, so that a cache and prefetch would only take memory.
    with MCPClient(f"edge:{options.models}", cache=None, prefetch=None, telemetry=telemetry) as client:
        watch(client, options, stop)


def watch(client: MCPClient, options: argparse.Namespace, stop: threading.Event) -> None:
    """Read, ask, tell; once per period, until told to stop or ``--steps`` are done."""
    session = client.session(socket.gethostname())
    window: deque[float] = deque(maxlen=options.window)
    started = time.monotonic()
    notify("READY=1")
    step = 0
    while not stop.is_set() and step != options.steps:
        step += 1
        try:
            window.append(read(options.sensor))
            if len(window) == options.window:
                x = np.array([window], dtype=np.float32)
                score = float(session.infer(x, path="/sensor", timeout=options.period).output[0])
                if score >= options.alarm:
                    log.warning("alarm: reading %.2f, score %.2f", window[-1], score)
            notify(
                "WATCHDOG=1"
            )  # only after a good step: systemd restarts a loop that has had none for a minute
        except (MCPError, OSError, ValueError) as error:
            log.error("no answer: %s", error)
        # By the clock, not by a pause: the time that a step takes does not add up.
        stop.wait(max(0.0, started + step * options.period - time.monotonic()))
    notify("STOPPING=1")


def read(sensor: Path) -> float:
    """One reading. The kernel's thermal zones count in thousandths of a degree."""
    return int(sensor.read_text()) / 1000


def notify(state: str) -> None:
    """Tell systemd (sd_notify(3)): a datagram to the socket it named; nothing where there is none."""
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.sendto(state.encode(), "\0" + address[1:] if address[0] == "@" else address)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", type=Path, default=Path("/var/lib/mcp/models"))
    parser.add_argument("--sensor", type=Path, default=Path("/sys/class/thermal/thermal_zone0/temp"))
    parser.add_argument("--telemetry", help="URL of an mcp-profile server; without it nothing is sent")
    parser.add_argument("--period", type=float, default=1.0, help="seconds between readings")
    parser.add_argument("--window", type=int, default=60, help="readings that the model sees")
    parser.add_argument("--alarm", type=float, default=4.0, help="a score from which on it is told")
    parser.add_argument("--steps", type=int, default=-1, help="stop after so many (default: never)")
    return parser.parse_args()


if __name__ == "__main__":
    main()
