"""GGUF names, configs and tensors against transformers and llama.cpp's own name table."""

import gguf
import numpy as np
import pytest
import torch
from weights_helpers import (
    ARRAY,
    BOOL,
    F32,
    I32,
    STRING,
    U32,
    gguf_bytes,
    llama_checkpoint,
    model_bytes,
    model_metadata,
    tensor_entry,
)

from cardan.core.interfaces.errors import WeightsError
from cardan.core.weights.gguf_checkpoint import GGUFCheckpoint
from cardan.core.weights.gguf_names import KNOWN_ARCHITECTURES, map_tensor_names

SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
}
# GGUF architecture: transformers' config class, its arguments, metadata beyond the common ones.
FAMILIES = {
    "llama": ("LlamaConfig", {"rope_theta": 500000.0}, {}),
    "qwen2": ("Qwen2Config", {"rope_theta": 500000.0}, {}),
    "qwen3": ("Qwen3Config", {"head_dim": 16}, {"attention__key_length": (U32, 16)}),
    "gemma2": (
        "Gemma2Config",
        {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 4},
        {
            "attention__key_length": (U32, 16),
            "attention__value_length": (U32, 16),
            "attention__sliding_window": (U32, 4),
            "attn_logit_softcapping": (F32, 50.0),
            "final_logit_softcapping": (F32, 30.0),
            "rope__freq_base": None,
        },
    ),
    "gemma3": (
        "Gemma3TextConfig",
        {
            "head_dim": 16,
            "query_pre_attn_scalar": 16,
            "sliding_window": 4,
            "num_hidden_layers": 7,
            "rope_theta": 500000.0,
        },
        {
            "attention__key_length": (U32, 16),
            "attention__sliding_window": (U32, 4),
            "block_count": (U32, 7),
        },
    ),
}


