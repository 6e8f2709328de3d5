"""The edge answers within 512 MB: a cold process in a control group that may have no more, swap included."""

from __future__ import annotations

import contextlib
import functools
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

FIRST_ANSWER = Path(__file__).parents[1] / "arm64" / "first_answer.py"
MB = 1024 * 1024


@contextlib.contextmanager
def limited(nbytes: int) -> Iterator[tuple[str, Callable[[], None]]]:
    """How memory is limited, and what a child must call to be: a memory cgroup (version 2 or 1) where one may be
    made, else the kernel's limit on private memory.
    """
    for root, limit, swap in (
        (Path("/sys/fs/cgroup"), "memory.max", ("memory.swap.max", 0)),
        (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes", ("memory.memsw.limit_in_bytes", nbytes)),
    ):
        group = root / f"mcp-test-{os.getpid()}"
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            if not (group / limit).exists():  # version 2 without the memory controller, or a plain tmpfs
                continue
            (group / limit).write_text(str(nbytes))
            with contextlib.suppress(OSError):  # a kernel that counts no swap
                (group / swap[0]).write_text(str(swap[1]))
            yield "cgroup", functools.partial(_join, group / "cgroup.procs")
            return
        finally:
            group.rmdir()
    yield "rlimit", lambda: resource.setrlimit(resource.RLIMIT_DATA, (nbytes, nbytes))


def _join(procs: Path) -> None:
    procs.write_text(str(os.getpid()))


def run_within(nbytes: int, *command: str | Path) -> subprocess.CompletedProcess[str]:
    with limited(nbytes) as (_, enter):
        return subprocess.run(
            [sys.executable, *command],
            preexec_fn=enter,
            capture_output=True,
            text=True,
            check=False,
            env=os.environ | {"PYTHONPATH": str(FIRST_ANSWER.parents[2])},
        )


def test_a_cold_process_answers_within_512_mb() -> None:
    done = run_within(512 * MB, FIRST_ANSWER)
    assert done.returncode == 0, done.stderr
    assert "answered" in done.stdout


def test_the_limit_is_one() -> None:
    """Else the test above would show nothing."""
    assert run_within(512 * MB, "-c", f"len(bytearray(b'x') * ({700 * MB}))").returncode != 0
