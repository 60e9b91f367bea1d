"""Qwen 3 with mixtures of experts (Qwen3-30B-A3B and its like)."""

from dataclasses import replace

from cardan.models.layers.config_reader import ConfigReader
from cardan.models.layers.decoder import DecoderForCausalLM
from cardan.models.layers.decoder_config import DecoderConfig, ExpertNames, read_experts
from cardan.models.qwen3 import read_qwen3


class Qwen3MoeForCausalLM(DecoderForCausalLM):
    """Qwen 3 whose MLPs are mixtures in every ``decoder_sparse_step``-th layer, except those that
    ``mlp_only_layers`` lists."""

    @classmethod
    def read_config(cls, config: ConfigReader) -> DecoderConfig:
        dense = read_qwen3(config)
        experts = read_experts(
            config, "moe_intermediate_size", config.flag("norm_topk_prob", False), ExpertNames()
        )
        period = config.integer("decoder_sparse_step", 1)
        without = config.counts("mlp_only_layers")
        if without and max(without) >= len(dense.layers):
            raise config.refuse(
                "mlp_only_layers", f"num_hidden_layers is {len(dense.layers)}, counted from 0"
            )
        layers = tuple(
            replace(layer, has_experts=(index + 1) % period == 0 and index not in without)
            for index, layer in enumerate(dense.layers)
        )
        return replace(dense, layers=layers, experts=experts)
