"""Rotary embedding parameters, as the several generations of ``config.json`` state them."""

from dataclasses import dataclass
from typing import Any, Final

from cardan.models.layers.config_reader import ConfigReader

FULL_ATTENTION: Final = "full_attention"
SLIDING_ATTENTION: Final = "sliding_attention"
LAYER_TYPES: Final = (FULL_ATTENTION, SLIDING_ATTENTION)

_DEFAULT_THETA: Final = 10_000.0


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """All frequencies divided by ``factor``."""

    factor: float


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Llama 3.1: low frequencies divided by ``factor``, a smooth passage, high ones kept."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """YaRN (Peng et al. 2023). ``attention_factor`` multiplies cosines and sines."""

    factor: float
    original_max_position_embeddings: int
    attention_factor: float | None
    mscale: float | None
    mscale_all_dim: float | None
    beta_fast: float
    beta_slow: float
    truncate: bool


Scaling = LinearScaling | Llama3Scaling | YarnScaling


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """One rotary embedding over whole heads of ``head_dim``."""

    head_dim: int
    theta: float
    scaling: Scaling | None = None


def read_rope(config: ConfigReader, head_dim: int, layer_type: str) -> RopeConfig:
    """The rotary embedding of layers of ``layer_type``.

    Reads ``rope_parameters`` (transformers 5; one for all layers, or one for each layer type) or
    ``rope_theta`` with ``rope_scaling`` (older).

    Raises:
        ConfigError: a parameter is missing or invalid, or the scaling is not known.
    """
    outer: dict[str, Any] = {"rope_theta": config.number("rope_theta", _DEFAULT_THETA)}
    rope = config.section("rope_parameters")
    if rope is not None and any(key in rope for key in LAYER_TYPES):
        if layer_type not in rope:
            raise rope.refuse(layer_type, "has no parameters, but layers are of this type")
        rope = rope.section(layer_type)
    if rope is None:
        rope = config.section("rope_scaling") or ConfigReader({}, "rope_parameters")
    return parse_rope(config, rope.merged(outer), head_dim)


def parse_rope(config: ConfigReader, rope: ConfigReader, head_dim: int) -> RopeConfig:
    """One rotary embedding from its own section; ``config`` gives the context lengths."""
    if head_dim % 2:
        raise config.refuse("head_dim", f"rotary embeddings need an even number, not {head_dim}")
    for section in (config, rope):
        if section.number("partial_rotary_factor", 1.0) != 1.0:
            raise section.refuse(
                "partial_rotary_factor", "this architecture rotates whole heads (1.0) only"
            )
    return RopeConfig(head_dim, rope.number("rope_theta"), _scaling(config, rope))


def _scaling(config: ConfigReader, rope: ConfigReader) -> Scaling | None:
    key = "rope_type" if "rope_type" in rope else "type"
    kind = rope.text(key, "default")
    if kind == "default":
        return None
    if kind == "linear":
        return LinearScaling(rope.number("factor"))
    if kind == "llama3":
        return _llama3(config, rope)
    if kind == "yarn":
        return _yarn(config, rope)
    raise rope.refuse(
        key, "this rotary scaling is not known; known are default, linear, llama3 and yarn"
    )


def _original_length(config: ConfigReader, rope: ConfigReader) -> int:
    """Context length of pre-training; a value outside the section wins, as in transformers."""
    key = "original_max_position_embeddings"
    if key in config:
        return config.integer(key)
    return rope.integer(key) if key in rope else config.integer("max_position_embeddings")


def _llama3(config: ConfigReader, rope: ConfigReader) -> Llama3Scaling:
    scaling = Llama3Scaling(
        factor=rope.number("factor"),
        low_freq_factor=rope.number("low_freq_factor"),
        high_freq_factor=rope.number("high_freq_factor"),
        original_max_position_embeddings=_original_length(config, rope),
    )
    if scaling.high_freq_factor <= scaling.low_freq_factor:
        raise rope.refuse(
            "high_freq_factor", f"must exceed low_freq_factor ({scaling.low_freq_factor:g})"
        )
    return scaling


def _yarn(config: ConfigReader, rope: ConfigReader) -> YarnScaling:
    original = _original_length(config, rope)
    if "factor" in rope:
        factor = rope.number("factor")
    else:
        factor = config.integer("max_position_embeddings") / original
    return YarnScaling(
        factor=factor,
        original_max_position_embeddings=original,
        attention_factor=rope.optional_number("attention_factor"),
        mscale=rope.optional_number("mscale"),
        mscale_all_dim=rope.optional_number("mscale_all_dim"),
        beta_fast=rope.number("beta_fast", 32.0),
        beta_slow=rope.number("beta_slow", 1.0),
        truncate=rope.flag("truncate", True),
    )
