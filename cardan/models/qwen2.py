"""Qwen 2 and 2.5: Llama with biases on queries, keys and values."""

from dataclasses import replace

from cardan.models.layers.config_reader import ConfigReader
from cardan.models.layers.decoder import DecoderForCausalLM
from cardan.models.layers.decoder_config import (
    AttentionConfig,
    DecoderConfig,
    read_attention,
    read_decoder,
    read_layer_types,
    read_layers,
)
from cardan.models.layers.rope_config import (
    FULL_ATTENTION,
    SLIDING_ATTENTION,
    read_rope,
)


class Qwen2ForCausalLM(DecoderForCausalLM):
    """Windows, where in use, hold for the layers from ``max_window_layers`` on."""

    @classmethod
    def read_config(cls, config: ConfigReader) -> DecoderConfig:
        return read_qwen(config, replace(read_attention(config), qkv_bias=True))


def read_qwen(config: ConfigReader, attention: AttentionConfig) -> DecoderConfig:
    """What Qwen 2 and 3 share: which layers have a window."""
    num_layers = config.integer("num_hidden_layers")
    in_use = config.flag("use_sliding_window", False) and "sliding_window" in config
    # 0 is a valid number of leading layers without a window.
    first = config.count("max_window_layers", 28) if in_use else num_layers
    kinds = read_layer_types(
        config,
        tuple(SLIDING_ATTENTION if n >= first else FULL_ATTENTION for n in range(num_layers)),
    )
    if SLIDING_ATTENTION in kinds and not in_use:
        raise config.refuse(
            "layer_types", "has sliding_attention, but use_sliding_window or sliding_window is off"
        )
    layers = read_layers(config, kinds, lambda kind: read_rope(config, attention.head_dim, kind))
    return read_decoder(config, attention, layers)
