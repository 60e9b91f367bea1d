"""Sizes that plans are made of, against the models themselves and the files' own libraries."""

import json
import math

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter, quant_shape_to_byte_shape
from model_helpers import ARCHITECTURES, build_model
from safetensors.numpy import save_file

from cardan.core.interfaces.errors import ConfigError, WeightsError
from cardan.core.interfaces.thread_communicator import ThreadCommunicator
from cardan.core.types.kv import KVCacheSpec
from cardan.core.weights.resolve import ModelFiles, resolve_model
from cardan.core.weights.tensor_table import StoredTensor, stored_tensors
from cardan.models.layers.config_reader import ConfigReader
from cardan.plan.memory import MemoryNeed, fit
from cardan.plan.shape import read_shape
from cardan.plan.weights import WeightForms, tensors_of_shape

SIZES = {
    "vocab_size": 101,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
CASES = [
    ("LlamaForCausalLM", {}),
    ("LlamaForCausalLM", {"tie_word_embeddings": True, "head_dim": 24, "sliding_window": 8}),
    ("LlamaForCausalLM", {"num_key_value_heads": None}),
    ("MistralForCausalLM", {"sliding_window": 8}),
    ("MistralForCausalLM", {"sliding_window": None}),
    ("Qwen2ForCausalLM", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2}),
    ("Qwen2ForCausalLM", {"use_sliding_window": False, "sliding_window": 8}),
    ("Qwen3ForCausalLM", {"head_dim": 32}),
    ("Qwen3MoeForCausalLM", {"head_dim": 16, "mlp_only_layers": [1], **EXPERTS}),
    ("Qwen3MoeForCausalLM", {"head_dim": 16, "decoder_sparse_step": 2, **EXPERTS}),
    ("MixtralForCausalLM", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    ("Gemma2ForCausalLM", {"sliding_window": 8}),
    ("Gemma2ForCausalLM", {"sliding_window": 8, "tie_word_embeddings": False, "head_dim": 16}),
    (
        "Gemma3ForCausalLM",
        {"sliding_window": 8, "layer_types": ["full_attention", "sliding_attention"] * 3},
    ),
    ("Gemma3ForCausalLM", {"sliding_window": 8}),
]


def serve(tensors, shape, scheme="none", ranks=1, kernels=(), dtype="bfloat16", copies=False):
    forms = WeightForms(dtype, scheme, ranks, lambda op, form, *_: (op, form) in kernels, copies)
    return forms.serve(tensors, shape)


def shape_of(**changes):
    return read_shape("LlamaForCausalLM", {**SIZES, **changes})


@pytest.mark.parametrize(("architecture", "changes"), CASES)
def test_shapes_are_those_that_models_read(architecture, changes):
    config = {**SIZES, **changes, "architectures": [architecture]}
    shape = read_shape(architecture, config)
    decoder = ARCHITECTURES[architecture].read_config(ConfigReader(config))
    attention = decoder.attention
    heads = (attention.num_heads, attention.num_kv_heads, attention.head_dim)
    assert (shape.num_heads, shape.num_kv_heads, shape.head_dim) == heads
    assert shape.is_tied == decoder.tie_word_embeddings
    assert shape.windows == tuple(layer.window for layer in decoder.layers)
    if decoder.experts is not None:
        assert shape.experts.num_layers == sum(layer.has_experts for layer in decoder.layers)
        assert shape.experts.top_k == decoder.experts.top_k
        assert shape.experts.intermediate_size == decoder.experts.intermediate_size
    else:
        assert shape.experts is None


@pytest.mark.parametrize(("architecture", "changes"), CASES)
def test_tensors_of_a_shape_are_those_that_models_load(architecture, changes):
    config = {**SIZES, **changes, "architectures": [architecture]}
    tensors = tensors_of_shape(read_shape(architecture, config), "bf16")
    matrices = [tensor for tensor in tensors if len(tensor.shape) > 1]
    slots = build_model(config).weight_slots()
    want = sum(math.prod(slot.shape) for slot in slots if len(slot.shape) > 1)
    assert sum(tensor.num_elements for tensor in matrices) == want
    assert sum(tensor.nbytes for tensor in matrices) == 2 * want


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": None}, "'hidden_size' is None"),
        ({"num_attention_heads": "4"}, "'num_attention_heads' is '4'"),
        ({"num_hidden_layers": 0}, "'num_hidden_layers' is 0: must be a positive integer"),
        ({"num_experts": 8}, "'num_experts_per_tok' is None"),
    ],
)
def test_shapes_that_are_not_known(changes, message):
    with pytest.raises(ConfigError, match=message):
        shape_of(**changes)


