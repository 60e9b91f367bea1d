"""Products with, and look-ups in, weights that are stored in quantised blocks.

Formats are those of ``cardan.core.types.ggml.BLOCK_TYPES``. Blocks are decoded on the host, by
NumPy: these definitions are to check kernels against, and no graph can capture them.
"""

import torch
from torch import Tensor

from cardan.core.ops.reference.block_decoders import decode_rows
from cardan.core.types.ggml import BLOCK_TYPES

# So many products of two 8-bit numbers add up exactly in float32.
_EXACT_SUMMANDS = 1024


def decode_blocks(weight: Tensor, format: str) -> Tensor:
    """Stored rows, uint8 [n, row bytes], in float32 [n, row elements] on the same device."""
    rows = decode_rows(weight.detach().cpu().numpy(), BLOCK_TYPES[format])
    return torch.from_numpy(rows).to(weight.device)


def block_linear(x: Tensor, weight: Tensor, bias: Tensor | None, format: str) -> Tensor:
    """x [..., I] times the transpose of the decoded weight [O, I], plus bias [O]: [..., O].

    ``weight`` is uint8 [O, row bytes] as stored. Decoded and summed in float32, or in float64 if
    x is; rounded once to x's dtype. Attributes of use: ``dtype`` (of x, bias and the result),
    ``format``, ``in_features`` (I), ``out_features`` (O).
    """
    computed = torch.promote_types(x.dtype, torch.float32)
    decoded = decode_blocks(weight, format).to(computed)
    wide_bias = None if bias is None else bias.to(computed)
    return torch.nn.functional.linear(x.to(computed), decoded, wide_bias).to(x.dtype)


def block_embedding(token_ids: Tensor, weight: Tensor, format: str, dtype: torch.dtype) -> Tensor:
    """Rows ``token_ids`` [T] int64 of a stored table, uint8 [V, row bytes]: [T, H] in ``dtype``.

    Decoded in float32 and rounded once. Attributes of use: ``dtype``, ``format``, ``hidden`` (H).
    """
    return decode_blocks(weight.index_select(0, token_ids), format).to(dtype)


def int8_linear(x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    """x [..., I] times the transpose of weight [O, I] int8 times scales [O], plus bias [O].

    Every row of x is quantised in float32: s = absmax / 127, q = x / s rounded to nearest even (0
    where s is 0). Sums of q times weight are exact; they are scaled by s and by the row's scale.
    ``scales`` are float32 and not negative. Attributes of use: ``dtype`` (of x, bias and the
    result), ``in_features`` (I), ``out_features`` (O).
    """
    rows = x.to(torch.float32)
    steps = rows.abs().amax(dim=-1, keepdim=True) / 127.0
    quantized = torch.where(steps > 0, rows / steps, 0.0).round()
    computed = torch.promote_types(x.dtype, torch.float32)
    out = _exact_sums(quantized, weight).to(computed) * steps.to(computed) * scales.to(computed)
    if bias is not None:
        out = out + bias.to(computed)
    return out.to(x.dtype)


def _exact_sums(x: Tensor, weight: Tensor) -> Tensor:
    """Integers x [..., I] of 8 bits in float32 times the transpose of weight [O, I] int8, in int32.

    Devices may have no float64, and no product of integers.
    """
    sums = torch.zeros((*x.shape[:-1], len(weight)), dtype=torch.int32, device=x.device)
    parts = (tensor.split(_EXACT_SUMMANDS, dim=-1) for tensor in (x, weight))
    for columns, rows in zip(*parts, strict=True):
        sums += torch.nn.functional.linear(columns, rows.to(torch.float32)).to(torch.int32)
    return sums
