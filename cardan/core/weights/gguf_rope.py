"""RoPE scaling of a GGUF file in the terms of a Hugging Face config."""

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from cardan.core.interfaces.errors import WeightsError
from cardan.core.types.errors import shown
from cardan.core.weights.gguf_metadata import GGUFMetadata
from cardan.core.weights.gguf_names import ROPE_FREQS

_FACTOR_TOLERANCE: Final = 1e-3


def rope_scaling_from_metadata(metadata: GGUFMetadata) -> dict[str, Any] | None:
    """The `rope_scaling` that the `rope.scaling.*` keys describe: none, linear or yarn.

    Raises:
        WeightsError: the scaling type is unknown or a key has a bad value.
    """
    kind = metadata.optional_string("rope.scaling.type")
    factor = metadata.optional_number("rope.scaling.factor")
    if kind is None:
        # The older key for what is now type "linear".
        factor = metadata.optional_number("rope.scale_linear")
        kind = "none" if factor is None or factor == 1.0 else "linear"
    if kind == "none":
        return None
    if kind not in ("linear", "yarn"):
        raise WeightsError(
            f"metadata 'rope.scaling.type': {shown(kind)} is not read (known: none, linear, yarn); "
            "use the model's safetensors files instead"
        )
    if factor is None or factor <= 0:
        raise WeightsError(f"metadata 'rope.scaling.factor': is {factor}, must be positive")
    scaling: dict[str, Any] = {"rope_type": kind, "factor": factor}
    if kind == "yarn":
        scaling |= _yarn_fields(metadata, factor)
    return scaling


def _yarn_fields(metadata: GGUFMetadata, factor: float) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    original = metadata.optional_integer("rope.scaling.original_context_length")
    if original is not None:
        fields["original_max_position_embeddings"] = original
    for key, field in (("yarn_beta_fast", "beta_fast"), ("yarn_beta_slow", "beta_slow")):
        beta = metadata.optional_number(f"rope.scaling.{key}")
        if beta is not None:
            fields[field] = beta
    # GGUF scales YaRN's own attention factor; Hugging Face replaces it.
    extra = metadata.optional_number("rope.scaling.attn_factor")
    if extra is not None and extra != 1.0:
        fields["attention_factor"] = extra * (0.1 * math.log(factor) + 1.0)
    return fields


def llama3_scaling_from_factors(
    factors: npt.NDArray[np.float32], rope_theta: float
) -> dict[str, Any]:
    """Recover Llama 3's `rope_scaling` from the frequency factors that a GGUF file holds instead.

    With `w` the wavelength of a dimension, `1 / factors` is 1 where `w` is short, `1 / factor`
    where it is long, and between them a straight line in `1 / w` that is fixed by
    `low_freq_factor`, `high_freq_factor` and `original_max_position_embeddings`. These three may be
    scaled together without effect, so `low_freq_factor` is 1, as in every published model.

    Args:
        factors: float32 `[head_dim / 2]`.
        rope_theta: the base frequency.

    Raises:
        WeightsError: the factors are not of this form.
    """
    ratio = np.asarray(factors, np.float64)
    if ratio.ndim != 1 or ratio.size < 2 or not np.isfinite(ratio).all() or ratio.min() < 0.999:
        raise WeightsError(f"tensor {ROPE_FREQS!r}: holds no frequency factors of at least 1")
    factor = round(float(ratio.max()), 4)
    inverse_wavelength = rope_theta ** (-np.arange(ratio.size) / ratio.size) / (2 * math.pi)
    between = (ratio > 1.0 + 1e-6) & (ratio < factor * (1.0 - 1e-6))
    if factor == 1.0 or between.sum() < 2:
        raise WeightsError(
            f"tensor {ROPE_FREQS!r}: its factors do not determine a Llama 3 RoPE scaling; "
            "use the model's safetensors files instead"
        )
    smooth = (1.0 / ratio[between] - 1.0 / factor) / (1.0 - 1.0 / factor)
    slope, intercept = np.polyfit(inverse_wavelength[between], smooth, 1)
    high = round(float(1.0 - 1.0 / intercept), 3) if intercept < -1e-6 else 0.0
    original = round(slope * (high - 1.0))
    scaling = {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }
    line = (original * inverse_wavelength - 1.0) / (high - 1.0) if high != 1.0 else np.zeros(1)
    expected = 1.0 / (1.0 / factor + np.clip(line, 0.0, 1.0) * (1.0 - 1.0 / factor))
    if high <= 1.0 or original < 1 or np.abs(expected / ratio - 1.0).max() > _FACTOR_TOLERANCE:
        raise WeightsError(
            f"tensor {ROPE_FREQS!r}: its factors are not those of a Llama 3 RoPE scaling; "
            "use the model's safetensors files instead"
        )
    return scaling
