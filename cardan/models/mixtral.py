"""Mixtral: Mistral with a mixture of experts in every layer."""

from dataclasses import replace

from cardan.models.layers.config_reader import ConfigReader
from cardan.models.layers.decoder import DecoderForCausalLM
from cardan.models.layers.decoder_config import DecoderConfig, ExpertNames, read_experts
from cardan.models.mistral import MistralForCausalLM

_NAMES = ExpertNames(mixture="block_sparse_moe", gate="w1", up="w3", down="w2")


class MixtralForCausalLM(DecoderForCausalLM):
    """The weights of the chosen experts always add up to 1."""

    @classmethod
    def read_config(cls, config: ConfigReader) -> DecoderConfig:
        dense = MistralForCausalLM.read_config(config)
        experts = read_experts(config, "intermediate_size", True, _NAMES)
        layers = tuple(replace(layer, has_experts=True) for layer in dense.layers)
        return replace(dense, layers=layers, experts=experts)
