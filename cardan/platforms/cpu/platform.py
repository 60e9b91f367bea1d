"""The CPU platform: found everywhere, chosen when nothing better is there. Imports no torch."""

import os
import platform
from collections.abc import Mapping, Sequence
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from cardan.core.interfaces.capabilities import Capabilities, DeviceInfo
from cardan.core.interfaces.constraints import Constraint
from cardan.core.interfaces.device import Device
from cardan.core.interfaces.errors import ConfigError
from cardan.core.interfaces.graphs import ShapePolicy
from cardan.core.interfaces.kernels import Needs, Provider
from cardan.core.interfaces.platform import ConfigView, Platform, Probe, Role
from cardan.core.interfaces.roofline import Roofline
from cardan.platforms.cpu.cpu_info import (
    NATIVE_BFLOAT16,
    cpu_name,
    instruction_sets,
    memory_bytes,
    memory_info,
    num_numa_nodes,
)
from cardan.platforms.cpu.native.block_providers import BLOCK_PROVIDERS
from cardan.platforms.cpu.native.elementwise_providers import ELEMENTWISE_PROVIDERS
from cardan.platforms.cpu.native.expert_providers import EXPERT_PROVIDERS
from cardan.platforms.cpu.native.library import native_status, start_building
from cardan.platforms.cpu.native.providers import LINEAR_PROVIDERS
from cardan.platforms.cpu.native.sampling_providers import SAMPLING_PROVIDERS
from cardan.platforms.cpu.numba.availability import is_installed as numba_is_installed
from cardan.platforms.cpu.numba.providers import NUMBA_PROVIDERS
from cardan.platforms.cpu.placement import (
    placement_facts,
    plan_placement,
    rank_details,
    rank_memory,
)
from cardan.platforms.cpu.roofline import cpu_roofline, measured_rates
from cardan.platforms.cpu.threads import usable_threads

if TYPE_CHECKING:
    from cardan.core.interfaces.attention import AttentionBackend
    from cardan.core.types.model import ModelSummary

_SCORE = 1
_MOST_KV_BYTES = 4 << 30
# Of a step that carries answers: about 25 ms of one thread's time for a model of 0.1 billion
# parameters, on AVX2.
_PROMPT_TOKENS_PER_THREAD = 128
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
_KERNELS = "cardan.platforms.cpu.kernels"
# Where the kernels cannot be compiled these say so, and the next ones serve.
_PROVIDERS: tuple[Provider, ...] = (
    *LINEAR_PROVIDERS,
    *BLOCK_PROVIDERS,
    *ELEMENTWISE_PROVIDERS,
    *EXPERT_PROVIDERS,
    *SAMPLING_PROVIDERS,
    Provider(
        op="rms_norm",
        name="cpu.rms_norm",
        load=f"{_KERNELS}:rms_norm",
        # In shorter dtypes torch rounds a float32 weight, or falls back with a warning.
        needs=Needs(dtypes=frozenset({"float32"})),
    ),
    Provider(
        op="rotary_embedding",
        name="cpu.rotary_embedding",
        load=f"{_KERNELS}:rotary_embedding",
    ),
)


