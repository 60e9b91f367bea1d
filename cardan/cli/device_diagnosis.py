"""What ``cardan doctor`` finds out about one device, as plain data."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from cardan.cli.platforms import device_fields
from cardan.core.config.engine import EngineConfig
from cardan.core.config.model import ModelConfig
from cardan.core.constraint_solver import Decision, owned_constraints, solve
from cardan.core.discovery import describe
from cardan.core.interfaces.attention import AttentionBackend, AttentionNeed
from cardan.core.interfaces.capabilities import Capabilities, DeviceInfo
from cardan.core.interfaces.constraints import Constraint
from cardan.core.interfaces.device import Device
from cardan.core.interfaces.kernels import OpSpec, Provider
from cardan.core.interfaces.memory import MemoryInfo
from cardan.core.interfaces.platform import ConfigView, Platform
from cardan.core.runtime import Runtime


@dataclass(frozen=True, slots=True)
class BackendVerdict:
    """Whether an attention backend serves a common decoder layer, or why not."""

    name: str
    accepted: bool
    reasons: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class KernelRow:
    """One operation: its provider, the outcome of its check, and why not the others."""

    op: str
    provider: str
    self_check: str
    rejected: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceDiagnosis:
    """One device of the chosen platform.

    ``settings`` are those of a run in which the user sets none, with whose values they are.
    ``memory`` and ``kernels`` are known only if it could be opened (``opened``). ``note`` says why
    there is no kernel table; ``problems`` are calls into the platform that failed.
    """

    device: dict[str, Any]
    capabilities: dict[str, Any]
    facts: dict[str, str]
    settings: tuple[Decision, ...]
    attention: tuple[BackendVerdict, ...]
    opened: bool
    memory: MemoryInfo | None
    kernels: tuple[KernelRow, ...]
    note: str
    problems: tuple[str, ...]


class _Asker:
    """Calls into a platform; one that raises is noted down and answered with a default."""

    def __init__(self) -> None:
        self.problems: list[str] = []

    def ask(self, what: str, call: Callable[[], Any], default: Any) -> Any:
        try:
            return call()
        except Exception as error:
            self.problems.append(f"{what}: {describe(error)}")
            return default


def diagnose_device(
    platform: Platform,
    info: DeviceInfo,
    more_ops: Sequence[OpSpec] = (),
    more_providers: Sequence[Provider] = (),
    more_constraints: Callable[[ConfigView], Sequence[Constraint]] = lambda config: (),
) -> DeviceDiagnosis:
    """Ask a platform about one of its devices, open it, resolve its kernels, and close it.

    ``more_ops``, ``more_providers`` and ``more_constraints`` are those of plugins. Never raises for
    what it examines.
    """
    asker = _Asker()
    capabilities = asker.ask("capabilities()", lambda: platform.capabilities(info), Capabilities())
    memory: MemoryInfo | None = None
    kernels: tuple[KernelRow, ...] = ()
    note = ""
    with Runtime() as runtime:
        device: Device | None = asker.ask("open()", lambda: runtime.open(platform, info), None)
        if device is not None:
            memory = asker.ask("memory_info()", device.memory_info, None)
            note = _no_table_because(device, platform)
            if not note:
                providers = asker.ask("kernels()", lambda: tuple(platform.kernels(info)), ())
                resolve = partial(
                    kernel_rows,
                    device,
                    capabilities,
                    ops=more_ops,
                    providers=(*providers, *more_providers),
                )
                kernels = asker.ask("kernel table", resolve, ())
    return DeviceDiagnosis(
        device=device_fields(info),
        capabilities=asdict(capabilities),
        facts=dict(asker.ask("doctor()", lambda: platform.doctor(info), {})),
        settings=asker.ask(
            "constrain()", lambda: unset_settings(platform, info, more_constraints), ()
        ),
        attention=_verdicts(asker, platform, info, capabilities),
        opened=device is not None,
        memory=memory,
        kernels=kernels,
        note=note,
        problems=tuple(asker.problems),
    )


def unset_settings(
    platform: Platform, info: DeviceInfo, more: Callable[[ConfigView], Sequence[Constraint]]
) -> tuple[Decision, ...]:
    """The settings of a run on ``info`` in which the user sets none."""
    config = EngineConfig(model=ModelConfig(model="demo"))
    owned = owned_constraints(platform.constrain(config, info), f"platform {platform.name}")
    resolved = solve(config, (*owned, *more(config)))
    listed = {item.path for item in resolved.settings}
    others = (item for item in resolved.decisions if item.path not in listed)
    return (*resolved.settings, *others)


def common_attention_need(capabilities: Capabilities) -> AttentionNeed:
    """What a plain decoder of today asks of attention."""
    dtype = capabilities.dtypes[0]
    return AttentionNeed(
        kind="mha",
        num_heads=32,
        num_kv_heads=8,
        k_head_dim=128,
        v_head_dim=128,
        dtype=dtype,
        kv_dtype=dtype,
        block_size=16,
    )


def kernel_rows(
    device: Device,
    capabilities: Capabilities,
    *,
    ops: Sequence[OpSpec],
    providers: Sequence[Provider],
) -> tuple[KernelRow, ...]:
    """Resolve, load and check every operation in the device's preferred dtype. Needs torch."""
    from cardan.core.ops.catalogue import CATALOGUE
    from cardan.core.ops.registry import KernelRegistry

    if device.torch_device is None:
        return ()
    registry = KernelRegistry(
        (*CATALOGUE, *ops),
        providers,
        device=device.torch_device,
        features=capabilities.instruction_sets,
        float64=capabilities.float64,
    )
    return tuple(
        KernelRow(
            op=item.op,
            provider=item.provider,
            self_check=item.self_check,
            rejected=tuple(
                f"{other.provider}: {'; '.join(other.reasons)}" for other in item.rejected
            ),
        )
        for item in registry.table(capabilities.dtypes[0])
    )


def _no_table_because(device: Device, platform: Platform) -> str:
    try:
        if device.torch_device is None:
            return "no kernel table: the platform runs whole steps itself"
        import torch  # noqa: F401 (only whether it is there)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        return f"no kernel table: torch is not installed; pip install 'cardan[{platform.name}]'"
    return ""


def _verdicts(
    asker: _Asker, platform: Platform, info: DeviceInfo, capabilities: Capabilities
) -> tuple[BackendVerdict, ...]:
    backends: Sequence[type[AttentionBackend]] = asker.ask(
        "attention()", lambda: tuple(platform.attention(info)), ()
    )
    need = common_attention_need(capabilities)
    verdicts = []
    for backend in backends:
        verdict = asker.ask(backend.name, partial(backend.accepts, need, info), None)
        if verdict is not None:
            verdicts.append(BackendVerdict(backend.name, bool(verdict), verdict.reasons))
    return tuple(verdicts)
