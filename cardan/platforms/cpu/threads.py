"""How many threads to compute with."""

import math
from pathlib import Path

from cardan.platforms.cpu.cgroup import cpu_quota
from cardan.platforms.cpu.numa import allowed_cpus, cores_of


def usable_threads(root: Path = Path("/")) -> int:
    """CPUs that affinity allows, counting the siblings of a core once, within the group's quota.

    A quota is rounded up; at least 1. ``root``: the file system to read.
    """
    threads = len(cores_of(root, allowed_cpus()))
    quota = cpu_quota(root)
    return max(1, threads if quota is None else min(threads, math.ceil(quota)))
