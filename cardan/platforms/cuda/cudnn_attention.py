"""cuDNN's attention, by way of torch, for prompts of round lengths; Triton's for all else."""

from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_cudnn_attention
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from cardan.core.interfaces.attention import AttentionNeed, BatchView, LayerParams
from cardan.core.interfaces.capabilities import DeviceInfo, Verdict
from cardan.platforms.shared.triton.attention import TritonAttention, TritonPlan

_BACKEND = SDPBackend.CUDNN_ATTENTION
_DTYPES = ("bfloat16", "float16")
_LONGEST_HEAD = 128
# cuDNN compiles a program for each number of rows and tokens, which takes as long as it saves in
# dozens of steps. So there are few of them: rows are multiples of so many tokens.
_ROUND = 1024


class CudnnAttention(TritonAttention):
    """For who asks for it by name: it is faster where the same lengths come again and again.

    A step whose rows all are prompts of the same number of tokens, a multiple of 1024 and without
    any cached before, is cuDNN's, unless the layer has more than a scale. Everything else, the
    cache included, is as ``TritonAttention`` has it.
    """

    name = "cudnn"

    @classmethod
    def accepts(cls, need: AttentionNeed, device: DeviceInfo) -> Verdict:
        reasons = list(super().accepts(need, device).reasons)
        if need.dtype not in _DTYPES:
            reasons.append(f"cuDNN computes no {need.dtype}")
        if need.k_head_dim % 8 or need.v_head_dim % 8:
            reasons.append("head dims are no multiples of 8")
        if max(need.k_head_dim, need.v_head_dim) > _LONGEST_HEAD:
            reasons.append(f"cuDNN's heads are not longer than {_LONGEST_HEAD}")
        return Verdict(tuple(reasons))

    def run(
        self,
        q: Tensor,
        cache: Tensor,
        plan: TritonPlan,
        layer: LayerParams,
        lse: Tensor | None = None,
    ) -> Tensor:
        length = round_length(plan.batch, len(q)) if plan.long_rows.is_fresh else 0
        if not length or lse is not None or not _is_plain(layer):
            return super().run(q, cache, plan, layer, lse)
        kept = plan.long_rows.take()
        if kept is None:
            return super().run(q, cache, plan, layer, lse)
        heads = [part.unflatten(1, (self._spec.num_kv_heads, -1)) for part in kept]
        queries, k, v = (part.unflatten(0, (-1, length)).transpose(1, 2) for part in (q, *heads))
        if not _serves(queries, k, v):
            plan.long_rows.keep(*heads)
            return super().run(q, cache, plan, layer, lse)
        with sdpa_kernel(_BACKEND):
            out = scaled_dot_product_attention(
                queries, k, v, is_causal=True, scale=layer.scale, enable_gqa=True
            )
        return out.transpose(1, 2).flatten(0, 1)


def round_length(batch: BatchView, num_tokens: int) -> int:
    """Query tokens of each row of a step, if all have the same round number and none is left over;
    else 0."""
    length = batch.max_query_len
    is_round = length > 0 and length % _ROUND == 0 and length * batch.num_rows == num_tokens
    return length if is_round and set(batch.query_lens) == {length} else 0


def _is_plain(layer: LayerParams) -> bool:
    additions = (layer.window, layer.softcap, layer.sinks, layer.alibi_slopes)
    return all(given is None for given in (*additions, layer.k_scale, layer.v_scale))


def _serves(q: Tensor, k: Tensor, v: Tensor) -> bool:
    return can_use_cudnn_attention(SDPAParams(q, k, v, None, 0.0, True, True))
