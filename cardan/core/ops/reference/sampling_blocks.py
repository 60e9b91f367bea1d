"""Blocks of the vocabulary: finding the largest logits without ordering all of them."""

import torch
from torch import Tensor

_LOW_32_BITS = 0xFFFFFFFF
# Small blocks leave few candidates for each place of a table.
_TABLE_BLOCK = 32


def block_maxima(logits: Tensor, size: int) -> Tensor:
    """Largest logit of each block of ``size`` ids, [N, ceil(V / size)]; NaN counts as largest."""
    num_rows, vocab_size = logits.shape
    head = vocab_size // size * size
    maxima = logits[:, :head].view(num_rows, vocab_size // size, size).amax(-1)
    if head < vocab_size:
        maxima = torch.cat((maxima, logits[:, head:].amax(-1, keepdim=True)), dim=1)
    return maxima


def block_sums(values: Tensor, size: int, wide: torch.dtype) -> Tensor:
    """Sum of each block of ``size`` ids, [N, ceil(V / size)] in dtype ``wide``.

    A block is short enough to be summed in the dtype of ``values`` (error below 1e-6 of the sum);
    only the sums are widened, for whatever is accumulated over them.
    """
    num_rows, vocab_size = values.shape
    head = vocab_size // size * size
    sums = values[:, :head].view(num_rows, vocab_size // size, size).sum(-1)
    if head < vocab_size:
        sums = torch.cat((sums, values[:, head:].sum(-1, keepdim=True)), dim=1)
    return sums.to(wide)


def candidates(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Some tokens of each row among which are its k likeliest, the lowest ids among equals.

    A block that is not among the k blocks with the largest maxima (the first ones among equals)
    has k tokens of other blocks before its own best one, so it can hold none of the k likeliest.

    Returns:
        ``values`` [N, C] and ``ids`` [N, C] int64. Ids past the end of the vocabulary fill the
        last block and have the value -inf.
    """
    vocab_size = logits.shape[1]
    places = torch.arange(vocab_size, device=logits.device)
    if 2 * k * _TABLE_BLOCK >= vocab_size:
        return logits, places.expand(logits.shape)
    maxima = block_maxima(logits, _TABLE_BLOCK)
    blocks = ranked(maxima, places[: maxima.shape[1]].expand(maxima.shape), k)
    ids = (blocks[:, :, None] * _TABLE_BLOCK + places[:_TABLE_BLOCK]).flatten(1)
    values = logits.gather(1, ids.clamp(max=vocab_size - 1))
    return values.masked_fill(ids >= vocab_size, -torch.inf), ids


def ranked(values: Tensor, ids: Tensor, k: int) -> Tensor:
    """The ids [N, k] of the k largest values [N, C], the lowest ids among equals.

    The plain top-k leaves the order of equals open. Keys of 64 bits decide it: the bits of a
    float32, with those of the magnitude inverted for negative numbers, order like the number
    itself, and the inverted id follows them.
    """
    # Adding zero turns -0.0, which has other bits than 0.0, into 0.0.
    bits = (values.float() + 0.0).view(torch.int32)
    ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(torch.int64)
    keys = (ordered << 32) | (_LOW_32_BITS - ids)
    return _LOW_32_BITS - (keys.topk(k, dim=-1).values & _LOW_32_BITS)
