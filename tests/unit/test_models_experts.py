"""Mixtures of experts: layouts of checkpoints, memory while loading, and configs."""

import json
import logging

import pytest
import torch
from model_helpers import Sequence, build_model, load_model, run_ranks
from safetensors.torch import load_file, save_file

from cardan.core.interfaces.errors import ConfigError, WeightsError
from cardan.core.interfaces.quantization import QuantScheme
from cardan.core.weights.hf_checkpoint import HFCheckpoint
from cardan.core.weights.loader import load_weights
from cardan.core.weights.stacked_experts import parts_of_stack
from cardan.models.layers.config_reader import ConfigReader
from cardan.models.mixtral import MixtralForCausalLM
from cardan.models.qwen3_moe import Qwen3MoeForCausalLM
from cardan.testing.tiny_models import make_tiny_model, prompt_ids

SIZES = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
}


def config_of(architecture="Qwen3MoeForCausalLM", **changes):
    return {"architectures": [architecture], **SIZES, **changes}


@pytest.mark.parametrize(
    ("changes", "sparse"),
    [
        ({}, [True] * 4),
        ({"decoder_sparse_step": 2}, [False, True, False, True]),
        ({"mlp_only_layers": [0, 3]}, [False, True, True, False]),
        ({"mlp_only_layers": [1], "decoder_sparse_step": 2}, [False, False, False, True]),
    ],
)
def test_layers_with_experts(changes, sparse):
    config = Qwen3MoeForCausalLM.read_config(ConfigReader(config_of(**changes)))
    assert [layer.has_experts for layer in config.layers] == sparse


def test_both_names_of_the_number_of_experts():
    named = config_of(num_experts=None, num_local_experts=6)
    assert Qwen3MoeForCausalLM.read_config(ConfigReader(named)).experts.num_experts == 6
    mixtral = MixtralForCausalLM.read_config(ConfigReader(named)).experts
    assert (mixtral.intermediate_size, mixtral.renormalize) == (24, True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts": None}, r"'num_local_experts' is missing"),
        ({"num_experts": 0}, r"'num_experts' is 0: must be a positive integer"),
        ({"num_experts_per_tok": 7}, r"'num_experts_per_tok' is 7: exceeds num_experts \(6\)"),
        ({"moe_intermediate_size": None}, r"'moe_intermediate_size' is missing"),
        ({"hidden_act": "gelu_pytorch_tanh"}, r"'hidden_act' is .*: experts .* silu only"),
        ({"decoder_sparse_step": 0}, r"'decoder_sparse_step' is 0"),
        ({"mlp_only_layers": [4]}, r"'mlp_only_layers' is \[4\]: num_hidden_layers is 4"),
        ({"mlp_only_layers": 1}, r"'mlp_only_layers' is 1: must be a list of integers"),
        ({"mlp_only_layers": [True]}, r"'mlp_only_layers' is .*: must be a list of integers"),
        ({"norm_topk_prob": 1}, r"'norm_topk_prob' is 1: must be true or false"),
    ],
)
def test_bad_configs_are_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        build_model(config_of(**changes))


def test_experts_that_ranks_cannot_share():
    config = config_of(moe_intermediate_size=9)
    with pytest.raises(ConfigError, match=r"moe_intermediate_size \(9\); use a divisor of 9"):
        run_ranks(2, lambda communicator: build_model(config, communicator=communicator))


def test_stacked_checkpoints_equal_published_ones(tmp_path):
    """transformers can save experts in stacks; both layouts make the same model."""
    theirs = make_tiny_model("qwen3_moe", tmp_path)
    token_ids = prompt_ids(16)
    expected = Sequence(load_model(tmp_path)).extend(token_ids)
    published = HFCheckpoint(tmp_path).names()
    assert "model.layers.0.mlp.experts.7.up_proj.weight" in published
    state = {name: value.contiguous() for name, value in theirs.state_dict().items()}
    assert "model.layers.0.mlp.experts.gate_up_proj" in state
    save_file(state, tmp_path / "model.safetensors")
    checkpoint = HFCheckpoint(tmp_path)
    assert checkpoint.names() == published
    name = "model.layers.2.mlp.experts.5.up_proj.weight"
    assert checkpoint.shape(name) == (32, 64)
    stack = state["model.layers.2.mlp.experts.gate_up_proj"]
    assert torch.equal(checkpoint.tensor(name), stack[5, 32:])
    assert checkpoint.tensor(name, torch.bfloat16).dtype == torch.bfloat16
    assert checkpoint.describe(name) == "model.safetensors"
    assert torch.equal(Sequence(load_model(tmp_path)).extend(token_ids), expected)


def test_what_is_no_stack_stays_as_it_is():
    stack = "model.layers.0.mlp.experts.gate_up_proj"
    assert parts_of_stack("model.layers.0.mlp.gate_up_proj", (2, 4, 3)) == {}
    for shape in ((4, 3), (2, 3, 3), (1 << 60, 0, 3)):
        assert parts_of_stack(stack, shape) == {}
    assert len(parts_of_stack(stack, (2, 4, 3))) == 4


def test_a_missing_expert_is_named(tmp_path):
    make_tiny_model("qwen3_moe", tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    del state["model.layers.0.mlp.experts.3.down_proj.weight"]
    save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(WeightsError, match=r"1 missing tensors: .*experts\.3\.down_proj\.weight"):
        load_model(tmp_path)


def test_experts_take_memory_while_their_layer_is_loaded(tmp_path):
    """Not before, so that of one layer at a time the loaded form and the kernel's are there."""
    make_tiny_model("qwen3_moe", tmp_path)
    checkpoint = HFCheckpoint(tmp_path)
    model = build_model(checkpoint.config)
    assert all(layer.mlp.experts.stacked is None for layer in (model.layers[0], model.layers[2]))
    load_weights(model, checkpoint)
    assert model.layers[0].mlp.experts.stacked.shape == (8, 3 * 32 * 64)


class AnyScheme(QuantScheme):
    name = "any"
    contract = (1, 0)

    @classmethod
    def detect(cls, config):
        return False

    def accepts(self, layer, in_features, out_features):
        assert "experts" not in layer
        assert not layer.endswith("mlp.gate")
        from cardan.core.interfaces.capabilities import Verdict

        return Verdict.no("none")

    def linear(self, ops, layer, in_features, out_features, dtype, device):
        raise AssertionError("no layer was accepted")


def test_experts_beside_quantised_layers_are_told_of(caplog):
    with caplog.at_level(logging.WARNING, logger="cardan.engine"):
        build_model(config_of(), quantization=AnyScheme())
    assert "quantization any: the experts' weights are kept in float32" in caplog.text


def test_ranks_load_their_share_of_stacks(tmp_path):
    theirs = make_tiny_model("qwen3_moe_sparse_step", tmp_path)
    token_ids = prompt_ids(12)
    expected = Sequence(load_model(tmp_path)).extend(token_ids)
    save_file(
        {name: value.contiguous() for name, value in theirs.state_dict().items()},
        tmp_path / "model.safetensors",
    )
    assert json.loads((tmp_path / "config.json").read_text())["num_local_experts"] == 8

    def work(communicator):
        model = load_model(tmp_path, communicator=communicator)
        return Sequence(model).extend(token_ids), model.layers[1].mlp.experts.stacked.shape

    for logits, shape in run_ranks(2, work):
        torch.testing.assert_close(logits, expected, atol=2e-4, rtol=0)
        assert shape == (8, 3 * 16 * 64)
