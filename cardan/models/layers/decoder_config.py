"""A decoder as numbers: what an architecture's ``config.json`` comes down to."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal

from cardan.models.layers.config_reader import ConfigReader
from cardan.models.layers.rope_config import (
    FULL_ATTENTION,
    LAYER_TYPES,
    SLIDING_ATTENTION,
    RopeConfig,
)

Activation = Literal["silu", "gelu_tanh"]

# transformers' names of the gated activations.
_ACTIVATIONS: Final[dict[str, Activation]] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
}


@dataclass(frozen=True, slots=True)
class LayerConfig:
    """What differs from layer to layer. ``window`` as in ``LayerParams``.

    ``has_experts``: the MLP is a mixture of experts.
    """

    rope: RopeConfig
    window: int | None = None
    has_experts: bool = False


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """What checkpoints call a layer's mixture, and the projections of an expert."""

    mixture: str = "mlp"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsConfig:
    """Mixtures of experts: gated MLPs with SiLU, of which ``top_k`` serve a token.

    ``intermediate_size`` is an expert's, on all ranks together; ``size_key`` is the config's key
    for it. ``renormalize``: the weights of the chosen experts add up to 1.
    """

    num_experts: int
    top_k: int
    intermediate_size: int
    size_key: str
    renormalize: bool
    names: ExpertNames = ExpertNames()


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionConfig:
    """Attention of all layers. Head counts are those of the whole model, not of one rank.

    ``scale`` multiplies q . k. ``head_norm``: queries and keys are normed head by head before they
    are rotated.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    qkv_bias: bool = False
    output_bias: bool = False
    head_norm: bool = False
    softcap: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """A decoder-only transformer with gated MLPs and RMS norms.

    Attributes:
        experts: of the layers that have them.
        norm_offset: added to every stored norm weight (Gemma stores weight - 1).
        sandwich_norms: norms after attention and after the MLP too, before the residual sums.
        embedding_scale: multiplies embeddings, rounded to the model's dtype first.
        logit_softcap: c replaces logits x by c * tanh(x / c).
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    rms_norm_eps: float
    activation: Activation
    tie_word_embeddings: bool
    attention: AttentionConfig
    layers: tuple[LayerConfig, ...]
    experts: ExpertsConfig | None = None
    mlp_bias: bool = False
    norm_offset: float = 0.0
    sandwich_norms: bool = False
    embedding_scale: float | None = None
    logit_softcap: float | None = None


def read_decoder(
    config: ConfigReader, attention: AttentionConfig, layers: tuple[LayerConfig, ...]
) -> DecoderConfig:
    """The keys that all architectures share; the rest as in Llama."""
    return DecoderConfig(
        vocab_size=config.integer("vocab_size"),
        hidden_size=config.integer("hidden_size"),
        intermediate_size=config.integer("intermediate_size"),
        rms_norm_eps=config.number("rms_norm_eps", 1e-6),
        activation=read_activation(config, "hidden_act", "silu"),
        tie_word_embeddings=config.flag("tie_word_embeddings", False),
        attention=attention,
        layers=layers,
    )


def read_attention(config: ConfigReader, default_head_dim: int | None = None) -> AttentionConfig:
    """Heads and scale; without biases.

    The head dimension is stated, or ``default_head_dim``, or the hidden size shared out among the
    heads.
    """
    num_heads = config.integer("num_attention_heads")
    num_kv_heads = config.integer("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise config.refuse("num_key_value_heads", f"must divide num_attention_heads ({num_heads})")
    hidden_size = config.integer("hidden_size")
    if default_head_dim is None and "head_dim" not in config and hidden_size % num_heads:
        raise config.refuse(
            "hidden_size", f"without head_dim, num_attention_heads ({num_heads}) must divide it"
        )
    head_dim = config.integer("head_dim", default_head_dim or hidden_size // num_heads)
    return AttentionConfig(
        num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, scale=head_dim**-0.5
    )


def read_experts(
    config: ConfigReader, size_key: str, renormalize: bool, names: ExpertNames
) -> ExpertsConfig:
    """The mixtures of a config, whose experts have the intermediate size under ``size_key``.

    The number of experts is ``num_experts`` or ``num_local_experts``, as transformers from 5 on
    writes it.
    """
    key = "num_experts" if "num_experts" in config else "num_local_experts"
    num_experts = config.integer(key)
    top_k = config.integer("num_experts_per_tok")
    if top_k > num_experts:
        raise config.refuse("num_experts_per_tok", f"exceeds {key} ({num_experts})")
    if read_activation(config, "hidden_act", "silu") != "silu":
        raise config.refuse("hidden_act", "experts are computed with silu only")
    return ExpertsConfig(
        num_experts=num_experts,
        top_k=top_k,
        intermediate_size=config.integer(size_key),
        size_key=size_key,
        renormalize=renormalize,
        names=names,
    )


def read_activation(config: ConfigReader, key: str, default: str) -> Activation:
    """The gated activation under ``key``."""
    known = _ACTIVATIONS.get(config.text(key, default))
    if known is None:
        raise config.refuse(key, f"is not one of {', '.join(sorted(_ACTIVATIONS))}")
    return known


def read_layer_types(config: ConfigReader, default: tuple[str, ...]) -> tuple[str, ...]:
    """The attention type of each layer: listed, or ``default``."""
    kinds = config.texts("layer_types")
    if kinds is None:
        return default
    if len(kinds) != len(default):
        raise config.refuse("layer_types", f"must have {len(default)} entries, one for each layer")
    for kind in kinds:
        if kind not in LAYER_TYPES:
            raise config.refuse("layer_types", f"{kind!r} is not one of {', '.join(LAYER_TYPES)}")
    return kinds


def periodic_layer_types(num_layers: int, period: int) -> tuple[str, ...]:
    """Every ``period``-th layer attends to everything, the others to a window."""
    return tuple(
        SLIDING_ATTENTION if (layer + 1) % period else FULL_ATTENTION for layer in range(num_layers)
    )


def read_layers(
    config: ConfigReader, kinds: tuple[str, ...], rope_of: Callable[[str], RopeConfig]
) -> tuple[LayerConfig, ...]:
    """Layers of the given types; ``rope_of`` gives the rotary embedding of a type.

    In all architectures here transformers lets a query at position p see keys at positions
    > p - sliding_window, which is the meaning of ``LayerParams.window``.
    """
    window = config.integer("sliding_window") if SLIDING_ATTENTION in kinds else None
    ropes = {kind: rope_of(kind) for kind in set(kinds)}
    return tuple(
        LayerConfig(ropes[kind], window if kind == SLIDING_ATTENTION else None) for kind in kinds
    )