def tiny_hf_model(arch, tied):
    import transformers

    name, changes, _ = FAMILIES[arch]
    fields = SIZES | {"rope_theta": 500000.0} | changes
    rope_theta = fields.pop("rope_theta")
    fields["tie_word_embeddings"] = tied
    if arch == "gemma3":
        fields["rope_parameters"] = {
            "full_attention": {"rope_type": "default", "rope_theta": rope_theta},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        }
    else:
        rope_theta = 10000.0 if arch == "gemma2" else rope_theta
        fields["rope_parameters"] = {"rope_type": "default", "rope_theta": rope_theta}
    config = getattr(transformers, name)(attn_implementation="eager", **fields)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def convert(arch, model, tied):
    """What llama.cpp's converter makes of a state dict: its names, its changes."""
    layers = model.config.num_hidden_layers
    table = gguf.get_tensor_name_map(getattr(gguf.MODEL_ARCH, arch.upper()), layers)
    tensors = {}
    for name, value in model.state_dict().items():
        if tied and name == "lm_head.weight":
            continue
        array = value.float().numpy()
        if arch == "llama" and (".q_proj." in name or ".k_proj." in name):
            heads = 4 if ".q_proj." in name else 2
            array = array.reshape(heads, 2, array.shape[0] // heads // 2, -1)
            array = array.swapaxes(1, 2).reshape(value.shape)
        if arch.startswith("gemma") and name.endswith("norm.weight"):
            array = array + 1
        tensors[table.get_name(name, try_suffixes=(".weight", ".bias"))] = array
    return tensors


@pytest.mark.parametrize(
    ("arch", "tied"),
    # The GGUF table has no output projection for gemma2, whose embeddings are always tied.
    [(arch, tied) for arch in FAMILIES for tied in (True, False) if tied or arch != "gemma2"],
)
def test_family_survives_the_way_through_gguf(tmp_path, arch, tied):
    import transformers

    model = tiny_hf_model(arch, tied)
    path = tmp_path / "m.gguf"
    metadata = model_metadata(arch, **FAMILIES[arch][2])
    path.write_bytes(model_bytes(metadata, convert(arch, model, tied)))
    checkpoint = GGUFCheckpoint(path)
    expected = {
        name: value
        for name, value in model.state_dict().items()
        if not (tied and name == "lm_head.weight")
    }
    assert checkpoint.names() == set(expected)
    for name, value in expected.items():
        assert checkpoint.shape(name) == tuple(value.shape)
        atol = 2e-7 if arch.startswith("gemma") and "norm" in name else 0
        torch.testing.assert_close(checkpoint.tensor(name), value, rtol=0, atol=atol)
        assert checkpoint.tensor(name, torch.bfloat16).dtype == torch.bfloat16
    # A model that transformers builds from the config alone gives the same logits.
    config = dict(checkpoint.config)
    del config["generation_config"]
    assert config["tie_word_embeddings"] is tied
    assert config["architectures"] == [type(model).__name__]
    hf_config = transformers.AutoConfig.for_model(
        config.pop("model_type"), attn_implementation="eager", **config
    )
    again = transformers.AutoModelForCausalLM.from_config(hf_config).eval()
    state = {name: checkpoint.tensor(name) for name in checkpoint.names()}
    result = again.load_state_dict(state, strict=False)
    assert not result.unexpected_keys
    assert result.missing_keys == (["lm_head.weight"] if tied else [])
    ids = torch.arange(24).reshape(1, 24)
    with torch.no_grad():
        torch.testing.assert_close(again(ids).logits, model(ids).logits, rtol=1e-4, atol=1e-4)
    checkpoint.close()


@pytest.mark.parametrize("arch", FAMILIES)
def test_config_equals_transformers_own_reading(tmp_path, arch):
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    path = tmp_path / "m.gguf"
    tokens = ("tokenizer.ggml.tokens", ARRAY, (STRING, ["a"] * 96))
    ids = [(f"tokenizer.ggml.{k}_token_id", U32, i) for i, k in enumerate(("bos", "eos"))]
    metadata = [*model_metadata(arch, **FAMILIES[arch][2]), tokens, *ids]
    metadata.append((f"{arch}.vocab_size", U32, 96))
    path.write_bytes(model_bytes(metadata, convert(arch, tiny_hf_model(arch, True), True)))
    ours = GGUFCheckpoint(path).config
    theirs = load_gguf_checkpoint(str(path))["config"]
    for key in set(theirs) - {"_model_name_or_path"}:
        assert ours[key] == theirs[key], key


def test_mapping_covers_llama_cpps_table():
    for arch in KNOWN_ARCHITECTURES:
        kind = getattr(gguf.MODEL_ARCH, arch.upper())
        names = [gguf.TENSOR_NAMES[t].format(bid=3) + ".weight" for t in gguf.MODEL_TENSORS[kind]]
        # Experts, rotary tables of old files, and classifier heads are no part of these models.
        names = [n for n in names if not any(w in n for w in ("exp", "inp", "rot_embd", "cls"))]
        names = [n for n in names if "rope_fact" not in n]
        assert map_tensor_names(arch, names)


def test_unknown_architecture_lists_the_known(tmp_path):
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf_bytes([("general.architecture", STRING, "falcon")]))
    with pytest.raises(
        WeightsError, match=r"m\.gguf: .*'falcon'.*gemma2, gemma3, llama, qwen2, qw"
    ):
        GGUFCheckpoint(path)
    path.write_bytes(gguf_bytes())
    with pytest.raises(WeightsError, match=r"general\.architecture': None"):
        GGUFCheckpoint(path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_count": None}, r"'llama\.block_count': is missing"),
        ({"block_count": (U32, 0)}, r"'llama\.block_count': is 0, must be positive"),
        ({"block_count": (U32, 2**32 - 1)}, "no tensors of layer 4294967294"),
        ({"embedding_length": (STRING, "32")}, "'32' is not an integer"),
        ({"embedding_length": (BOOL, True)}, "True is not an integer"),
        ({"attention__head_count": (U32, 64)}, "64 heads exceed hidden size 32"),
        ({"attention__head_count_kv": (I32, -2)}, "is -2, must be positive"),
        ({"attention__head_count_kv": (ARRAY, (I32, [2, 4]))}, "layers differ"),
        ({"attention__layer_norm_rms_epsilon": (F32, float("nan"))}, "nan is not a finite"),
        ({"rope__dimension_count": (U32, 4)}, "is 4, but the head dimension is 8"),
        ({"rope__freq_base": (F32, -1.0)}, "must be above 1"),
        ({"expert_count": (U32, 8)}, "expert_count': mixtures of experts"),
        ({"rope__scaling__type": (STRING, "longrope")}, "'longrope' is not read"),
        ({"rope__scaling__type": (STRING, "yarn")}, "factor': is None"),
        ({"rope__scaling__type": (U32, 1)}, "1 is not a string"),
    ],
)
def test_bad_metadata_is_named(tmp_path, changes, message):
    with pytest.raises(WeightsError, match=message) as caught:
        llama_checkpoint(tmp_path, **changes)
    assert "m.gguf" in str(caught.value)


