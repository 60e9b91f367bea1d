"""Shapes of models, and what is measured of each."""

from dataclasses import dataclass

SHAPES = {
    "0.6B": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": 151936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": True,
    },
    "8B": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
    },
    "30B-A3B": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": False,
    },
    # For trying this script where there is no accelerator.
    "tiny": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 16384,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
    },
}
SHAPES["tiny-moe"] = {
    **SHAPES["tiny"],
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What is measured of a shape; lengths are tokens.

    Attributes:
        throughput: requests, and the length of each prompt and answer.
        batches: of decode rows.
        prompt: length before decode rows.
        answer: length of decode rows.
        long: sequences, and the length of their prompts, of the row with a long context.
        prefills: prompts and their length.
        busy_batch: of the row that says how busy the device is.
    """

    throughput: tuple[int, int, int] = (512, 512, 256)
    batches: tuple[int, ...] = (1, 64, 256)
    prompt: int = 128
    answer: int = 128
    long: tuple[int, int] = (16, 16384)
    prefills: tuple[tuple[int, int], ...] = ((1, 8192), (8, 4096))
    busy_batch: int = 256


_TINY = Work(
    throughput=(8, 16, 8),
    batches=(1, 4),
    prompt=16,
    answer=8,
    long=(2, 256),
    prefills=((1, 256), (2, 128)),
    busy_batch=4,
)
WORK = {
    "0.6B": Work(throughput=(1024, 256, 128)),
    "8B": Work(),
    "30B-A3B": Work(),
    "tiny": _TINY,
    "tiny-moe": _TINY,
}
