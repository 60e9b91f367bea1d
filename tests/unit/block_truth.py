"""Stored blocks and activations, and what products with them must give."""

import gguf
import numpy as np
import torch

from cardan.core.ops.reference.block_inputs import random_blocks
from cardan.core.types.ggml import BLOCK_TYPES, block_format

FORMATS = tuple(BLOCK_TYPES)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def name_of(dtype):
    return str(dtype).removeprefix("torch.")


def decoded(weight, format):
    """The gguf package's values of stored rows, float32."""
    kind = getattr(gguf.GGMLQuantizationType, format.upper())
    return torch.from_numpy(gguf.dequantize(weight.numpy(), kind)).view(weight.shape[0], -1)


def stored(format, outputs, inputs, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return random_blocks(format, outputs, inputs, inputs**-0.5, generator)


def activations(rows, inputs, dtype=torch.float32, seed=1):
    generator = torch.Generator().manual_seed(seed)
    # Blocks of very different sizes, and one of zeros.
    x = torch.randn(rows, inputs, generator=generator)
    sizes = torch.randint(-3, 3, (rows, inputs // 32), generator=generator)
    x = x * torch.exp2(sizes).repeat_interleave(32, 1)
    x[:, :32] *= torch.arange(rows).fmod(2).unsqueeze(1)
    return x.to(dtype)


def rounded(x, block=32):
    """x in float64 as kernels see it that round it: 8 bits and a scale for each block."""
    blocks = x.float().reshape(x.shape[0], -1, block)
    most = blocks.abs().amax(-1, keepdim=True)
    inverse = torch.where(most > 2.0**-100, torch.tensor(127.0) / most, 0.0)
    return ((blocks * inverse).round().double() * (most / 127).double()).view(x.shape)


def assert_close(found, x, weight, bias=None, rounding=0.0):
    """Within 1e-5 of the sum of magnitudes, and the rounding of the result's dtype."""
    truth = x.double() @ weight.double().T
    scale = x.double().abs() @ weight.double().abs().T
    if bias is not None:
        truth, scale = truth + bias.double(), scale + bias.double().abs()
    excess = (found.double() - truth).abs() - rounding * truth.abs()
    assert bool((excess <= 1e-5 * scale + 1e-30).all()), float((excess / scale).max())


def edge_blocks(format):
    """Rows of one block each: all bits of codes and scales clear or set, with the largest finite,
    subnormal, zero and negative factors."""
    size = block_format(format).nbytes
    halves = np.array([65504, -65504, 6e-8, -6e-8, 0.0, -0.0, 1.5, -3e-5], np.float16)
    rows = []
    for half in halves.view(np.uint16):
        for fill in (0x00, 0xFF, 0x80, 0x7F):
            row = np.full(size, fill, np.uint8)
            for at in {"q2_k": (80, 82), "q3_k": (108,), "q6_k": (208,)}.get(format, (0, 2)):
                if at == 0 or format not in ("q4_0", "q5_0", "q8_0", "iq4_nl"):
                    row[at : at + 2] = [half & 255, half >> 8]
            rows.append(row)
    return torch.from_numpy(np.stack(rows))