def test_heads_of_safetensors_files(tmp_path):
    arrays = {
        "model.embed_tokens.weight": np.zeros((8, 4), np.float16),
        "model.norm.weight": np.zeros(4, np.float32),
    }
    save_file(arrays, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text("{}")
    found = stored_tensors(resolve_model(str(tmp_path)))
    assert sorted(found, key=lambda item: item.name) == [
        StoredTensor("model.embed_tokens.weight", (8, 4), "f16", 64),
        StoredTensor("model.norm.weight", (4,), "f32", 16),
    ]


def test_files_beside_the_checkpoint_are_not_counted(tmp_path):
    files = ModelFiles("m", "hf", tmp_path, None)
    for name in ("a", "b", "consolidated"):
        save_file(
            {f"{name}.weight": np.zeros((2, 2), np.float32)}, tmp_path / f"{name}.safetensors"
        )
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {n: f"{n[0]}.safetensors" for n in ("a.w", "b.w")}}))
    assert [item.name for item in stored_tensors(files)] == ["a.weight", "b.weight"]
    (tmp_path / "b.safetensors").unlink()
    assert stored_tensors(files) == ()
    index.write_text(json.dumps({"weight_map": {"a": "../a.safetensors"}}))
    with pytest.raises(WeightsError, match="must have plain file names"):
        stored_tensors(files)
    index.unlink()
    save_file({"whole": np.zeros(1, np.float32)}, tmp_path / "model.safetensors")
    assert [item.name for item in stored_tensors(files)] == ["whole"]


def test_a_directory_may_have_no_weights(tmp_path):
    assert stored_tensors(ModelFiles("m", "hf", tmp_path, None)) == ()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "no header of a safetensors file"),
        (b"\xff" * 8, "no header of a safetensors file"),
        (b"\x02" + b"\0" * 7 + b"[]", "no header of a safetensors file"),
        (b"\x0a" + b"\0" * 7 + b'{"a": {}} ', "tensor 'a': its entry in the header is damaged"),
        (
            b"\x3c" + b"\0" * 7 + b'{"a": {"dtype":"F32","shape":[2,2],"data_offsets":[0,16]}}'
            b"  " + b"\0" * 15,
            "tensor 'a' ends at byte 16 of the data, but the file has 15 of them",
        ),
    ],
)
def test_damaged_safetensors_files(tmp_path, content, message):
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(WeightsError, match=message):
        stored_tensors(ModelFiles("m", "hf", tmp_path, None))


