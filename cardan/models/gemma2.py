"""Gemma 2: scaled embeddings, four norms a layer, soft caps, a window in every second layer."""

from collections.abc import Callable
from dataclasses import replace

from cardan.models.layers.config_reader import ConfigReader
from cardan.models.layers.decoder import DecoderForCausalLM
from cardan.models.layers.decoder_config import (
    AttentionConfig,
    DecoderConfig,
    periodic_layer_types,
    read_activation,
    read_attention,
    read_decoder,
    read_layer_types,
    read_layers,
)
from cardan.models.layers.rope_config import RopeConfig, read_rope

_HEAD_DIM = 256
_QUERY_PRE_ATTN_SCALAR = 256.0


class Gemma2ForCausalLM(DecoderForCausalLM):
    """The first layer has a window, the second none, and so on, unless ``layer_types`` is given."""

    @classmethod
    def read_config(cls, config: ConfigReader) -> DecoderConfig:
        attention = replace(
            read_gemma_attention(config), softcap=config.optional_number("attn_logit_softcapping")
        )
        return read_gemma(
            config,
            attention,
            lambda kind: read_rope(config, attention.head_dim, kind),
            window_period=2,
        )


def read_gemma_attention(config: ConfigReader) -> AttentionConfig:
    """Attention of Gemma 2 and 3: the scale does not follow from the head dimension.

    Raises:
        ConfigError: it is an encoder under the decoder's name, or a key is invalid.
    """
    if config.flag("use_bidirectional_attention", False):
        raise config.refuse("use_bidirectional_attention", "only causal attention is supported")
    bias = config.flag("attention_bias", False)
    scalar = config.number("query_pre_attn_scalar", _QUERY_PRE_ATTN_SCALAR)
    return replace(
        read_attention(config, _HEAD_DIM), scale=scalar**-0.5, qkv_bias=bias, output_bias=bias
    )


def read_gemma(
    config: ConfigReader,
    attention: AttentionConfig,
    rope_of: Callable[[str], RopeConfig],
    window_period: int,
) -> DecoderConfig:
    """What Gemma 2 and 3 share. Every ``window_period``-th layer has no window."""
    kinds = read_layer_types(
        config, periodic_layer_types(config.integer("num_hidden_layers"), window_period)
    )
    return replace(
        read_decoder(config, attention, read_layers(config, kinds, rope_of)),
        activation=read_activation(config, "hidden_activation", "gelu_pytorch_tanh"),
        tie_word_embeddings=config.flag("tie_word_embeddings", True),
        norm_offset=1.0,
        sandwich_norms=True,
        embedding_scale=config.integer("hidden_size") ** 0.5,
        logit_softcap=config.optional_number("final_logit_softcapping"),
    )
