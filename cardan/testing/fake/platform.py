"""A device that only poses as one: host memory behind a queue of asynchronous work."""

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from cardan.core.interfaces.capabilities import Capabilities, DeviceInfo
from cardan.core.interfaces.device import Device
from cardan.core.interfaces.errors import UnsupportedError
from cardan.core.interfaces.graphs import ShapePolicy
from cardan.core.interfaces.kernels import Provider
from cardan.core.interfaces.platform import ConfigView, Platform, Probe, Role
from cardan.core.types.model import ModelSummary
from cardan.testing.fake.settings import VARIABLE, FakeSettings

if TYPE_CHECKING:
    from cardan.core.interfaces.attention import AttentionBackend
    from cardan.core.interfaces.executor import ModelExecutor, ModelParts

_TOKEN_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
_SEQUENCE_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
_KV_LEN_BUCKETS = (64, 128, 256, 512, 1024, 2048, 4096, 8192)


class FakePlatform(Platform):
    """Found only where the environment asks for it; never chosen unless it is named."""

    name = "fake"
    contract = (1, 0)

    def __init__(self, settings: FakeSettings | None = None) -> None:
        """Without ``settings`` those of the environment hold."""
        self._settings = settings or FakeSettings.from_env(os.environ)

    def probe(self) -> Probe:
        if self._settings is None:
            return Probe.absent(f"for tests of the engine; {VARIABLE}=1 brings it up")
        self._probe_faults(self._settings)
        return Probe.present(0, "host memory that poses as a device")

    def devices(self) -> Sequence[DeviceInfo]:
        settings = self._held()
        return tuple(
            DeviceInfo(
                platform=self.name,
                index=index,
                name=f"fake device {index}",
                arch="fake",
                memory_bytes=settings.memory_mb << 20,
                details={"tier": settings.tier, "step_ms": f"{settings.step_ms:g}"},
            )
            for index in range(settings.num_devices)
        )

    def capabilities(self, device: DeviceInfo) -> Capabilities:
        settings = self._held()
        return Capabilities(
            dtypes=("float32", "bfloat16", "float16"),
            graphs=settings.graphs,
            static_shapes=settings.static,
            async_depth=settings.depth,
            streams=settings.tier == "kernel",
            sleep_levels=(1, 2) if settings.tier == "kernel" else (),
            determinism="run",
            float64=settings.float64,
        )

    def shapes(self, model: ModelSummary, device: DeviceInfo) -> ShapePolicy:
        settings = self._held()
        if not settings.static and settings.graphs == "none":
            return ShapePolicy()
        return ShapePolicy(
            token_buckets=_TOKEN_BUCKETS,
            sequence_buckets=_SEQUENCE_BUCKETS,
            kv_len_buckets=_KV_LEN_BUCKETS,
            strict=settings.static,
        )

    def child_env(self, role: Role, devices: Sequence[DeviceInfo]) -> Mapping[str, str]:
        value = os.environ.get(VARIABLE)
        return {} if value is None else {VARIABLE: value}

    def kernels(self, device: DeviceInfo) -> Sequence[Provider]:
        from cardan.testing.fake.faulty_kernels import providers

        return providers(self._held().faults)

    def attention(self, device: DeviceInfo) -> "Sequence[type[AttentionBackend]]":
        from cardan.testing.fake.attention import backends

        return backends(self._held().faults)

    def open(self, device: DeviceInfo) -> Device:
        if self._held().tier == "executor":
            from cardan.testing.fake.opaque_device import OpaqueDevice

            return OpaqueDevice(device, self.capabilities(device), self._held())
        from cardan.testing.fake.device import FakeDevice

        return FakeDevice(device, self.capabilities(device), self._held())

    def executor(
        self, device: Device, config: ConfigView, parts: "ModelParts"
    ) -> "ModelExecutor | None":
        if self._held().tier == "kernel":
            return None
        from cardan.testing.fake.executor import FakeExecutor
        from cardan.testing.fake.opaque_device import OpaqueDevice

        if not isinstance(device, OpaqueDevice):
            raise UnsupportedError("the fake executor runs on a device that its platform opened")
        return FakeExecutor(device, self._held(), config)

    def _probe_faults(self, settings: FakeSettings) -> None:
        if "env_write" in settings.faults:
            os.environ["CARDAN_FAKE_WAS_PROBED"] = "1"
        if "device_at_probe" in settings.faults:
            from cardan.testing.fake.queue import DeviceQueue

            DeviceQueue("probe").submit(lambda: None)

    def _held(self) -> FakeSettings:
        if self._settings is None:
            raise UnsupportedError(f"the fake platform has no settings; set {VARIABLE}")
        return self._settings
