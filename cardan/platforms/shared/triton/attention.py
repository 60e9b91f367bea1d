"""Paged attention in Triton: any mix of rows, two launches a layer at most."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from cardan.core.interfaces.attention import (
    AttentionBackend,
    AttentionNeed,
    BatchView,
    KVLayout,
    LayerParams,
)
from cardan.core.interfaces.capabilities import DeviceInfo, Verdict
from cardan.core.interfaces.device import Device
from cardan.core.types.kv import KVCacheSpec
from cardan.platforms.shared.triton.attention_tuning import (
    DeviceSizes,
    HeadSizes,
    Tuning,
    decode_tuning,
    fresh_tuning,
    ragged_tuning,
)
from cardan.platforms.shared.triton.kernels.decode_attention import decode_kernel
from cardan.platforms.shared.triton.kernels.paged_cache import write_kernel
from cardan.platforms.shared.triton.kernels.ragged_attention import ragged_kernel
from cardan.platforms.shared.triton.rows import power_of_two

_DTYPES = ("float32", "bfloat16", "float16")
_LONGEST_HEAD = 256
_NO_WINDOW = 2**31 - 1
# The instruction set of devices that copy tiles of tensors by themselves.
TILE_COPIES = "tile_copies"
# Where such copies may begin, and what strides are multiples of, bytes.
_COPY_ALIGNMENT = 16
# Where a device does not say: what the smallest ones have.
_DEFAULT_CORES = 8
_DEFAULT_SHARED_BYTES = 64 << 10


@dataclass(slots=True)
class TritonPlan:
    """One step: its tensors, and whether any row can have several query tokens.

    ``is_fresh``: such rows have no earlier keys. ``step_keys`` and ``step_values`` are then those
    of the layer whose ``run`` is next, [T, key heads * dim].
    """

    batch: BatchView
    has_ragged_rows: bool
    is_fresh: bool
    step_keys: Tensor | None = None
    step_values: Tensor | None = None


class TritonAttention(AttentionBackend):
    """Multi-head, grouped and multi-query attention with all that ``LayerParams`` offers.

    Rows of one query token and other rows are served by a kernel each, which leaves the other
    kernel's rows alone: so nothing depends on the order of rows, or on what the host knows, and
    steps can be captured. Products of bfloat16 and float16 are summed in float32.

    Owner of the counters by which parts of a row find the last one of them. Their number grows with
    the rows; captured graphs keep the ones that they were captured with.
    """

    name = "triton"

    @classmethod
    def accepts(cls, need: AttentionNeed, device: DeviceInfo) -> Verdict:
        reasons = []
        if need.kind != "mha":
            reasons.append(f"kind {need.kind} is not mha")
        if need.tree_mask:
            reasons.append("no tree masks")
        for what, dtype in (("dtype", need.dtype), ("cache dtype", need.kv_dtype)):
            if dtype not in _DTYPES:
                reasons.append(f"{what} {dtype} is not among {', '.join(_DTYPES)}")
        if max(need.k_head_dim, need.v_head_dim) > _LONGEST_HEAD:
            reasons.append(f"heads are longer than {_LONGEST_HEAD}")
        return Verdict(tuple(reasons))

    @classmethod
    def layout(cls, spec: KVCacheSpec, device: DeviceInfo) -> KVLayout:
        """``[block, kv, token, head, content]``: a token's heads lie together, as they come."""
        return KVLayout()

    def __init__(self, spec: KVCacheSpec, layout: KVLayout, device: Device) -> None:
        self._spec = spec
        self._axes = [layout.order.index(axis) for axis in range(5)]
        self._sizes = _device_sizes(device.torch_device or torch.device("cpu"))
        self._copies_tiles = TILE_COPIES in device.capabilities.instruction_sets
        self._counters: list[Tensor] = []

    def plan(self, batch: BatchView) -> TritonPlan:
        self._reserve_counters(batch)
        return TritonPlan(batch, batch.max_query_len > 1, self._copies_tiles and _is_fresh(batch))

    def write(self, k: Tensor, v: Tensor, cache: Tensor, plan: TritonPlan) -> None:
        spec, num_tokens = self._spec, plan.batch.num_tokens
        if not num_tokens:
            return
        k, v = _dense(k), _dense(v)
        if plan.is_fresh:
            plan.step_keys, plan.step_values = _side_by_side(k), _side_by_side(v)
        block, kv, head, token = self._strides(cache)
        heads = power_of_two(spec.num_kv_heads)
        dims = power_of_two(max(spec.k_head_dim, spec.v_head_dim))
        write_kernel[(num_tokens,)](
            k,
            v,
            cache,
            plan.batch.slot_mapping,
            *k.stride()[:2],
            *v.stride()[:2],
            block,
            kv,
            head,
            token,
            BLOCK_SIZE=spec.block_size,
            NUM_HEADS=spec.num_kv_heads,
            K_DIM=spec.k_head_dim,
            V_DIM=spec.v_head_dim,
            HEADS=heads,
            DIMS=dims,
            num_warps=min(8, max(1, heads * dims // 256)),
        )

    def run(
        self,
        q: Tensor,
        cache: Tensor,
        plan: TritonPlan,
        layer: LayerParams,
        lse: Tensor | None = None,
    ) -> Tensor:
        q = _dense(q)
        out = torch.empty(*q.shape[:2], self._spec.v_head_dim, dtype=q.dtype, device=q.device)
        if not plan.batch.num_rows or not len(q):
            return out
        call = _Call(q, cache, out, lse, layer)
        self._run_decode(call, plan)
        if plan.has_ragged_rows:
            self._run_ragged(call, plan)
        return out

    def _run_decode(self, call: "_Call", plan: TritonPlan) -> None:
        batch, sizes = plan.batch, self._head_sizes(call)
        num_heads = self._spec.num_kv_heads
        tuning = decode_tuning(sizes, batch.num_rows * num_heads, self._sizes)
        parts = (batch.num_rows, num_heads, tuning.splits)
        part_out = part_sums = call.out
        if tuning.splits > 1:
            part_out = call.floats(*parts, tuning.packed, sizes.v_block)
            part_sums = call.floats(*parts, 2, tuning.packed)
        decode_kernel[parts](
            *call.tensors(),
            part_out,
            part_sums,
            self._counters[-1],
            *self._step_arguments(call, plan),
            PACKED=tuning.packed,
            TILE=tuning.tile,
            STAGES=tuning.num_stages,
            IS_SPLIT=tuning.splits > 1,
            LEAST=tuning.least_part,
            num_warps=tuning.num_warps,
            num_stages=tuning.num_stages,
            **self._constants(call, sizes),
        )

    def _run_ragged(self, call: "_Call", plan: TritonPlan) -> None:
        batch, sizes = plan.batch, self._head_sizes(call)
        fresh = self._fresh_arguments(call, plan, sizes)
        tuning = ragged_tuning(sizes, self._sizes)
        step: tuple[Any, ...] = (call.out,) * 4
        strides = (0, 0)
        if fresh is not None:
            tuning, step, strides = fresh
        query_start_loc, seq_lens, block_table, *numbers = self._step_arguments(call, plan)
        grid = (batch.num_tokens // tuning.queries + batch.num_rows, self._spec.num_kv_heads)
        ragged_kernel[grid](
            *call.tensors(),
            *step,
            query_start_loc,
            seq_lens,
            block_table,
            batch.num_rows,
            *numbers,
            *strides,
            PACKED=tuning.packed,
            TILE_QUERIES=tuning.queries,
            TILE=tuning.tile,
            STAGES=tuning.num_stages,
            HAS_WINDOW=call.layer.window is not None,
            IS_FRESH=fresh is not None,
            num_warps=tuning.num_warps,
            num_stages=tuning.num_stages,
            **self._constants(call, sizes),
        )

    def _fresh_arguments(
        self, call: "_Call", plan: TritonPlan, sizes: HeadSizes
    ) -> tuple[Tuning, tuple[Any, ...], tuple[int, int]] | None:
        """Tuning, tensors and strides where keys are read where the step made them."""
        k, v = plan.step_keys, plan.step_values
        plan.step_keys = plan.step_values = None
        if k is None or v is None or call.layer.window is not None:
            return None
        if (sizes.k_block, sizes.v_block) != (sizes.k_dim, sizes.v_dim) or k.dtype != call.q.dtype:
            return None
        tuning = fresh_tuning(sizes, self._sizes)
        k_tiles = TensorDescriptor.from_tensor(k, [tuning.tile, sizes.k_dim])
        v_tiles = TensorDescriptor.from_tensor(v, [tuning.tile, sizes.v_dim])
        return tuning, (k, v, k_tiles, v_tiles), (k.stride(0), v.stride(0))

    def _head_sizes(self, call: "_Call") -> HeadSizes:
        spec = self._spec
        group = call.q.shape[1] // spec.num_kv_heads
        num_bytes = max(call.q.element_size(), call.cache.element_size())
        return HeadSizes(group, spec.k_head_dim, spec.v_head_dim, num_bytes)

    def _step_arguments(self, call: "_Call", plan: TritonPlan) -> tuple[Any, ...]:
        """What both kernels take of the step, the layer's numbers and all strides, in order."""
        batch, layer = plan.batch, call.layer
        window = _NO_WINDOW if layer.window is None else layer.window
        return (
            batch.query_start_loc,
            batch.seq_lens,
            batch.block_table,
            layer.scale,
            1.0 if layer.softcap is None else layer.softcap,
            window,
            *call.q.stride()[:2],
            *self._strides(call.cache),
            batch.block_table.stride(0),
        )

    def _constants(self, call: "_Call", sizes: HeadSizes) -> dict[str, Any]:
        layer = call.layer
        return {
            "BLOCK_SIZE": self._spec.block_size,
            "GROUP": sizes.group,
            "K_DIM": sizes.k_dim,
            "V_DIM": sizes.v_dim,
            "K_BLOCK": sizes.k_block,
            "V_BLOCK": sizes.v_block,
            "HAS_CAP": layer.softcap is not None,
            "HAS_SLOPES": layer.alibi_slopes is not None,
            "HAS_SINKS": layer.sinks is not None,
            "HAS_LSE": call.lse is not None,
        }

    def _strides(self, cache: Tensor) -> tuple[int, int, int, int]:
        """Of a block, of values behind keys, of a head and of a token, in elements."""
        block, kv, head, token, _ = (cache.stride(axis) for axis in self._axes)
        return block, kv, head, token

    def _reserve_counters(self, batch: BatchView) -> None:
        needed = batch.num_rows * self._spec.num_kv_heads
        if not self._counters or len(self._counters[-1]) < needed:
            device = batch.block_table.device
            self._counters.append(torch.zeros(needed, dtype=torch.int32, device=device))


@dataclass(frozen=True, slots=True)
class _Call:
    """One layer's tensors and parameters."""

    q: Tensor
    cache: Tensor
    out: Tensor
    lse: Tensor | None
    layer: LayerParams

    def floats(self, *shape: int) -> Tensor:
        """Scratch, float32 on the device."""
        return torch.empty(shape, dtype=torch.float32, device=self.q.device)

    def tensors(self) -> tuple[Tensor, ...]:
        """What both kernels begin with; ``out`` stands for what the layer does not have."""
        optional = (self.lse, self.layer.sinks, self.layer.alibi_slopes)
        return (
            self.q,
            self.cache,
            self.out,
            *(self.out if tensor is None else tensor for tensor in optional),
        )


def _is_fresh(batch: BatchView) -> bool:
    """Whether no row of several query tokens has earlier keys. A step that is captured is not: what
    the host knows of it are bounds, which none of its rows reaches."""
    rows = list(zip(batch.query_lens, batch.seq_lens_host, strict=True))
    is_exact = max(batch.query_lens, default=0) == batch.max_query_len
    return is_exact and all(count == length for count, length in rows if count > 1)


def _side_by_side(heads: Tensor) -> Tensor | None:
    """[T, heads, dim] as [T, heads * dim], or None where it cannot be copied in tiles."""
    if heads.stride(1) != heads.shape[2] or heads.data_ptr() % _COPY_ALIGNMENT:
        return None
    if heads.stride(0) * heads.element_size() % _COPY_ALIGNMENT:
        return None
    return heads.flatten(1)


def _dense(heads: Tensor) -> Tensor:
    return heads if heads.stride(-1) == 1 else heads.contiguous()


def _device_sizes(device: torch.device) -> DeviceSizes:
    properties = None
    if device.type != "cpu":
        properties = torch.get_device_module(device).get_device_properties(device)
    return DeviceSizes(
        getattr(properties, "multi_processor_count", _DEFAULT_CORES),
        getattr(properties, "shared_memory_per_block_optin", _DEFAULT_SHARED_BYTES),
    )
