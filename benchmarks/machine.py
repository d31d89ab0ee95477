"""What a figure was measured on: enough to judge it, nothing that names the machine."""

from __future__ import annotations

import os
import platform
import time
from importlib import metadata
from pathlib import Path

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
"""Not passed on to contestants: torch.set_num_threads(1) is all that a user writes, and has to be enough."""

_PACKAGES = ("swath", "torchrl", "stable-baselines3", "pufferlib", "torch", "tensordict", "gymnasium", "numpy")


def facts() -> dict[str, str]:
    """Processor, cores, system and versions."""
    return {
        "cpu": _cpu_model(),
        "cores": str(usable_cores()),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        **{package: _version(package) for package in _PACKAGES},
    }


def usable_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def busy_share(seconds: float = 0.3) -> float | None:
    """How much of all cores is at work during the next moment: by others, if nothing of ours runs. None if unknown."""
    before = _times()
    time.sleep(seconds)
    after = _times()
    if before is None or after is None or after[1] == before[1]:
        return None
    return 1 - (after[0] - before[0]) / (after[1] - before[1])


def _times() -> tuple[int, int] | None:
    """Idle and all time of all cores so far."""
    try:
        fields = [int(field) for field in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    except (OSError, ValueError):
        return None
    return fields[3] + fields[4], sum(fields)


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or "unknown"
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or "unknown")


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"
