"""What this machine is: how many cores a model may use, which accelerator is there, and what its CPU can
do.
"""

from __future__ import annotations

import hashlib
import math
import os
import platform
import re
from dataclasses import dataclass
from pathlib import Path

# Best first. TensorRT is left out: it spends minutes on building an engine before the first answer.
_PREFERRED = {
    "CUDAExecutionProvider": "cuda:0",
    "MIGraphXExecutionProvider": "rocm:0",
    "CoreMLExecutionProvider": "coreml",
}
_NODES = {"cuda:0": "/dev/nvidiactl", "rocm:0": "/dev/kfd"}  # a build for a GPU may run where there is none


@dataclass(frozen=True, slots=True)
class DeviceHint:
    """What to pass to ``EdgeRuntime``: ``device`` and ``threads``; and why: ``cores`` usable here,
    ``memory_bytes`` in all.
    """

    device: str
    threads: int
    cores: int
    memory_bytes: int
    providers: tuple[str, ...]


def device_hint() -> DeviceHint:
    """The best device that ONNX Runtime can use here. Raises ``ImportError`` where onnxruntime is not
    installed.
    """
    import onnxruntime as ort

    providers = tuple(ort.get_available_providers())
    devices = [device for provider, device in _PREFERRED.items() if provider in providers]
    device = next((each for each in devices if each not in _NODES or Path(_NODES[each]).exists()), "cpu")
    cores = usable_cores()
    return DeviceHint(device, cores, cores, _memory_bytes(), providers)


def usable_cores(root: Path = Path("/")) -> int:
    """Physical cores that this process may keep busy: its affinity, one per pair of hyper-threads, within its
    CPU quota.

    Two threads of a model on one core wait for each other; more threads than the quota allows are all stopped
    for the rest of each period. ``root``: where ``/sys`` lies.
    """
    try:
        cpus = os.sched_getaffinity(0)
    except AttributeError:  # macOS and Windows have no affinity to ask for
        return os.cpu_count() or 1
    cores = {_siblings(root, cpu) for cpu in cpus}
    return max(1, math.ceil(min(len(cores), _quota(root))))


def cpu_identity() -> str:
    """Equal on machines whose CPUs run the same instructions: an optimised graph is laid out for them."""
    described = {platform.machine()}
    for line in _read(Path("/proc/cpuinfo")).splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features", "CPU part"):  # x86, ARM
            described.add(value.strip())
    return hashlib.sha256("\n".join(sorted(described)).encode()).hexdigest()[:16]


def _siblings(root: Path, cpu: int) -> str:
    """Which logical CPUs share a core with this one, as the kernel writes it; alone if it does not say."""
    return _read(root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").strip() or str(cpu)


def _quota(root: Path) -> float:
    """CPUs' worth of time per period that the control group allows (version 2, then 1)."""
    quota, _, period = _read(root / "sys/fs/cgroup/cpu.max").strip().partition(" ")
    if not quota:
        quota = _read(root / "sys/fs/cgroup/cpu/cpu.cfs_quota_us").strip()
        period = _read(root / "sys/fs/cgroup/cpu/cpu.cfs_period_us").strip()
    if re.fullmatch(r"[1-9]\d*", quota) is None or re.fullmatch(r"[1-9]\d*", period) is None:
        return math.inf  # "max", "-1", or no control groups here
    return int(quota) / int(period)


def _memory_bytes() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return 0


def _read(path: Path) -> str:
    try:
        return path.read_text("utf-8", "replace")
    except OSError:
        return ""
