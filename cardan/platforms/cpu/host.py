"""What the host offers: processors, threads, instruction sets, memory. Reads files only."""

import os
import platform
from collections.abc import Iterable
from pathlib import Path

# Flags of /proc/cpuinfo that kernels may need, by the names that cardan uses.
_X86_FLAGS = {
    "sse4_2": "sse4_2",
    "avx2": "avx2",
    "fma": "fma",
    "f16c": "f16c",
    "avx512f": "avx512f",
    "avx512_vnni": "avx512_vnni",
    "avx512_bf16": "avx512_bf16",
    "avx_vnni": "avx_vnni",
    "amx_bf16": "amx_bf16",
    "amx_int8": "amx_int8",
}
_ARM_FLAGS = {
    "asimd": "neon",
    "asimddp": "dotprod",
    "i8mm": "i8mm",
    "bf16": "bf16",
    "sve": "sve",
    "sve2": "sve2",
}
_UNLIMITED = 1 << 60


def cpu_name(proc: Path = Path("/proc")) -> str:
    """The processor's name as people know it."""
    for key in ("model name", "Model", "Hardware"):
        values = _cpuinfo(key, proc)
        if values:
            return values[0]
    return platform.processor() or platform.machine() or "CPU"


def instruction_sets(proc: Path = Path("/proc")) -> tuple[str, ...]:
    """Instruction sets that matter to kernels, in a fixed order."""
    flags: set[str] = set()
    for key in ("flags", "Features"):
        values = _cpuinfo(key, proc)
        if values:
            flags |= set(values[0].split())
    found = [name for flag, name in {**_X86_FLAGS, **_ARM_FLAGS}.items() if flag in flags]
    if not found and platform.machine() in ("arm64", "aarch64"):
        found = ["neon"]  # every 64-bit Arm has it; some systems have no /proc
    return tuple(found)


def usable_threads(
    proc: Path = Path("/proc"),
    cgroup: Path = Path("/sys/fs/cgroup"),
    topology: Path = Path("/sys/devices/system/cpu"),
) -> int:
    """Threads that can compute at once: affinity, the cgroup's quota, one for each core."""
    if hasattr(os, "sched_getaffinity"):
        cpus = sorted(os.sched_getaffinity(0))
    else:
        cpus = list(range(os.cpu_count() or 1))
    count = len(_first_siblings(cpus, topology))
    quota = _cpu_quota(proc, cgroup)
    if quota is not None:
        count = min(count, max(1, -(-int(quota * 1000) // 1000)))
    return max(1, count)


def numa_nodes(nodes: Path = Path("/sys/devices/system/node")) -> int:
    return max(1, len(list(nodes.glob("node[0-9]*")))) if nodes.is_dir() else 1


def total_memory(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes of memory that this process may use in all."""
    return min(_meminfo("MemTotal", proc), _cgroup_memory_limit(proc, cgroup))


def free_memory(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes that can be taken without swapping, within the cgroup's limit."""
    available = _meminfo("MemAvailable", proc)
    limit = _cgroup_memory_limit(proc, cgroup)
    if limit < _UNLIMITED:
        available = min(available, max(limit - _cgroup_memory_used(proc, cgroup), 0))
    return available


def _cpuinfo(key: str, proc: Path) -> list[str]:
    try:
        text = (proc / "cpuinfo").read_text(errors="replace")
    except OSError:
        return []
    values = []
    for line in text.splitlines():
        name, _, value = line.partition(":")
        if name.strip() == key:
            values.append(value.strip())
    return values


def _meminfo(key: str, proc: Path) -> int:
    try:
        text = (proc / "meminfo").read_text()
    except OSError:
        return _sysconf_memory()
    for line in text.splitlines():
        name, _, value = line.partition(":")
        if name == key:
            return int(value.split()[0]) * 1024
    return _sysconf_memory()


def _sysconf_memory() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _first_siblings(cpus: Iterable[int], topology: Path) -> list[int]:
    """One CPU for each physical core."""
    seen: set[str] = set()
    first = []
    for cpu in cpus:
        siblings = _read(topology / f"cpu{cpu}" / "topology" / "thread_siblings_list") or str(cpu)
        if siblings not in seen:
            seen.add(siblings)
            first.append(cpu)
    return first


def _cgroup_folders(proc: Path, cgroup: Path, controller: str) -> list[Path]:
    """Folders of this process's cgroup (v2, then v1's controller) up to the root."""
    folders: list[Path] = []
    for line in (_read(proc / "self" / "cgroup") or "").splitlines():
        _number, controllers, path = line.split(":", 2)
        base = cgroup if not controllers else cgroup / controller
        if not controllers or controller in controllers.split(","):
            inner = base / path.lstrip("/")
            while inner != base and base in inner.parents:
                folders.append(inner)
                inner = inner.parent
            folders.append(base)
    return folders or [cgroup, cgroup / controller]


def _cpu_quota(proc: Path, cgroup: Path) -> float | None:
    """CPUs' worth of time that the cgroup may use; None without a limit."""
    quotas: list[float] = []
    for folder in _cgroup_folders(proc, cgroup, "cpu"):
        text = _read(folder / "cpu.max")
        if text is None:
            quota, period = _read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us")
            text = f"{quota} {period}" if quota and period else None
        if text is not None:
            quota, _, period = text.partition(" ")
            if quota not in ("max", "-1"):
                quotas.append(int(quota) / int(period or 100_000))
    return min(quotas, default=None)


def _cgroup_memory_limit(proc: Path, cgroup: Path) -> int:
    limits = [_UNLIMITED]
    for folder in _cgroup_folders(proc, cgroup, "memory"):
        for name in ("memory.max", "memory.limit_in_bytes"):
            text = _read(folder / name)
            if text is not None and text != "max":
                limits.append(int(text))
    return min(limits)


def _cgroup_memory_used(proc: Path, cgroup: Path) -> int:
    for folder in _cgroup_folders(proc, cgroup, "memory"):
        for name in ("memory.current", "memory.usage_in_bytes"):
            text = _read(folder / name)
            if text is not None:
                return int(text)
    return 0


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None
