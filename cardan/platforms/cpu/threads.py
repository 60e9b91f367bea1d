"""How many threads to compute with."""

import math
import os
from pathlib import Path

from cardan.platforms.cpu.cgroup import cpu_quota


def usable_threads(root: Path = Path("/")) -> int:
    """CPUs that affinity allows, counting the siblings of a core once, within the group's quota.

    A quota is rounded up; at least 1. ``root``: the file system to read.
    """
    threads = _physical_cores(root, _allowed_cpus())
    quota = cpu_quota(root)
    return max(1, threads if quota is None else min(threads, math.ceil(quota)))


def _allowed_cpus() -> set[int]:
    if hasattr(os, "sched_getaffinity"):
        return set(os.sched_getaffinity(0))
    return set(range(os.cpu_count() or 1))


def _physical_cores(root: Path, cpus: set[int]) -> int:
    """Distinct cores among ``cpus``; a CPU of unknown topology counts as a core."""
    cores = set()
    for cpu in cpus:
        file = root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
        try:
            cores.add(file.read_text(encoding="ascii").strip())
        except OSError:
            cores.add(f"cpu {cpu}")
    return len(cores)
