"""One saved call, run again: on a platform, and by its definition in float64."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from cardan.core.config.plugins import PluginConfig
from cardan.core.discovery import Discovery
from cardan.core.interfaces.attention import AttentionBackend, BatchView, HeadRotation
from cardan.core.interfaces.device import Device
from cardan.core.interfaces.kernels import OpSpec, Provider
from cardan.core.interfaces.platform import Platform
from cardan.core.ops.catalogue import CATALOGUE
from cardan.core.ops.compare import Comparison, copy_args, reference_kernel
from cardan.core.ops.reference.attention import ReferenceAttention
from cardan.core.ops.registry import KernelRegistry
from cardan.core.platform_selection import installed_platforms, select_platform
from cardan.core.plugin_manager import PluginManager
from cardan.core.runtime import Runtime
from cardan.core.types.errors import ConfigError
from cardan.core.types.kv import KVCacheGroup, KVCacheSpec
from cardan.diff.judge import worst
from cardan.diff.recorder import ATTENTION, attention_tolerance
from cardan.diff.saved_call import SavedCall, layer_params, op_args
from cardan.diff.truth import attend, host, op_truth, tensors_of


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """Errors against the float64 definition: of who serves the call on the platform, and of the
    definition itself in the call's dtype. ``note`` says why it is not who served it before."""

    platform: str
    provider: str
    error: Comparison
    body_error: Comparison
    note: str = ""

    @property
    def is_equal(self) -> bool:
        return self.error.ok


def replay(call: SavedCall, platform: str | None) -> ReplayResult:
    """Run ``call`` on ``platform`` (None: the one it comes from).

    Raises:
        CardanError: the platform is not here, or does not know the call's operation or backend.
    """
    discovery = Discovery()
    plugins = PluginManager(PluginConfig(), discovery)
    wanted = platform or str(call.facts["platform"])
    selection = select_platform(wanted, installed_platforms(discovery))
    info = selection.devices[0]
    with Runtime() as runtime:
        device = runtime.open(selection.platform, info)
        if device.torch_device is None:
            raise ConfigError(
                f"platform {selection.platform.name} runs whole steps itself: it has no single "
                "calls to replay"
            )
        ops = {op.name: op for op in (*CATALOGUE, *plugins.ops())}
        providers = (
            *selection.platform.kernels(info),
            *plugins.kernels(selection.platform.name, info),
        )
        # One that fails its check is what is looked for.
        registry = KernelRegistry(
            tuple(ops.values()),
            providers,
            device=device.torch_device,
            features=device.capabilities.instruction_sets,
            float64=device.capabilities.float64,
            unchecked=True,
        )
        with device.inference():
            if call.kv is not None:
                return _Backend(call, call.kv, selection.platform, device, ops).replay(registry)
            return _replay_op(call, selection.platform.name, device, registry, ops, providers)


def _replay_op(
    call: SavedCall,
    platform: str,
    device: Device,
    registry: KernelRegistry,
    ops: dict[str, OpSpec],
    providers: Sequence[Provider],
) -> ReplayResult:
    if call.op not in ops:
        raise ConfigError(
            f"the saved call is of operation {call.op}, which is not known here; install the "
            "plugin that brings it"
        )
    spec = ops[call.op]
    kernel = registry.bind(call.op, **call.attributes)
    provider = registry.resolve(call.op, **call.attributes).provider
    args = op_args(call, _torch_device(device))
    truth = op_truth(spec, args, ops)
    working = [host(x) for x in tensors_of(reference_kernel(spec, ops)(*copy_args(args, "cpu")))]
    if spec.prepares is not None:
        weight = args[spec.prepares]
        args[spec.prepares] = registry.prepare(call.op, weight, **call.attributes)
    got = [host(item) for item in tensors_of(kernel(*args))]
    dtype = str(call.attributes["dtype"])
    own = {item.name: item.tolerances for item in providers if item.op == call.op}
    tolerance = own.get(provider, {}).get(dtype) or spec.tolerances.get(dtype)
    return ReplayResult(
        platform,
        provider,
        worst(got, truth, tolerance),
        worst(working, truth, tolerance),
        _other_provider(call, provider),
    )