class CpuPlatform(Platform):
    """One device: all CPUs that this process may use."""

    name = "cpu"
    contract = (1, 0)

    def __init__(self, root: Path = Path("/")) -> None:
        """``root``: the file system that facts are read from."""
        self._root = root

    def probe(self) -> Probe:
        if not _has_torch():
            return Probe.broken("torch is not installed", "pip install 'cardan[cpu]'")
        return Probe.present(_SCORE, cpu_name(self._root))

    def devices(self) -> Sequence[DeviceInfo]:
        details = {
            "num_threads": str(usable_threads(self._root)),
            "instruction_sets": " ".join(instruction_sets(self._root)),
            "numa_nodes": str(num_numa_nodes(self._root)),
            **rank_details(),
            "torch": _torch_version(),
        }
        return (
            DeviceInfo(
                platform=self.name,
                index=0,
                name=cpu_name(self._root),
                arch=platform.machine(),
                memory_bytes=memory_bytes(self._root),
                details=details,
            ),
        )

    def open(self, device: DeviceInfo) -> Device:
        placement = plan_placement(self._root, device, self._num_threads(device))
        # Before what brings torch, so that compilers run while that is imported.
        start_building()
        from cardan.platforms.cpu.device import CpuDevice

        source = partial(rank_memory, self._root, placement.num_ranks)
        return CpuDevice(device, self.capabilities(device), source, placement)

    def capabilities(self, device: DeviceInfo) -> Capabilities:
        features = instruction_sets(self._root)
        native = bool(NATIVE_BFLOAT16.intersection(features))
        short = ("bfloat16", "float32") if native else ("float32", "bfloat16")
        return Capabilities(
            dtypes=(*short, "float16"),
            instruction_sets=features,
            kv_dtypes=("int8",),
            graphs="decode",
            unified_memory=True,
            sleep_levels=(1, 2),
            determinism="run",
        )

    def constrain(self, config: ConfigView, device: DeviceInfo) -> Sequence[Constraint]:
        dtype = self.capabilities(device).dtypes[0]
        prompt_tokens = min(2048, _PROMPT_TOKENS_PER_THREAD * self._num_threads(device))
        return (
            Constraint(
                "scheduler.async_depth", "==", 0, "the CPU computes while the host would plan"
            ),
            Constraint(
                "parallel.tensor_parallel_size",
                "<=",
                config.get("device.num_threads") or usable_threads(self._root),
                "each rank is a process with CPUs of its own; --threads raises the limit",
            ),
            Constraint("cache.block_size", "==", 16, "small blocks waste little memory", "prefer"),
            Constraint(
                "scheduler.mixed_prefill_token_budget",
                "==",
                prompt_tokens,
                "prompts hold up running answers for no longer than a step of so many tokens takes",
                "prefer",
            ),
            Constraint("model.dtype", "==", dtype, "the fastest dtype of this CPU", "prefer"),
            *self._cache_size(config),
        )

    def child_env(self, role: Role, devices: Sequence[DeviceInfo]) -> Mapping[str, str]:
        """Sizes of thread pools that are made when libraries load, unless the user set them."""
        if role == "server" or not devices:
            return {}
        placement = plan_placement(self._root, devices[0], self._num_threads(devices[0]))
        threads = str(placement.num_threads)
        # Torch's threads sleep at once when they have nothing to do: the kernels' own pool needs
        # the CPUs then.
        wanted = {**dict.fromkeys(_THREAD_VARIABLES, threads), "OMP_WAIT_POLICY": "PASSIVE"}
        return {name: value for name, value in wanted.items() if name not in os.environ}

    def shapes(self, model: "ModelSummary", device: DeviceInfo) -> ShapePolicy:
        """Any shape: padding would be computed, and taking down a step costs little more than it
        does."""
        return ShapePolicy(lazy=True)

    def kernels(self, device: DeviceInfo) -> Sequence[Provider]:
        # The native kernels are asked first, so numba is imported only where they are missing.
        return (*_PROVIDERS, *NUMBA_PROVIDERS) if numba_is_installed() else _PROVIDERS

    def attention(self, device: DeviceInfo) -> "Sequence[type[AttentionBackend]]":
        from cardan.platforms.cpu.attention import CpuAttention
        from cardan.platforms.cpu.native.attention import NativeAttention
        from cardan.platforms.cpu.numba.attention import NumbaAttention

        if not numba_is_installed():
            return (NativeAttention, CpuAttention)
        return (NativeAttention, NumbaAttention, CpuAttention)

    def doctor(self, device: DeviceInfo) -> Mapping[str, str]:
        set_by_user = {name: os.environ[name] for name in _THREAD_VARIABLES if name in os.environ}
        facts = placement_facts(self._root)
        return {"torch": _torch_version(), "kernels": native_status(), **facts, **set_by_user}

    def roofline(self, device: DeviceInfo, measure: bool = False) -> Roofline | None:
        memory = memory_info(self._root)
        rates = measured_rates(self._num_threads(device)) if measure else None
        return cpu_roofline(rates, instruction_sets(self._root), memory.total - memory.free)

    def _cache_size(self, config: ConfigView) -> tuple[Constraint, ...]:
        """None where the user asked for a share of the memory."""
        if config.get("cache.memory_utilization") is not None:
            return ()
        num_bytes = min(_MOST_KV_BYTES, memory_info(self._root).free // 4)
        return (
            Constraint(
                "cache.kv_cache_memory_bytes",
                "==",
                num_bytes // config.get("parallel.tensor_parallel_size"),
                "a quarter of the free memory, at most 4 GiB, leaves the host usable",
                "prefer",
            ),
        )

    def _num_threads(self, device: DeviceInfo) -> int:
        """The number in the device's details, which a setting of the user replaces."""
        text = device.details.get("num_threads")
        if text is None:
            return usable_threads(self._root)
        if not text.isdigit() or int(text) < 1:
            raise ConfigError(f"device.num_threads must be a whole number from 1, got {text!r}")
        return int(text)


def _has_torch() -> bool:
    try:
        return find_spec("torch") is not None
    except (ImportError, ValueError):
        return False


def _torch_version() -> str:
    try:
        return version("torch")
    except PackageNotFoundError:
        return "missing"
