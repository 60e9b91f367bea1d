"""Qwen 3: queries and keys are normed head by head."""

from dataclasses import replace

from cardan.models.layers.config_reader import ConfigReader
from cardan.models.layers.decoder import DecoderForCausalLM
from cardan.models.layers.decoder_config import DecoderConfig, read_attention
from cardan.models.qwen2 import read_qwen

_HEAD_DIM = 128


class Qwen3ForCausalLM(DecoderForCausalLM):
    """Windows as in Qwen 2; biases as the config says."""

    @classmethod
    def read_config(cls, config: ConfigReader) -> DecoderConfig:
        return read_qwen3(config)


def read_qwen3(config: ConfigReader) -> DecoderConfig:
    """What Qwen 3 and its mixtures of experts share."""
    bias = config.flag("attention_bias", False)
    attention = replace(
        read_attention(config, _HEAD_DIM), qkv_bias=bias, output_bias=bias, head_norm=True
    )
    return read_qwen(config, attention)
