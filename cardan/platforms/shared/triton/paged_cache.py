"""One layer's paged cache as the Triton kernels see it, and the launches that write to it."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cardan.core.interfaces.attention import HeadRotation
from cardan.core.types.kv import KVCacheSpec
from cardan.platforms.shared.triton.dependent_launch import are_fixed, dependent
from cardan.platforms.shared.triton.kernels.paged_cache import write_kernel
from cardan.platforms.shared.triton.kernels.rotate_and_write import rotate_and_write_kernel
from cardan.platforms.shared.triton.rows import power_of_two

# Heads that one program of the fused launch takes.
_HEADS = 8
_SCALE_BYTES = 4


@dataclass(frozen=True, slots=True)
class CacheForm:
    """How the caches of a KV group lie in memory.

    ``axes``: where block, kv, head, token and content are among a cache's axes.
    """

    spec: KVCacheSpec
    axes: tuple[int, ...]

    def constants(self, cache: Tensor) -> dict[str, int]:
        """What kernels know of ``cache`` when they are compiled: strides in elements, and where
        scales are, in elements of float32 from the beginning of a content (-1: nowhere).

        Known strides tell the compiler how contents are aligned; contents with scales are so by 4
        bytes only.
        """
        block, kv, head, token, _ = (cache.stride(axis) for axis in self.axes)
        return {
            "BLOCK_STRIDE": block,
            "KV_STRIDE": kv,
            "HEAD_STRIDE": head,
            "TOKEN_STRIDE": token,
            "SCALE_AT": self.spec.content_size // _SCALE_BYTES - 1 if self.spec.scale_bytes else -1,
            "BLOCK_SIZE": self.spec.block_size,
        }

    def scales(self, cache: Tensor) -> Tensor:
        """``cache`` seen as float32 where it has scales; else what stands for none."""
        return cache.view(torch.float32) if self.spec.scale_bytes else cache

    def write(self, k: Tensor, v: Tensor, cache: Tensor, slots: Tensor) -> None:
        """Store k and v [T, key heads, dim] at ``slots`` [T]; their last axis is dense."""
        if not len(slots):
            return
        spec = self.spec
        heads = power_of_two(spec.num_kv_heads)
        dims = power_of_two(max(spec.k_head_dim, spec.v_head_dim))
        write_kernel[(len(slots),)](
            k,
            v,
            cache,
            self.scales(cache),
            slots,
            *k.stride()[:2],
            *v.stride()[:2],
            **self.constants(cache),
            NUM_HEADS=spec.num_kv_heads,
            K_DIM=spec.k_head_dim,
            V_DIM=spec.v_head_dim,
            HEADS=heads,
            DIMS=dims,
            num_warps=min(8, max(1, heads * dims // 256)),
        )

    def rotate_and_write(
        self,
        qkv: tuple[Tensor, Tensor, Tensor],
        positions: Tensor,
        rotation: HeadRotation,
        target: tuple[Tensor, Tensor],
        keeps_keys: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """Norm and rotate q and k, store k and v; ``target``: the cache and the slots [T].

        Returns the queries and, if ``keeps_keys``, the keys as they were stored, both dense.
        """
        q, k, v = qkv
        cache, slots = target
        spec, num_tokens = self.spec, q.shape[0]
        q_out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        k_out = torch.empty(k.shape, dtype=k.dtype, device=k.device) if keeps_keys else None
        if not num_tokens:
            return q_out, k_out
        num_q, num_k, dim = q.shape[1], spec.num_kv_heads, spec.k_head_dim
        half = rotation.cos_sin.shape[1] // 2
        rest = dim - 2 * half
        heads = min(_HEADS, power_of_two(max(num_q, num_k)))
        weights = (rotation.q_weight, rotation.k_weight)
        chunks = -(-num_q // heads) + 2 * -(-num_k // heads)
        constants: dict[str, Any] = self.constants(cache)
        rotate_and_write_kernel[(num_tokens, chunks)](
            q,
            k,
            v,
            q_out,
            q_out if k_out is None else k_out,
            cache,
            self.scales(cache),
            slots,
            *(q_out if weight is None else weight for weight in weights),
            rotation.cos_sin,
            positions,
            rotation.eps,
            *q.stride()[:2],
            *k.stride()[:2],
            *v.stride()[:2],
            are_fixed(q),
            **constants,
            NUM_Q=num_q,
            NUM_K=num_k,
            DIM=dim,
            V_DIM=spec.v_head_dim,
            V_BLOCK=power_of_two(spec.v_head_dim),
            HALF=half,
            HEADS=heads,
            HALF_BLOCK=power_of_two(half),
            REST_BLOCK=power_of_two(rest) if rest else 0,
            NORMED=rotation.q_weight is not None,
            KEEPS_KEYS=keeps_keys,
            num_warps=2,
            **dependent(q, num_tokens),
        )
        return q_out, k_out
