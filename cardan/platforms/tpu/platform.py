"""The platform for Google's TPUs. Importing and probing start no runtime; imports no jax."""

import os
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from cardan.core.interfaces.capabilities import Capabilities, DeviceInfo
from cardan.core.interfaces.constraints import Constraint
from cardan.core.interfaces.device import Device
from cardan.core.interfaces.errors import UnsupportedError
from cardan.core.interfaces.graphs import ShapePolicy
from cardan.core.interfaces.kernels import Needs, Provider
from cardan.core.interfaces.platform import ConfigView, Platform, Probe, Role
from cardan.core.interfaces.roofline import Roofline
from cardan.platforms.tpu.chips import Chip, chip_called, chips_of, device_nodes, known_chips

if TYPE_CHECKING:
    from cardan.core.interfaces.executor import ModelExecutor, ModelParts
    from cardan.core.types.model import ModelSummary

# How many devices the host's processor poses as: programs are compiled for it instead of TPUs.
HOST_VARIABLE = "CARDAN_TPU_HOST"
HOST_ARCH = "host"

_SCORE = 95
_EXTRA = "pip install 'cardan[tpu]'"
_MODULES = ("jax", "torchax", "torch")


class TpuPlatform(Platform):
    """The TPUs of this machine; a host that poses as one only where the environment asks for it.

    jax and torchax rename torch's device of third parties, hence the claim.
    """

    name = "tpu"
    contract = (1, 0)
    claims = frozenset({"torch.privateuse1"})

    def __init__(self, root: Path = Path("/"), environment: Mapping[str, str] = os.environ) -> None:
        """``root`` is where the machine's files are."""
        self._root = root
        self._environment = environment

    def probe(self) -> Probe:
        chips, is_host = chips_of(self._root), self._is_host
        if not chips and not is_host:
            return Probe.absent("there is no TPU on the PCI bus")
        missing = [name for name in _MODULES if find_spec(name) is None]
        if chips and not is_host and find_spec("libtpu") is None:
            missing.append("libtpu")
        if missing:
            return Probe.broken(f"{', '.join(missing)} is not installed", _EXTRA)
        if is_host:
            return Probe.present(0, "programs for TPUs, compiled for this host by XLA")
        if not device_nodes(self._root):
            fix = "load the driver, or give the container the devices /dev/accel* or /dev/vfio"
            return Probe.broken("no device node leads to the TPUs", fix)
        return Probe.present(_SCORE, f"{len(chips)} x {chips[0].name}")

    def devices(self) -> Sequence[DeviceInfo]:
        if self._is_host:
            return tuple(
                DeviceInfo(platform="tpu", index=index, name="XLA on the host", arch=HOST_ARCH)
                for index in range(self._num_host_devices)
            )
        return tuple(_info(index, chip) for index, chip in enumerate(chips_of(self._root)))

    def open(self, device: DeviceInfo) -> Device:
        from cardan.platforms.tpu.opening import open_device

        return open_device(device, self.capabilities(device), max(self._num_host_devices, 1))

    def capabilities(self, device: DeviceInfo) -> Capabilities:
        is_host = device.arch == HOST_ARCH
        return Capabilities(
            dtypes=("float32", "bfloat16") if is_host else ("bfloat16", "float32"),
            float64=False,
            instruction_sets=(device.arch,),
            static_shapes=True,
            async_depth=1,
            determinism="run",
        )

    def constrain(self, config: ConfigView, device: DeviceInfo) -> Sequence[Constraint]:
        is_host = device.arch == HOST_ARCH
        rows, tokens, share = (8, 64, 0.2) if is_host else (128, 1024, 0.9)
        return (
            Constraint(
                "model.quantization",
                "in",
                (None, "none"),
                "weights are used in the model's dtype",
            ),
            Constraint("cache.kv_cache_dtype", "==", "auto", "the cache has the model's dtype"),
            Constraint(
                "cache.block_size",
                "==",
                32,
                "whole tiles of a TPU's memory hold 16 tokens in bfloat16",
                "prefer",
            ),
            Constraint("cache.block_size", "multiple_of", 8, "a tile of a TPU's memory has 8 rows"),
            Constraint(
                "cache.memory_utilization", "==", share, "programs say what they take", "prefer"
            ),
            Constraint(
                "scheduler.max_num_seqs", "==", rows, "each number of rows is compiled", "prefer"
            ),
            Constraint(
                "scheduler.max_num_batched_tokens",
                "==",
                tokens,
                "each number of tokens is compiled",
                "prefer",
            ),
        )

    def shapes(self, model: "ModelSummary", device: DeviceInfo) -> ShapePolicy:
        from cardan.platforms.tpu.buckets import step_policy

        return step_policy(model.max_model_len)

    def child_env(self, role: Role, devices: Sequence[DeviceInfo]) -> Mapping[str, str]:
        """jax takes the host's processor, and asks no metadata server, where that is wanted."""
        if not self._is_host:
            return {}
        wanted = {HOST_VARIABLE: str(self._num_host_devices), "JAX_PLATFORMS": "cpu"}
        return {name: value for name, value in wanted.items() if name not in self._environment}

    def kernels(self, device: DeviceInfo) -> Sequence[Provider]:
        """Operations whose definitions cannot be traced."""
        return (
            Provider(
                op="expert_mlp",
                name="tpu.expert_mlp",
                load="cardan.platforms.tpu.experts:expert_mlp",
                needs=Needs(modules=("jax", "torchax")),
            ),
        )

    def executor(
        self, device: Device, config: ConfigView, parts: "ModelParts"
    ) -> "ModelExecutor | None":
        from cardan.platforms.tpu.device import TpuDevice
        from cardan.platforms.tpu.executor import TpuExecutor

        if not isinstance(device, TpuDevice):
            raise UnsupportedError("the tpu executor runs on a device that its platform opened")
        return TpuExecutor(device, config, parts)

    def doctor(self, device: DeviceInfo) -> Mapping[str, str]:
        names = ("torch", "jax", "jaxlib", "torchax", "libtpu")
        return {**{name: _version(name) for name in names}, **device.details}

    def roofline(self, device: DeviceInfo, measure: bool = False) -> Roofline | None:
        chip = chip_called(device.name)
        if chip is None:
            return None
        half = chip.half_tflops * 1e12
        return Roofline(
            bytes_per_s=chip.gbytes_per_s * 1e9,
            # Products of float32 at full precision take six of bfloat16.
            flop_per_s={"bfloat16": half, "int8": chip.int8_tops * 1e12, "float32": half / 6},
            source=f"Google's documentation of {chip.name}",
        )

    def known_devices(self) -> Sequence[DeviceInfo]:
        return tuple(_info(0, chip) for chip in known_chips())

    @property
    def _is_host(self) -> bool:
        return self._num_host_devices > 0

    @property
    def _num_host_devices(self) -> int:
        number = self._environment.get(HOST_VARIABLE, "")
        return int(number) if number.isdigit() else 0


def _info(index: int, chip: Chip) -> DeviceInfo:
    return DeviceInfo(
        platform="tpu",
        index=index,
        name=chip.name,
        arch=chip.arch,
        memory_bytes=chip.memory_bytes,
    )


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "missing"
