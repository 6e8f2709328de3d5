"""Virtual environments of the servers we did not write: made by pip on first use, with exact versions, and kept.

``python -m tests.peers.venvs`` makes those of the suite. They lie in ``.venv-peers`` of the checkout, or where
``MCP_PEERS_VENVS`` says, so that several checkouts can share them.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

_REQUIREMENTS = Path(__file__).parent / "requirements"
_CHECKOUT = Path(__file__).resolve().parents[2]


class PeerError(RuntimeError):
    """A peer can't be installed or started; the message holds what pip or the server said."""


def folder() -> Path:
    """Where the environments lie."""
    return Path(os.environ.get("MCP_PEERS_VENVS") or _CHECKOUT / ".venv-peers").resolve()


def python_of(peer: str) -> Path:
    """The Python of a peer's environment, which is made now if it is not there or its requirements changed.

    Every package is listed with its version in ``requirements/PEER.txt`` (``--no-deps``: nothing else comes in, and nothing
    moves under us). Processes that want the same environment wait for one another.
    """
    wanted = _REQUIREMENTS / f"{peer}.txt"
    key = hashlib.sha256(wanted.read_bytes() + sys.version.encode()).hexdigest()
    venv = folder() / peer
    venv.parent.mkdir(parents=True, exist_ok=True)
    with open(venv.parent / f"{peer}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        stamp = venv / "installed"
        if not (stamp.exists() and stamp.read_text() == key):
            shutil.rmtree(venv, ignore_errors=True)
            _run([sys.executable, "-m", "venv", str(venv)], peer)
            pip = [str(venv / "bin/python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
            _run([*pip, "--no-deps", "--only-binary=:all:", "--no-compile", "-r", str(wanted)], peer)
            stamp.write_text(key)
    return venv / "bin/python"


def main() -> None:
    """Make the environments of the suite, all at once: much of the time is waiting for the index."""
    peers = ("triton", "mlserver", "kserve")
    started = time.monotonic()
    with ThreadPoolExecutor() as pool:
        for peer, python in zip(peers, pool.map(python_of, peers), strict=True):
            print(f"{peer}: {python} ({time.monotonic() - started:.0f} s)")


def packages_of(python: Path) -> Path:
    """The folder with an environment's packages."""
    version = sysconfig.get_python_version()
    return python.parent.parent / "lib" / f"python{version}" / "site-packages"


def _run(command: list[str], peer: str) -> None:
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    if ran.returncode:
        raise PeerError(
            f"{peer} can't be installed, and the tests against it are not left out silently. {' '.join(command)}\n"
            f"{ran.stdout[-2000:]}{ran.stderr[-4000:]}"
        )


if __name__ == "__main__":
    try:
        main()
    except PeerError as error:
        sys.exit(str(error))
