"""Weights quantised while they load, in tiny models of transformers."""

import gguf
import numpy as np
import pytest
import stored_kernels
import torch
from model_helpers import Sequence, build_model, load_model, reference_ops, run_ranks
from stored_models import checkpoint_of, stored_model, true_logits
from transformers import AutoModelForCausalLM

from cardan.bootstrap.model_source import read_model
from cardan.bootstrap.quantization import choose_scheme
from cardan.core.config.model import ModelConfig
from cardan.core.discovery import QUANTIZATION, Discovery
from cardan.core.interfaces.errors import ConfigError
from cardan.core.weights.dummy_checkpoint import DummyCheckpoint
from cardan.core.weights.loader import load_weights
from cardan.plugins.quantization.gguf import GGUFScheme
from cardan.plugins.quantization.online import Int8Scheme, Q4Scheme, Q8Scheme
from cardan.plugins.quantization.quantizers import quantize_q4_1, quantize_q8_0
from cardan.testing.tiny_models import make_tiny_model, prompt_ids

TOKENS = prompt_ids(24)
PROVIDERS = [stored_kernels.provider(op) for op in ("block_linear", "int8_linear")]
SCHEMES = {scheme.name: scheme for scheme in (Q8Scheme, Q4Scheme, Int8Scheme)}


def ops():
    return stored_kernels.stored_ops(*PROVIDERS)


def logits_of(model):
    return Sequence(model).extend(TOKENS)


def rounded(format, weight):
    """A weight as the scheme keeps it, decoded by the ``gguf`` package."""
    kind = gguf.GGMLQuantizationType[format.upper()]
    quantize = {"q8_0": quantize_q8_0, "q4_1": quantize_q4_1}[format]
    data = quantize(weight.detach()).numpy()
    if format == "q8_0":
        assert np.array_equal(data, gguf.quants.quantize(weight.detach().numpy(), kind))
    return torch.from_numpy(gguf.quants.dequantize(data, kind))


