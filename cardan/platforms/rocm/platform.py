"""The platform for AMD's GPUs. Importing and probing start no HIP; they import no torch."""

import os
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from cardan.core.interfaces.capabilities import Capabilities, DeviceInfo
from cardan.core.interfaces.constraints import Constraint
from cardan.core.interfaces.device import Device
from cardan.core.interfaces.errors import UnsupportedError
from cardan.core.interfaces.graphs import ShapePolicy
from cardan.core.interfaces.kernels import Provider
from cardan.core.interfaces.platform import ConfigView, Platform, Probe
from cardan.core.interfaces.roofline import Roofline
from cardan.platforms.rocm.architectures import architecture, features, known_architectures
from cardan.platforms.rocm.products import gpu_roofline, known_gpus
from cardan.platforms.rocm.providers import providers
from cardan.platforms.rocm.topology import (
    DriverFacts,
    GpuFacts,
    Places,
    driver_facts,
    visible_gpus,
)
from cardan.platforms.rocm.torch_build import TorchBuild, installed_torch, package_version
from cardan.platforms.shared.triton.cache_dtypes import cache_dtypes

if TYPE_CHECKING:
    from cardan.core.interfaces.attention import AttentionBackend
    from cardan.core.types.model import ModelSummary

_SCORE = 100
_BUILD = "install a build of torch for ROCm (docs/rocm.md)"
_VARIABLES = ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")
# What the driver of the other vendor that torch is built for leaves in /dev.
_OTHERS = "nvidiactl"
# Rows of decode steps, and tokens of mixed ones, that graphs are captured for.
_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512)
_MANY_ROWS_FROM = 60 << 30


