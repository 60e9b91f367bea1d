"""Checks of weights in stored blocks and of activations, for the kernels in C and by numba."""

from collections.abc import Collection

import torch
from torch import Tensor

from cardan.core.types.ggml import BlockFormat, block_format


def check_stored(
    weight: Tensor, format: str, in_features: int | None, known: Collection[str]
) -> BlockFormat:
    """The format's blocks, after a look at the stored rows; ``in_features`` None: not compared.

    Raises:
        ValueError: the format is not among ``known``, or the rows are not whole blocks of it.
    """
    if format not in known:
        raise ValueError(f"no kernels for format {format!r}; known: {', '.join(known)}")
    block = block_format(format)
    if weight.dtype is not torch.uint8 or weight.dim() != 2 or not weight.is_cpu:
        raise ValueError(
            f"weight must be a uint8 matrix on the host, got {weight.dtype} "
            f"{tuple(weight.shape)} on {weight.device}"
        )
    blocks, rest = divmod(weight.shape[1], block.nbytes)
    if rest or (in_features is not None and in_features != blocks * block.elements):
        raise ValueError(
            f"rows of {weight.shape[1]} bytes are not in_features={in_features} in {format} "
            f"blocks ({block.elements} values in {block.nbytes} bytes)"
        )
    return block


def bad_activations(x: Tensor, inputs: int) -> ValueError:
    return ValueError(
        f"x must be float32, bfloat16 or float16 (..., {inputs}) on the host, got {x.dtype} "
        f"{tuple(x.shape)} on {x.device}"
    )