@pytest.mark.parametrize(("scheme", "format"), [(Q8Scheme, "q8_0"), (Q4Scheme, "q4_1")])
@pytest.mark.parametrize("case", ["llama", "llama_tied_biased", "qwen3"])
def test_blocks_equal_the_model_with_rounded_weights(case, scheme, format, tmp_path):
    truth = make_tiny_model(case, tmp_path)
    # Tied or not, the head has a weight of its own now.
    truth.lm_head.weight = torch.nn.Parameter(truth.lm_head.weight.detach().clone())
    with torch.no_grad():
        for name, module in truth.named_modules():
            if isinstance(module, torch.nn.Linear):
                own = "q8_0" if name == "lm_head" else format
                module.weight.copy_(rounded(own, module.weight))
    expected = true_logits(truth, TOKENS)
    got = logits_of(load_model(tmp_path, ops=ops(), quantization=scheme()))
    torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(("name", "least"), [("q8", 0.999), ("q4", 0.9), ("int8", 0.998)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_logits_stay_near(name, least, dtype, tmp_path):
    truth = true_logits(make_tiny_model("llama", tmp_path), TOKENS)
    model = load_model(
        tmp_path,
        ops=ops(),
        quantization=SCHEMES[name](),
        dtype=getattr(torch, dtype),
        kv_dtype=dtype,
    )
    similarity = torch.nn.functional.cosine_similarity(logits_of(model), truth)
    assert similarity.mean() > (least if dtype == "float32" else least - 0.01)


@pytest.mark.parametrize(
    ("name", "summary"),
    [
        ("q8", "layers quantised: 13 in q8_0"),
        ("q4", "layers quantised: 12 in q4_1, 1 in q8_0"),
        ("int8", "layers quantised: 13 in int8"),
    ],
)
def test_what_is_quantised_is_told(name, summary, tmp_path, caplog):
    make_tiny_model("llama", tmp_path)
    scheme, table = SCHEMES[name](), ops()
    model = load_model(tmp_path, ops=table, quantization=scheme)
    assert scheme.summary() == summary
    assert not caplog.messages
    served = {(item.op, item.provider) for item in table.explain() if "linear" in item.op}
    assert served == {("int8_linear" if name == "int8" else "block_linear", "test.stored")}
    # The embedding is looked up in full precision.
    assert model.embed_tokens.method.table.dtype == torch.float32


@pytest.mark.parametrize("name", SCHEMES)
def test_without_kernels_weights_are_rounded_and_kept(name, tmp_path, caplog):
    make_tiny_model("llama", tmp_path)
    expected = logits_of(load_model(tmp_path, ops=ops(), quantization=SCHEMES[name]()))
    table = reference_ops()
    rounded = logits_of(load_model(tmp_path, ops=table, quantization=SCHEMES[name]()))
    if name == "int8":
        # Activations are not rounded.
        assert torch.nn.functional.cosine_similarity(rounded, expected).mean() > 0.998
    else:
        torch.testing.assert_close(rounded, expected, rtol=1e-3, atol=1e-3)
    assert f"quantization {name}: no kernel here computes on" in caplog.messages[0]
    assert len(caplog.messages) == (2 if name == "q4" else 1)


def test_widths_that_do_not_fit_stay_dense(tmp_path):
    # Heads of 24 make an output projection of 96 inputs; 3 layers of them fit, 80 do not.
    make_tiny_model("llama", tmp_path)
    config = {**checkpoint_config(tmp_path), "intermediate_size": 80}
    scheme = Q4Scheme()
    model = build_model(config, ops=ops(), quantization=scheme)
    load_dummy(model, config)
    assert scheme.summary() == (
        "layers quantised: 9 in q4_1, 1 in q8_0; 3 stay in full precision, because their "
        "in_features (80) are not a multiple of 32"
    )
    assert logits_of(model).isfinite().all()


@pytest.mark.parametrize("name", SCHEMES)
def test_dummy_weights(name, tmp_path):
    make_tiny_model("llama_tied_biased", tmp_path)
    config = checkpoint_config(tmp_path)
    scheme = SCHEMES[name]()
    model = build_model(config, ops=ops(), quantization=scheme)
    load_dummy(model, config)
    assert logits_of(model).isfinite().all()


@pytest.mark.parametrize("name", SCHEMES)
def test_ranks_quantise_their_own_slices(name, tmp_path):
    truth = true_logits(make_tiny_model("llama_tied_biased", tmp_path), TOKENS)

    def work(communicator):
        scheme = SCHEMES[name]()
        model = load_model(tmp_path, ops=ops(), quantization=scheme, communicator=communicator)
        return logits_of(model)

    first, second = run_ranks(2, work)
    assert torch.equal(first, second)
    assert torch.nn.functional.cosine_similarity(first, truth).mean() > 0.95


def test_blocks_of_the_right_format_are_taken_as_they_are(tmp_path):
    formats = dict.fromkeys(("token_embd", "attn_q", "attn_k", "attn_v", "ffn_up"), "q8_0")
    formats |= {"ffn_gate": "q4_k"}
    truth = true_logits(stored_model(tmp_path / "m.gguf", formats), [5, 9, 11])
    checkpoint = checkpoint_of(tmp_path / "m.gguf")
    read = []
    tensor = checkpoint.tensor
    checkpoint.tensor = lambda name: (read.append(name), tensor(name))[1]
    model = build_model(checkpoint.config, ops=ops(), quantization=Q8Scheme())
    load_weights(model, checkpoint)
    got = Sequence(model).extend([5, 9, 11])
    assert torch.nn.functional.cosine_similarity(got, truth).min() > 0.999
    assert not any("up_proj" in name or "q_proj" in name for name in read)
    assert any("gate_proj" in name for name in read)


@pytest.mark.parametrize("has_kernel", [True, False])
def test_a_stored_table_is_looked_up_as_it_is(has_kernel, tmp_path):
    stored_model(tmp_path / "m.gguf", {"token_embd": "q8_0"})
    checkpoint = checkpoint_of(tmp_path / "m.gguf")
    lookup = [stored_kernels.provider("block_embedding")] if has_kernel else []
    table = stored_kernels.stored_ops(*PROVIDERS, *lookup)
    model = build_model(checkpoint.config, ops=table, quantization=Q4Scheme())
    load_weights(model, checkpoint)
    assert (model.embed_tokens.method.table is None) == has_kernel
    ids = torch.tensor([3, 90])
    expected = checkpoint.tensor("model.embed_tokens.weight")[ids]
    assert torch.equal(model.embed_tokens(ids), expected)


def checkpoint_config(directory):
    return read_model(ModelConfig(model=str(directory))).config


def load_dummy(model, config):
    shapes = {slot.name: slot.shape for slot in model.weight_slots()}
    load_weights(model, DummyCheckpoint(config, shapes, seed=1))


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    made = tmp_path_factory.mktemp("llama")
    make_tiny_model("llama", made)
    return made


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory):
    made = tmp_path_factory.mktemp("gguf") / "m.gguf"
    stored_model(made, {"token_embd": "q8_0"})
    return made


def chosen(path, **changes):
    config = ModelConfig(model=str(path), **changes)
    return choose_scheme(config, read_model(config), Discovery())


@pytest.mark.parametrize(
    ("changes", "scheme"),
    [
        ({}, None),
        ({"quantization": "none"}, None),
        ({"quantization": "q8"}, Q8Scheme),
        ({"quantization": "q4", "load_format": "dummy"}, Q4Scheme),
        ({"quantization": "int8"}, Int8Scheme),
    ],
)
def test_the_scheme_of_a_directory(changes, scheme, directory):
    found = chosen(directory, **changes)
    assert type(found) is (scheme or type(None))


@pytest.mark.parametrize(
    ("changes", "scheme"),
    [
        ({}, GGUFScheme),
        ({"quantization": "gguf"}, GGUFScheme),
        ({"quantization": "none"}, None),
        ({"quantization": "q4"}, Q4Scheme),
        ({"load_format": "dummy"}, None),
    ],
)
def test_the_scheme_of_a_gguf_file(changes, scheme, gguf_file):
    found = chosen(gguf_file, **changes)
    assert type(found) is (scheme or type(None))


def test_schemes_that_cannot_be(directory, gguf_file):
    message = r"no scheme named 'q5' \(installed: gguf, int8, q4, q8, none\)"
    with pytest.raises(ConfigError, match=message):
        chosen(directory, quantization="q5")
    message = "keeps the blocks of a GGUF file.*choose one of int8, q4, q8, or give a .gguf file"
    with pytest.raises(ConfigError, match=message):
        chosen(directory, quantization="gguf")
    with pytest.raises(ConfigError, match="keeps the blocks of a GGUF file"):
        chosen(gguf_file, quantization="gguf", load_format="dummy")
    quantized = {"quantization_config": {"quant_method": "gptq"}}
    with pytest.raises(ConfigError, match=r"its quantization_config \(gptq\) is of no installed"):
        chosen(directory, hf_overrides=quantized)
    assert chosen(directory, hf_overrides=quantized, quantization="none") is None


def test_installed_schemes():
    assert Discovery().names(QUANTIZATION) == ("gguf", "int8", "q4", "q8")
    for name in ("int8", "q4", "q8"):
        assert Discovery().load(QUANTIZATION, name) is SCHEMES[name]


def test_transformers_model_is_unharmed(directory):
    """Weights that are views of the mapped file are never written to."""
    before = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    model = load_model(directory)
    logits_of(model)
    model = load_model(directory, dtype=torch.bfloat16, kv_dtype="bfloat16")
    logits_of(model)
    after = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    for name, value in before.state_dict().items():
        assert torch.equal(value, after.state_dict()[name])
