"""Gemma 3, text only: Gemma 2 with head norms and two rotary embeddings."""

from dataclasses import replace
from typing import Any, Final

from cardan.models.gemma2 import read_gemma, read_gemma_attention
from cardan.models.layers.config_reader import ConfigReader
from cardan.models.layers.decoder import DecoderForCausalLM
from cardan.models.layers.decoder_config import DecoderConfig
from cardan.models.layers.rope_config import (
    FULL_ATTENTION,
    LAYER_TYPES,
    SLIDING_ATTENTION,
    RopeConfig,
    parse_rope,
)

_WINDOW_PERIOD: Final = 6
# Key of the rotary base outside rope_parameters, and its default, by layer type.
_THETA: Final = {
    FULL_ATTENTION: ("rope_theta", 1_000_000.0),
    SLIDING_ATTENTION: ("rope_local_base_freq", 10_000.0),
}


class Gemma3ForCausalLM(DecoderForCausalLM):
    """Windows in five layers of six, unless ``layer_types`` or ``sliding_window_pattern`` says."""

    @classmethod
    def read_config(cls, config: ConfigReader) -> DecoderConfig:
        if "attn_logit_softcapping" in config:
            raise config.refuse(
                "attn_logit_softcapping", "Gemma 3 norms queries and keys instead; must be null"
            )
        attention = replace(read_gemma_attention(config), head_norm=True)
        return read_gemma(
            config,
            attention,
            lambda kind: _rope(config, attention.head_dim, kind),
            window_period=config.integer("sliding_window_pattern", _WINDOW_PERIOD),
        )


def _rope(config: ConfigReader, head_dim: int, kind: str) -> RopeConfig:
    """Local layers are never scaled by ``rope_scaling``, the older way to scale."""
    key, default = _THETA[kind]
    outer: dict[str, Any] = {"rope_theta": config.number(key, default)}
    parameters = config.section("rope_parameters")
    rope = None
    if parameters is not None:
        unknown = [name for name in parameters.names() if name not in LAYER_TYPES]
        if unknown:
            raise parameters.refuse(unknown[0], f"keys must be among {', '.join(LAYER_TYPES)}")
        rope = parameters.section(kind)
    elif kind == FULL_ATTENTION:
        rope = config.section("rope_scaling")
    return parse_rope(config, (rope or ConfigReader({}, "rope_parameters")).merged(outer), head_dim)
