"""Attention as its formula says, in float64 on the host, one sequence at a time."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from cardan.core.interfaces.attention import LayerParams

Float64 = npt.NDArray[np.float64]

# Accepted error, absolute and relative, of outputs of about unit size.
TOLERANCE = {"float32": 1e-5, "bfloat16": 3e-2, "float16": 4e-3}
# The log-sum-exp is float32 whatever the inputs are; products of short ones are rounded on some
# devices before they are summed.
LSE_TOLERANCE = {"float32": 1e-5, "bfloat16": 3e-2, "float16": 4e-3}


def attend_row(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: LayerParams
) -> tuple[Float64, Float64]:
    """Attention of the last T tokens of one sequence of length L to all of it, causally.

    q [T, num_heads, k_head_dim], k [L, num_kv_heads, k_head_dim], v [L, num_kv_heads, v_head_dim]
    in any dtype. Returns the output [T, num_heads, v_head_dim] and log-sum-exp [T, num_heads].
    """
    queries, keys, values = (x.to("cpu", torch.float64).numpy() for x in (q, k, v))
    count, num_heads, _ = queries.shape
    length, num_kv_heads, _ = keys.shape
    group = num_heads // num_kv_heads
    keys, values = (np.repeat(x, group, axis=1) for x in (keys, values))
    scores = np.einsum("thd,lhd->htl", queries, keys) * layer.scale
    if layer.softcap is not None:
        scores = layer.softcap * np.tanh(scores / layer.softcap)
    distance = (np.arange(length - count, length)[:, None] - np.arange(length)).astype(np.float64)
    if layer.alibi_slopes is not None:
        scores = scores - _host(layer.alibi_slopes)[:, None, None] * distance
    hidden = distance < 0
    if layer.window is not None:
        hidden |= distance >= layer.window
    weights = np.where(hidden, 0.0, np.exp(scores))
    total = weights.sum(-1)
    if layer.sinks is not None:
        total = total + np.exp(_host(layer.sinks))[:, None]
    out = np.einsum("htl,lhd->thd", weights, values) / total.T[:, :, None]
    return out, np.log(total).T


def error_text(got: torch.Tensor, want: Float64, tolerance: float) -> str:
    """Empty if ``got`` is within ``tolerance`` of ``want``; else the worst element in words."""
    actual = got.detach().to("cpu", torch.float64).numpy()
    if actual.shape != want.shape:
        return f"the shape is {actual.shape} instead of {want.shape}"
    if not want.size:
        return ""
    error = np.abs(actual - want)
    ratio = np.where(np.isfinite(error), error / (tolerance + tolerance * np.abs(want)), np.inf)
    place = np.unravel_index(int(ratio.argmax()), ratio.shape)
    if ratio[place] <= 1:
        return ""
    wrong = int((ratio > 1).any(axis=tuple(range(1, ratio.ndim))).sum())
    return (
        f"{wrong} of {len(want)} tokens are off; at {[int(i) for i in place]}: "
        f"{actual[place]:.6g} instead of {want[place]:.6g}"
    )


def concatenate(parts: Sequence[tuple[Float64, Float64]]) -> tuple[Float64, Float64]:
    """Rows' outputs and log-sum-exps, one after the other."""
    return np.concatenate([out for out, _ in parts]), np.concatenate([lse for _, lse in parts])


def _host(values: torch.Tensor) -> Float64:
    array: Float64 = values.detach().to("cpu", torch.float64).numpy()
    return array
