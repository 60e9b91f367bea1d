"""Paged attention whose every shape follows from the shapes of its inputs alone."""

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from cardan.core.interfaces.attention import (
    AttentionBackend,
    AttentionNeed,
    BatchView,
    KVLayout,
    LayerParams,
)
from cardan.core.interfaces.capabilities import DeviceInfo, Verdict
from cardan.core.interfaces.device import Device
from cardan.core.interfaces.errors import UnsupportedError
from cardan.core.interfaces.torch_attention import refusals
from cardan.core.types.kv import KVCacheSpec
from cardan.testing.fake.settings import StandingFault

# Standing faults of the fake platform that live in attention.
_FAULTS: frozenset[StandingFault] = frozenset(
    {"wrong_mask", "window_off_by_one", "stale_block", "lost_write"}
)


def backends(faults: frozenset[StandingFault]) -> "Sequence[type[AttentionBackend]]":
    """The fake platform's backends, with those of ``faults`` that concern attention."""
    sound: Sequence[type[AttentionBackend]] = (FakeAttention,)
    if not faults & _FAULTS:
        return sound
    from cardan.testing.fake.faulty_attention import faulty

    return faulty(sound, faults)


class FakeAttention(AttentionBackend):
    """Gathers for each query token the keys of its row, as many as the block table is wide.

    Slow and simple: no value of a step decides what is computed, so any step can be captured, and
    a mixed batch is nothing special. The plan of a step is its ``BatchView``, whose tensors the
    core updates in place. Only slots that a sequence has written are read for it; padding tokens
    write to the null block, and their result is zero.
    """

    name = "fake"
    # Bytes of keys and values that are gathered at once.
    max_gather_bytes: ClassVar[int] = 64 << 20

    @classmethod
    def accepts(cls, need: AttentionNeed, device: DeviceInfo) -> Verdict:
        # It can be captured, too, and keeps caches as they come; else as any backend over torch.
        reasons = list(refusals(replace(need, captured=False)))
        if need.kv_dtype != need.dtype:
            reasons.append(f"kv dtype {need.kv_dtype} differs from the computing one, {need.dtype}")
        return Verdict(tuple(reasons))

    @classmethod
    def layout(cls, spec: KVCacheSpec, device: DeviceInfo) -> KVLayout:
        """``[block, 2, token in block, head, max(k_head_dim, v_head_dim)]``."""
        return KVLayout()

    def __init__(self, spec: KVCacheSpec, layout: KVLayout, device: Device) -> None:
        if layout.order != KVLayout().order or layout.opaque:
            raise UnsupportedError("fake attention reads only its own cache layout")
        self._spec = spec

    def plan(self, batch: BatchView) -> BatchView:
        if batch.features:
            names = ", ".join(sorted(batch.features))
            raise UnsupportedError(f"fake attention cannot honour {names}")
        return batch

    def write(self, k: Tensor, v: Tensor, cache: Tensor, plan: BatchView) -> None:
        spec = self._spec
        slots = self._cache_rows(plan.slot_mapping.clamp(min=0))
        rows = cache.flatten(0, 2)
        rows[..., : spec.k_head_dim].index_copy_(0, slots, k)
        rows[spec.block_size :, :, : spec.v_head_dim].index_copy_(0, slots, v)

    def run(
        self,
        q: Tensor,
        cache: Tensor,
        plan: BatchView,
        layer: LayerParams,
        lse: Tensor | None = None,
    ) -> Tensor:
        if layer.k_scale is not None or layer.v_scale is not None:
            raise UnsupportedError("fake attention reads no scaled (quantised) cache")
        out = q.new_empty(q.shape[0], q.shape[1], self._spec.v_head_dim)
        num_keys = plan.block_table.shape[1] * self._spec.block_size
        if layer.window is not None:
            num_keys = min(num_keys, layer.window)
        bytes_per_token = num_keys * cache.shape[3] * cache.shape[4] * 2 * cache.itemsize
        step = max(1, self.max_gather_bytes // max(1, bytes_per_token))
        for start in range(0, q.shape[0], step):
            part = slice(start, start + step)
            keys, values, distance = self._gather(cache, plan, part, num_keys, layer.window)
            result, sums = _attend(q[part], keys, values, distance, layer)
            out[part] = result
            if lse is not None:
                lse[part] = sums
        is_padding = torch.arange(q.shape[0], device=q.device) >= plan.query_start_loc[-1:]
        return out.masked_fill_(is_padding.view(-1, 1, 1), 0.0)

    def _gather(
        self, cache: Tensor, plan: BatchView, part: slice, num_keys: int, window: int | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Keys and values [n, K, head, content] of the part's tokens, and the distance [n, K] of
        each key; a negative distance is past the token, and its place repeats the last key."""
        spec = self._spec
        position = plan.positions[part].unsqueeze(1)
        reach = torch.arange(num_keys, device=position.device)
        if window is None:
            reach = reach.expand(position.shape[0], num_keys)
        else:
            reach = reach + (position - window + 1).clamp(min=0)
        key = reach.minimum(position)
        block = plan.block_table[plan.token_rows[part].unsqueeze(1), key // spec.block_size]
        slots = block.to(torch.int64) * spec.block_size + key % spec.block_size
        index = self._cache_rows(slots).flatten()
        rows = cache.flatten(0, 2)
        keys = rows.index_select(0, index).unflatten(0, key.shape)
        values = rows[spec.block_size :].index_select(0, index).unflatten(0, key.shape)
        return keys[..., : spec.k_head_dim], values[..., : spec.v_head_dim], position - reach

    def _cache_rows(self, slots: Tensor) -> Tensor:
        """Rows of the keys of ``slots`` in the cache as [blocks * 2 * block_size, head, content];
        the values lie ``block_size`` rows further on."""
        return slots + slots // self._spec.block_size * self._spec.block_size


def _attend(
    q: Tensor, keys: Tensor, values: Tensor, distance: Tensor, layer: LayerParams
) -> tuple[Tensor, Tensor]:
    """q [n, heads, dim] to its own keys: [n, heads, v dim] in q's dtype, log-sum-exp [n, heads]."""
    num_tokens, num_heads, _ = q.shape
    wide = torch.promote_types(q.dtype, torch.float32)
    # Heads of one group share keys.
    grouped = q.to(wide).unflatten(1, (keys.shape[2], -1))
    scores = (grouped @ keys.to(wide).permute(0, 2, 3, 1)).flatten(1, 2) * layer.scale
    if layer.softcap is not None:
        scores = (scores / layer.softcap).tanh() * layer.softcap
    if layer.alibi_slopes is not None:
        scores = scores - layer.alibi_slopes.to(wide).unsqueeze(1) * distance.unsqueeze(1)
    scores = scores.masked_fill((distance < 0).unsqueeze(1), -torch.inf)
    top = scores.amax(-1, keepdim=True)
    if layer.sinks is not None:
        sinks = layer.sinks.to(wide).unsqueeze(1)
        top = top.maximum(sinks)
    weights = (scores - top).exp()
    total = weights.sum(-1, keepdim=True)
    if layer.sinks is not None:
        total = total + (sinks - top).exp()
    grouped = weights.unflatten(1, (keys.shape[2], -1))
    mixed = (grouped @ values.to(wide).transpose(1, 2)).view(num_tokens, num_heads, -1)
    sums = (top + total.log()).squeeze(-1).to(torch.float32)
    return (mixed / total).to(q.dtype), sums
