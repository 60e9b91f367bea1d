"""Tables of cosines and sines for rotary position embeddings."""

import math

import torch

from cardan.models.layers.rope_config import LinearScaling, Llama3Scaling, RopeConfig, YarnScaling


def cos_sin_cache(rope: RopeConfig, max_len: int, device: torch.device) -> torch.Tensor:
    """The table [max_len, head_dim] float32 for positions 0..max_len-1.

    The first head_dim / 2 columns are cosines, the rest sines. Computed on the host in float32, in
    transformers' order of operations, so that long positions round alike.
    """
    inv_freq, factor = _frequencies(rope)
    angles = torch.arange(max_len, dtype=torch.float32)[:, None] * inv_freq
    return (torch.cat([angles.cos(), angles.sin()], dim=-1) * factor).to(device)


def _frequencies(rope: RopeConfig) -> tuple[torch.Tensor, float]:
    """Radians per position of each pair, and the factor of the table."""
    exponents = torch.arange(0, rope.head_dim, 2, dtype=torch.float32) / rope.head_dim
    periods = rope.theta**exponents
    match rope.scaling:
        case None:
            return 1.0 / periods, 1.0
        case LinearScaling(factor):
            return (1.0 / periods) / factor, 1.0
        case Llama3Scaling() as llama3:
            return _llama3(1.0 / periods, llama3), 1.0
        case YarnScaling() as yarn:
            return _yarn(periods, rope, yarn), _yarn_factor(yarn)


def _llama3(inv_freq: torch.Tensor, scaling: Llama3Scaling) -> torch.Tensor:
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    # How often each pair turns within the original context.
    turns = scaling.original_max_position_embeddings / (2 * math.pi / inv_freq)
    keep = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - keep) * inv_freq / scaling.factor + keep * inv_freq


def _yarn(periods: torch.Tensor, rope: RopeConfig, scaling: YarnScaling) -> torch.Tensor:
    def pair_of(turns: float) -> float:
        """The (fractional) pair that turns so often within the original context."""
        length = scaling.original_max_position_embeddings / (turns * 2 * math.pi)
        return rope.head_dim * math.log(length) / (2 * math.log(rope.theta))

    low, high = pair_of(scaling.beta_fast), pair_of(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.head_dim - 1)
    if low == high:
        high += 0.001
    pairs = torch.arange(rope.head_dim // 2, dtype=torch.float32)
    keep = 1 - ((pairs - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - keep) / (scaling.factor * periods) + keep / periods


def _yarn_factor(scaling: YarnScaling) -> float:
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.mscale is not None and scaling.mscale_all_dim is not None:
        return _mscale(scaling.factor, scaling.mscale) / _mscale(
            scaling.factor, scaling.mscale_all_dim
        )
    return _mscale(scaling.factor, 1.0)


def _mscale(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0