def test_tables_of_gguf_files(tmp_path):
    path = tmp_path / "m.gguf"
    writer = GGUFWriter(path, "llama")
    stored = {"token_embd.weight": ("Q8_0", (4, 64)), "blk.0.attn_q.weight": ("Q4_1", (64, 32))}
    for name, (kind, shape) in stored.items():
        data = np.zeros(quant_shape_to_byte_shape(shape, GGMLQuantizationType[kind]), np.uint8)
        writer.add_tensor(name, data, raw_dtype=GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = stored_tensors(ModelFiles("m", "gguf", tmp_path, path))
    assert [(item.name, item.form, item.shape) for item in found] == [
        ("model.embed_tokens.weight", "q8_0", (4, 64)),
        ("model.layers.0.self_attn.q_proj.weight", "q4_1", (64, 32)),
    ]
    assert [item.nbytes for item in found] == [item.n_bytes for item in GGUFReader(path).tensors]


def test_a_tied_head_takes_no_memory_unless_it_is_copied():
    shape = shape_of(tie_word_embeddings=True)
    tensors = tensors_of_shape(shape, "bf16")
    stored = sum(tensor.nbytes for tensor in tensors)
    table = 2 * shape.vocab_size * shape.hidden_size
    assert serve(tensors, shape).nbytes == stored
    assert serve(tensors, shape, copies=True).nbytes == stored + table
    assert serve(tensors, shape, dtype="float32").nbytes == 2 * stored
    for weights in (serve(tensors, shape), serve(tensors, shape, copies=True)):
        assert weights.read_bytes(1) == stored  # the head, and not the embeddings


@pytest.mark.parametrize(
    ("scheme", "op", "forms", "bits"),
    [
        ("q8", "block_linear", ("q8_0",), 8.5),
        ("q4", "block_linear", ("q4_1", "q8_0"), 5),
        ("int8", "int8_linear", ("int8",), 8),
    ],
)
def test_quantized_layers(scheme, op, forms, bits):
    shape = shape_of(hidden_size=64, intermediate_size=128, vocab_size=96)
    tensors = tensors_of_shape(shape, "bf16")
    full = serve(tensors, shape)
    # Without a kernel layers are rounded and stay as large.
    assert serve(tensors, shape, scheme).nbytes == full.nbytes
    found = serve(tensors, shape, scheme, kernels=[(op, form) for form in forms])
    of_layers = [item for item in found.tensors if item.role == "linear"]
    elements = sum(item.elements for item in of_layers)
    outputs = sum(item.shape[0] for item in tensors if ".layers." in item.name and item.shape[1:])
    scales = 4 * outputs if scheme == "int8" else 0
    assert sum(item.nbytes for item in of_layers) == elements * bits / 8 + scales
    (embedding,) = (item for item in found.tensors if item.role == "embedding")
    assert embedding.nbytes == 2 * 96 * 64
    (head,) = (item for item in found.tensors if item.role == "head")
    head_bits = 8 if scheme == "int8" else 8.5
    assert head.nbytes == 96 * 64 * head_bits / 8 + (4 * 96 if scheme == "int8" else 0)


def test_blocks_stay_where_there_are_kernels_for_them():
    shape = shape_of()
    tensors = [
        StoredTensor("model.layers.0.mlp.up_proj.weight", (96, 64), "q4_1", 96 * 40),
        StoredTensor("model.layers.0.mlp.gate_proj.weight", (96, 64), "q6_k", 5),
        StoredTensor("model.embed_tokens.weight", (101, 64), "q8_0", 101 * 68),
    ]
    kernels = [("block_linear", "q4_1"), ("block_embedding", "q8_0")]
    found = serve(tensors, shape, "gguf", kernels=kernels).tensors
    assert [item.nbytes for item in found] == [96 * 40, 2 * 96 * 64, 101 * 68]
    assert [item.dtype for item in found] == ["int8", "bfloat16", "int8"]
    assert serve(tensors, shape, "none", kernels=kernels).nbytes == 2 * (2 * 96 * 64 + 101 * 64)


def test_a_cut_through_blocks_is_decoded():
    shape = shape_of()
    kernels = [("block_linear", "q8_0")]
    down = [StoredTensor("model.layers.0.mlp.down_proj.weight", (64, 96), "q8_0", 64 * 102)]
    assert serve(down, shape, "gguf", kernels=kernels).nbytes == 64 * 102
    assert serve(down, shape, "gguf", 2, kernels).nbytes == 64 * 48 * 2


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_rank_holds_its_part(ranks):
    """As the models' own layers do."""
    config = {**SIZES, "vocab_size": 102, "architectures": ["LlamaForCausalLM"]}
    shape = read_shape("LlamaForCausalLM", config)
    communicator = ThreadCommunicator.group(ranks)[0] if ranks > 1 else None
    model = build_model(config, communicator=communicator)
    found = serve(tensors_of_shape(shape, "f32"), shape, ranks=ranks, dtype="float32")
    qkv = model.layers[0].self_attn.qkv_proj
    assert qkv.num_kv_heads == max(1, shape.num_kv_heads // ranks)
    rows = (qkv.num_heads + 2 * qkv.num_kv_heads) * shape.head_dim
    linear = [item for item in found.tensors if item.role == "linear"]
    assert sum(item.elements for item in linear[:3]) == rows * shape.hidden_size
    assert linear[4].elements == model.layers[0].mlp.gate_up_proj.intermediate_size * 64
    (head,) = (item for item in found.tensors if item.role == "head")
    assert head.nbytes == 4 * 64 * -(-102 // ranks)


@pytest.mark.parametrize(
    ("changes", "ranks", "message"),
    [
        ({}, 3, "does not divide num_attention_heads"),
        ({"intermediate_size": 98}, 4, "does not divide intermediate_size"),
        (
            {"num_attention_heads": 12, "num_key_value_heads": 3, "hidden_size": 96},
            4,
            "neither a divisor nor a multiple of num_key_value_heads",
        ),
        ({**EXPERTS, "moe_intermediate_size": 31}, 2, "does not divide moe_intermediate_size"),
    ],
)
def test_ranks_need_equal_shares(changes, ranks, message):
    shape = shape_of(**changes)
    with pytest.raises(ConfigError, match=message):
        serve((), shape, ranks=ranks)


def test_a_scheme_of_unknown_size():
    with pytest.raises(ConfigError, match="mine: sizes of this scheme are not known"):
        serve((), shape_of(), "mine")


def test_experts_hit_are_those_of_independent_choices():
    shape = read_shape("Qwen3MoeForCausalLM", {**SIZES, **EXPERTS})
    weights = serve(tensors_of_shape(shape, "bf16"), shape)
    random = np.random.default_rng(0)
    for tokens in (1, 5, 40):
        hits = [
            len({e for _ in range(tokens) for e in random.choice(8, 2, replace=False)})
            for _ in range(800)
        ]
        assert 8 * weights.share_hit(tokens) == pytest.approx(np.mean(hits), rel=0.03)
    experts = sum(item.nbytes for item in weights.tensors if item.role == "experts")
    assert weights.read_bytes(5) - weights.read_bytes(1) == pytest.approx(
        experts * (weights.share_hit(5) - weights.share_hit(1))
    )


def need(**changes):
    values = {
        "total": 1000 * 512, "reserved": 0, "weights": 0, "step": 0, "graphs": 0,
        "kv_budget": None, "utilization": 0.5,
    }  # fmt: skip
    return MemoryNeed(**{**values, **changes})


SPEC = KVCacheSpec("full", 16, 1, 4, 4, "bfloat16")  # 512 bytes a block in two layers


@pytest.mark.parametrize(
    ("changes", "want"),
    [
        ({}, (500 - 1) * 16),
        ({"weights": 100 * 512, "reserved": 100 * 512}, (400 - 1) * 16),
        ({"step": 10 * 512, "graphs": 5 * 512}, (485 - 1) * 16),
        ({"kv_budget": 20 * 512}, 19 * 16),
        ({"kv_budget": 20 * 512, "total": None}, 19 * 16),
    ],
)
def test_the_cache_gets_what_is_left(changes, want):
    found = fit(need(**changes), [SPEC] * 2, 64, True, 1000)
    assert (found.kv_tokens, found.problem) == (want, "")
    assert found.kv_bytes == (want // 16 + 1) * 512


@pytest.mark.parametrize(
    ("changes", "wanted", "message"),
    [
        ({"weights": 1001 * 512}, 64, "weights of 500.5 KiB do not fit into the 500.0 KiB"),
        ({"step": 500 * 512}, 64, "no room for a KV cache"),
        ({"total": None}, 64, "is not known before it is opened"),
        ({}, 499 * 16 + 1, "a context of 7985 tokens needs"),
        ({"kv_budget": 900 * 512, "weights": 200 * 512}, 64, "do not fit into the 400.0 KiB"),
    ],
)
def test_what_does_not_fit(changes, wanted, message):
    found = fit(need(**changes), [SPEC] * 2, wanted, True, 1000)
    assert message in found.problem
    assert (found.kv_tokens, found.kv_bytes) == (0, 0)


def test_a_length_that_nobody_asked_for_is_cut():
    found = fit(need(), [SPEC] * 2, 100_000, False, 1000)
    assert found.problem == ""
    assert found.max_model_len == found.kv_tokens == 499 * 16
    assert "limited to 7984 tokens" in found.warning
