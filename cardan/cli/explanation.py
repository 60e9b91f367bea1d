"""What ``cardan doctor --explain`` finds out: whose every setting and kernel is, as plain data.

Weights are not loaded: the model is built without memory, which binds its operations.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, is_dataclass
from typing import TYPE_CHECKING, Any

from cardan.cli.device_diagnosis import KernelRow
from cardan.core.config.engine import EngineConfig
from cardan.core.constraint_solver import DEFAULT, USER, Resolved, owned_constraints, solve
from cardan.core.discovery import GROUPS, Discovery
from cardan.core.interfaces.capabilities import Capabilities, DeviceInfo
from cardan.core.interfaces.device import Device
from cardan.core.interfaces.errors import UnsupportedError
from cardan.core.interfaces.platform import Platform
from cardan.core.interfaces.version import contract_name
from cardan.core.platform_selection import Selection, installed_platforms, select_platform
from cardan.core.plugin_manager import PluginManager
from cardan.core.runtime import Runtime
from cardan.core.types.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from cardan.bootstrap.model_source import ModelSource
    from cardan.core.interfaces.attention import AttentionBackend
    from cardan.core.interfaces.executor import LoadReport
    from cardan.core.interfaces.model import CausalLM
    from cardan.core.interfaces.quantization import QuantScheme
    from cardan.core.ops.registry import KernelRegistry


@dataclass(frozen=True, slots=True)
class SettingRow:
    """One setting: its value, whose value that is, and why."""

    path: str
    value: Any
    owner: str
    reason: str = ""


@dataclass(frozen=True, slots=True)
class AttentionRow:
    """One KV group: its layers, who serves them, why not the others, and its cache."""

    layers: str
    backend: str
    rejected: tuple[str, ...]
    layout: str
    bytes_per_token: int
    graphs: str


@dataclass(frozen=True, slots=True)
class InstalledRow:
    """What one package brings to one group of entry points."""

    package: str
    group: str
    names: str


@dataclass(frozen=True, slots=True)
class Explanation:
    """Everything resolved for one device. Without a model there are no ``attention`` rows, and
    ``kernels`` are those of every operation at the size of its first test input; with one, the uses
    of the model come first.

    ``not_followed`` are preferences that others overruled; ``note`` says what is left out.
    """

    platform: SettingRow
    device: str
    settings: tuple[SettingRow, ...]
    not_followed: tuple[str, ...]
    kernels: tuple[KernelRow, ...]
    attention: tuple[AttentionRow, ...]
    graphs: str
    installed: tuple[InstalledRow, ...]
    contract: str
    note: str = ""

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def explain(config: EngineConfig, model: str | None, sources: Mapping[str, str]) -> Explanation:
    """Resolve all that a run with ``config`` would; ``sources`` says of settings' paths where the
    user has set them. ``model`` None: as far as it goes without one.

    Raises:
        CardanError: such a run would fail, too.
    """
    discovery = Discovery()
    plugins = PluginManager(config.plugins, discovery)
    plugins.check_options(config.plugins.options)
    selection = select_platform(config.device.platform, installed_platforms(discovery))
    platform, info = selection.platform, selection.devices[0]
    wishes = owned_constraints(platform.constrain(config, info), f"platform {platform.name}")
    resolved = solve(config, (*wishes, *plugins.constraints(config)))
    source = None if model is None else _read(config)
    capabilities = platform.capabilities(info)
    rows, solved = _settings(resolved, sources, source, capabilities, info)
    with Runtime() as runtime:
        device = runtime.open(platform, info)
        found = _Resolver(platform, device, solved, discovery, plugins, source)
        kernels, attention, graphs, note = found.resolve()
    if source is not None:
        rows = _with_schemes(rows, found)
    return Explanation(
        platform=_platform_row(selection, sources),
        device=info.name,
        settings=rows,
        not_followed=tuple(str(item) for item in resolved.unmet),
        kernels=kernels,
        attention=attention,
        graphs=graphs,
        installed=_installed(discovery),
        contract=contract_name(),
        note=note,
    )


def _installed(discovery: Discovery) -> tuple[InstalledRow, ...]:
    names: dict[tuple[str, str], list[str]] = {}
    for group in GROUPS:
        for entry in discovery.entries(group):
            names.setdefault((entry.origin, group), []).append(entry.name)
    return tuple(InstalledRow(*key, ", ".join(found)) for key, found in sorted(names.items()))


def _read(config: EngineConfig) -> "ModelSource":
    from cardan.bootstrap.model_source import read_model

    return read_model(config.model)


def _platform_row(selection: Selection, sources: Mapping[str, str]) -> SettingRow:
    path = "device.platform"
    owner = sources.get(path, "core")
    contract = ".".join(map(str, selection.platform.contract))
    reason = f"{selection.reason}; written for contract {contract}"
    return SettingRow(path, selection.platform.name, owner, reason)


def _settings(
    resolved: Resolved,
    sources: Mapping[str, str],
    source: "ModelSource | None",
    capabilities: Capabilities,
    info: DeviceInfo,
) -> tuple[tuple[SettingRow, ...], EngineConfig]:
    """A row for every setting, and the configuration with the model's dtype in it."""
    from cardan.bootstrap.model_source import max_model_len, normal_dtype

    known = {item.path: item for item in (*resolved.settings, *resolved.decisions)}
    config = resolved.config
    rows: dict[str, SettingRow] = {}
    for path in setting_paths(config):
        item, value = known.get(path), config.get(path)
        if item is not None and item.owner not in (USER, DEFAULT):
            rows[path] = SettingRow(path, value, item.owner, item.reason)
        else:
            rows[path] = SettingRow(path, value, sources.get(path, "default"))
    if source is not None and config.model.dtype == "auto":
        own = source.dtype
        is_own = own in capabilities.dtypes
        dtype = own if own is not None and is_own else capabilities.dtypes[0]
        why = "what the checkpoint names" if is_own else f"{info.name} prefers it to others it has"
        owner = "checkpoint" if is_own else f"platform {info.platform}"
        rows["model.dtype"] = SettingRow("model.dtype", dtype, owner, why)
        config = config.with_value("model.dtype", dtype)
    elif config.model.dtype != "auto":
        config = config.with_value("model.dtype", normal_dtype(config.model.dtype))
    if source is not None and config.model.max_model_len is None:
        length = max_model_len(config.model, source)
        rows["model.max_model_len"] = SettingRow(
            "model.max_model_len", length, "checkpoint", "or what the KV cache can hold, if less"
        )
    if config.model.dtype != "auto" and config.model.dtype not in capabilities.dtypes:
        raise ConfigError(
            f"model.dtype {config.model.dtype} is not available on {info.name}; "
            f"choose one of {', '.join(capabilities.dtypes)}"
        )
    rows.pop("device.platform")
    if source is None:
        rows.pop("model.model")
    return tuple(rows.values()), config


