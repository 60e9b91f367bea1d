"""GGUF models used as they are stored, against transformers with the decoded numbers."""

from collections import Counter

import pytest
import stored_kernels
import torch
from model_helpers import Sequence, build_model, reference_ops, run_ranks
from stored_models import HIDDEN, INTERMEDIATE, VOCAB, checkpoint_of, stored_model, true_logits

from cardan.core.weights.loader import load_weights
from cardan.plugins.quantization.gguf import GGUFScheme
from cardan.testing.tiny_models import prompt_ids

# A file as quantisers make them: one format, and others where it matters.
MIXED = {
    "token_embd": "q6_k",
    "attn_q": "q4_k",
    "attn_k": "q4_k",
    "attn_v": "q6_k",
    "attn_output": "q4_k",
    "ffn_gate": "q4_1",
    "ffn_up": "q5_1",
    "ffn_down": "q8_0",
}
# Formats without a kernel, and full precision, beside others with one.
PARTLY = {
    "token_embd": "q3_k",
    "output": "q4_0",
    "attn_q": "q4_0",
    "attn_k": "f16",
    "attn_v": "iq4_nl",
    "attn_output": "q5_0",
    "ffn_gate": "q2_k",
    "ffn_up": "q4_0",
}
TOKENS = [token_id % VOCAB for token_id in prompt_ids(24)]


def load(path, scheme, ops=None, **changes):
    checkpoint = checkpoint_of(path)
    ops = ops or stored_kernels.stored_ops()
    model = build_model(checkpoint.config, ops=ops, quantization=scheme, **changes)
    load_weights(model, checkpoint)
    checkpoint.close()
    return model


def logits_of(model):
    sequence = Sequence(model)
    return torch.cat([sequence.extend(TOKENS[:11]), sequence.extend(TOKENS[11:])])


def uses(ops, op):
    """Sizes of the products that providers serve."""
    return Counter(
        (item.attributes["format"], item.attributes["out_features"])
        for item in ops.explain()
        if item.op == op and item.provider != "reference"
    )


@pytest.mark.parametrize(
    ("formats", "tied"), [(MIXED, True), (MIXED, False), (PARTLY, True), (PARTLY, False)]
)
def test_logits_equal_those_of_the_decoded_model(formats, tied, tmp_path):
    truth = true_logits(stored_model(tmp_path / "m.gguf", formats, tied), TOKENS)
    got = logits_of(load(tmp_path / "m.gguf", GGUFScheme()))
    torch.testing.assert_close(got, truth, rtol=1e-3, atol=1e-3)
    assert torch.equal(got.argmax(-1), truth.argmax(-1))


def test_blocks_stay_as_they_are_stored(tmp_path):
    stored_model(tmp_path / "m.gguf", MIXED)
    scheme, ops = GGUFScheme(), stored_kernels.stored_ops()
    model = load(tmp_path / "m.gguf", scheme, ops)
    served = uses(ops, "block_linear")
    # Query and key are one product, value is another, and so are gate and up.
    assert {("q4_k", 256 + 128), ("q6_k", 128), ("q4_1", INTERMEDIATE), ("q5_1", INTERMEDIATE)} < {
        *served
    }
    assert ("q6_k", VOCAB) in served
    assert [item.op for item in ops.explain() if item.op == "linear"] == []
    assert model.embed_tokens.method.table is None
    assert scheme.summary() == (
        "matrices as stored or decoded: 6 q4_k, 3 q6_k, 2 q4_1, 2 q5_1, 2 q8_0"
    )


def test_what_has_no_kernel_is_decoded_while_it_loads(tmp_path):
    truth = true_logits(stored_model(tmp_path / "m.gguf", MIXED), TOKENS)
    scheme, ops = GGUFScheme(), reference_ops()
    model = load(tmp_path / "m.gguf", scheme, ops)
    assert {item.provider for item in ops.explain()} == {"reference"}
    assert scheme.summary() == "matrices as stored or decoded: 15 float32"
    torch.testing.assert_close(logits_of(model), truth, rtol=1e-3, atol=1e-3)
    # The tied head and the embedding are one table.
    table = model.embed_tokens.method.table
    [(_, product)] = model.lm_head.method.products
    assert product.__self__.weight.data_ptr() == table.data_ptr()


