"""Tensor parallelism: ranks together compute what one rank computes alone."""

import pytest
import torch
from model_helpers import Sequence, build_model, load_model, run_ranks

from cardan.core.interfaces.errors import ConfigError
from cardan.models.layers.sharding import Span, kv_head_span, vocab_span
from cardan.testing.tiny_models import VOCAB_SIZE, make_tiny_model, prompt_ids

# Biases after sums, replicated kv heads (4 ranks, 2 or 1 of them), head norms, tied and untied.
PARALLEL = [
    "llama_tied_biased",
    "llama_yarn",
    "qwen2_windows",
    "qwen3_windows",
    "qwen3_moe",
    "gemma2",
    "gemma3",
]


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("name", PARALLEL)
def test_ranks_agree_with_one(name, world_size, tmp_path):
    make_tiny_model(name, tmp_path)
    token_ids = prompt_ids(24)
    alone = load_model(tmp_path)
    expected = Sequence(alone).extend(token_ids)

    def work(communicator):
        model = load_model(tmp_path, communicator=communicator)
        sequence = Sequence(model)
        logits = torch.cat([sequence.extend(token_ids[:20]), sequence.extend(token_ids[20:])])
        return logits, model.kv_specs()[0], model.attention_needs()[0], num_elements(model)

    results = run_ranks(world_size, work)
    num_kv_heads = alone.kv_specs()[0].num_kv_heads
    for logits, spec, need, _ in results:
        torch.testing.assert_close(logits, expected, atol=2e-4, rtol=0)
        assert spec.num_kv_heads == need.num_kv_heads == max(num_kv_heads // world_size, 1)
        assert need.num_heads == 4 // world_size
    # Weights are shared out, not copied.
    assert max(result[3] for result in results) < num_elements(alone) * (0.5 + 0.5 / world_size)
    # The embedding of an uneven vocabulary takes equally many rows on all ranks.
    assert len({result[3] for result in results}) == 1
    assert VOCAB_SIZE % world_size


def num_elements(model):
    """Of all weights; a table that embedding and head share counts once."""
    methods = [module.method for module in model.modules() if hasattr(module, "method")]
    weights = [getattr(method, "weight", None) for method in methods]
    tables = [getattr(method, "table", None) for method in methods]
    found = [tensor for tensor in (*weights, *tables, *model.parameters()) if tensor is not None]
    return sum({tensor.data_ptr(): tensor.numel() for tensor in found}.values())


@pytest.mark.parametrize(("num_kv_heads", "world_size"), [(8, 2), (2, 8), (1, 4), (4, 4), (2, 1)])
def test_kv_heads_follow_their_queries(num_kv_heads, world_size):
    num_heads = 16
    for rank in range(world_size):
        span = kv_head_span(num_kv_heads, rank, world_size)
        first = rank * (num_heads // world_size)
        queries = range(first, first + num_heads // world_size)
        wanted = {query // (num_heads // num_kv_heads) for query in queries}
        assert set(range(span.start, span.stop)) == wanted


def test_vocabulary_smaller_than_the_padding():
    spans = [vocab_span(5, rank, 4) for rank in range(4)]
    assert spans == [(Span(0, 2), 2), (Span(2, 2), 2), (Span(4, 1), 2), (Span(5, 0), 2)]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_attention_heads": 3, "num_key_value_heads": 3}, r"num_attention_heads \(3\)"),
        ({"intermediate_size": 97}, r"intermediate_size \(97\); use a divisor of 97"),
        (
            {"num_attention_heads": 12, "num_key_value_heads": 3, "head_dim": 16},
            r"num_key_value_heads \(3\); use a multiple or a divisor of 3",
        ),
    ],
)
def test_uneven_shares_are_refused(changes, message):
    config = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 8,
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "max_position_embeddings": 8,
        **changes,
    }
    size = 4 if "head_dim" in changes else 2
    with pytest.raises(ConfigError, match=f"tensor_parallel_size is {size}.*{message}"):
        run_ranks(size, lambda communicator: build_model(config, communicator=communicator))
