"""Mistral: Llama without biases, with one window for all layers or none."""

from cardan.models.layers.config_reader import ConfigReader
from cardan.models.layers.decoder import DecoderForCausalLM
from cardan.models.layers.decoder_config import (
    DecoderConfig,
    read_attention,
    read_decoder,
    read_layer_types,
    read_layers,
)
from cardan.models.layers.rope_config import FULL_ATTENTION, SLIDING_ATTENTION, read_rope


class MistralForCausalLM(DecoderForCausalLM):
    """``sliding_window`` holds for all layers; null means full attention."""

    @classmethod
    def read_config(cls, config: ConfigReader) -> DecoderConfig:
        attention = read_attention(config)
        kind = SLIDING_ATTENTION if "sliding_window" in config else FULL_ATTENTION
        kinds = (kind,) * config.integer("num_hidden_layers")
        if read_layer_types(config, kinds) != kinds:
            raise config.refuse(
                "layer_types",
                f"with this sliding_window all layers of a Mistral model are {kind}",
            )
        layers = read_layers(
            config, kinds, lambda kind: read_rope(config, attention.head_dim, kind)
        )
        return read_decoder(config, attention, layers)
