"""Self-attention of one layer: projections, head norms, rotation, and the call to the backend."""

from collections.abc import Iterator

import torch
from torch import nn

from cardan.core.interfaces.attention import AttentionNeed, HeadRotation, LayerParams
from cardan.core.interfaces.model import BuildContext, StepContext, WeightSlot
from cardan.core.types.kv import SCALE_BYTES, KVCacheSpec
from cardan.models.layers.decoder_config import DecoderConfig
from cardan.models.layers.linear import QKVLinear, RowLinear, dtype_name
from cardan.models.layers.norm import RMSNormWeight


class SelfAttention(nn.Module):
    """x [T, hidden_size] -> [T, hidden_size], or [R, hidden_size] of the tokens ``ends`` [R].

    ``cos_sin`` is the rotary table of the layer, shared with other layers.
    """

    def __init__(
        self, index: int, config: DecoderConfig, cos_sin: torch.Tensor, build: BuildContext
    ) -> None:
        super().__init__()
        prefix = f"model.layers.{index}.self_attn."
        spec = config.attention
        self._index = index
        self._head_dim = spec.head_dim
        heads = (spec.num_heads, spec.num_kv_heads)
        self.qkv_proj = QKVLinear(
            prefix, config.hidden_size, spec.head_dim, heads, spec.qkv_bias, build
        )
        width = spec.num_heads * spec.head_dim
        self.o_proj = RowLinear(
            f"{prefix}o_proj", width, config.hidden_size, spec.output_bias, build
        )
        self.rotation = (
            NormedRotation(prefix, config, cos_sin, build)
            if spec.head_norm
            else Rotation(config, cos_sin, build)
        )
        self._params = LayerParams(
            scale=spec.scale, window=config.layers[index].window, softcap=spec.softcap
        )
        self._build = build

    def forward(
        self, x: torch.Tensor, step: StepContext, ends: torch.Tensor | None = None
    ) -> torch.Tensor:
        num_heads, num_kv_heads = self.qkv_proj.num_heads, self.qkv_proj.num_kv_heads
        qkv = self.qkv_proj(x).unflatten(-1, (num_heads + 2 * num_kv_heads, self._head_dim))
        q, k, v = qkv.split([num_heads, num_kv_heads, num_kv_heads], dim=-2)
        rotation = self.rotation.for_attention
        attended = step.attend(self._index, q, k, v, self._params, rotation).flatten(-2)
        out: torch.Tensor = self.o_proj(rows_of(attended, ends))
        return out

    def weight_slots(self) -> Iterator[WeightSlot]:
        yield from self.qkv_proj.weight_slots()
        yield from self.o_proj.weight_slots()
        yield from self.rotation.weight_slots()

    def kv_spec(self) -> KVCacheSpec:
        """What this rank keeps for each token. Layers with a window keep every token too: they
        share the block tables of the others, and the mask does the rest."""
        return KVCacheSpec(
            kind="full",
            block_size=self._build.block_size,
            num_kv_heads=self.qkv_proj.num_kv_heads,
            k_head_dim=self._head_dim,
            v_head_dim=self._head_dim,
            dtype=self._build.kv_dtype,
            scale_bytes=SCALE_BYTES.get(self._build.kv_dtype, 0),
        )

    def attention_need(self) -> AttentionNeed:
        """What this rank's layer asks of a backend."""
        window = self._params.window
        return AttentionNeed(
            kind="mha",
            num_heads=self.qkv_proj.num_heads,
            num_kv_heads=self.qkv_proj.num_kv_heads,
            k_head_dim=self._head_dim,
            v_head_dim=self._head_dim,
            dtype=dtype_name(self._build.dtype),
            kv_dtype=self._build.kv_dtype,
            block_size=self._build.block_size,
            windows=frozenset() if window is None else frozenset({window}),
            softcap=self._params.softcap is not None,
        )


def rows_of(x: torch.Tensor, places: torch.Tensor | None) -> torch.Tensor:
    """The rows of x at ``places``; all of them where it is None."""
    return x if places is None else x.index_select(0, places)


class Rotation(nn.Module):
    """Rotates queries [T, num_heads, head_dim] and keys [T, num_kv_heads, head_dim]."""

    def __init__(self, config: DecoderConfig, cos_sin: torch.Tensor, build: BuildContext) -> None:
        super().__init__()
        use: dict[str, int | str] = {
            "dtype": dtype_name(build.dtype),
            "head_dim": config.attention.head_dim,
        }
        rotate = build.ops.bind("rotary_embedding", **use)

        def rotated(
            q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor
        ) -> tuple[torch.Tensor, torch.Tensor]:
            found: tuple[torch.Tensor, torch.Tensor] = rotate(q, k, cos_sin, positions)
            return found

        self.for_attention = HeadRotation(
            rotate=rotated,
            provider=build.ops.resolve("rotary_embedding", **use).provider,
            cos_sin=cos_sin,
        )

    def weight_slots(self) -> Iterator[WeightSlot]:
        """No weights."""
        yield from ()


class NormedRotation(nn.Module):
    """Norms every head of queries and keys, then rotates. Shapes as ``Rotation``."""

    def __init__(
        self, prefix: str, config: DecoderConfig, cos_sin: torch.Tensor, build: BuildContext
    ) -> None:
        super().__init__()
        head_dim, offset, eps = (
            config.attention.head_dim,
            config.norm_offset,
            config.rms_norm_eps,
        )
        self.q_norm = RMSNormWeight(f"{prefix}q_norm", head_dim, offset, build)
        self.k_norm = RMSNormWeight(f"{prefix}k_norm", head_dim, offset, build)
        use: dict[str, int | str] = {
            "dtype": dtype_name(build.dtype),
            "head_dim": head_dim,
            "hidden": head_dim,
        }
        norm_and_rotate = build.ops.bind("qk_norm_rope", **use)
        weights = (self.q_norm.weight, self.k_norm.weight)

        def rotated(
            q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor
        ) -> tuple[torch.Tensor, torch.Tensor]:
            found: tuple[torch.Tensor, torch.Tensor] = norm_and_rotate(
                q, k, *weights, eps, cos_sin, positions
            )
            return found

        self.for_attention = HeadRotation(
            rotate=rotated,
            provider=build.ops.resolve("qk_norm_rope", **use).provider,
            cos_sin=cos_sin,
            q_weight=weights[0],
            k_weight=weights[1],
            eps=eps,
        )

    def weight_slots(self) -> Iterator[WeightSlot]:
        yield from self.q_norm.weight_slots()
        yield from self.k_norm.weight_slots()
