"""A model: IBM Granite 3, a Llama whose parts are scaled.

Written against the contract alone. One rank computes it all.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from cardan.core.interfaces.attention import AttentionNeed
from cardan.core.interfaces.errors import ConfigError
from cardan.core.interfaces.model import BuildContext, CausalLM, StepContext, WeightSlot
from cardan.core.interfaces.quantization import LinearMethod
from cardan.core.interfaces.torch_linear import DenseEmbedding
from cardan.core.types.kv import SCALE_BYTES, KVCacheSpec
from cardan_extras.granite_layer import Attention, Linear, Mlp, Norm, dtype_name


@dataclass(frozen=True, slots=True)
class GraniteConfig:
    """The numbers of a ``config.json``. ``multipliers`` scale embeddings, attention scores, what
    each block adds to the residual, and (a divisor) logits."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float
    rope_theta: float
    multipliers: tuple[float, float, float, float]
    attention_bias: bool
    mlp_bias: bool
    is_tied: bool

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> "GraniteConfig":
        """Raises ConfigError where a key is missing or asks for what is not here."""
        sizes = ("vocab_size", "hidden_size", "intermediate_size")
        for key in (*sizes, "num_hidden_layers", "num_attention_heads"):
            if not isinstance(config.get(key), int):
                raise ConfigError(
                    f"config.json: '{key}' is {config.get(key)!r}: must be an integer"
                )
        if config.get("hidden_act", "silu") != "silu":
            raise ConfigError(
                f"config.json: 'hidden_act' is {config['hidden_act']!r}: must be silu"
            )
        rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
        # Older files say ``type``.
        kind = rope.get("rope_type") or rope.get("type") or "default"
        if kind != "default":
            raise ConfigError(
                f"config.json: rope_type is {kind!r}: Granite here has no rope scaling"
            )
        heads = config["num_attention_heads"]
        return cls(
            vocab_size=config["vocab_size"],
            hidden_size=config["hidden_size"],
            intermediate_size=config["intermediate_size"],
            num_layers=config["num_hidden_layers"],
            num_heads=heads,
            num_kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            eps=config.get("rms_norm_eps", 1e-6),
            rope_theta=rope.get("rope_theta") or config.get("rope_theta") or 10_000.0,
            multipliers=(
                config.get("embedding_multiplier", 1.0),
                config.get("attention_multiplier", 1.0),
                config.get("residual_multiplier", 1.0),
                config.get("logits_scaling", 1.0),
            ),
            attention_bias=config.get("attention_bias", False),
            mlp_bias=config.get("mlp_bias", False),
            is_tied=config.get("tie_word_embeddings", False),
        )


class GraniteForCausalLM(CausalLM):
    """A decoder with norms before its blocks, whose results are scaled before they are added."""

    contract: ClassVar[tuple[int, int]] = (1, 0)
    # Where the head is tied its tensor may be listed all the same.
    ignored_weights: ClassVar[Sequence[str]] = (r".*rotary_emb\.inv_freq", r"lm_head\.weight")

    def __init__(self, config: Mapping[str, Any], build: BuildContext) -> None:
        if build.world_size > 1:
            raise ConfigError("parallel.tensor_parallel_size must be 1: Granite is not shared out")
        self._config = read = GraniteConfig.read(config)
        self._build = build
        self._embedding_scale, scale, self._residual_scale, self._logits_scale = read.multipliers
        table = rotary_table(read.rope_theta, read.head_dim, build)
        hidden, dtype = read.hidden_size, dtype_name(build.dtype)
        scheme = build.quantization
        stored = scheme and scheme.embedding(
            build.ops, read.vocab_size, hidden, dtype, build.device
        )
        self._embedding = stored or DenseEmbedding(build.ops, hidden, build.dtype, build.device)
        heads = (read.num_heads, read.num_kv_heads, read.head_dim)
        self._attention = [
            Attention(index, hidden, heads, (scale, read.attention_bias, table), build)
            for index in range(read.num_layers)
        ]
        self._mlp = [
            Mlp(index, (hidden, read.intermediate_size), read.mlp_bias, build)
            for index in range(read.num_layers)
        ]
        # Norm 2n comes before the attention of layer n, 2n + 1 before its MLP; the last ends all.
        names = [
            f"model.layers.{index}.{which}_layernorm"
            for index in range(read.num_layers)
            for which in ("input", "post_attention")
        ]
        self._norms = [Norm(name, hidden, read.eps, build) for name in (*names, "model.norm")]
        self._head = Linear("lm_head", hidden, {"lm_head": read.vocab_size}, False, build)
        self._widen = build.ops.bind("to_float32", dtype=dtype, hidden=read.vocab_size)

    def weight_slots(self) -> Iterator[WeightSlot]:
        shape = (self._config.vocab_size, self._config.hidden_size)
        load = self._load_tied if self._config.is_tied else self._embedding.load
        yield WeightSlot("model.embed_tokens.weight", shape, load)
        if not self._config.is_tied:
            yield from self._head.weight_slots()
        parts: list[Attention | Mlp | Norm] = [*self._attention, *self._mlp, *self._norms]
        for part in parts:
            yield from part.weight_slots()

    def finish_loading(self) -> None:
        self._embedding.finish()
        parts: list[Attention | Mlp | Linear] = [*self._attention, *self._mlp, self._head]
        for part in parts:
            part.finish_loading()

    def kv_specs(self) -> Sequence[KVCacheSpec]:
        read, build = self._config, self._build
        spec = KVCacheSpec(
            kind="full",
            block_size=build.block_size,
            num_kv_heads=read.num_kv_heads,
            k_head_dim=read.head_dim,
            v_head_dim=read.head_dim,
            dtype=build.kv_dtype,
            scale_bytes=SCALE_BYTES.get(build.kv_dtype, 0),
        )
        return [spec] * read.num_layers

    def attention_needs(self) -> Sequence[AttentionNeed]:
        read, build = self._config, self._build
        need = AttentionNeed(
            kind="mha",
            num_heads=read.num_heads,
            num_kv_heads=read.num_kv_heads,
            k_head_dim=read.head_dim,
            v_head_dim=read.head_dim,
            dtype=dtype_name(build.dtype),
            kv_dtype=build.kv_dtype,
            block_size=build.block_size,
        )
        return [need] * read.num_layers

    def forward(self, token_ids: Tensor, step: StepContext) -> Tensor:
        residual = self._embedding.lookup(token_ids) * self._embedding_scale
        x = self._norms[0](residual)
        for index, (attention, mlp) in enumerate(zip(self._attention, self._mlp, strict=True)):
            added = attention(x, step) * self._residual_scale
            x, residual = self._norms[2 * index + 1].add(added, residual)
            added = mlp(x) * self._residual_scale
            x, residual = self._norms[2 * index + 2].add(added, residual)
        return x

    def compute_logits(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self._widen(self._head(hidden))
        return logits / self._logits_scale

    def _load_tied(self, weight: Tensor) -> None:
        self._embedding.load(weight)
        table = self._embedding.table
        method: LinearMethod = self._head.method
        method.load(0, table if table is not None and method.keeps_precision else weight)


def rotary_table(theta: float, head_dim: int, build: BuildContext) -> Tensor:
    """Cosines, then sines, for ``rotary_embedding``: [max_model_len, head_dim] float32."""
    periods = theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    angles = torch.arange(build.max_model_len, dtype=torch.float32)[:, None] * (1.0 / periods)
    return torch.cat((angles.cos(), angles.sin()), dim=-1).to(build.device)
