"""A decoder's sizes, as far as planning needs them, from its ``config.json``."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cardan.core.types.errors import ConfigError, shown

_TIED_UNLESS_STATED = ("Gemma2ForCausalLM", "Gemma3ForCausalLM")
_HEAD_DIMS = {"Gemma2ForCausalLM": 256, "Gemma3ForCausalLM": 256}
# Architectures whose mixtures' experts have the MLP's own intermediate size.
_EXPERTS_OF_MLP_SIZE = ("MixtralForCausalLM",)
# Every so many layers one has no window, where ``layer_types`` is missing.
_WINDOW_PERIODS = {"Gemma2ForCausalLM": 2, "Gemma3ForCausalLM": 6}
_QWEN = ("Qwen2ForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM")
_SLIDING = "sliding_attention"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertShape:
    """Mixtures: ``top_k`` of ``num_experts`` gated MLPs serve a token, in ``num_layers`` layers."""

    num_experts: int
    top_k: int
    intermediate_size: int
    num_layers: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Sizes of the whole model, not of a rank.

    ``windows``: tokens that each layer looks back at most, None: all.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    is_tied: bool
    windows: tuple[int | None, ...]
    experts: ExpertShape | None = None

    @property
    def num_layers(self) -> int:
        return len(self.windows)

    @property
    def attention_width(self) -> int:
        """Elements of one token's queries."""
        return self.num_heads * self.head_dim


def read_shape(architecture: str, config: Mapping[str, Any]) -> ModelShape:
    """The sizes that ``config`` states.

    Raises:
        ConfigError: a size is missing or no positive integer.
    """
    num_layers = _size(config, "num_hidden_layers")
    num_heads = _size(config, "num_attention_heads")
    hidden_size = _size(config, "hidden_size")
    tied = config.get("tie_word_embeddings")
    default_dim = _HEAD_DIMS.get(architecture, hidden_size // num_heads)
    return ModelShape(
        vocab_size=_size(config, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=_size(config, "intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=_size(config, "num_key_value_heads", num_heads),
        head_dim=_size(config, "head_dim", default_dim),
        is_tied=architecture in _TIED_UNLESS_STATED if tied is None else bool(tied),
        windows=_windows(architecture, config, num_layers),
        experts=_experts(architecture, config, num_layers),
    )


def _experts(architecture: str, config: Mapping[str, Any], num_layers: int) -> ExpertShape | None:
    key = "num_experts" if config.get("num_experts") else "num_local_experts"
    if not config.get(key):
        return None
    period = _size(config, "decoder_sparse_step", 1)
    dense = config.get("mlp_only_layers") or ()
    own_size = architecture in _EXPERTS_OF_MLP_SIZE
    return ExpertShape(
        num_experts=_size(config, key),
        top_k=_size(config, "num_experts_per_tok"),
        intermediate_size=_size(
            config, "intermediate_size" if own_size else "moe_intermediate_size"
        ),
        num_layers=sum(
            (layer + 1) % period == 0 and layer not in dense for layer in range(num_layers)
        ),
    )


def _windows(
    architecture: str, config: Mapping[str, Any], num_layers: int
) -> tuple[int | None, ...]:
    window = config.get("sliding_window")
    is_off = architecture in _QWEN and not config.get("use_sliding_window", False)
    if architecture == "LlamaForCausalLM" or not isinstance(window, int) or is_off:
        return (None,) * num_layers
    kinds = config.get("layer_types")
    if isinstance(kinds, list) and len(kinds) == num_layers:
        return tuple(window if kind == _SLIDING else None for kind in kinds)
    period = _WINDOW_PERIODS.get(architecture)
    first = _count(config, "max_window_layers", 28) if architecture in _QWEN else 0
    return tuple(
        window if layer >= first and (period is None or (layer + 1) % period) else None
        for layer in range(num_layers)
    )


def _size(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = _count(config, key, default)
    if value < 1:
        raise ConfigError(f"config.json: '{key}' is {value}: must be a positive integer")
    return value


def _count(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = config.get(key)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ConfigError(
            f"config.json: '{key}' is {shown(value)}: must be a positive integer; without it the "
            "model's size is not known"
        )
    return value
