"""The CPU's identity and memory, from the files of Linux or, elsewhere, from Python."""

import os
import platform
from pathlib import Path

from cardan.core.interfaces.memory import MemoryInfo
from cardan.platforms.cpu.cgroup import memory_left, memory_limit

# Instruction sets that kernels may need, as Linux names them (x86 "flags", Arm "Features").
INSTRUCTION_SETS: tuple[str, ...] = (
    "sse4_2",
    "avx2",
    "fma",
    "f16c",
    "avx_vnni",
    "avx512f",
    "avx512bw",
    "avx512dq",
    "avx512vl",
    "avx512_vnni",
    "avx512_bf16",
    "amx_tile",
    "amx_bf16",
    "amx_int8",
    "neon",
    "asimdhp",
    "asimddp",
    "i8mm",
    "sve",
    "bf16",
)
# Any of these multiplies bfloat16 matrices in hardware.
NATIVE_BFLOAT16 = frozenset({"avx512_bf16", "amx_bf16", "bf16"})
# Linux calls Arm's vector unit "neon" in 32 bits and "asimd" in 64.
_ALIASES = {"asimd": "neon"}


def instruction_sets(root: Path) -> tuple[str, ...]:
    """Those of ``INSTRUCTION_SETS`` that the CPU has."""
    fields = _cpuinfo(root)
    found = set(f"{fields.get('flags', '')} {fields.get('Features', '')}".split())
    found |= {_ALIASES.get(name, name) for name in found}
    return tuple(name for name in INSTRUCTION_SETS if name in found)


def cpu_name(root: Path) -> str:
    """The model's name, or the architecture where nothing better is known."""
    name = _cpuinfo(root).get("model name", "")
    return name or platform.processor() or platform.machine() or "unknown CPU"


def num_numa_nodes(root: Path) -> int:
    """Memory nodes; 1 where the system does not say."""
    return len(list((root / "sys/devices/system/node").glob("node[0-9]*"))) or 1


def memory_bytes(root: Path) -> int | None:
    """Memory of the machine, or the group's limit if that is less; None if unknown."""
    total = _meminfo(root).get("MemTotal") or _sysconf_total()
    if total is None:
        return None
    limit = memory_limit(root)
    return total if limit is None else min(total, limit)


def memory_info(root: Path) -> MemoryInfo:
    """What can be had without swapping, within the group's limit; an estimate."""
    total = memory_bytes(root) or 0
    free = _meminfo(root).get("MemAvailable", total // 2)
    left = memory_left(root)
    return MemoryInfo(total, min(free, total) if left is None else min(free, left), exact=False)


def _meminfo(root: Path) -> dict[str, int]:
    """Fields of /proc/meminfo, in bytes."""
    fields = {}
    for line in _lines(root / "proc/meminfo"):
        name, _, value = line.partition(":")
        number = value.split()[:1]
        if number and number[0].isdigit():
            fields[name] = int(number[0]) * 1024
    return fields


def _cpuinfo(root: Path) -> dict[str, str]:
    """Fields of the first processor that has them."""
    fields: dict[str, str] = {}
    for line in _lines(root / "proc/cpuinfo"):
        name, _, value = line.partition(":")
        fields.setdefault(name.strip(), value.strip())
    return fields


def _sysconf_total() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