def _with_schemes(rows: tuple[SettingRow, ...], found: "_Resolver") -> tuple[SettingRow, ...]:
    """``rows`` with what is chosen for the quantisation and the cache's dtype left open."""
    scheme, kv_dtype = found.scheme(), found.kv_dtype()
    name = "none" if scheme is None else scheme.name
    why = "its weights in full precision" if scheme is None else "what its weights are stored in"
    follows = f"model.dtype {found.config.model.dtype}"
    if kv_dtype != found.config.model.dtype:
        follows = "quantised weights have rounded more than that already"
    chosen = {
        "model.quantization": SettingRow("model.quantization", name, "checkpoint", why),
        "cache.kv_cache_dtype": SettingRow("cache.kv_cache_dtype", kv_dtype, "core", follows),
    }
    return tuple(
        chosen[row.path] if row.path in chosen and row.value in (None, "auto") else row
        for row in rows
    )


def setting_paths(config: EngineConfig) -> list[str]:
    """``section.name`` of every setting."""
    return [
        f"{section.name}.{setting.name}"
        for section in fields(config)
        if is_dataclass(getattr(config, section.name))
        for setting in fields(getattr(config, section.name))
    ]


_Found = tuple[tuple[KernelRow, ...], tuple[AttentionRow, ...], str, str]


