"""The cache of the CPU's attention kernels, in C and by numba, and what both check of a step."""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from cardan.core.interfaces.attention import BatchView, KVLayout, LayerParams
from cardan.core.interfaces.errors import UnsupportedError
from cardan.core.types.kv import SCALE_BYTES, KVCacheSpec

# ``[block, 2, head, token in block, content]``: what a head reads of a block lies together.
ORDER = (0, 1, 2, 3, 4)


@dataclass(frozen=True, slots=True)
class PagedCache:
    """The caches that a backend, whose ``name`` errors tell, reads: contiguous tensors
    ``[blocks, *shape]`` of ``dtype``, in ``ORDER``."""

    name: str
    spec: KVCacheSpec
    dtype: torch.dtype
    shape: tuple[int, ...]

    @classmethod
    def of(cls, name: str, spec: KVCacheSpec, layout: KVLayout) -> Self:
        """
        Raises:
            UnsupportedError: the layout or the scales are not those that the kernels read.
        """
        if layout.order != ORDER or layout.opaque:
            raise UnsupportedError(f"{name} attention reads only its own cache layout")
        if spec.scale_bytes != SCALE_BYTES.get(spec.dtype, 0):
            raise UnsupportedError(
                f"{name} attention reads no {spec.dtype} cache with scales of "
                f"{spec.scale_bytes} bytes"
            )
        shape = (2, spec.num_kv_heads, spec.block_size, spec.content_size)
        return cls(name, spec, getattr(torch, spec.dtype), shape)

    def num_blocks(self, cache: Tensor) -> int:
        """
        Raises:
            ValueError: ``cache`` is none of these.
        """
        shape = cache.shape
        if shape[1:] != self.shape or cache.dtype is not self.dtype or not cache.is_contiguous():
            raise ValueError(
                f"the cache must be contiguous {self.dtype} (blocks, "
                f"{', '.join(map(str, self.shape))}), got {cache.dtype} {tuple(shape)}"
            )
        return shape[0]

    def check_features(self, batch: BatchView, features: frozenset[str]) -> None:
        """
        Raises:
            UnsupportedError: the batch needs more than ``features``.
        """
        unknown = batch.features - features
        if unknown:
            raise UnsupportedError(
                f"{self.name} attention cannot honour {', '.join(sorted(unknown))}"
            )

    def check_query(self, q: Tensor, num_tokens: int, layer: LayerParams) -> None:
        """
        Raises:
            UnsupportedError: the layer has scales of its own.
            ValueError: ``q`` is not ``[num_tokens, a multiple of the key heads, head dim]``.
        """
        if layer.k_scale is not None or layer.v_scale is not None:
            raise UnsupportedError(
                f"{self.name} attention reads no cache that is scaled layer by layer"
            )
        tokens, num_heads, head_dim = q.shape
        num_kv_heads = self.spec.num_kv_heads
        if tokens != num_tokens or head_dim != self.spec.k_head_dim:
            raise ValueError(
                f"q {tuple(q.shape)} must be ({num_tokens}, num_heads, {self.spec.k_head_dim})"
            )
        if num_heads % num_kv_heads or not num_heads:
            raise ValueError(f"{num_heads} query heads are no multiple of {num_kv_heads} key heads")

    def check_new(self, k: Tensor, v: Tensor, num_tokens: int) -> None:
        """
        Raises:
            ValueError: keys and values of a step are not those of ``num_tokens`` tokens.
        """
        heads = (num_tokens, self.spec.num_kv_heads)
        wanted = (*heads, self.spec.k_head_dim), (*heads, self.spec.v_head_dim)
        if k.shape != wanted[0] or v.shape != wanted[1]:
            raise ValueError(
                f"k {tuple(k.shape)} and v {tuple(v.shape)} must be {wanted[0]} and {wanted[1]}"
            )


def packed(tensor: Tensor, dtype: torch.dtype, name: str) -> Tensor:
    """``tensor``, contiguous.

    Raises:
        ValueError: it is not of ``dtype``.
    """
    if tensor.dtype is not dtype:
        raise ValueError(f"{name} must be {dtype}, got {tensor.dtype}")
    return tensor if tensor.is_contiguous() else tensor.contiguous()


def per_head(values: Tensor, num_heads: int, name: str) -> Tensor:
    """One number for each query head, float32 and contiguous.

    Raises:
        ValueError: there are not so many.
    """
    if values.numel() != num_heads:
        raise ValueError(f"{name} has {values.numel()} elements for {num_heads} heads")
    return values.to(torch.float32).contiguous()


def beyond(num_blocks: int) -> IndexError:
    return IndexError(
        f"the block table or slot mapping names a block beyond the {num_blocks} of the cache"
    )
