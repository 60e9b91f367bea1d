"""One layer's tensors and numbers, as the attention kernels take them."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cardan.core.interfaces.attention import LayerParams
from cardan.core.types.kv import KVCacheSpec
from cardan.platforms.shared.triton.attention_tuning import HeadSizes
from cardan.platforms.shared.triton.paged_cache import CacheForm

_NO_WINDOW = 2**31 - 1


@dataclass(frozen=True, slots=True)
class LayerCall:
    """q [T, heads, dim] with a dense last axis, the layer's cache, and what is to be filled."""

    form: CacheForm
    q: Tensor
    cache: Tensor
    out: Tensor
    lse: Tensor | None
    layer: LayerParams

    @property
    def spec(self) -> KVCacheSpec:
        return self.form.spec

    def sizes(self, num_bytes: int) -> HeadSizes:
        """``num_bytes``: of an element of the keys where they are read."""
        group = self.q.shape[1] // self.spec.num_kv_heads
        return HeadSizes(group, self.spec.k_head_dim, self.spec.v_head_dim, num_bytes)

    def floats(self, *shape: int) -> Tensor:
        """Scratch, float32 on the device."""
        return torch.empty(shape, dtype=torch.float32, device=self.q.device)

    def given(self, tensor: Tensor | None) -> Tensor:
        """``out`` stands for what the layer does not have."""
        return self.out if tensor is None else tensor.contiguous()

    def paged(self) -> tuple[Tensor, ...]:
        """What the kernels that read the cache begin with."""
        layer = self.layer
        return (
            self.q,
            self.cache,
            self.out,
            self.given(self.lse),
            self.given(layer.sinks),
            self.given(layer.alibi_slopes),
            self.form.scales(self.cache),
            self.given(layer.k_scale),
            self.given(layer.v_scale),
        )

    def numbers(self) -> tuple[float, float, int]:
        """Scale, soft cap and window."""
        layer = self.layer
        cap = 1.0 if layer.softcap is None else layer.softcap
        return layer.scale, cap, min(_NO_WINDOW, layer.window or _NO_WINDOW)

    def scale_strides(self) -> tuple[int, ...]:
        """From one key head's scale of keys to the next, and of values."""
        return tuple(
            0 if scale is None or scale.numel() == 1 else 1
            for scale in (self.layer.k_scale, self.layer.v_scale)
        )

    def constants(self, sizes: HeadSizes) -> dict[str, Any]:
        """What all kernels know of the layer when they are compiled."""
        layer = self.layer
        return {
            "GROUP": sizes.group,
            "K_DIM": sizes.k_dim,
            "V_DIM": sizes.v_dim,
            "K_BLOCK": sizes.k_block,
            "V_BLOCK": sizes.v_block,
            "HAS_CAP": layer.softcap is not None,
            "HAS_SLOPES": layer.alibi_slopes is not None,
            "HAS_SINKS": layer.sinks is not None,
            "HAS_K_SCALE": layer.k_scale is not None,
            "HAS_V_SCALE": layer.v_scale is not None,
            "HAS_LSE": self.lse is not None,
        }


def dense(tensor: Tensor) -> Tensor:
    """With a last axis whose elements lie side by side."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()
