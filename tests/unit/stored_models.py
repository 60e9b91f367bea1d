"""Tiny llamas in GGUF files whose matrices are random blocks of chosen formats."""

import gguf
import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from weights_helpers import F32, STRING, U32, gguf_bytes, tensor_entry

from cardan.core.ops.reference.block_inputs import random_blocks
from cardan.core.types.ggml import BLOCK_TYPES
from cardan.core.weights.gguf_checkpoint import GGUFCheckpoint

HIDDEN, INTERMEDIATE, VOCAB, LAYERS = 256, 512, 96, 2
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 64
_PARTS = {
    "attn_q": ("self_attn.q_proj", HEADS * HEAD_DIM, HIDDEN),
    "attn_k": ("self_attn.k_proj", KV_HEADS * HEAD_DIM, HIDDEN),
    "attn_v": ("self_attn.v_proj", KV_HEADS * HEAD_DIM, HIDDEN),
    "attn_output": ("self_attn.o_proj", HIDDEN, HEADS * HEAD_DIM),
    "ffn_gate": ("mlp.gate_proj", INTERMEDIATE, HIDDEN),
    "ffn_up": ("mlp.up_proj", INTERMEDIATE, HIDDEN),
    "ffn_down": ("mlp.down_proj", HIDDEN, INTERMEDIATE),
}
PLAIN = {"f32": np.float32, "f16": np.float16}


def stored_model(path, formats, tied=True, vocab=VOCAB):
    """Write a model to ``path`` and return transformers' model of the same numbers.

    ``formats`` maps the GGUF names of a layer's matrices, ``token_embd`` and ``output`` to
    formats; ``f32`` where there is none.
    """
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=128,
        rms_norm_eps=1e-6,
        tie_word_embeddings=tied,
    )
    tables = {"token_embd": "model.embed_tokens.weight"}
    if not tied:
        tables["output"] = "lm_head.weight"
    writer = _Writer(formats)
    values = {
        name: writer.matrix(gguf_name, gguf_name, vocab, HIDDEN, scale=1.0 if tied else 0.3)
        for gguf_name, name in tables.items()
    }
    for layer in range(LAYERS):
        for part, (name, rows, columns) in _PARTS.items():
            made = writer.matrix(f"blk.{layer}.{part}", part, rows, columns, columns**-0.5)
            values[f"model.layers.{layer}.{name}.weight"] = made
        norms = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
        for part, name in norms.items():
            made = writer.norm(f"blk.{layer}.{part}")
            values[f"model.layers.{layer}.{name}.weight"] = made
    values["model.norm.weight"] = writer.norm("output_norm")
    path.write_bytes(writer.file())
    model = LlamaForCausalLM(config).eval()
    missing, unexpected = model.load_state_dict(values, strict=False)
    assert not unexpected
    assert set(missing) <= {"lm_head.weight"}
    return model


def true_logits(model, token_ids):
    """transformers' logits [T, vocab]."""
    with torch.no_grad():
        return model(torch.tensor([token_ids])).logits[0]


def checkpoint_of(path):
    return GGUFCheckpoint(path)


class _Writer:
    def __init__(self, formats):
        self._formats = formats
        self._generator = torch.Generator().manual_seed(len(formats))
        self._entries, self._data = [], b""

    def matrix(self, gguf_name, part, rows, columns, scale):
        """Add a matrix; its numbers as Hugging Face has them."""
        format = self._formats.get(part, "f32")
        if format in PLAIN:
            drawn = torch.randn(rows, columns, generator=self._generator) * scale
            stored = drawn.numpy().astype(PLAIN[format])
            values = stored.astype(np.float32)
            kind = 0 if format == "f32" else 1
            raw = stored.view(np.uint8)
        else:
            kind = int(BLOCK_TYPES[format])
            raw = random_blocks(format, rows, columns, scale, self._generator).numpy()
            values = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType(kind))
        heads = {"attn_q": HEADS, "attn_k": KV_HEADS}.get(part)
        if heads:
            # Files hold the two halves of a head's rows interleaved.
            raw = raw.reshape(heads, 2, HEAD_DIM // 2, -1).swapaxes(1, 2).reshape(rows, -1)
        self._add(f"{gguf_name}.weight", (columns, rows), kind, raw)
        return torch.from_numpy(values.astype(np.float32))

    def norm(self, gguf_name):
        values = 1 + 0.2 * torch.randn(HIDDEN, generator=self._generator)
        self._add(f"{gguf_name}.weight", (HIDDEN,), 0, values.numpy())
        return values

    def file(self):
        metadata = [
            ("general.architecture", STRING, "llama"),
            ("llama.block_count", U32, LAYERS),
            ("llama.context_length", U32, 128),
            ("llama.embedding_length", U32, HIDDEN),
            ("llama.feed_forward_length", U32, INTERMEDIATE),
            ("llama.attention.head_count", U32, HEADS),
            ("llama.attention.head_count_kv", U32, KV_HEADS),
            ("llama.attention.layer_norm_rms_epsilon", F32, 1e-6),
            ("llama.rope.freq_base", F32, 10000.0),
        ]
        return gguf_bytes(metadata, self._entries, self._data)

    def _add(self, name, dims, kind, array):
        self._entries.append(tensor_entry(name, dims, kind, len(self._data)))
        raw = np.ascontiguousarray(array).tobytes()
        self._data += raw + b"\0" * (-len(raw) % 32)