class RocmPlatform(Platform):
    """The GPUs of known instruction sets that ROCm's variables leave visible.

    Nothing here has run on such a GPU: docs/rocm.md says what was compiled, and what reviewed.
    """

    name = "rocm"
    contract = (1, 0)

    def __init__(
        self,
        places: Places | None = None,
        environment: Mapping[str, str] = os.environ,
        torch_build: Callable[[], TorchBuild] = installed_torch,
    ) -> None:
        """``places``: where the kernel's files are; ``torch_build`` looks at torch's."""
        self._places = places or Places()
        self._environment = environment
        self._torch_build = torch_build
        self._known: DriverFacts | None = None

    def probe(self) -> Probe:
        facts = self._facts()
        if not facts.is_loaded:
            return self._without_driver(facts)
        usable = self._usable()
        if not usable:
            return Probe.absent(self._why_none(facts))
        build = self._torch_build()
        if build.kind == "cuda" and (self._places.devices / _OTHERS).exists():
            return Probe.absent(f"torch {build.version} is a build for others that are here")
        if build.kind != "hip":
            return self._without_hip(build)
        gpus = [gpu for _, gpu in usable]
        closed = self._closed(gpus)
        if closed:
            return Probe.broken(
                f"this process may not open {closed}",
                "add its user to the groups render and video and log in again; in a container, "
                "pass --device /dev/kfd --device /dev/dri --group-add render --group-add video",
            )
        lacking = [gpu for gpu in gpus if build.archs and gpu.arch not in build.archs]
        if lacking:
            names = ", ".join(f"{gpu.name} ({gpu.arch})" for gpu in lacking)
            return Probe.broken(
                f"torch {build.version} has kernels for {', '.join(sorted(build.archs))}, and "
                f"none for {names}",
                "install a build of torch that has them, or leave these GPUs out of "
                "ROCR_VISIBLE_DEVICES",
            )
        return Probe.present(_SCORE, ", ".join(f"{gpu.name} ({gpu.arch})" for gpu in gpus))

    def devices(self) -> Sequence[DeviceInfo]:
        version = self._facts().version
        return tuple(
            DeviceInfo(
                platform=self.name,
                index=index,
                name=gpu.name,
                arch=gpu.arch,
                memory_bytes=gpu.memory_bytes,
                details={
                    "bus": gpu.bus_id,
                    "id": gpu.unique_id,
                    "ordinal": str(ordinal),
                    "render": gpu.render,
                    "units": str(gpu.num_units),
                    "lanes": str(gpu.lanes),
                    "driver": version or "of the kernel",
                },
            )
            for index, (ordinal, gpu) in enumerate(self._usable())
        )

    def open(self, device: DeviceInfo) -> Device:
        from cardan.platforms.rocm.device import open_device

        return open_device(device, self.capabilities(device))

    def capabilities(self, device: DeviceInfo) -> Capabilities:
        found = architecture(device.arch)
        if found is None:
            raise UnsupportedError(
                f"rocm knows no {device.arch}; it knows {', '.join(known_architectures())}"
            )
        return Capabilities(
            dtypes=("bfloat16", "float16", "float32"),
            kv_dtypes=cache_dtypes(device.arch),
            instruction_sets=features(found),
            graphs="full",
            async_depth=1,
            streams=True,
            pinned_host_memory=True,
            # Cards for desktops often go by the host.
            peer_copies=found.products == "mfma",
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

    def shapes(self, model: "ModelSummary", device: DeviceInfo) -> ShapePolicy:
        return ShapePolicy(token_buckets=_BUCKETS, sequence_buckets=_BUCKETS)

    def kernels(self, device: DeviceInfo) -> Sequence[Provider]:
        return providers(device.arch)

    def attention(self, device: DeviceInfo) -> "Sequence[type[AttentionBackend]]":
        if find_spec("triton") is None:
            return ()
        from cardan.platforms.shared.triton.attention import TritonAttention

        return (TritonAttention,)

    def doctor(self, device: DeviceInfo) -> Mapping[str, str]:
        build = self._torch_build()
        return {
            "torch": f"{build.version} ({build.kind})",
            "triton": package_version("triton"),
            "aiter": package_version("amd-aiter"),
            **device.details,
        }

    def roofline(self, device: DeviceInfo, measure: bool = False) -> Roofline | None:
        return gpu_roofline(device)

    def known_devices(self) -> Sequence[DeviceInfo]:
        return known_gpus(self.name)

    def _facts(self) -> DriverFacts:
        """Read once."""
        if self._known is None:
            self._known = driver_facts(self._places, self._environment)
        return self._known

    def _usable(self) -> list[tuple[int, GpuFacts]]:
        """Devices that are visible and known, each with its place among the visible ones, by which
        HIP counts; they are numbered in this order."""
        visible = visible_gpus(self._facts().gpus, self._environment)
        return [item for item in enumerate(visible) if architecture(item[1].arch) is not None]

    def _closed(self, gpus: Sequence[GpuFacts]) -> str:
        """Files that must be open to compute, and are not."""
        folder = self._places.devices
        wanted: list[Path] = [folder / "kfd"]
        wanted += [folder / "dri" / gpu.render for gpu in gpus if gpu.render]
        return ", ".join(str(path) for path in wanted if not self._places.is_open(path))

    def _why_none(self, facts: DriverFacts) -> str:
        if not facts.gpus:
            return "AMD's driver lists no GPU"
        visible = visible_gpus(facts.gpus, self._environment)
        if not visible:
            given = [name for name in _VARIABLES if name in self._environment]
            listed = ", ".join(f"{name}={self._environment[name]!r}" for name in given)
            return f"{listed} hides all of the {len(facts.gpus)} GPUs"
        found = ", ".join(f"{gpu.name} is {gpu.arch}" for gpu in visible)
        return f"no GPU is one of {', '.join(known_architectures())} ({found})"

    def _without_driver(self, facts: DriverFacts) -> Probe:
        """Only who has a torch for these GPUs wants to use one."""
        if not facts.num_on_bus:
            return Probe.absent("there is no AMD GPU")
        reason = f"{facts.num_on_bus} AMD GPUs are on the bus, and their driver is not loaded"
        if self._torch_build().kind != "hip":
            return Probe.absent(reason)
        return Probe.broken(
            f"{reason} (/sys/class/kfd is missing)",
            "load it (modprobe amdgpu), or install AMD's amdgpu-dkms for this kernel",
        )

    def _without_hip(self, build: TorchBuild) -> Probe:
        if build.kind == "none":
            return Probe.broken("torch is not installed", _BUILD)
        meant = "CUDA" if build.kind == "cuda" else "the host alone"
        return Probe.broken(f"torch {build.version} is a build for {meant}", _BUILD)