def test_unknown_tensors_are_refused(tmp_path):
    tensors = {f"blk.{i}.strange.weight": np.zeros(1) for i in range(7)}
    with pytest.raises(WeightsError, match=r"blk\.0\.strange\.weight.* and 2 more have no place"):
        llama_checkpoint(tmp_path, tensors)


def test_split_files_are_refused(tmp_path):
    with pytest.raises(WeightsError, match=r"split into 3 files.*--merge"):
        llama_checkpoint(tmp_path, extra=[("split.count", U32, 3)])


def test_unknown_name_and_odd_rows_are_named(tmp_path):
    checkpoint = llama_checkpoint(tmp_path, {"blk.0.attn_q.weight": np.zeros((30, 32))})
    with pytest.raises(WeightsError, match="no tensor for 'nope'"):
        checkpoint.tensor("nope")
    with pytest.raises(WeightsError, match=r"attn_q\.weight': 30 rows do not make 4 heads"):
        checkpoint.tensor("model.layers.0.self_attn.q_proj.weight")
    described = checkpoint.describe("model.layers.0.self_attn.q_proj.weight")
    assert described == "m.gguf: tensor 'blk.0.attn_q.weight'"


def test_quantised_rows_and_biases_are_put_back_in_halves(tmp_path):
    rng = np.random.default_rng(0)
    q = rng.normal(size=(32, 32)).astype(np.float32)
    bias = rng.normal(size=32).astype(np.float32)

    def permute(array):
        return array.reshape(4, 2, 4, -1).swapaxes(1, 2).reshape(array.shape)

    blocks = gguf.quants.quantize(permute(q), gguf.GGMLQuantizationType.Q8_0)
    entries = [
        tensor_entry("blk.1.attn_norm.weight", (32,), 0, 0),
        tensor_entry("token_embd.weight", (32, 1), 0, 128),
        tensor_entry("blk.0.attn_q.weight", (32, 32), 8, 256),
        tensor_entry("blk.0.attn_q.bias", (32,), 0, 256 + 1088),
    ]
    data = bytes(256) + blocks.tobytes() + permute(bias).tobytes()
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf_bytes(model_metadata("llama"), entries, data))
    checkpoint = GGUFCheckpoint(path)
    expected = gguf.quants.dequantize(
        gguf.quants.quantize(q, gguf.GGMLQuantizationType.Q8_0), gguf.GGMLQuantizationType.Q8_0
    )
    prefix = "model.layers.0.self_attn.q_proj."
    assert np.array_equal(checkpoint.tensor(prefix + "weight").numpy(), expected)
    assert np.array_equal(checkpoint.tensor(prefix + "bias").numpy(), bias)
    assert checkpoint.config["attention_bias"] is True


@pytest.mark.model
@pytest.mark.slow
def test_demo_model_equals_transformers(demo_gguf, hf_demo):
    _, model = hf_demo
    checkpoint = GGUFCheckpoint(demo_gguf)
    theirs = model.config.to_dict()
    theirs["rope_theta"] = theirs["rope_parameters"]["rope_theta"]
    ours = dict(checkpoint.config)
    assert ours.pop("architectures") == ["LlamaForCausalLM"]
    generation = ours.pop("generation_config")
    assert ours.pop("rope_scaling") is None
    assert theirs["rope_parameters"]["rope_type"] == "default"
    assert ours == {key: theirs[key] for key in ours}
    assert generation == {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
    state = model.state_dict()
    assert checkpoint.names() == set(state) - {"lm_head.weight"}
    for name in checkpoint.names():
        assert torch.equal(checkpoint.tensor(name), state[name]), name
        half = checkpoint.tensor(name, torch.bfloat16)
        assert torch.equal(half, state[name].to(torch.bfloat16)), name
