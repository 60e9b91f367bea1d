"""The platform: found through the entry point ``basalt`` of the group ``cardan.platforms``."""

import os
from collections.abc import Sequence
from importlib.util import find_spec
from typing import ClassVar

from cardan.core.interfaces.attention import AttentionBackend
from cardan.core.interfaces.capabilities import Capabilities, DeviceInfo
from cardan.core.interfaces.constraints import Constraint
from cardan.core.interfaces.device import Device
from cardan.core.interfaces.kernels import Needs, Provider
from cardan.core.interfaces.memory import MemoryInfo
from cardan.core.interfaces.platform import ConfigView, Platform, Probe

_DTYPES = ("float32", "bfloat16", "float16")


class BasaltPlatform(Platform):
    """One Basalt B1, which is memory and arithmetic of the host behind a torch device of its own.

    Two operations have kernels, attention has a backend; all else runs on the definitions.
    """

    name: ClassVar[str] = "basalt"
    contract: ClassVar[tuple[int, int]] = (1, 0)
    # torch has one place for devices that it does not know, and a process one owner of it.
    claims: ClassVar[frozenset[str]] = frozenset({"torch.privateuse1"})

    def probe(self) -> Probe:
        if find_spec("torch") is None:
            return Probe.broken("torch is not installed", "pip install torch")
        # The score of what is only emulated: never chosen before a real device.
        return Probe.present(0, "one emulated Basalt B1")

    def devices(self) -> Sequence[DeviceInfo]:
        return [DeviceInfo(platform=self.name, index=0, name="Basalt B1 (emulated)", arch="b1")]

    def capabilities(self, device: DeviceInfo) -> Capabilities:
        return Capabilities(dtypes=_DTYPES, instruction_sets=("b1",), determinism="run")

    def constrain(self, config: ConfigView, device: DeviceInfo) -> Sequence[Constraint]:
        return [Constraint("cache.kv_cache_memory_bytes", "==", 1 << 28, "emulated", "prefer")]

    def open(self, device: DeviceInfo) -> Device:
        from cardan.core.interfaces.torch_device import TorchDevice
        from cardan_basalt.torch_backend import NAME, register

        register()
        return TorchDevice(device, self.capabilities(device), f"{NAME}:0", memory_info)

    def kernels(self, device: DeviceInfo) -> Sequence[Provider]:
        where = "cardan_basalt.kernels:"
        needs = Needs(dtypes=frozenset(_DTYPES), features=frozenset({"b1"}))
        return [
            Provider(op=op, name=f"basalt.{op}", load=where + op, prepare=prepare, needs=needs)
            for op, prepare in (("linear", where + "prepare_linear"), ("rms_norm", ""))
        ]

    def attention(self, device: DeviceInfo) -> Sequence[type[AttentionBackend]]:
        from cardan_basalt.attention import BasaltAttention

        return [BasaltAttention]


def memory_info() -> MemoryInfo:
    """The host's memory, of which others take their part at any time."""
    page = os.sysconf("SC_PAGE_SIZE")
    total, free = os.sysconf("SC_PHYS_PAGES") * page, os.sysconf("SC_AVPHYS_PAGES") * page
    return MemoryInfo(total=total, free=free, exact=False)