@dataclass(frozen=True, slots=True)
class _Resolver:
    """Resolves kernels and attention on an open device. Needs torch."""

    platform: Platform
    device: Device
    config: EngineConfig
    discovery: Discovery
    plugins: PluginManager
    source: "ModelSource | None"

    def resolve(self) -> _Found:
        torch_device = self.device.torch_device
        own = self.platform.executor(self.device, self.config, self)
        if own is not None:
            own.close()
        if torch_device is None or own is not None:
            note = "the platform runs whole steps itself: it has no kernels or attention to choose"
            return (), (), f"{self.device.capabilities.graphs} (its own)", note
        registry = self.ops(torch_device)
        if self.source is None:
            dtype = self.config.model.dtype
            dtype = self.device.capabilities.dtypes[0] if dtype == "auto" else dtype
            registry.table(dtype)
            return self._kernels(registry), (), self._graphs(()), "name a model to see its own uses"
        model = self._build(registry, self.source)
        attention = self._attention(model)
        # What is bound later: for stored blocks as they are read, and to sample.
        registry.table(self.config.model.dtype)
        return self._kernels(registry), attention, self._graphs(attention), ""

    def scheme(self) -> "QuantScheme | None":
        """How weights are kept."""
        from cardan.bootstrap.quantization import choose_scheme

        if self.source is None or self.device.torch_device is None:
            return None
        return choose_scheme(self.config.model, self.source, self.discovery)

    def kv_dtype(self) -> str:
        """Of the cache, by the rule of the core's executor."""
        from cardan.bootstrap.model_source import normal_kv_dtype

        wanted, dtype = normal_kv_dtype(self.config.cache.kv_cache_dtype), self.config.model.dtype
        if wanted != "auto":
            return wanted
        is_rounded = dtype == "float32" and self.scheme() is not None
        return "float16" if is_rounded and "float16" in self.device.capabilities.dtypes else dtype

    def model_class(self, architecture: str) -> "type[CausalLM]":
        """See ``ModelParts``; this is one."""
        from cardan.core.discovery import MODELS

        model: type[CausalLM] = self.discovery.load(MODELS, architecture)
        return model

    def ops(self, device: "torch.device") -> "KernelRegistry":
        """The operations and all kernels for tensors of ``device``."""
        from cardan.core.ops.catalogue import CATALOGUE
        from cardan.core.ops.registry import KernelRegistry

        info = self.device.info
        return KernelRegistry(
            (*CATALOGUE, *self.plugins.ops()),
            (*self.platform.kernels(info), *self.plugins.kernels(self.platform.name, info)),
            device=device,
            features=self.device.capabilities.instruction_sets,
            float64=self.device.capabilities.float64,
            pins=self.config.device.kernels,
            strict=self.config.device.strict_kernels,
        )

    def load_weights(self, model: "CausalLM", source: Any) -> "LoadReport":
        """See ``ModelParts``; an explanation loads none.

        Raises:
            UnsupportedError: always.
        """
        raise UnsupportedError("doctor --explain loads no weights; load them in ModelExecutor.load")

    def _build(self, registry: "KernelRegistry", source: "ModelSource") -> "CausalLM":
        """The model without memory for its weights."""
        import torch

        from cardan.core.config.fallbacks import chosen
        from cardan.core.interfaces.model import BuildContext

        dtype = self.config.model.dtype
        build = BuildContext(
            dtype=getattr(torch, dtype),
            device=torch.device("meta"),
            ops=registry,
            max_model_len=16,  # of the rotary tables, which are of no use here
            block_size=chosen(self.config.cache.block_size, "cache.block_size"),
            kv_dtype=self.kv_dtype(),
            quantization=self.scheme(),
        )
        return self.model_class(source.architecture)(source.config, build)

    def _kernels(self, registry: "KernelRegistry") -> tuple[KernelRow, ...]:
        """Uses of one operation that one provider serves alike are one row."""
        rows: dict[tuple[str, str, tuple[str, ...]], KernelRow] = {}
        for item in registry.explain():
            rejected = tuple(
                f"{other.provider}: {'; '.join(other.reasons)}" for other in item.rejected
            )
            row = KernelRow(item.op, item.provider, item.self_check, rejected)
            rows.setdefault((item.op, item.provider, rejected), row)
        return tuple(rows.values())

    def _attention(self, model: "CausalLM") -> tuple[AttentionRow, ...]:
        from cardan.core.kvcache.sizing import group_layers
        from cardan.core.ops.reference.attention import ReferenceAttention
        from cardan.core.runner.attention_binding import choose_backend, merge_needs

        info = self.device.info
        candidates: tuple[type[AttentionBackend], ...] = (
            *self.platform.attention(info),
            ReferenceAttention,
        )
        needs = model.attention_needs()
        rows = []
        for group in group_layers(model.kv_specs()):
            need = merge_needs([needs[layer] for layer in group.layers])
            pinned = self.config.device.attention_backend
            choice = choose_backend(need, candidates, info, pinned)
            layout = choice.backend.layout(group.spec, info)
            kept = "opaque" if layout.opaque else "axes " + " ".join(map(str, layout.order))
            refusal = "; ".join(choice.captured_decode.reasons)
            rows.append(
                AttentionRow(
                    layers=f"{len(group.layers)} from layer {group.layers[0]}",
                    backend=choice.backend.name,
                    rejected=tuple(
                        f"{item.provider}: {'; '.join(item.reasons)}" for item in choice.rejected
                    ),
                    layout=f"{group.spec.dtype}, blocks of {group.spec.block_size}, {kept}",
                    bytes_per_token=len(group.layers) * group.spec.bytes_per_token,
                    graphs=f"no: {refusal}" if refusal else "yes",
                )
            )
        return tuple(rows)

    def _graphs(self, attention: tuple[AttentionRow, ...]) -> str:
        support = self.device.capabilities.graphs
        if support == "none":
            return "none: the device captures none"
        if self.config.device.enforce_eager:
            return "none: device.enforce_eager is set"
        refused = [
            f"{row.backend} attention: {row.graphs[4:]}" for row in attention if row.graphs != "yes"
        ]
        return f"none: {'; '.join(refused)}" if refused else f"up to {support}"
