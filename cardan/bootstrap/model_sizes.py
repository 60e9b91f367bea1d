"""Whether the numbers of a model's configuration can be those of a model."""

from collections.abc import Mapping
from typing import Any

from cardan.core.types.errors import ConfigError, shown

# Far above every known model. Below these whatever is made from a number alone stays affordable,
# and the weights' shapes tell the rest.
_MOST = {
    "vocab_size": 1 << 24,
    "hidden_size": 1 << 20,
    "num_hidden_layers": 1 << 12,
    "max_position_embeddings": 1 << 24,
    "intermediate_size": 1 << 24,
    "num_attention_heads": 1 << 16,
    "num_key_value_heads": 1 << 16,
    "head_dim": 1 << 16,
    "num_experts": 1 << 14,
    "num_local_experts": 1 << 14,
    "moe_intermediate_size": 1 << 24,
}
# Names under which older architectures state what planning reads (Hugging Face's attribute maps of
# GPT-2, GPT-J, BLOOM, MPT, Falcon and their like).
_OTHER_NAMES = {
    "hidden_size": ("n_embd", "d_model"),
    "num_hidden_layers": ("n_layer", "n_layers", "num_layers"),
    "max_position_embeddings": ("n_positions", "n_ctx", "max_seq_len", "seq_length"),
}
_REQUIRED = ("vocab_size", "hidden_size", "num_hidden_layers")


def with_common_names(config: Mapping[str, Any]) -> dict[str, Any]:
    """``config`` with the common name added for each size that it states under another alone.

    So a plugin's architecture is asked, which reads the names that are its own.
    """
    found = dict(config)
    for name, others in _OTHER_NAMES.items():
        if found.get(name) is None:
            stated = (config[other] for other in others if config.get(other) is not None)
            value = next(stated, None)
            if value is not None:
                found[name] = value
    return found


def check_sizes(config: Mapping[str, Any]) -> None:
    """Look at the sizes that planning reads, and bound those that architectures read.

    Raises:
        ConfigError: one is missing, no positive integer, or larger than any model's.
    """
    for key, most in _MOST.items():
        value: Any = config.get(key)
        if value is None and key in _REQUIRED:
            raise ConfigError(f"config.json: '{key}' is missing; download the file again")
        is_integer = isinstance(value, int) and not isinstance(value, bool)
        if key in _REQUIRED and (not is_integer or value < 1):
            raise ConfigError(
                f"config.json: '{key}' is {shown(value)}: must be a positive integer; download "
                "the file again"
            )
        if is_integer and value > most:
            raise ConfigError(
                f"config.json: '{key}' is {shown(value)}, more than any model has (at most {most} "
                "is taken); the file is damaged, download it again"
            )