@dataclass(frozen=True, slots=True)
class _Backend:
    """An attention backend on a cache of its own with one sequence."""

    call: SavedCall
    spec: KVCacheSpec
    platform: Platform
    device: Device
    ops: dict[str, OpSpec]

    def replay(self, registry: KernelRegistry) -> ReplayResult:
        chosen = self._choose()
        layout = chosen.layout(self.spec, self.device.info)
        length, dtype = len(self.call.tensors["keys"]), self.call.attributes["dtype"]
        num_blocks = -(-length // self.spec.block_size) + 1
        pool = self.device.memory.kv_pool(KVCacheGroup((0,), self.spec), layout, num_blocks)
        backend = chosen(self.spec, layout, self.device)
        run = self._attend if self.call.op == ATTENTION else partial(self._rotate, registry)
        got, truth, body = run(backend, pool.view(0))
        tolerance = attention_tolerance(str(dtype), self.spec.dtype)
        return ReplayResult(
            self.platform.name,
            chosen.name,
            worst([host(got)], [truth], tolerance),
            worst([body], [truth], tolerance),
            _other_provider(self.call, chosen.name),
        )

    def _choose(self) -> type[AttentionBackend]:
        candidates: tuple[type[AttentionBackend], ...] = (
            *self.platform.attention(self.device.info),
            ReferenceAttention,
        )
        named = [item for item in candidates if item.name == self.call.provider]
        return (named or candidates)[0]

    def _attend(self, backend: AttentionBackend, cache: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        place = _torch_device(self.device)
        q, keys, values = (self.call.tensors[name] for name in ("q", "keys", "values"))
        stored = [x.to(q.dtype).to(place) for x in (keys, values)]
        backend.write(stored[0], stored[1], cache, backend.plan(self._view(len(keys), len(keys))))
        plan = backend.plan(self._view(len(q), len(keys)))
        out = backend.run(q.to(place), cache, plan, layer_params(self.call, place))
        truth = attend(q, keys, values, layer_params(self.call, torch.device("cpu")))
        return out, truth, truth.to(q.dtype)

    def _rotate(
        self, registry: KernelRegistry, backend: AttentionBackend, cache: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        place, tensors = _torch_device(self.device), self.call.tensors
        numbers = dict(self.call.numbers or {})
        op, eps = str(numbers["kind"]), float(numbers.get("eps", 0.0))
        q, k, v, positions = (tensors[name].to(place) for name in ("q", "k", "v", "positions"))
        constants: list[Any] = [tensors["cos_sin"].to(place)]
        if op != "rotary_embedding":
            weights = [tensors[name].to(place) for name in ("q_weight", "k_weight")]
            constants = [*weights, eps, *constants]
        use: dict[str, Any] = {"dtype": self.call.attributes["dtype"], "head_dim": q.shape[-1]}
        use |= {} if op == "rotary_embedding" else {"hidden": q.shape[-1]}
        kernel = registry.bind(op, **use)
        rotation = HeadRotation(
            rotate=lambda q, k, positions: kernel(q, k, *constants, positions),
            provider=registry.resolve(op, **use).provider,
            cos_sin=constants[-1],
        )
        if op != "rotary_embedding":
            rotation = replace(rotation, q_weight=constants[0], k_weight=constants[1], eps=eps)
        plan = backend.plan(self._view(len(q), len(tensors["keys"])))
        got = backend.rotate_and_write((q, k, v), positions, rotation, cache, plan)
        args = (q, k, *constants, positions)
        truth = op_truth(self.ops[op], args, self.ops)[0]
        body = reference_kernel(self.ops[op], self.ops)(*copy_args(args, "cpu"))[0]
        return got, truth, body

    def _view(self, count: int, length: int) -> BatchView:
        """The last ``count`` tokens of a sequence of ``length`` that lies in blocks 1, 2, ..."""
        place, size = _torch_device(self.device), self.spec.block_size
        positions = torch.arange(length - count, length)
        blocks = torch.arange(1, -(-length // size) + 1, dtype=torch.int32)
        return BatchView(
            query_lens=[count],
            seq_lens_host=[length],
            query_start_loc=torch.tensor([0, count]).to(place),
            seq_lens=torch.tensor([length]).to(place),
            positions=positions.to(place),
            token_rows=torch.zeros(count, dtype=torch.int64).to(place),
            slot_mapping=(positions + size).to(place),
            block_table=blocks[None].to(place),
            max_query_len=count,
            max_seq_len=length,
        )


def _torch_device(device: Device) -> torch.device:
    if device.torch_device is None:
        raise ConfigError(f"{device.info.name} has no torch device")
    return device.torch_device


def _other_provider(call: SavedCall, provider: str) -> str:
    if provider == call.provider:
        return ""
    return f"it was saved of {call.provider}; here {provider} serves it"
