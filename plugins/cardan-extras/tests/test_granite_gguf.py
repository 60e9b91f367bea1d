"""A GGUF file of Granite, written by llama.cpp's own package, against its safetensors original."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from safetensors.torch import load_file
from test_extras import GRANITE, PROMPT, SETTINGS, SIZES, greedy, make_model, params

from cardan.core.interfaces.errors import CardanError
from cardan.llm import LLM

ARCH = gguf.MODEL_ARCH.GRANITE
NAMES = gguf.get_tensor_name_map(ARCH, SIZES["num_hidden_layers"])
Change = Callable[[gguf.GGUFWriter, dict[str, np.ndarray]], object]


def interleaved(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """As the converter's LlamaModel permutes queries and keys."""
    halves = rows.reshape(num_heads, 2, rows.shape[0] // num_heads // 2, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)


def write(folder: Path, config: dict[str, Any], change: Change | None = None) -> Path:
    """The safetensors checkpoint of ``folder`` as a GGUF file in float32."""
    path = folder / "granite.gguf"
    writer = gguf.GGUFWriter(path, "granite")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(config["vocab_size"])
    if "head_dim" in config:
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
    writer.add_embedding_scale(config["embedding_multiplier"])
    writer.add_residual_scale(config["residual_multiplier"])
    writer.add_logit_scale(config["logits_scaling"])
    writer.add_attention_scale(config["attention_multiplier"])
    tensors = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        values = tensor.numpy()
        for key, heads in (("q_proj", "num_attention_heads"), ("k_proj", "num_key_value_heads")):
            if key in name:
                values = interleaved(values, config[heads])
        tensors[NAMES.get_name(name, (".weight", ".bias"))] = values
    if change is not None:
        change(writer, tensors)
    for name, values in tensors.items():
        writer.add_tensor(name, np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def answer(llm: LLM) -> tuple[list[int], list[list[float]]]:
    """Ids, and the log-probabilities of the likeliest tokens at each place."""
    settings = params(logprobs=5)
    output = llm.generate([PROMPT], settings, use_tqdm=False)[0].outputs[0]
    assert output.logprobs is not None
    tables = [sorted(item.logprob for item in table.values()) for table in output.logprobs]
    return output.token_ids, tables


@pytest.mark.parametrize(
    "changes",
    [{"tie_word_embeddings": True}, {"attention_bias": True, "mlp_bias": True, "head_dim": 24}],
    ids=["tied", "biased"],
)
def test_the_file_is_its_original(tmp_path: Path, changes: dict[str, Any]) -> None:
    theirs = make_model(tmp_path, "granite", **GRANITE, **changes)
    path = write(tmp_path, {**SIZES, **GRANITE, **changes})
    with LLM(str(tmp_path), **SETTINGS) as llm:
        expected = answer(llm)
    assert expected[0] == greedy(theirs)
    with LLM(str(path), tokenizer=str(tmp_path), kv_cache_dtype="float32", **SETTINGS) as llm:
        assert llm.info.architecture == "GraniteForCausalLM"
        ids, tables = answer(llm)
    assert ids == expected[0]
    # Settings of a file are float32.
    np.testing.assert_allclose(tables, expected[1], atol=2e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda writer, tensors: writer.add_float32("granite.residual_scale", 0.0), "is 0.0"),
        (
            lambda writer, tensors: tensors.update({"blk.0.attn_sinks.weight": np.ones(4, "f4")}),
            "'blk.0.attn_sinks.weight' have no place in a 'granite' model",
        ),
        (
            lambda writer, tensors: tensors.pop("blk.1.attn_q.weight"),
            "1 missing tensors: model.layers.1.self_attn.q_proj.weight",
        ),
    ],
    ids=["setting", "unknown", "missing"],
)
def test_files_that_do_not_fit(tmp_path: Path, change: Change, message: str) -> None:
    make_model(tmp_path, "granite", **GRANITE)
    path = write(tmp_path, {**SIZES, **GRANITE}, change)
    with pytest.raises(CardanError, match=message):
        LLM(str(path), tokenizer=str(tmp_path), **SETTINGS)


def test_planning_reads_it_without_torch(tmp_path: Path) -> None:
    make_model(tmp_path, "granite", **GRANITE)
    path = write(tmp_path, {**SIZES, **GRANITE})
    code = (
        "import sys\n"
        "from cardan.bootstrap.model_source import gguf_plugin, read_model\n"
        "from cardan.core.config.model import ModelConfig\n"
        "from cardan.core.weights.tensor_table import stored_tensors\n"
        f"source = read_model(ModelConfig(model={str(path)!r}))\n"
        "print(source.architecture, len(stored_tensors(source.files, gguf_plugin)))\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    num_tensors = 3 + 9 * SIZES["num_hidden_layers"]
    assert done.stdout.split() == ["GraniteForCausalLM", str(num_tensors)]


def test_the_original_has_no_name_that_is_lost() -> None:
    """Of llama.cpp's own tensors of the architecture."""
    from cardan_extras.granite_gguf import GraniteGGUF

    known = {gguf.TENSOR_NAMES[tensor] for tensor in gguf.MODEL_TENSORS[ARCH]}
    blocks = {name.removeprefix("blk.{bid}.") for name in known if name.startswith("blk.")}
    assert set(GraniteGGUF.layer_tensors) == blocks
