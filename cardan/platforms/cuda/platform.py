"""The platform for NVIDIA's GPUs. Importing and probing make no CUDA context; imports no torch."""

import os
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from cardan.core.interfaces.capabilities import Capabilities, DeviceInfo
from cardan.core.interfaces.constraints import Constraint
from cardan.core.interfaces.device import Device
from cardan.core.interfaces.graphs import ShapePolicy
from cardan.core.interfaces.kernels import Provider
from cardan.core.interfaces.platform import ConfigView, Platform, Probe, Role
from cardan.core.interfaces.roofline import Roofline
from cardan.platforms.cuda.nvml import (
    LIBRARY,
    DriverError,
    DriverFacts,
    GpuFacts,
    driver_facts,
    visible_gpus,
)
from cardan.platforms.cuda.providers import CUDA_PROVIDERS
from cardan.platforms.cuda.roofline import gpu_roofline, known_gpus
from cardan.platforms.shared.triton.cache_dtypes import cache_dtypes
from cardan.platforms.shared.triton.providers import TRITON_PROVIDERS

if TYPE_CHECKING:
    from cardan.core.interfaces.attention import AttentionBackend
    from cardan.core.types.model import ModelSummary

_SCORE = 100
_OLDEST = (8, 0)
_EXTRA = "pip install 'cardan[cuda]'"
# Rows of decode steps, and tokens of mixed ones, that graphs are captured for. Above the largest
# the launches of a step take less time than its work.
_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512)
_MANY_ROWS_FROM = 60 << 30
# What the driver of the other vendor that torch is built for leaves in /dev.
_OTHER_DRIVER = Path("/dev/kfd")


