"""Rotary tables and their configs against transformers."""

import pytest
import torch
from transformers import AutoConfig
from transformers.models.gemma3.modeling_gemma3 import Gemma3RotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from cardan.core.interfaces.errors import ConfigError
from cardan.models.gemma3 import Gemma3ForCausalLM
from cardan.models.layers.config_reader import ConfigReader
from cardan.models.layers.rope_config import read_rope
from cardan.models.layers.rotary import cos_sin_cache

MAX_LEN = 9000
CPU = torch.device("cpu")
HEADS = {"hidden_size": 512, "num_attention_heads": 4, "max_position_embeddings": 8192}
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 2048,
}
YARN = {"factor": 4.0, "original_max_position_embeddings": 2048}

# Both generations of keys. Whole config entries besides HEADS.
CONFIGS = {
    "theta": {"rope_theta": 500000.0},
    "none": {},
    "null_scaling": {"rope_theta": 100.0, "rope_scaling": None},
    "linear": {"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 3.0}},
    "llama3": {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
    "llama3_new": {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}},
    "yarn": {"rope_theta": 1e6, "rope_scaling": {"type": "yarn", **YARN}},
    "yarn_new": {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, **YARN}},
    "yarn_exact_ramp": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e5,
            **YARN,
            "truncate": False,
            "beta_fast": 20.0,
            "beta_slow": 2.0,
        }
    },
    "yarn_attention_factor": {
        "rope_theta": 1e4,
        "rope_scaling": {"rope_type": "yarn", **YARN, "attention_factor": 0.8},
    },
    "yarn_mscale": {
        "rope_theta": 1e4,
        "rope_scaling": {"rope_type": "yarn", **YARN, "mscale": 0.7, "mscale_all_dim": 1.2},
    },
    "yarn_no_original": {
        "rope_theta": 1e4,
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0},
    },
}


def reference(module, *layer_type):
    """Table in our form from a rotary module of transformers."""
    positions = torch.arange(MAX_LEN)[None]
    cos, sin = module(torch.zeros(1), positions, *layer_type)
    half = cos.shape[-1] // 2
    return torch.cat([cos[0, :, :half], sin[0, :, :half]], dim=-1)


@pytest.mark.parametrize("name", CONFIGS)
def test_tables_of_llama(name):
    entries = CONFIGS[name]
    # transformers changes the objects that it is given.
    theirs = LlamaRotaryEmbedding(AutoConfig.for_model("llama", **HEADS, **_copied(entries)))
    rope = read_rope(ConfigReader({**HEADS, **entries}), 128, "full_attention")
    table = cos_sin_cache(rope, MAX_LEN, CPU)
    assert table.dtype == torch.float32
    assert table.shape == (MAX_LEN, 128)
    # An ulp of a frequency times the largest position.
    torch.testing.assert_close(table, reference(theirs), atol=2e-3, rtol=0)
    torch.testing.assert_close(table[:512], reference(theirs)[:512], atol=1e-4, rtol=0)


def _copied(entries):
    return {
        key: dict(value) if isinstance(value, dict) else value for key, value in entries.items()
    }


GEMMA3 = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "sliding_window": 8,
    "sliding_window_pattern": 2,
}


@pytest.mark.parametrize(
    "entries",
    [
        {},
        {
            "rope_theta": 5e5,
            "rope_local_base_freq": 300.0,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        },
        {
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e5},
                "sliding_attention": {"rope_type": "default", "rope_theta": 70.0},
            }
        },
    ],
    ids=["defaults", "older", "newer"],
)
def test_local_and_global_tables_of_gemma3(entries):
    config = AutoConfig.for_model("gemma3_text", **GEMMA3, **_copied(entries))
    theirs = Gemma3RotaryEmbedding(config)
    layers = Gemma3ForCausalLM.read_config(ConfigReader({**GEMMA3, **entries})).layers
    assert [layer.window for layer in layers] == [8, None]
    for layer, kind in zip(layers, ("sliding_attention", "full_attention"), strict=True):
        table = cos_sin_cache(layer.rope, MAX_LEN, CPU)
        torch.testing.assert_close(table, reference(theirs, kind), atol=1e-3, rtol=0)


def test_tables_by_layer_type():
    nested = {
        "full_attention": {"rope_theta": 7.0},
        "sliding_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 9.0},
    }
    config = ConfigReader({**HEADS, "rope_parameters": nested})
    assert read_rope(config, 8, "full_attention").theta == 7.0
    local = read_rope(config, 8, "sliding_attention")
    assert local.theta == 9.0
    assert local.scaling is not None
    assert local.scaling.factor == 2.0


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"rope_theta": -1}, r"'rope_theta' is -1: must be positive"),
        ({"rope_theta": "x"}, r"'rope_theta' is 'x': must be a number"),
        ({"rope_scaling": 3}, r"'rope_scaling' is 3: must be an object"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, r"'rope_scaling.type' is 'dynamic'"),
        (
            {"rope_scaling": {"rope_type": "longrope"}},
            r"known are default, linear, llama3 and yarn",
        ),
        ({"rope_scaling": {"type": "linear"}}, r"'rope_scaling.factor' is missing"),
        (
            {"rope_parameters": {"rope_type": "llama3", "factor": 2.0}},
            r"'rope_parameters.low_freq_factor' is missing",
        ),
        (
            {"rope_scaling": {"type": "llama3", **LLAMA3, "high_freq_factor": 1.0}},
            r"'rope_scaling.high_freq_factor' is 1.0: must exceed low_freq_factor",
        ),
        ({"partial_rotary_factor": 0.5}, r"'partial_rotary_factor' is 0.5"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, r"rotates whole heads"),
        (
            {"rope_parameters": {"sliding_attention": {"rope_theta": 1.0}}},
            r"'rope_parameters.full_attention' is None: has no parameters",
        ),
    ],
)
def test_bad_rope_is_refused(entries, message):
    with pytest.raises(ConfigError, match=message):
        read_rope(ConfigReader({**HEADS, **entries}), 128, "full_attention")
