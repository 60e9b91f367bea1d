"""The config of a GGUF file in the shape of a Hugging Face `config.json`.

Keys are those of ggml's `docs/gguf.md`; keys that a file may leave out default to what llama.cpp
assumes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from cardan.core.interfaces.errors import WeightsError
from cardan.core.interfaces.gguf import GGUFArchitecture
from cardan.core.types.ggml import GGMLType
from cardan.core.weights.gguf_file import GGUFFile
from cardan.core.weights.gguf_metadata import GGUFMetadata
from cardan.core.weights.gguf_names import (
    ROPE_FREQS,
    FindPlugin,
    check_architecture,
    no_plugin,
)
from cardan.core.weights.gguf_rope import (
    llama3_scaling_from_factors,
    rope_scaling_from_metadata,
)

_DEFAULT_ROPE_THETA: Final = 10000.0
_MIN_SCALE: Final = 1e-6
# Architecture name and model_type of each GGUF architecture.
_HF_MODELS: Final = {
    "llama": ("LlamaForCausalLM", "llama"),
    "qwen2": ("Qwen2ForCausalLM", "qwen2"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
    "qwen3moe": ("Qwen3MoeForCausalLM", "qwen3_moe"),
    "gemma2": ("Gemma2ForCausalLM", "gemma2"),
    "gemma3": ("Gemma3ForCausalLM", "gemma3_text"),
}
# The architecture with mixtures of experts.
_MIXTURE: Final = "qwen3moe"
# The models whose attention is scaled by hidden_size / heads, told by their number of layers.
_WIDE_SCALE_LAYERS: Final = {"gemma2": 46, "gemma3": 62}
# Ends of a turn that chat models stop at, where the file does not name the token.
_END_OF_TURN: Final = ("<|im_end|>", "<|eot_id|>", "<end_of_turn>")


def hf_config_from_gguf(file: GGUFFile, find: FindPlugin = no_plugin) -> dict[str, Any]:
    """Build the config.

    Besides the usual fields, `generation_config` holds the token ids; its `eos_token_id` lists the
    end of a turn too where the vocabulary has one. `find` knows plugins by architecture.

    Raises:
        WeightsError: the architecture is unknown, a key is missing or has a bad value, or the model
            has a feature that its architecture is not read with. The message names the key.
    """
    try:
        stated = file.metadata.get("general.architecture")
        architecture, plugin = check_architecture(stated, find)
        metadata = GGUFMetadata(file.metadata, architecture)
        names = _HF_MODELS[architecture] if plugin is None else (plugin.model, plugin.model_type)
        config = _common_fields(file, metadata, architecture, names)
        config |= _token_ids(file.metadata)
        if plugin is not None:
            return config | _plugin_fields(plugin, file.metadata, architecture)
        if architecture in ("gemma2", "gemma3"):
            config |= _gemma_fields(metadata, architecture, config)
        else:
            config |= _window_fields(metadata, architecture)
        if architecture == _MIXTURE:
            config |= _expert_fields(file, metadata, config["num_hidden_layers"])
        return config
    except WeightsError as error:
        raise WeightsError(f"{file.path}: {error}") from error


def _plugin_fields(
    plugin: type[GGUFArchitecture], metadata: Mapping[str, object], architecture: str
) -> dict[str, Any]:
    prefix = f"{architecture}."
    own = {
        key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)
    }
    return dict(plugin.config(own))


def _common_fields(
    file: GGUFFile, metadata: GGUFMetadata, architecture: str, names: tuple[str, str]
) -> dict[str, Any]:
    """``names``: the Hugging Face architecture and model_type."""
    if architecture != _MIXTURE and metadata.optional_integer("expert_count"):
        raise WeightsError(
            f"metadata '{architecture}.expert_count': mixtures of experts are read from GGUF for "
            f"{_MIXTURE!r} only; use the model's safetensors files instead"
        )
    hf_architecture, model_type = names
    num_heads = metadata.integer("attention.head_count")
    head_dim = _head_dim(metadata, num_heads)
    rope_theta = metadata.optional_number("rope.freq_base") or _DEFAULT_ROPE_THETA
    if rope_theta <= 1:
        raise WeightsError(
            f"metadata '{architecture}.rope.freq_base': is {rope_theta}, must be above 1"
        )
    return {
        "architectures": [hf_architecture],
        "model_type": model_type,
        "vocab_size": _vocab_size(file, metadata),
        "hidden_size": metadata.integer("embedding_length"),
        "intermediate_size": metadata.integer("feed_forward_length"),
        "num_hidden_layers": _num_layers(file, metadata),
        "num_attention_heads": num_heads,
        "num_key_value_heads": metadata.integer("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": metadata.number("attention.layer_norm_rms_epsilon"),
        "rope_theta": rope_theta,
        "rope_scaling": _rope_scaling(file, metadata, architecture, head_dim, rope_theta),
        "max_position_embeddings": metadata.integer("context_length"),
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in file.tensors,
        "tie_word_embeddings": "output.weight" not in file.tensors,
    }


def _vocab_size(file: GGUFFile, metadata: GGUFMetadata) -> int:
    """The rows of the embedding, which may be padded beyond the vocabulary."""
    embedding = file.tensors.get("token_embd.weight")
    if embedding is not None and embedding.shape:
        return embedding.shape[0]
    return metadata.integer("vocab_size")


def _num_layers(file: GGUFFile, metadata: GGUFMetadata) -> int:
    num_layers = metadata.integer("block_count")
    if f"blk.{num_layers - 1}.attn_norm.weight" not in file.tensors:
        raise WeightsError(
            f"metadata 'block_count': says {num_layers}, but the file has no tensors of layer "
            f"{num_layers - 1}"
        )
    return num_layers


def _head_dim(metadata: GGUFMetadata, num_heads: int) -> int:
    hidden_size = metadata.integer("embedding_length")
    if hidden_size < num_heads:
        raise WeightsError(
            f"metadata 'attention.head_count': {num_heads} heads exceed hidden size {hidden_size}"
        )
    head_dim = metadata.integer("attention.key_length", hidden_size // num_heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        other = metadata.optional_integer(key)
        if other is not None and other != head_dim:
            raise WeightsError(
                f"metadata {key!r}: is {other}, but the head dimension is {head_dim}; models where "
                "they differ are not read from GGUF"
            )
    return head_dim


def _rope_scaling(
    file: GGUFFile, metadata: GGUFMetadata, architecture: str, head_dim: int, rope_theta: float
) -> dict[str, Any] | None:
    scaling = rope_scaling_from_metadata(metadata)
    freqs = file.tensors.get(ROPE_FREQS)
    if freqs is None:
        return scaling
    if architecture != "llama" or scaling is not None or freqs.type_id != GGMLType.F32:
        raise WeightsError(
            f"tensor {ROPE_FREQS!r}: is read as float32 in 'llama' models without another RoPE "
            "scaling only"
        )
    if freqs.shape != (head_dim // 2,):
        raise WeightsError(
            f"tensor {ROPE_FREQS!r}: has shape {freqs.shape}, but half the head dimension is "
            f"{head_dim // 2}"
        )
    factors = np.frombuffer(file.raw(ROPE_FREQS), np.dtype("<f4"))
    if (factors == 1.0).all():
        return None
    return llama3_scaling_from_factors(factors, rope_theta)


def _window_fields(metadata: GGUFMetadata, architecture: str) -> dict[str, Any]:
    window = metadata.optional_integer("attention.sliding_window")
    if not window:
        return {} if architecture == "llama" else {"sliding_window": None}
    if architecture == "llama":
        return {
            "architectures": ["MistralForCausalLM"],
            "model_type": "mistral",
            "sliding_window": window,
        }
    return {"sliding_window": window, "use_sliding_window": True, "max_window_layers": 0}


def _expert_fields(file: GGUFFile, metadata: GGUFMetadata, num_layers: int) -> dict[str, Any]:
    """Layers without a router are dense. llama.cpp always renormalises the weights."""
    routers = "blk.{}.ffn_gate_inp.weight"
    return {
        "num_experts": metadata.integer("expert_count"),
        "num_experts_per_tok": metadata.integer("expert_used_count"),
        "moe_intermediate_size": metadata.integer("expert_feed_forward_length"),
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [
            layer for layer in range(num_layers) if routers.format(layer) not in file.tensors
        ],
    }


def _gemma_fields(
    metadata: GGUFMetadata, architecture: str, config: Mapping[str, Any]
) -> dict[str, Any]:
    gemma2 = architecture == "gemma2"
    num_layers: int = config["num_hidden_layers"]
    scale = metadata.optional_number("attention.scale")
    scalar: float = config["head_dim"]
    if scale is not None and not _MIN_SCALE <= scale <= 1.0 / _MIN_SCALE:
        raise WeightsError(f"metadata '{architecture}.attention.scale': is {scale}, out of range")
    if scale is not None:
        scalar = scale**-2
    elif num_layers == _WIDE_SCALE_LAYERS[architecture]:
        scalar = config["hidden_size"] // config["num_attention_heads"]
    fields: dict[str, Any] = {
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": scalar,
        "attn_logit_softcapping": metadata.optional_number("attn_logit_softcapping")
        or (50.0 if gemma2 else None),
        "final_logit_softcapping": metadata.optional_number("final_logit_softcapping")
        or (30.0 if gemma2 else None),
        "sliding_window": metadata.optional_integer("attention.sliding_window")
        or (4096 if gemma2 else metadata.integer("attention.sliding_window")),
        "layer_types": _layer_types(metadata, num_layers, period=2 if gemma2 else 6),
    }
    if not gemma2:
        fields["rope_local_base_freq"] = (
            metadata.optional_number("rope.freq_base_swa") or _DEFAULT_ROPE_THETA
        )
    return fields


def _layer_types(metadata: GGUFMetadata, num_layers: int, period: int) -> list[str]:
    """The kind of each layer: every `period`-th is full, unless the file says otherwise."""
    key = "attention.sliding_window_pattern"
    pattern = metadata.array(key)
    if pattern is None:
        given = metadata.optional_integer(key)
        period = period if given is None else given
        sliding = [period == 0 or (layer + 1) % period != 0 for layer in range(num_layers)]
    elif pattern.size == num_layers:
        sliding = [bool(flag) for flag in pattern]
    else:
        raise WeightsError(f"metadata {key!r}: has {pattern.size} flags for {num_layers} layers")
    return ["sliding_attention" if flag else "full_attention" for flag in sliding]


def _token_ids(metadata: Mapping[str, object]) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for key, field in (
        ("bos", "bos_token_id"),
        ("eos", "eos_token_id"),
        ("padding", "pad_token_id"),
    ):
        value = metadata.get(f"tokenizer.ggml.{key}_token_id")
        fields[field] = value if isinstance(value, int) else None
    generation = {field: value for field, value in fields.items() if value is not None}
    stops = [value for value in (fields["eos_token_id"],) if value is not None]
    end_of_turn = _end_of_turn(metadata)
    if end_of_turn is not None and end_of_turn not in stops:
        stops.append(end_of_turn)
    if stops:
        generation["eos_token_id"] = stops if len(stops) > 1 else stops[0]
    return fields | {"generation_config": generation}


def _end_of_turn(metadata: Mapping[str, object]) -> int | None:
    given = metadata.get("tokenizer.ggml.eot_token_id")
    if isinstance(given, int):
        return given
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list):
        return None
    ids = [tokens.index(token) for token in _END_OF_TURN if token in tokens]
    return ids[0] if len(ids) == 1 else None
