"""Llama, and what shares its shape: SmolLM2, TinyLlama, Yi, ..."""

from dataclasses import replace

from cardan.models.layers.config_reader import ConfigReader
from cardan.models.layers.decoder import DecoderForCausalLM
from cardan.models.layers.decoder_config import (
    DecoderConfig,
    LayerConfig,
    read_attention,
    read_decoder,
)
from cardan.models.layers.rope_config import FULL_ATTENTION, read_rope


class LlamaForCausalLM(DecoderForCausalLM):
    """Full attention in every layer; biases and the head dimension as the config says."""

    @classmethod
    def read_config(cls, config: ConfigReader) -> DecoderConfig:
        attention = read_attention(config)
        bias = config.flag("attention_bias", False)
        layer = LayerConfig(read_rope(config, attention.head_dim, FULL_ATTENTION))
        return replace(
            read_decoder(
                config,
                replace(attention, qkv_bias=bias, output_bias=bias),
                (layer,) * config.integer("num_hidden_layers"),
            ),
            mlp_bias=config.flag("mlp_bias", False),
        )
