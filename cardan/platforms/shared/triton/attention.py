"""Paged attention in Triton: any mix of rows, two launches a layer at most."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

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
    DeviceSizes,
    HeadSizes,
    Tuning,
    decode_tuning,
    fresh_tuning,
    ragged_tuning,
)
from cardan.platforms.shared.triton.cache_dtypes import cache_dtypes
from cardan.platforms.shared.triton.kernels.decode_attention import decode_kernel
from cardan.platforms.shared.triton.kernels.ragged_attention import ragged_kernel
from cardan.platforms.shared.triton.paged_cache import CacheForm
from cardan.platforms.shared.triton.providers import ROTATIONS
from cardan.platforms.shared.triton.rows import power_of_two

_DTYPES = ("float32", "bfloat16", "float16")
_LONGEST_HEAD = 256
_NO_WINDOW = 2**31 - 1
# The instruction set of devices that copy tiles of tensors by themselves.
TILE_COPIES = "tile_copies"
# Where such copies may begin, and what strides are multiples of, bytes.
_COPY_ALIGNMENT = 16
# Steps make room for the counters of at least so many parts, so that it seldom grows.
_LEAST_COUNTERS = 4096
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
    steps can be captured. Products of bfloat16 and float16 are summed in float32. Tokens of no row
    yield zeros.

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
        self._sizes = _device_sizes(device.torch_device or torch.device("cpu"))
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
        is_fresh = has_ragged_rows and self._copies_tiles and _is_fresh(batch)
        return TritonPlan(batch, has_ragged_rows, is_fresh)

    def write(self, k: Tensor, v: Tensor, cache: Tensor, plan: TritonPlan) -> None:
        k, v = _dense(k), _dense(v)
        # What the cache rounds must be read from there, as later steps do.
        if plan.is_fresh and k.dtype == cache.dtype:
            plan.step_keys, plan.step_values = _side_by_side(k), _side_by_side(v)
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
        q, k, v = (_dense(heads) for heads in qkv)
        keeps_keys = plan.is_fresh and k.dtype == cache.dtype
        target = (cache, plan.batch.slot_mapping)
        q, keys = self._form.rotate_and_write((q, k, v), positions, rotation, target, keeps_keys)
        if keys is not None:
            plan.step_keys, plan.step_values = _side_by_side(keys), _side_by_side(v)
        return q

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
            return out.zero_()
        sums = None if lse is None else lse.contiguous()
        call = _Call(q, cache, out, sums, layer)
        self._run_decode(call, plan)
        if plan.has_ragged_rows:
            self._run_ragged(call, plan)
        if lse is not None and sums is not None and sums is not lse:
            lse.copy_(sums)
        return out

    def _run_decode(self, call: "_Call", plan: TritonPlan) -> None:
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
            *call.tensors(self._form),
            part_out,
            part_sums,
            self._counters[-1],
            *self._step_arguments(call, plan, num_tokens),
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
        num_tiles = batch.num_tokens // tuning.queries + batch.num_rows + 1
        ragged_kernel[(num_tiles, self._spec.num_kv_heads)](
            *call.tensors(self._form),
            *step,
            *self._step_arguments(call, plan, batch.num_tokens),
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

    def _step_arguments(self, call: "_Call", plan: TritonPlan, num_tokens: int) -> tuple[Any, ...]:
        """What both kernels take of the step, the layer's numbers and strides, in order."""
        batch, layer = plan.batch, call.layer
        table = _dense(batch.block_table)
        scale_strides = (
            0 if scale is None or scale.numel() == 1 else 1
            for scale in (layer.k_scale, layer.v_scale)
        )
        return (
            batch.query_start_loc,
            batch.seq_lens,
            table,
            batch.num_rows,
            num_tokens,
            layer.scale,
            1.0 if layer.softcap is None else layer.softcap,
            min(_NO_WINDOW, layer.window or _NO_WINDOW),
            *call.q.stride()[:2],
            table.stride(0),
            *scale_strides,
        )

    def _constants(self, call: "_Call", sizes: HeadSizes) -> dict[str, Any]:
        layer = call.layer
        return {
            **self._form.constants(call.cache),
            "GROUP": sizes.group,
            "K_DIM": sizes.k_dim,
            "V_DIM": sizes.v_dim,
            "K_BLOCK": sizes.k_block,
            "V_BLOCK": sizes.v_block,
            "HAS_CAP": layer.softcap is not None,
            "HAS_SLOPES": layer.alibi_slopes is not None,
            "HAS_SINKS": layer.sinks is not None,
            "HAS_K_SCALE": layer.k_scale is not None,
            "HAS_V_SCALE": layer.v_scale is not None,
            "HAS_LSE": call.lse is not None,
        }

    def _reserve_counters(self, batch: BatchView) -> None:
        needed = max(_LEAST_COUNTERS, power_of_two(batch.num_rows * self._spec.num_kv_heads))
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

    def tensors(self, form: CacheForm) -> tuple[Tensor, ...]:
        """What both kernels begin with; ``out`` stands for what the layer does not have."""
        layer = self.layer

        def given(tensor: Tensor | None) -> Tensor:
            return self.out if tensor is None else tensor.contiguous()

        return (
            self.q,
            self.cache,
            self.out,
            given(self.lse),
            given(layer.sinks),
            given(layer.alibi_slopes),
            form.scales(self.cache),
            given(layer.k_scale),
            given(layer.v_scale),
        )


def _is_fresh(batch: BatchView) -> bool:
    """Whether no row of several query tokens has earlier keys. A step that is captured is not: what
    the host knows of it are bounds, which none of its rows reaches."""
    counts, lengths = np.asarray(batch.query_lens), np.asarray(batch.seq_lens_host)
    is_exact = counts.max(initial=0) == batch.max_query_len
    return bool(is_exact and ((counts < 2) | (counts == lengths)).all())


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
