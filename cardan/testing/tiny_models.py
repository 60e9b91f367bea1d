"""Tiny random models of every architecture, made by transformers, as the truth for ours."""

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

VOCAB_SIZE = 509

_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.15,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
_LLAMA3: dict[str, Any] = {
    "rope_type": "llama3",
    "rope_theta": 5000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}
_GEMMA3_ROPE: dict[str, Any] = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 2000.0},
}
_WIDE_GEMMA: dict[str, Any] = {"head_dim": 24, "query_pre_attn_scalar": 20, "sliding_window": 8}

_EXPERTS: dict[str, Any] = {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
}

# Name -> (model_type, what differs from the sizes above).
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama_tied_biased": (
        "llama",
        {
            "attention_bias": True,
            "mlp_bias": True,
            "head_dim": 24,
            "tie_word_embeddings": True,
            "num_key_value_heads": 4,
        },
    ),
    "llama_llama3": ("llama", {"rope_parameters": _LLAMA3}),
    "llama_linear": ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0}}),
    "llama_yarn": ("llama", {"rope_parameters": _YARN, "num_key_value_heads": 1}),
    "llama_yarn_explicit": (
        "llama",
        {
            "rope_parameters": {
                **_YARN,
                "attention_factor": 1.3,
                "beta_fast": 8.0,
                "beta_slow": 2.0,
                "truncate": False,
            }
        },
    ),
    "llama_yarn_mscale": (
        "llama",
        {"rope_parameters": {**_YARN, "mscale": 0.7, "mscale_all_dim": 1.1}},
    ),
    "mistral": ("mistral", {"sliding_window": 8}),
    "mistral_no_window": ("mistral", {"sliding_window": None, "head_dim": 24}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2_windows": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
    ),
    "qwen3": ("qwen3", {"head_dim": 24}),
    "qwen3_windows": (
        "qwen3",
        {
            "head_dim": 16,
            "attention_bias": True,
            "use_sliding_window": True,
            "sliding_window": 11,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "qwen3_moe": (
        "qwen3_moe",
        {"head_dim": 16, "norm_topk_prob": True, "mlp_only_layers": [1], **_EXPERTS},
    ),
    "qwen3_moe_sparse_step": ("qwen3_moe", {"head_dim": 24, "decoder_sparse_step": 2, **_EXPERTS}),
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "gemma2": ("gemma2", {**_WIDE_GEMMA, "tie_word_embeddings": True}),
    "gemma2_strong_caps": (
        "gemma2",
        {
            **_WIDE_GEMMA,
            "attention_bias": True,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 5.0,
        },
    ),
    "gemma3": (
        "gemma3_text",
        {
            **_WIDE_GEMMA,
            "tie_word_embeddings": True,
            "sliding_window_pattern": 3,
            "rope_parameters": _GEMMA3_ROPE,
            "num_key_value_heads": 1,
        },
    ),
}


def make_tiny_model(name: str, directory: Path) -> PreTrainedModel:
    """Make the model of ``CASES[name]`` in float32 and save it into ``directory``, with a
    tokenizer of one word an id.

    Weights are wide enough that outputs differ from token to token, and norms and biases are not
    left at their neutral values.
    """
    model_type, changes = CASES[name]
    config = AutoConfig.for_model(model_type, **{**_SIZES, **changes})
    generator = torch.Generator().manual_seed(len(name))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(len(name))
        made: Any = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            config, dtype=torch.float32, attn_implementation="eager"
        )
    model: PreTrainedModel = made.eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.2)
    model.save_pretrained(directory)
    make_tokenizer().save(str(directory / "tokenizer.json"))
    return model


def make_tokenizer() -> Tokenizer:
    """A tokenizer whose token i is the word ``wi``; words are set apart by spaces."""
    words = {f"w{index}": index for index in range(VOCAB_SIZE)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return tokenizer


def prompt_ids(length: int, seed: int = 0) -> list[int]:
    """Random token ids."""
    generator = torch.Generator().manual_seed(seed)
    drawn: list[int] = torch.randint(3, VOCAB_SIZE, (length,), generator=generator).tolist()
    return drawn
