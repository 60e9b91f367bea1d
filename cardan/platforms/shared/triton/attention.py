"""Paged attention in Triton: any mix of rows, two launches a layer at most."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cardan.core.interfaces.attention import (
    AttentionBackend,
    AttentionNeed,
    BatchView,
    HeadRotation,
    KVLayout,
    LayerParams,
)
from cardan.core.interfaces.capabilities import DeviceInfo, Verdict
from cardan.core.interfaces.device import Device
from cardan.core.interfaces.errors import UnsupportedError
from cardan.core.types.kv import SCALE_BYTES, KVCacheSpec
from cardan.platforms.shared.triton.attention_tuning import (
    HeadSizes,
    decode_tuning,
    ragged_tuning,
)
from cardan.platforms.shared.triton.cache_dtypes import cache_dtypes
from cardan.platforms.shared.triton.dependent_launch import are_fixed, dependent
from cardan.platforms.shared.triton.device_target import (
    device_sizes,
    product_options,
    settling,
)
from cardan.platforms.shared.triton.kernels.decode_attention import decode_kernel
from cardan.platforms.shared.triton.kernels.ragged_attention import ragged_kernel
from cardan.platforms.shared.triton.layer_call import LayerCall, dense
from cardan.platforms.shared.triton.paged_cache import CacheForm
from cardan.platforms.shared.triton.prefill import LongRows, long_rows, run_prefill
from cardan.platforms.shared.triton.providers import ROTATIONS
from cardan.platforms.shared.triton.rows import power_of_two

_DTYPES = ("float32", "bfloat16", "float16")
_LONGEST_HEAD = 256
# The instruction set of devices that copy tiles of tensors by themselves.
TILE_COPIES = "tile_copies"
# Steps make room for the counters of at least so many parts, so that it seldom grows.
_LEAST_COUNTERS = 4096
# Query heads of a step, of all rows, up to which the next kernel may begin while keys are read;
# else it begins after that, for the weights that it loads slow the keys down.
_FEW_HEADS = 16


@dataclass(slots=True)
class TritonPlan:
    """One step: its tensors, whether any row can have a single query token, or several, and what
    is known of the long ones of these."""

    batch: BatchView
    has_single_rows: bool
    has_ragged_rows: bool
    long_rows: LongRows


class TritonAttention(AttentionBackend):
    """Multi-head, grouped and multi-query attention with all that ``LayerParams`` offers.

    Rows of one query token and other rows are served by a kernel each, which leaves the other
    kernel's rows alone: so nothing depends on the order of rows, and steps can be captured. A
    kernel that has no rows for certain is not launched. Products of bfloat16 and float16 are summed
    in float32. Tokens of no row yield zeros.

    Equal steps give equal bits. A row's bits depend on the step that it is in: on how many rows
    there are (which decides how many parts its keys are cut into) and on how many of its tokens
    are computed at once.

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
        if need.num_heads % need.num_kv_heads:
            reasons.append(
                f"{need.num_heads} heads are no multiple of {need.num_kv_heads} key heads"
            )
        for what, dtype, known in (
            ("dtype", need.dtype, _DTYPES),
            ("cache dtype", need.kv_dtype, (*_DTYPES, *cache_dtypes(device.arch))),
        ):
            if dtype not in known:
                reasons.append(f"{what} {dtype} is not among {', '.join(known)} on {device.arch}")
        if max(need.k_head_dim, need.v_head_dim) > _LONGEST_HEAD:
            reasons.append(f"heads are longer than {_LONGEST_HEAD}")
        return Verdict(tuple(reasons))

    @classmethod
    def layout(cls, spec: KVCacheSpec, device: DeviceInfo) -> KVLayout:
        """``[block, kv, token, head, content]``: a token's heads lie together, as they come."""
        return KVLayout()

    def __init__(self, spec: KVCacheSpec, layout: KVLayout, device: Device) -> None:
        if layout.opaque:
            raise UnsupportedError(f"{self.name} attention reads no opaque cache")
        if spec.scale_bytes != SCALE_BYTES.get(spec.dtype, 0):
            raise UnsupportedError(
                f"{self.name} attention reads no {spec.dtype} cache with scales of "
                f"{spec.scale_bytes} bytes"
            )
        self._spec = spec
        self._form = CacheForm(spec, tuple(layout.order.index(axis) for axis in range(5)))
        self._sizes = device_sizes(device.torch_device or torch.device("cpu"))
        self._copies_tiles = TILE_COPIES in device.capabilities.instruction_sets
        self._counters: list[Tensor] = []

    def plan(self, batch: BatchView) -> TritonPlan:
        unknown = batch.features - self.features
        if unknown:
            raise UnsupportedError(
                f"{self.name} attention cannot honour {', '.join(sorted(unknown))}"
            )
        self._reserve_counters(batch)
        has_ragged_rows = batch.max_query_len > 1
        # A step that is captured stands for all of its shape, and has rows of one token for them.
        has_single_rows = not has_ragged_rows or 1 in batch.query_lens
        is_known = has_ragged_rows and self._copies_tiles
        rows = long_rows(batch) if is_known else LongRows()
        return TritonPlan(batch, has_single_rows, has_ragged_rows, rows)

    def write(self, k: Tensor, v: Tensor, cache: Tensor, plan: TritonPlan) -> None:
        k, v = dense(k), dense(v)
        # What the cache rounds must be read from there, as later steps do.
        if plan.long_rows.is_fresh and k.dtype == cache.dtype:
            plan.long_rows.keep(k, v)
        self._form.write(k, v, cache, plan.batch.slot_mapping)

    def rotate_and_write(
        self,
        qkv: tuple[Tensor, Tensor, Tensor],
        positions: Tensor,
        rotation: HeadRotation,
        cache: Tensor,
        plan: TritonPlan,
    ) -> Tensor:
        """One launch, where the rotation would be that of the kernels here anyway."""
        if rotation.provider not in ROTATIONS:
            return AttentionBackend.rotate_and_write(self, qkv, positions, rotation, cache, plan)
        q, k, v = (dense(heads) for heads in qkv)
        keeps_keys = plan.long_rows.is_fresh and k.dtype == cache.dtype
        target = (cache, plan.batch.slot_mapping)
        q, keys = self._form.rotate_and_write((q, k, v), positions, rotation, target, keeps_keys)
        if keys is not None:
            plan.long_rows.keep(keys, v)
        return q

    def run(
        self,
        q: Tensor,
        cache: Tensor,
        plan: TritonPlan,
        layer: LayerParams,
        lse: Tensor | None = None,
    ) -> Tensor:
        q = dense(q)
        out = torch.empty(*q.shape[:2], self._spec.v_head_dim, dtype=q.dtype, device=q.device)
        if not plan.batch.num_rows or not len(q):
            return out.zero_()
        sums = None if lse is None else lse.contiguous()
        call = LayerCall(self._form, q, cache, out, sums, layer)
        if plan.has_single_rows:
            self._run_decode(call, plan)
        if plan.has_ragged_rows and not run_prefill(call, plan.batch, plan.long_rows, self._sizes):
            self._run_ragged(call, plan)
        if lse is not None and sums is not None and sums is not lse:
            lse.copy_(sums)
        return out

    def _run_decode(self, call: LayerCall, plan: TritonPlan) -> None:
        batch, sizes = plan.batch, self._head_sizes(call)
        num_heads = self._spec.num_kv_heads
        # Programs beyond the rows are for tokens of no row; with ragged rows these have others.
        num_tokens = 0 if plan.has_ragged_rows else batch.num_tokens
        grid = (max(batch.num_rows, num_tokens), num_heads)
        tuning = decode_tuning(sizes, batch.num_rows * num_heads, self._sizes)
        parts = (batch.num_rows, num_heads, tuning.splits)
        part_out = part_sums = call.out
        if tuning.splits > 1:
            part_out = call.floats(*parts, tuning.packed, sizes.v_block)
            part_sums = call.floats(*parts, 2, tuning.packed)
        decode_kernel[(*grid, tuning.splits)](
            *call.paged(),
            part_out,
            part_sums,
            self._counters[-1],
            *self._step_arguments(call, plan, num_tokens),
            are_fixed(call.q),
            PACKED=tuning.packed,
            TILE=tuning.tile,
            STAGES=tuning.num_stages,
            IS_SPLIT=tuning.splits > 1,
            LEAST=tuning.least_part,
            SETTLING=settling(call.q.device),
            num_warps=tuning.num_warps,
            num_stages=tuning.num_stages,
            **product_options(call.q.device),
            IS_SHORT=batch.num_rows * call.q.shape[1] <= _FEW_HEADS,
            **dependent(call.q, batch.num_rows),
            **self._form.constants(call.cache),
            **call.constants(sizes),
        )

    def _run_ragged(self, call: LayerCall, plan: TritonPlan) -> None:
        batch, sizes = plan.batch, self._head_sizes(call)
        tuning = ragged_tuning(sizes, self._sizes)
        num_tiles = batch.num_tokens // tuning.queries + batch.num_rows + 1
        ragged_kernel[(num_tiles, self._spec.num_kv_heads)](
            *call.paged(),
            *self._step_arguments(call, plan, batch.num_tokens),
            PACKED=tuning.packed,
            TILE_QUERIES=tuning.queries,
            TILE=tuning.tile,
            STAGES=tuning.num_stages,
            HAS_WINDOW=call.layer.window is not None,
            num_warps=tuning.num_warps,
            num_stages=tuning.num_stages,
            **product_options(call.q.device),
            **self._form.constants(call.cache),
            **call.constants(sizes),
        )

    def _head_sizes(self, call: LayerCall) -> HeadSizes:
        return call.sizes(max(call.q.element_size(), call.cache.element_size()))

    def _step_arguments(
        self, call: LayerCall, plan: TritonPlan, num_tokens: int
    ) -> tuple[Any, ...]:
        """What both kernels take of the step, the layer's numbers and strides, in order."""
        batch, table = plan.batch, dense(plan.batch.block_table)
        return (
            batch.query_start_loc,
            batch.seq_lens,
            table,
            batch.num_rows,
            num_tokens,
            *call.numbers(),
            *call.q.stride()[:2],
            table.stride(0),
            *call.scale_strides(),
        )

    def _reserve_counters(self, batch: BatchView) -> None:
        needed = max(_LEAST_COUNTERS, power_of_two(batch.num_rows * self._spec.num_kv_heads))
        if not self._counters or len(self._counters[-1]) < needed:
            device = batch.block_table.device
            self._counters.append(torch.zeros(needed, dtype=torch.int32, device=device))
