"""What a KV cache holds for one token and head, and how tensors become that and back.

A cache without scales holds the numbers themselves in its dtype; what is beyond the largest number
of a float8 becomes that. An ``int8`` cache holds whole
numbers q from -127 to 127 and behind them, in the last four bytes of the content, one float32
scale (little-endian) for each token and head, of keys and of values apart. A head's numbers are
q * scale, with scale = max |x| / 127 and q = x / scale rounded to the nearest, ties to even, and
limited to 127, all in float32. Zeros have the scale 0; numbers that are not all finite have a
scale that is not, so that reading gives NaN. Between the numbers and the scale lies padding.
"""

import torch
from torch import Tensor

from cardan.core.types.kv import KVCacheSpec

_LARGEST = 127.0
# Names that torch spells otherwise.
_TORCH_NAMES = {"float8_e4m3": "float8_e4m3fn"}


def torch_kv_dtype(name: str) -> torch.dtype:
    """The dtype of caches called ``name`` (``DTYPE_BYTES``)."""
    dtype: torch.dtype = getattr(torch, _TORCH_NAMES.get(name, name))
    return dtype


def stored_content(x: Tensor, spec: KVCacheSpec, dtype: torch.dtype) -> Tensor:
    """Keys or values [..., head_dim] as a cache of ``spec`` in ``dtype`` holds them.

    With scales the last axis is the whole content, ``spec.content_size``; else as it was.
    """
    if not spec.scale_bytes:
        if dtype.is_floating_point and dtype.itemsize == 1:
            largest = torch.finfo(dtype).max
            x = x.to(torch.float32).clamp(-largest, largest)
        return x.to(dtype)
    wide = x.to(torch.float32)
    scale = wide.abs().amax(-1, keepdim=True) / _LARGEST
    whole = torch.where(scale > 0, wide / scale, 0.0).round_().clamp_(-_LARGEST, _LARGEST)
    content = torch.zeros((*x.shape[:-1], spec.content_size), dtype=dtype, device=x.device)
    content[..., : x.shape[-1]] = whole.nan_to_num_(0.0)
    content.view(torch.float32)[..., -1:] = scale
    return content


def loaded_content(content: Tensor, head_dim: int, spec: KVCacheSpec) -> Tensor:
    """The first ``head_dim`` numbers of contiguous ``content`` [..., content_size]: float32 if
    the cache has scales, else in its dtype."""
    numbers = content[..., :head_dim]
    if not spec.scale_bytes:
        return numbers
    return numbers.to(torch.float32) * content.view(torch.float32)[..., -1:]