class CudaPlatform(Platform):
    """The GPUs that ``CUDA_VISIBLE_DEVICES`` leaves, from compute capability 8.0."""

    name = "cuda"
    contract = (1, 0)

    def __init__(
        self,
        facts: Callable[[], DriverFacts] = driver_facts,
        environment: Mapping[str, str] = os.environ,
        torch_folder: Callable[[], Path | None] | None = None,
    ) -> None:
        """``facts`` asks the driver; ``torch_folder`` finds torch without importing it."""
        self._ask = facts
        self._known: DriverFacts | OSError | DriverError | None = None
        self._environment = environment
        self._torch_folder = torch_folder or _torch_folder

    def probe(self) -> Probe:
        try:
            facts = self._facts()
        except OSError:
            return Probe.absent(f"there is no NVIDIA driver ({LIBRARY} is missing)")
        except DriverError as error:
            if error.is_absent:
                return Probe.absent("NVIDIA's driver is not loaded")
            fix = "load the driver that NVML belongs to, or restart after an update of it"
            return Probe.broken(str(error), fix)
        gpus = self._usable(facts)
        if not gpus:
            return Probe.absent(self._why_none(facts))
        return self._with_torch(gpus)

    def devices(self) -> Sequence[DeviceInfo]:
        try:
            facts = self._facts()
        except (OSError, DriverError):
            return ()
        return tuple(
            DeviceInfo(
                platform=self.name,
                index=index,
                name=gpu.name,
                arch=_arch(gpu),
                memory_bytes=gpu.memory_bytes,
                details={
                    "uuid": gpu.uuid,
                    "driver": facts.version,
                    "cuda": ".".join(map(str, facts.cuda_version)),
                },
            )
            for index, gpu in enumerate(self._usable(facts))
        )

    def open(self, device: DeviceInfo) -> Device:
        from cardan.platforms.cuda.device import open_device

        return open_device(device, self.capabilities(device))

    def capabilities(self, device: DeviceInfo) -> Capabilities:
        return Capabilities(
            dtypes=("bfloat16", "float16", "float32"),
            kv_dtypes=cache_dtypes(device.arch),
            instruction_sets=(device.arch, *_features(device.arch)),
            graphs="full",
            async_depth=1,
            streams=True,
            pinned_host_memory=True,
            peer_copies=True,
            sleep_levels=(1, 2),
            determinism="run",
        )

    def constrain(self, config: ConfigView, device: DeviceInfo) -> Sequence[Constraint]:
        num_rows = 512 if (device.memory_bytes or 0) >= _MANY_ROWS_FROM else 256
        return (
            Constraint("cache.block_size", "==", 16, "small blocks waste little memory", "prefer"),
            Constraint(
                "cache.memory_utilization",
                "==",
                0.9,
                "steps and graphs are measured, so a tenth is reserve enough",
                "prefer",
            ),
            Constraint(
                "scheduler.max_num_batched_tokens",
                "==",
                8192,
                "matrix products of so many rows reach the full rate",
                "prefer",
            ),
            Constraint(
                "scheduler.max_num_seqs",
                "==",
                num_rows,
                "weights are read once for all rows of a step",
                "prefer",
            ),
        )

    def child_env(self, role: Role, devices: Sequence[DeviceInfo]) -> Mapping[str, str]:
        """CUDA then counts devices as NVML does."""
        if role == "server" or not devices or "CUDA_DEVICE_ORDER" in self._environment:
            return {}
        return {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}

    def shapes(self, model: "ModelSummary", device: DeviceInfo) -> ShapePolicy:
        return ShapePolicy(token_buckets=_BUCKETS, sequence_buckets=_BUCKETS)

    def kernels(self, device: DeviceInfo) -> Sequence[Provider]:
        return (*CUDA_PROVIDERS, *TRITON_PROVIDERS)

    def attention(self, device: DeviceInfo) -> "Sequence[type[AttentionBackend]]":
        if find_spec("triton") is None:
            return ()
        from cardan.platforms.cuda.cudnn_attention import CudnnAttention
        from cardan.platforms.shared.triton.attention import TritonAttention

        return (TritonAttention, CudnnAttention)

    def doctor(self, device: DeviceInfo) -> Mapping[str, str]:
        versions = {name: _version(name) for name in ("torch", "triton")}
        return {**versions, **device.details}

    def roofline(self, device: DeviceInfo, measure: bool = False) -> Roofline | None:
        return gpu_roofline(device)

    def known_devices(self) -> Sequence[DeviceInfo]:
        return known_gpus(self.name)

    def _facts(self) -> DriverFacts:
        """What the driver said, a refusal too; it is asked once."""
        if self._known is None:
            try:
                self._known = self._ask()
            except (OSError, DriverError) as error:
                self._known = error
        if isinstance(self._known, DriverFacts):
            return self._known
        raise self._known

    def _usable(self, facts: DriverFacts) -> tuple[GpuFacts, ...]:
        """Devices that are visible and new enough; they are numbered in this order."""
        visible = visible_gpus(facts.gpus, self._environment)
        return tuple(gpu for gpu in visible if gpu.compute_capability >= _OLDEST)

    def _why_none(self, facts: DriverFacts) -> str:
        if not facts.gpus:
            return "the driver lists no GPU"
        visible = visible_gpus(facts.gpus, self._environment)
        if not visible:
            listed = self._environment.get("CUDA_VISIBLE_DEVICES", "")
            return f"CUDA_VISIBLE_DEVICES={listed!r} hides all of the {len(facts.gpus)} GPUs"
        found = ", ".join(f"{gpu.name} has {_capability(gpu)}" for gpu in visible)
        wanted = ".".join(map(str, _OLDEST))
        return f"no GPU has compute capability {wanted} or more ({found})"

    def _with_torch(self, gpus: Sequence[GpuFacts]) -> Probe:
        folder = self._torch_folder()
        if folder is None:
            return Probe.broken("torch is not installed", _EXTRA)
        if (folder / "lib" / "libtorch_hip.so").exists() and _OTHER_DRIVER.exists():
            return Probe.absent(
                f"torch {_version('torch')} is a build for other GPUs that are here"
            )
        if not (folder / "lib" / "libtorch_cuda.so").exists():
            return Probe.broken(
                f"torch {_version('torch')} is a build without CUDA",
                f"install a build of torch with CUDA: {_EXTRA}",
            )
        names = ", ".join(f"{gpu.name} ({_capability(gpu)})" for gpu in gpus)
        return Probe.present(_SCORE, names)


def _capability(gpu: GpuFacts) -> str:
    return ".".join(map(str, gpu.compute_capability))


def _arch(gpu: GpuFacts) -> str:
    return "sm_{}{}".format(*gpu.compute_capability)


def _features(arch: str) -> tuple[str, ...]:
    """Words that kernels ask for. Devices from 9.0 copy tiles of tensors by themselves."""
    return ("tile_copies",) if int(arch.removeprefix("sm_")) >= 90 else ()


def _torch_folder() -> Path | None:
    try:
        spec = find_spec("torch")
    except (ImportError, ValueError):
        return None
    places = spec.submodule_search_locations if spec is not None else None
    return Path(places[0]) if places else None


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "missing"
