"""Sizes of a model that its config.json states under other names."""

import json

import pytest
from transformers import AutoConfig

from cardan.bootstrap.model_sizes import with_common_names
from cardan.bootstrap.model_source import read_model
from cardan.core.config.model import ModelConfig

SIZES = {"vocab_size": 320, "hidden_size": 48, "num_hidden_layers": 3}


@pytest.mark.parametrize("kind", ["gpt2", "gptj", "bloom", "mpt", "codegen"])
def test_names_are_those_of_transformers(kind):
    config = AutoConfig.for_model(kind, **SIZES)
    found = with_common_names(json.loads(config.to_json_string(use_diff=False)))
    assert {name: found[name] for name in SIZES} == SIZES


def test_common_names_win():
    config = {"hidden_size": 8, "n_embd": 9, "n_layer": 2, "num_layers": 5, "d_model": None}
    assert with_common_names(config) == {**config, "num_hidden_layers": 2}


def test_a_model_is_read_that_has_them(tmp_path):
    values = {"architectures": ["OddForCausalLM"], "vocab_size": 9, "d_model": 4, "n_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps(values))
    (tmp_path / "model.safetensors").write_bytes(b"")
    source = read_model(ModelConfig(model=str(tmp_path)))
    assert source.config["hidden_size"] == 4
    assert source.architecture == "OddForCausalLM"
