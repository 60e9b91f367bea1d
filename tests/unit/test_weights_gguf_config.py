"""RoPE scaling, windows and token ids of GGUF files in a config's terms."""

import numpy as np
import pytest
import torch
from weights_helpers import (
    ARRAY,
    BOOL,
    F32,
    STRING,
    U32,
    llama_checkpoint,
    model_bytes,
    model_metadata,
)

from cardan.core.interfaces.errors import WeightsError
from cardan.core.weights.gguf_rope import llama3_scaling_from_factors


def test_linear_and_yarn_scaling(tmp_path):
    linear = llama_checkpoint(
        tmp_path, rope__scaling__type=(STRING, "linear"), rope__scaling__factor=(F32, 4)
    )
    assert linear.config["rope_scaling"] == {"rope_type": "linear", "factor": 4.0}
    old = llama_checkpoint(tmp_path, rope__scale_linear=(F32, 2.0))
    assert old.config["rope_scaling"] == {"rope_type": "linear", "factor": 2.0}
    yarn = llama_checkpoint(
        tmp_path,
        rope__scaling__type=(STRING, "yarn"),
        rope__scaling__factor=(F32, 4.0),
        rope__scaling__original_context_length=(U32, 128),
        rope__scaling__yarn_beta_fast=(F32, 16.0),
        rope__scaling__attn_factor=(F32, 2.0),
    )
    assert yarn.config["rope_scaling"] == {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 128,
        "beta_fast": 16.0,
        "attention_factor": pytest.approx(2 * (0.1 * np.log(4) + 1)),
    }


@pytest.mark.parametrize("factor", [8.0, 32.0])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_llama3_scaling_is_recovered_from_the_factors(tmp_path, factor, head_dim):
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaling = {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    config = LlamaConfig(
        hidden_size=head_dim * 4,
        num_attention_heads=4,
        max_position_embeddings=131072,
        rope_parameters=scaling | {"rope_theta": 500000.0},
    )
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    plain = 500000.0 ** (-torch.arange(0, head_dim, 2).double() / head_dim)
    factors = (plain / scaled.double()).float().numpy()
    assert llama3_scaling_from_factors(factors, 500000.0) == scaling
    checkpoint = llama_checkpoint(
        tmp_path, {"rope_freqs.weight": factors}, attention__key_length=(U32, head_dim)
    )
    assert checkpoint.config["rope_scaling"] == scaling
    assert "rope_freqs.weight" not in checkpoint.names()
    assert np.array_equal(checkpoint.tensor("rope_freqs.weight").numpy(), factors)


def test_other_rope_factors(tmp_path):
    ones = llama_checkpoint(tmp_path, {"rope_freqs.weight": np.ones(4)})
    assert ones.config["rope_scaling"] is None
    with pytest.raises(WeightsError, match="half the head dimension is 4"):
        llama_checkpoint(tmp_path, {"rope_freqs.weight": np.ones(5)})
    for bad in ([1, 1, 2, 2], [0, 1, 2, 3], [1, 3, 2, 8], [1, np.nan, 2, 8], [4, 3, 2, 1]):
        with pytest.raises(WeightsError, match=r"rope_freqs\.weight"):
            llama_checkpoint(tmp_path, {"rope_freqs.weight": np.array(bad)})


def test_mistral_window_and_token_ids(tmp_path):
    extra = [
        ("tokenizer.ggml.tokens", ARRAY, (STRING, ["a", "b", "<|eot_id|>", "c"])),
        ("tokenizer.ggml.bos_token_id", U32, 0),
        ("tokenizer.ggml.eos_token_id", U32, 1),
    ]
    checkpoint = llama_checkpoint(tmp_path, extra=extra, attention__sliding_window=(U32, 256))
    config = checkpoint.config
    assert (config["model_type"], config["sliding_window"]) == ("mistral", 256)
    assert config["architectures"] == ["MistralForCausalLM"]
    assert (config["bos_token_id"], config["eos_token_id"], config["pad_token_id"]) == (0, 1, None)
    assert config["generation_config"] == {"bos_token_id": 0, "eos_token_id": [1, 2]}
    extra.append(("tokenizer.ggml.eot_token_id", U32, 3))
    assert llama_checkpoint(tmp_path, extra=extra).config["generation_config"]["eos_token_id"] == [
        1,
        3,
    ]


def test_gemma3_layer_pattern(tmp_path):
    from cardan.core.weights.gguf_config import hf_config_from_gguf
    from cardan.core.weights.gguf_file import GGUFFile

    def layer_types(**changes):
        path = tmp_path / "m.gguf"
        metadata = model_metadata("gemma3", attention__sliding_window=(U32, 8), **changes)
        path.write_bytes(model_bytes(metadata, {"blk.1.attn_norm.weight": np.zeros(32)}))
        with GGUFFile(path) as file:
            return [kind[:4] for kind in hf_config_from_gguf(file)["layer_types"]]

    vocab = {"vocab_size": (U32, 96)}
    key = "attention__sliding_window_pattern"
    assert layer_types(**vocab) == ["slid", "slid"]
    assert layer_types(**vocab, **{key: (U32, 2)}) == ["slid", "full"]
    assert layer_types(**vocab, **{key: (ARRAY, (BOOL, [False, True]))}) == ["full", "slid"]
    with pytest.raises(WeightsError, match="has 1 flags for 2 layers"):
        layer_types(**vocab, **{key: (ARRAY, (BOOL, [True]))})
    with pytest.raises(WeightsError, match=r"vocab_size': is missing"):
        layer_types()
