"""What a machine is said to be, from what its kernel says."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mcp_client.edge.device import cpu_identity, device_hint, usable_cores


def machine(root: Path, siblings: dict[int, str], files: dict[str, str] | None = None) -> Path:
    """A ``/sys`` that says which CPUs share a core."""
    texts = {
        f"devices/system/cpu/cpu{cpu}/topology/thread_siblings_list": text for cpu, text in siblings.items()
    }
    for name, text in (texts | (files or {})).items():
        path = root / "sys" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.fixture
def eight_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)


HYPER = {cpu: f"{cpu % 4},{cpu % 4 + 4}\n" for cpu in range(8)}


@pytest.mark.usefixtures("eight_cpus")
@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({}, 4),
        ({"fs/cgroup/cpu.max": "max 100000\n"}, 4),
        ({"fs/cgroup/cpu.max": "200000 100000\n"}, 2),
        ({"fs/cgroup/cpu.max": "150000 100000\n"}, 2),
        ({"fs/cgroup/cpu.max": "10000 100000\n"}, 1),
        ({"fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n", "fs/cgroup/cpu/cpu.cfs_period_us": "100000\n"}, 4),
        ({"fs/cgroup/cpu/cpu.cfs_quota_us": "300000\n", "fs/cgroup/cpu/cpu.cfs_period_us": "100000\n"}, 3),
        ({"fs/cgroup/cpu.max": "rubbish"}, 4),
    ],
    ids=str,
)
def test_cores_are_physical_and_within_the_quota(tmp_path: Path, files: dict[str, str], cores: int) -> None:
    assert usable_cores(machine(tmp_path, HYPER, files)) == cores


@pytest.mark.usefixtures("eight_cpus")
def test_cpus_are_cores_where_the_kernel_does_not_say(tmp_path: Path) -> None:
    assert usable_cores(tmp_path) == 8


def test_a_hint_names_what_can_be_used_here() -> None:
    hint = device_hint()
    assert hint.device == "cpu"
    assert 1 <= hint.threads == hint.cores <= (os.cpu_count() or 1)
    assert hint.memory_bytes > 0
    assert "CPUExecutionProvider" in hint.providers


def test_the_cpu_is_the_same_one_each_time() -> None:
    assert cpu_identity() == cpu_identity()
    assert len(cpu_identity()) == 16
