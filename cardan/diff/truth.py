"""What calls should have given: in float64 on the host, from the arguments that they got."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from cardan.core.interfaces.attention import HeadRotation, LayerParams
from cardan.core.interfaces.kernels import OpSpec
from cardan.core.interfaces.torch_kv_content import loaded_content, stored_content, torch_kv_dtype
from cardan.core.ops.compare import copy_args, reference_kernel
from cardan.core.types.kv import KVCacheSpec
from cardan.diff.recorder import ATTENTION, ROTATE, CallEvent


def tensors_of(result: Any) -> list[Tensor]:
    """The tensors that a kernel returned."""
    if isinstance(result, Tensor):
        return [result]
    return [item for item in result or () if isinstance(item, Tensor)]


def host(tensor: Tensor) -> Tensor:
    """A copy on the host in the same dtype, which nothing else writes to."""
    return tensor.detach().to("cpu", copy=True)


def op_truth(spec: OpSpec, args: Sequence[Any], ops: Mapping[str, OpSpec]) -> list[Tensor]:
    """Outputs of the operation's body in float64."""
    return tensors_of(reference_kernel(spec, ops)(*copy_args(args, "cpu", widen=True)))


def held(x: Tensor, spec: KVCacheSpec) -> Tensor:
    """Keys or values as a cache of ``spec`` gives them back, in float64."""
    content = stored_content(x, spec, torch_kv_dtype(spec.dtype))
    return loaded_content(content, x.shape[-1], spec).to(torch.float64)


def attend(q: Tensor, k: Tensor, v: Tensor, layer: LayerParams) -> Tensor:
    """Attention of the last T tokens of one sequence of length L to all of it, causally.

    q [T, num_heads, k_head_dim], k [L, num_kv_heads, k_head_dim], v [L, num_kv_heads, v_head_dim]
    -> [T, num_heads, v_head_dim], float64.
    """
    queries = q.to("cpu", torch.float64)
    group = q.shape[1] // k.shape[1]
    keys, values = (x.repeat_interleave(group, dim=1) for x in (k, v))
    scores = torch.einsum("thd,lhd->htl", queries, keys) * layer.scale
    if layer.softcap is not None:
        scores = layer.softcap * torch.tanh(scores / layer.softcap)
    length, count = len(k), len(q)
    distance = torch.arange(length - count, length)[:, None] - torch.arange(length)
    if layer.alibi_slopes is not None:
        scores = scores - layer.alibi_slopes.to("cpu", torch.float64)[:, None, None] * distance
    hidden = distance < 0
    if layer.window is not None:
        hidden = hidden | (distance >= layer.window)
    scores = scores.masked_fill(hidden, -torch.inf)
    if layer.sinks is not None:
        sinks = layer.sinks.to("cpu", torch.float64)[:, None, None].expand(-1, count, 1)
        scores = torch.cat((scores, sinks), -1)
    weights = scores.softmax(-1)[..., :length]
    return torch.einsum("htl,lhd->thd", weights, values)


@dataclass(slots=True)
class History:
    """Keys and values of one sequence in one layer, as its cache should hold them: float64."""

    keys: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)

    def add(self, k: Tensor, v: Tensor, spec: KVCacheSpec) -> None:
        """Take further tokens: [T, num_kv_heads, head_dim]."""
        self.keys.append(held(k, spec))
        self.values.append(held(v, spec))

    def whole(self) -> tuple[Tensor, Tensor]:
        return torch.cat(self.keys), torch.cat(self.values)


class AttentionTruth:
    """The truth of attention calls over one sequence, layer by layer as they come."""

    def __init__(self, ops: Mapping[str, OpSpec]) -> None:
        self._ops = ops
        self._histories: dict[str, History] = {}

    def history(self, path: str) -> tuple[Tensor, Tensor]:
        """Keys and values of the layer so far."""
        return self._histories[path].whole()

    def of(self, event: CallEvent) -> list[Tensor]:
        """What the call should have returned; takes up what it should have stored."""
        spec = event.site.kv
        if spec is None:
            raise ValueError(f"{event.site.op} is no call of an attention backend")
        if event.site.op == ATTENTION:
            q, layer = event.args
            return [attend(q, *self.history(event.path), layer)]
        history = self._histories.setdefault(event.path, History())
        if event.site.op != ROTATE:
            k, v = event.args
            history.add(host(k), host(v), spec)
            return []
        q, k, v, positions, rotation = event.args
        rotated, key = self._rotated(rotation, (q, k), positions)
        history.add(key.to(k.dtype), host(v), spec)
        return [rotated]

    def _rotated(
        self, rotation: HeadRotation, qk: tuple[Tensor, Tensor], positions: Tensor
    ) -> tuple[Tensor, Tensor]:
        args: tuple[Any, ...]
        if rotation.q_weight is None:
            op, args = "rotary_embedding", (*qk, rotation.cos_sin, positions)
        else:
            op = "qk_norm_rope"
            weights = (rotation.q_weight, rotation.k_weight, rotation.eps)
            args = (*qk, *weights, rotation.cos_sin, positions)
        q, k = op_truth(self._ops[op], args, self._ops)
        return q, k
