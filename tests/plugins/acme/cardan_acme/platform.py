"""A platform with two devices that nothing can be computed on."""

from collections.abc import Sequence
from typing import ClassVar

from cardan.core.interfaces.attention import AttentionBackend
from cardan.core.interfaces.capabilities import Capabilities, DeviceInfo
from cardan.core.interfaces.constraints import Constraint
from cardan.core.interfaces.device import Device
from cardan.core.interfaces.platform import ConfigView, Platform, Probe


class AcmePlatform(Platform):
    name: ClassVar[str] = "acme"
    contract: ClassVar[tuple[int, int]] = (1, 0)
    claims: ClassVar[frozenset[str]] = frozenset({"torch.privateuse1"})

    def probe(self) -> Probe:
        return Probe.present(90, "two rockets found")

    def devices(self) -> Sequence[DeviceInfo]:
        return [
            DeviceInfo(
                platform="acme", index=index, name="Rocket", arch="r2", memory_bytes=8 * 2**30
            )
            for index in (0, 1)
        ]

    def open(self, device: DeviceInfo) -> Device:
        from cardan_acme.device import AcmeDevice

        return AcmeDevice(device)

    def capabilities(self, device: DeviceInfo) -> Capabilities:
        return Capabilities(dtypes=("bfloat16", "float32"), async_depth=1)

    def constrain(self, config: ConfigView, device: DeviceInfo) -> Sequence[Constraint]:
        return [Constraint("cache.block_size", "multiple_of", 32, "rockets load 32 tokens")]

    def attention(self, device: DeviceInfo) -> Sequence[type[AttentionBackend]]:
        from cardan_acme.attention import AcmeAttention

        return [AcmeAttention]
