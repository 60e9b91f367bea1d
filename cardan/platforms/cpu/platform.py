"""The CPU as a platform: the one that everybody has. Importing this brings no torch."""

import platform as host_platform
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import TYPE_CHECKING, ClassVar

from cardan.core.interfaces.capabilities import Capabilities, DeviceInfo
from cardan.core.interfaces.constraints import Constraint
from cardan.core.interfaces.device import Device
from cardan.core.interfaces.platform import ConfigView, Platform, Probe
from cardan.platforms.cpu import host

if TYPE_CHECKING:
    from cardan.core.interfaces.attention import AttentionBackend

# Any accelerator that is present outscores this.
_SCORE = 1
# Instruction sets that multiply bfloat16 in hardware; elsewhere it is slower than float32.
_FAST_BF16 = frozenset({"avx512_bf16", "amx_bf16", "bf16"})
# The KV cache's share of host memory unless the user says otherwise.
_MOST_KV_BYTES = 4 << 30
_KV_SHARE = 0.25


class CpuPlatform(Platform):
    """torch on the host's processors; every process has exactly one such device."""

    name: ClassVar[str] = "cpu"
    contract: ClassVar[tuple[int, int]] = (0, 1)

    def probe(self) -> Probe:
        if find_spec("torch") is None:
            return Probe.broken("torch is not installed", "pip install 'cardan[cpu]'")
        return Probe.present(_SCORE, host.cpu_name())

    def devices(self) -> Sequence[DeviceInfo]:
        return (
            DeviceInfo(
                platform=self.name,
                index=0,
                name=host.cpu_name(),
                arch=host_platform.machine(),
                memory_bytes=host.total_memory(),
                details={
                    "threads": str(host.usable_threads()),
                    "numa_nodes": str(host.numa_nodes()),
                },
            ),
        )

    def capabilities(self, device: DeviceInfo) -> Capabilities:
        sets = host.instruction_sets()
        fast_bf16 = not _FAST_BF16.isdisjoint(sets)
        return Capabilities(
            dtypes=("bfloat16", "float32") if fast_bf16 else ("float32", "bfloat16"),
            instruction_sets=sets,
            unified_memory=True,
            determinism="run",
        )

    def constrain(self, config: ConfigView, device: DeviceInfo) -> Sequence[Constraint]:
        dtype = self.capabilities(device).dtypes[0]
        has_bf16 = dtype == "bfloat16"
        why = "computes" if has_bf16 else "has no instructions for bfloat16, so float32 computes"
        budget = min(_MOST_KV_BYTES, int(host.free_memory() * _KV_SHARE))
        return (
            Constraint("model.dtype", "==", dtype, f"this CPU {why} fastest in it", "prefer"),
            Constraint("cache.block_size", "==", 32, "long runs of keys to gather", "prefer"),
            Constraint(
                "cache.kv_cache_memory_bytes",
                "==",
                budget,
                "a quarter of the free memory, at most 4 GiB, leaves the host usable",
                "prefer",
            ),
            Constraint("scheduler.async_depth", "==", 0, "the host itself computes the step"),
            Constraint(
                "parallel.tensor_parallel_size",
                "==",
                1,
                "one process serves all cores; ranks over processes are not wired up yet",
            ),
        )

    def attention(self, device: DeviceInfo) -> "Sequence[type[AttentionBackend]]":
        from cardan.platforms.cpu.attention import CpuAttention

        return (CpuAttention,)

    def open(self, device: DeviceInfo) -> Device:
        from cardan.platforms.cpu.device import CpuDevice

        return CpuDevice(device, self.capabilities(device))

    def doctor(self, device: DeviceInfo) -> Mapping[str, str]:
        try:
            return {"torch": version("torch")}
        except PackageNotFoundError:
            return {"torch": "not installed"}