def test_without_a_scheme_all_is_decoded(tmp_path):
    truth = true_logits(stored_model(tmp_path / "m.gguf", PARTLY), TOKENS)
    model = load(tmp_path / "m.gguf", None)
    torch.testing.assert_close(logits_of(model), truth, rtol=1e-3, atol=1e-3)
    assert model.lm_head.method.weight.data_ptr() == model.embed_tokens.method.table.data_ptr()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_short_dtypes(dtype, tmp_path):
    truth = true_logits(stored_model(tmp_path / "m.gguf", MIXED), TOKENS)
    got = logits_of(
        load(tmp_path / "m.gguf", GGUFScheme(), dtype=getattr(torch, dtype), kv_dtype=dtype)
    )
    assert torch.nn.functional.cosine_similarity(got, truth).min() > 0.998


@pytest.mark.parametrize("formats", [MIXED, PARTLY])
def test_ranks_hold_slices_of_stored_blocks(formats, tmp_path):
    truth = true_logits(stored_model(tmp_path / "m.gguf", formats), TOKENS)
    tables = [stored_kernels.stored_ops() for _ in range(2)]

    def work(communicator):
        ops = tables[communicator.rank]
        model = load(tmp_path / "m.gguf", GGUFScheme(), ops, communicator=communicator)
        return logits_of(model)

    for got in run_ranks(2, work):
        torch.testing.assert_close(got, truth, rtol=1e-3, atol=1e-3)
    if formats is MIXED:
        # 128 of 256 columns cut blocks of 256, 256 of 512 columns do not cut those of 32.
        assert ("q4_k", HIDDEN) not in uses(tables[0], "block_linear")
        assert ("q8_0", HIDDEN) in uses(tables[0], "block_linear")


def test_a_vocabulary_that_ranks_pad(tmp_path):
    truth = true_logits(stored_model(tmp_path / "m.gguf", MIXED, vocab=VOCAB + 1), TOKENS)
    tables = [stored_kernels.stored_ops() for _ in range(2)]

    def work(communicator):
        ops = tables[communicator.rank]
        return logits_of(load(tmp_path / "m.gguf", GGUFScheme(), ops, communicator=communicator))

    for got in run_ranks(2, work):
        torch.testing.assert_close(got, truth, rtol=1e-3, atol=1e-3)
    # The last rank has a row of zeros beside its stored ones.
    served = [uses(ops, "block_linear") for ops in tables]
    assert ("q6_k", VOCAB // 2 + 1) in served[0]
    assert ("q6_k", VOCAB // 2) in served[1]


def test_a_provider_may_serve_the_parts_but_not_the_whole(tmp_path):
    truth = true_logits(stored_model(tmp_path / "m.gguf", MIXED), TOKENS)
    needs = stored_kernels.provider().needs
    narrow = stored_kernels.provider(
        needs=type(needs)(one_of=needs.one_of, at_most={"out_features": 256})
    )
    ops = stored_kernels.stored_ops(narrow)
    got = logits_of(load(tmp_path / "m.gguf", GGUFScheme(), ops))
    torch.testing.assert_close(got, truth, rtol=1e-3, atol=1e-3)
    assert uses(ops, "block_linear")["q4_k", 128] == 1
    assert max(rows for _, rows in uses(ops, "block_linear")) == 256


def test_the_stored_table_is_a_view_of_the_mapped_file(tmp_path):
    stored_model(tmp_path / "m.gguf", MIXED)
    checkpoint = checkpoint_of(tmp_path / "m.gguf")
    name = "model.embed_tokens.weight"
    first, second = checkpoint.stored(name), checkpoint.stored(name)
    assert first.data.data_ptr() == second.data.data_ptr()
    assert (first.format, first.num_rows, first.in_features) == ("q6_k", VOCAB, HIDDEN)
    before = first.data.clone()
    checkpoint.release_pages()
    checkpoint.close()
    checkpoint.release_pages()
    assert torch.equal(first.data, before)


def test_only_matrices_in_known_blocks_are_offered_as_stored(tmp_path):
    stored_model(tmp_path / "m.gguf", PARTLY)
    checkpoint = checkpoint_of(tmp_path / "m.gguf")
    assert checkpoint.stored("model.norm.weight") is None
    assert checkpoint.stored("model.layers.0.self_attn.k_proj.weight") is None
    assert checkpoint.stored("model.layers.0.mlp.gate_proj.weight").format == "q2_k"
