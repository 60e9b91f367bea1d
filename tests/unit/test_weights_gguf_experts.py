"""Mixtures of experts in GGUF files, written by the gguf package, against its decoding."""

import gguf
import numpy as np
import pytest
import torch
from model_helpers import Sequence, build_model, load_model
from weights_helpers import F32, STRING, U32, model_bytes, model_metadata

from cardan.core.interfaces.errors import WeightsError
from cardan.core.weights.gguf_checkpoint import GGUFCheckpoint
from cardan.core.weights.hf_checkpoint import HFCheckpoint
from cardan.core.weights.loader import load_weights
from cardan.testing.tiny_models import make_tiny_model, prompt_ids

Q8 = gguf.GGMLQuantizationType.Q8_0
EXPERTS = ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")


def write_file(path, model):
    """A tiny qwen3moe file as llama.cpp's converter makes it, experts in blocks of 8 bits."""
    config = model.config
    writer = gguf.GGUFWriter(str(path), "qwen3moe")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_expert_count(config.num_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    table = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3MOE, config.num_hidden_layers)
    for name, value in unstacked(model).items():
        array = value.float().numpy()
        # Dense layers among mixtures have names that the table of the architecture lacks.
        own = table.get_name(name, try_suffixes=(".weight",)) or dense_name(name)
        if own.split(".")[-2] in EXPERTS:
            writer.add_tensor(own, gguf.quants.quantize(array, Q8), raw_dtype=Q8)
        else:
            writer.add_tensor(own, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def unstacked(model):
    """The state, with gate and up projections apart as the converter has them."""
    state = {}
    for name, value in model.state_dict().items():
        if name.endswith("gate_up_proj"):
            gate, up = value.chunk(2, dim=1)
            state[name.replace("gate_up_proj", "gate_proj.weight")] = gate.contiguous()
            state[name.replace("gate_up_proj", "up_proj.weight")] = up.contiguous()
        else:
            state[name + ".weight" * name.endswith("experts.down_proj")] = value
    return state


def dense_name(name):
    _, _, layer, _, projection, _ = name.split(".")
    return f"blk.{layer}.ffn_{projection.removesuffix('_proj')}.weight"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """(transformers' model, its directory, the file)."""
    directory = tmp_path_factory.mktemp("qwen3_moe")
    model = make_tiny_model("qwen3_moe", directory)
    write_file(directory / "m.gguf", model)
    return model, directory, directory / "m.gguf"


def test_experts_equal_the_packages_decoding(made):
    _, directory, path = made
    published, checkpoint = HFCheckpoint(directory), GGUFCheckpoint(path)
    assert checkpoint.names() == published.names()
    raw = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    for name in checkpoint.names():
        assert checkpoint.shape(name) == published.shape(name)
        found = checkpoint.tensor(name)
        if ".experts." not in name:
            assert torch.equal(found, published.tensor(name)), name
            continue
        _, _, layer, _, _, expert, projection, _ = name.split(".")
        own = f"blk.{layer}.ffn_{projection.removesuffix('_proj')}_exps.weight"
        decoded = gguf.quants.dequantize(raw[own].data, Q8)[int(expert)]
        assert np.array_equal(found.numpy(), decoded), name
        assert own in checkpoint.describe(name)
        blocks = checkpoint.stored(name)
        assert (blocks.format, blocks.in_features) == ("q8_0", decoded.shape[1])
        assert np.array_equal(blocks.data.numpy(), raw[own].data[int(expert)])


def test_the_model_computes_what_transformers_computes(made):
    model, directory, path = made
    checkpoint = GGUFCheckpoint(path)
    theirs = HFCheckpoint(directory).config
    for key in ("num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob", "hidden_size"):
        assert checkpoint.config[key] == theirs[key]
    assert checkpoint.config["num_experts"] == theirs["num_local_experts"]
    assert checkpoint.config["mlp_only_layers"] == [1]
    assert checkpoint.config["architectures"] == theirs["architectures"]
    ours = build_model(checkpoint.config)
    load_weights(ours, checkpoint)
    token_ids = prompt_ids(24)
    found = Sequence(ours).extend(token_ids)
    # The same values, decoded by the package, in transformers.
    with torch.no_grad():
        for name, value in model.state_dict().items():
            if ".experts." in name:
                blocks = gguf.quants.quantize(value.numpy(), Q8)
                value.copy_(torch.from_numpy(gguf.quants.dequantize(blocks, Q8)))
        expected = model(torch.tensor([token_ids]), use_cache=False).logits[0]
    torch.testing.assert_close(found.log_softmax(-1), expected.log_softmax(-1), atol=1e-4, rtol=0)
    full = Sequence(load_model(directory)).extend(token_ids)
    assert not torch.equal(found, full)


def test_config_equals_transformers_own_reading(made):
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    *_, path = made
    ours, theirs = GGUFCheckpoint(path).config, load_gguf_checkpoint(str(path))["config"]
    for key in set(theirs) - {"_model_name_or_path", "vocab_size"}:
        assert ours[key] == theirs[key], key


def checkpoint_with(tmp_path, shape, **changes):
    fields = {
        "expert_count": (U32, 4),
        "expert_used_count": (U32, 2),
        "expert_feed_forward_length": (U32, 8),
        **changes,
    }
    tensors = {
        "token_embd.weight": np.zeros((96, 32)),
        "blk.1.attn_norm.weight": np.zeros(32),
        "blk.0.ffn_up_exps.weight": np.zeros(shape),
    }
    path = tmp_path / "m.gguf"
    path.write_bytes(model_bytes(model_metadata("qwen3moe", **fields), tensors))
    return GGUFCheckpoint(path)


@pytest.mark.parametrize(
    ("shape", "changes", "message"),
    [
        ((3, 8, 32), {}, r"ffn_up_exps\.weight': has shape \(3, 8, 32\), not those of 4 experts"),
        ((4, 32), {}, r"has shape \(4, 32\), not those of 4 experts"),
        ((4, 8, 32), {"expert_count": None}, r"'qwen3moe\.expert_count': is missing"),
        ((4, 8, 32), {"expert_used_count": (F32, 2.0)}, r"expert_used_count': 2\.0 is not an int"),
        ((4, 8, 32), {"expert_feed_forward_length": (STRING, "8")}, r"'8' is not an integer"),
    ],
)
def test_bad_files_are_refused(tmp_path, shape, changes, message):
    with pytest.raises(WeightsError, match=message) as caught:
        checkpoint_with(tmp_path, shape, **changes)
    assert "m.gguf" in str(caught.value)


def test_layers_without_a_router_are_dense(tmp_path):
    assert checkpoint_with(tmp_path, (4, 8, 32)).config["mlp_only_layers"] == [0, 1]
