"""A whole decoder, built from its numbers."""

import logging
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import nn

from cardan.core.interfaces.attention import AttentionNeed
from cardan.core.interfaces.model import BuildContext, CausalLM, StepContext, WeightSlot
from cardan.core.types.kv import KVCacheSpec
from cardan.models.layers.config_reader import ConfigReader
from cardan.models.layers.decoder_config import DecoderConfig
from cardan.models.layers.decoder_layer import DecoderLayer, SandwichDecoderLayer
from cardan.models.layers.embedding import LMHead, TokenEmbedding, vocabulary_slots
from cardan.models.layers.experts import ExpertMixture
from cardan.models.layers.linear import Linear, dtype_name
from cardan.models.layers.norm import RMSNorm
from cardan.models.layers.rope_config import RopeConfig
from cardan.models.layers.rotary import cos_sin_cache

_LOG = logging.getLogger("cardan.engine")


class DecoderForCausalLM(nn.Module, CausalLM):
    """A decoder-only transformer. An architecture says how to read its config.

    Raises:
        ConfigError: the config lacks a key, has one that cannot be honoured, or cannot be shared
            out among the ranks.
    """

    contract: ClassVar[tuple[int, int]] = (1, 0)
    # The head's tensor is listed for tied models; where there is a slot for it, it is loaded.
    ignored_weights: ClassVar[Sequence[str]] = (r".*rotary_emb\.inv_freq", r"lm_head\.weight")

    def __init__(self, config: Mapping[str, Any], build: BuildContext) -> None:
        super().__init__()
        self.config = self.read_config(ConfigReader(config))
        if self.config.experts is not None and build.quantization is not None and not build.rank:
            _LOG.warning(
                "quantization %s: the experts' weights are kept in %s, since no kernel computes on "
                "quantised ones yet",
                build.quantization.name,
                dtype_name(build.dtype),
            )
        tables: dict[RopeConfig, torch.Tensor] = {}
        for layer in self.config.layers:
            if layer.rope not in tables:
                tables[layer.rope] = cos_sin_cache(layer.rope, build.max_model_len, build.device)
        layer_class = SandwichDecoderLayer if self.config.sandwich_norms else DecoderLayer
        self.embed_tokens = TokenEmbedding(self.config, build)
        self.layers = nn.ModuleList(
            layer_class(index, self.config, tables[layer.rope], build)
            for index, layer in enumerate(self.config.layers)
        )
        self.norm = RMSNorm("model.norm", self.config, build)
        self.narrows = self.config.layers[-1].window is None
        self.lm_head = LMHead(self.config, build)

    @classmethod
    @abstractmethod
    def read_config(cls, config: ConfigReader) -> DecoderConfig:
        """The decoder that a ``config.json`` of this architecture describes."""

    def weight_slots(self) -> Iterator[WeightSlot]:
        yield from vocabulary_slots(self.config, self.embed_tokens, self.lm_head)
        for layer in self._decoder_layers():
            yield from layer.weight_slots()
        yield from self.norm.weight_slots()

    def finish_loading(self) -> None:
        for module in self.modules():
            if isinstance(module, ExpertMixture | Linear | LMHead | TokenEmbedding):
                module.finish_loading()

    def kv_specs(self) -> Sequence[KVCacheSpec]:
        return [layer.self_attn.kv_spec() for layer in self._decoder_layers()]

    def attention_needs(self) -> Sequence[AttentionNeed]:
        return [layer.self_attn.attention_need() for layer in self._decoder_layers()]

    def forward(self, token_ids: torch.Tensor, step: StepContext) -> torch.Tensor:
        x = self.embed_tokens(token_ids)
        residual = None
        *layers, last_layer = self.layers
        for layer in layers:
            x, residual = layer(x, residual, step)
        ends = step.row_ends if self.narrows else None
        x, residual = last_layer(x, residual, step, ends)
        normed, _ = self.norm.add(x, residual)
        return normed

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.lm_head(hidden)
        return logits

    def _decoder_layers(self) -> Iterator[DecoderLayer]:
        for layer in self.layers:
            assert isinstance(layer, DecoderLayer)
            yield layer
