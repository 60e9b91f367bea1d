"""Limits that a container or service manager sets: control groups, versions 1 and 2.

All functions take the root of the file system, so that they can be tried on a made-up one.
"""

from collections.abc import Iterator
from pathlib import Path

# Version 1 writes "no limit" as the largest multiple of a page below 2**63.
_NO_LIMIT = 1 << 60


def cpu_quota(root: Path) -> float | None:
    """CPUs' worth of time that this process may use, or None without a limit."""
    quotas = []
    for folder in _folders(root, ""):
        quota, period, *_ = [*_read(folder / "cpu.max").split(), "", ""]
        if quota.isdigit() and period.isdigit():
            quotas.append(int(quota) / int(period))
    for folder in _folders(root, "cpu"):
        quota, period = (_read(folder / f"cpu.cfs_{name}_us") for name in ("quota", "period"))
        if quota.isdigit() and period.isdigit():
            quotas.append(int(quota) / int(period))
    return min(quotas, default=None)


def memory_limit(root: Path) -> int | None:
    """Bytes that this process's group may use, or None without a limit."""
    limits = [limit for limit, _ in _memory(root)]
    return min(limits, default=None)


def memory_left(root: Path) -> int | None:
    """Bytes below the tightest limit, counting file cache as free; None without a limit."""
    return min((max(0, limit - used) for limit, used in _memory(root)), default=None)


def _memory(root: Path) -> Iterator[tuple[int, int]]:
    """(limit, bytes used besides reclaimable file cache) of each limited group."""
    files = (
        ("", "memory.max", "memory.current", "inactive_file"),
        ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    )
    for controller, limit_file, usage_file, cache_key in files:
        for folder in _folders(root, controller):
            limit, usage = _read(folder / limit_file), _read(folder / usage_file)
            if not limit.isdigit() or int(limit) >= _NO_LIMIT:
                continue
            stat = dict(
                line.split()[:2] for line in _read(folder / "memory.stat").splitlines() if line
            )
            cache = int(stat.get(cache_key, 0))
            yield int(limit), max(0, int(usage) - cache) if usage.isdigit() else 0


def _folders(root: Path, controller: str) -> Iterator[Path]:
    """Folders of this process's group and its ancestors; ``controller`` "" is version 2.

    Inside a container the group's path is often that of the host and the mount shows the group
    itself, so the mount's top counts too.
    """
    mount = root / "sys/fs/cgroup"
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controller not in controllers.split(","):
            continue
        # Version 1 mounts a controller under its own name or those of all that share it.
        tops = [mount] if not controller else [mount / controllers, mount / controller]
        for top in dict.fromkeys(tops):
            folder = top / path.lstrip("/")
            for candidate in (folder, *folder.parents):
                if candidate.is_relative_to(top):
                    yield candidate


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""
