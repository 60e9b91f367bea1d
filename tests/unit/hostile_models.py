"""Small whole models to damage, and how a model is read and started."""

import json
import resource
from pathlib import Path

import gguf
import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from weights_helpers import ARRAY, F32, I32, STRING, U32, model_bytes

from cardan.bootstrap.engine_builder import build_engine
from cardan.bootstrap.model_source import max_model_len, read_model, read_tokenizer
from cardan.core.config.cache import CacheConfig
from cardan.core.config.device import DeviceConfig
from cardan.core.config.engine import EngineConfig
from cardan.core.config.model import ModelConfig
from cardan.core.config.scheduler import SchedulerConfig
from cardan.core.text.token_bytes import byte_level_token
from cardan.core.types.errors import CardanError
from cardan.core.weights.gguf_checkpoint import GGUFCheckpoint
from cardan.core.weights.gguf_names import map_tensor_names
from cardan.core.weights.hf_checkpoint import HFCheckpoint

VOCAB_SIZE = 260
HF_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "eos_token_id": 259,
    "torch_dtype": "float32",
}
TOKENIZER_CONFIG = {
    "bos_token": "<s>",
    "eos_token": "</s>",
    "chat_template": "{{ messages[0].content }}",
    "added_tokens_decoder": {"256": {"content": "<s>", "special": True}},
}
_TOKENS = [*(byte_level_token(bytes([byte])) for byte in range(256)), "ab", "abc", "<s>", "</s>"]
METADATA = {
    "general.architecture": (STRING, "llama"),
    "llama.context_length": (U32, 64),
    "llama.embedding_length": (U32, 16),
    "llama.block_count": (U32, 1),
    "llama.feed_forward_length": (U32, 32),
    "llama.attention.head_count": (U32, 2),
    "llama.attention.head_count_kv": (U32, 1),
    "llama.attention.layer_norm_rms_epsilon": (F32, 1e-5),
    "llama.rope.freq_base": (F32, 10000.0),
    "llama.rope.dimension_count": (U32, 8),
    "tokenizer.ggml.model": (STRING, "gpt2"),
    "tokenizer.ggml.pre": (STRING, "gpt-2"),
    "tokenizer.ggml.tokens": (ARRAY, (STRING, _TOKENS)),
    "tokenizer.ggml.token_type": (ARRAY, (I32, [1] * 258 + [3, 3])),
    "tokenizer.ggml.merges": (ARRAY, (STRING, ["a b", "ab c"])),
    "tokenizer.ggml.bos_token_id": (U32, 258),
    "tokenizer.ggml.eos_token_id": (U32, 259),
    "tokenizer.chat_template": (STRING, "{{ messages[0].content }}"),
}
_LAYER = {
    "attn_norm": (16,),
    "attn_q": (16, 16),
    "attn_k": (8, 16),
    "attn_v": (8, 16),
    "attn_output": (16, 16),
    "ffn_norm": (16,),
    "ffn_gate": (32, 16),
    "ffn_up": (32, 16),
    "ffn_down": (16, 32),
}


def tensors() -> dict[str, np.ndarray]:
    """The weights under their GGUF names."""
    generator = np.random.default_rng(0)
    shapes = {"token_embd.weight": (VOCAB_SIZE, 16), "output_norm.weight": (16,)}
    shapes |= {f"blk.0.{name}.weight": shape for name, shape in _LAYER.items()}
    return {
        name: generator.standard_normal(shape).astype(np.float32) * np.float32(0.1)
        for name, shape in shapes.items()
    }


def metadata_bytes(changes: dict[str, tuple | None]) -> bytes:
    """A whole model whose metadata are changed; None drops a key."""
    fields = {**METADATA, **changes}
    triples = [(key, *field) for key, field in fields.items() if field is not None]
    return model_bytes(triples, tensors())


def write_gguf(path: Path) -> bytes:
    """A whole model as the `gguf` package writes it, one tensor quantised; returns its bytes."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(16)
    writer.add_block_count(1)
    writer.add_feed_forward_length(32)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(_TOKENS)
    writer.add_token_types([1] * 258 + [3, 3])
    writer.add_token_merges(["a b", "ab c"])
    writer.add_bos_token_id(258)
    writer.add_eos_token_id(259)
    q8_0 = gguf.GGMLQuantizationType.Q8_0
    for name, array in tensors().items():
        if name == "blk.0.ffn_down.weight":
            writer.add_tensor(name, gguf.quants.quantize(array, q8_0), raw_dtype=q8_0)
        else:
            writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.read_bytes()


def write_directory(directory: Path) -> Path:
    """A whole model as transformers lays it out; returns the directory."""
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(HF_CONFIG))
    (directory / "tokenizer_config.json").write_text(json.dumps(TOKENIZER_CONFIG))
    (directory / "generation_config.json").write_text('{"eos_token_id": 257}')
    arrays = tensors()
    names = map_tensor_names("llama", arrays)
    weights = {name: torch.from_numpy(arrays[at.gguf_name]) for name, at in names.items()}
    save_file(weights, directory / "model.safetensors")
    vocabulary = {byte_level_token(bytes([byte])): byte for byte in range(256)}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>"])
    backend.save(str(directory / "tokenizer.json"))
    return directory


def engine_config(path: Path, **changes) -> EngineConfig:
    return EngineConfig(
        model=ModelConfig(model=str(path), **changes),
        cache=CacheConfig(kv_cache_memory_bytes=1 << 18),
        device=DeviceConfig(platform="cpu"),
        scheduler=SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=64),
    )


def read(path: Path) -> None:
    """Read everything that a model's files say, without building the model."""
    config = engine_config(path).model
    source = read_model(config)
    tokenizer = read_tokenizer(config, source)
    tokenizer.decode(tokenizer.encode("abc äöü <s>"))
    max_model_len(config, source)
    assert source.architecture
    assert isinstance(source.generation_config, dict)
    files = source.files
    checkpoint = HFCheckpoint(files.path) if files.gguf is None else GGUFCheckpoint(files.gguf)
    try:
        for name in checkpoint.names():
            assert tuple(checkpoint.tensor(name).shape) == checkpoint.shape(name)
    finally:
        checkpoint.close()


def start(path: Path) -> None:
    """Build an engine and close it."""
    build_engine(engine_config(path)).close("the test is over")


def check_refusal(error: CardanError, *names: str) -> None:
    """An error for a user: one short line without control characters, which names all ``names``."""
    text = str(error)
    assert text.isprintable(), text
    assert len(text) < 1500
    for name in names:
        assert name in text, text


def peak_bytes() -> int:
    """The most memory that this process has ever held."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
