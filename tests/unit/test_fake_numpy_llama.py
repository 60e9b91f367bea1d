"""The NumPy step model against transformers."""

from functools import cache

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from cardan.core.interfaces.errors import ConfigError, UnsupportedError, WeightsError
from cardan.testing.fake.numpy_llama import LlamaSizes, NumpyLlama, RowSpan

VOCAB_SIZE = 131
BLOCK_SIZE = 4
SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "rms_norm_eps": 1e-5,
}
VARIANTS = {
    "gqa": {},
    "tied": {"tie_word_embeddings": True, "num_key_value_heads": 4},
    "mqa_wide_heads": {
        "num_key_value_heads": 1,
        "head_dim": 12,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
    },
}


@cache
def models(variant: str) -> tuple[LlamaForCausalLM, NumpyLlama]:
    config = LlamaConfig(**{**SIZES, **VARIANTS[variant]}, attn_implementation="eager")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(len(variant))
        truth = LlamaForCausalLM(config).float().eval()
        with torch.no_grad():
            for parameter in truth.parameters():
                if parameter.ndim == 1:
                    parameter += 0.2 * torch.randn_like(parameter)
    weights = {name: tensor.detach().numpy() for name, tensor in truth.state_dict().items()}
    values = {**config.to_dict(), "architectures": ["LlamaForCausalLM"]}
    return truth, NumpyLlama(values, weights.__getitem__)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    wide = logits.astype(np.float64)
    wide -= wide.max(axis=-1, keepdims=True)
    return wide - np.log(np.exp(wide).sum(axis=-1, keepdims=True))


def true_logprobs(model: LlamaForCausalLM, token_ids: np.ndarray) -> np.ndarray:
    with torch.inference_mode():
        logits = model(torch.from_numpy(token_ids)[None]).logits[0]
    return log_softmax(logits.numpy())


class Paged:
    """Runs sequences over permuted blocks of a cache that starts as garbage."""

    def __init__(self, model: NumpyLlama, num_rows: int, seed: int) -> None:
        self.model = model
        blocks_per_row = 8
        ids = np.random.default_rng(seed).permutation(num_rows * blocks_per_row) + 1
        self.blocks = ids.reshape(num_rows, blocks_per_row).astype(np.int32)
        self.cache = model.make_cache(num_rows * blocks_per_row + 1, BLOCK_SIZE)
        self.cache[:] = np.nan
        self.computed = [0] * num_rows

    def step(self, parts: dict[int, np.ndarray], padding: int = 0) -> dict[int, np.ndarray]:
        """Log-probabilities after every token of ``parts``; ``padding`` tokens follow the rows."""
        spans, positions, slots, start = [], [], [], 0
        for row, ids in parts.items():
            at = np.arange(self.computed[row], self.computed[row] + len(ids))
            self.computed[row] += len(ids)
            positions.append(at)
            slots.append(self.blocks[row][at // BLOCK_SIZE] * BLOCK_SIZE + at % BLOCK_SIZE)
            spans.append(RowSpan(start, start + len(ids), self.blocks[row], self.computed[row]))
            start += len(ids)
        logits = self.model.forward(
            np.concatenate([*parts.values(), np.zeros(padding, dtype=np.int64)]),
            np.concatenate([*positions, np.zeros(padding, dtype=np.int64)]),
            np.concatenate([*slots, np.full(padding, -1)]),
            spans,
            self.cache,
            np.arange(start),
        )
        assert logits.dtype == np.float32
        assert logits.shape == (start, VOCAB_SIZE)
        logprobs = log_softmax(logits)
        return {
            row: logprobs[span.start : span.end] for row, span in zip(parts, spans, strict=True)
        }


@pytest.mark.parametrize("variant", VARIANTS)
def test_whole_chunked_and_batched_prompts_match_transformers(variant):
    truth, model = models(variant)
    generator = np.random.default_rng(1)
    prompts = [generator.integers(0, VOCAB_SIZE, length) for length in (29, 1, 16)]
    wanted = [true_logprobs(truth, ids) for ids in prompts]

    whole = Paged(model, 3, seed=2).step(dict(enumerate(prompts)))
    for row, expected in enumerate(wanted):
        np.testing.assert_allclose(whole[row], expected, atol=1e-4, rtol=0)

    paged = Paged(model, 3, seed=3)
    first = paged.step({0: prompts[0][:7], 2: prompts[2][:4]}, padding=3)
    second = paged.step({2: prompts[2][4:5], 1: prompts[1], 0: prompts[0][7:]})
    third = paged.step({2: prompts[2][5:]}, padding=1)
    chunked = [
        np.concatenate([first[0], second[0]]),
        second[1],
        np.concatenate([first[2], second[2], third[2]]),
    ]
    for found, expected in zip(chunked, wanted, strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-4, rtol=0)


def test_greedy_decoding_matches_transformers():
    truth, model = models("gqa")
    prompt = np.random.default_rng(4).integers(0, VOCAB_SIZE, 9)
    paged = Paged(model, 1, seed=5)
    tokens = list(prompt)
    last = paged.step({0: prompt})[0][-1]
    for _ in range(12):
        tokens.append(int(last.argmax()))
        last = paged.step({0: np.array(tokens[-1:])})[0][-1]
    logprobs = true_logprobs(truth, np.array(tokens))
    assert tokens[len(prompt) :] == logprobs[len(prompt) - 1 : -1].argmax(-1).tolist()


def test_only_chosen_tokens_have_logits():
    _, model = models("tied")
    ids = np.arange(6)
    cache = model.make_cache(3, BLOCK_SIZE)
    arguments = (ids, np.arange(6), 4 + np.arange(6), [(0, 6, np.array([1, 2]), 6)], cache)
    every = model.forward(*arguments, np.arange(6))
    np.testing.assert_allclose(
        model.forward(*arguments, np.array([5, 2])), every[[5, 2]], atol=1e-5
    )
    assert model.forward(*arguments, np.array([], dtype=np.int64)).shape == (0, VOCAB_SIZE)


@pytest.mark.parametrize("variant", VARIANTS)
def test_names_shapes_and_bytes(variant):
    truth, model = models(variant)
    state = truth.state_dict()
    if truth.config.tie_word_embeddings:
        del state["lm_head.weight"]
    shapes = model.weight_shapes(truth.config.to_dict())
    assert shapes == {name: tuple(tensor.shape) for name, tensor in state.items()}
    assert model.weight_bytes == sum(4 * tensor.numel() for tensor in state.values())
    assert model.kv_bytes(7, 16) == model.make_cache(7, 16).nbytes


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["Qwen2ForCausalLM"]}, "is a Llama, not Qwen2ForCausalLM"),
        ({"attention_bias": True}, "no biases, but 'attention_bias'"),
        ({"mlp_bias": True}, "no biases, but 'mlp_bias'"),
        ({"hidden_act": "gelu"}, "'hidden_act' is gelu"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope is linear"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope is yarn"),
        ({"partial_rotary_factor": 0.5}, "whole heads"),
    ],
)
def test_more_than_a_plain_llama_is_refused(change, message):
    with pytest.raises(UnsupportedError, match=message):
        LlamaSizes.read({**SIZES, **change})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vocab_size": None}, "'vocab_size' is None"),
        ({"num_attention_heads": 0}, "'num_attention_heads' is 0"),
        ({"num_key_value_heads": 3}, "num_key_value_heads is 3"),
        ({"head_dim": 7}, "even"),
        ({"rope_theta": float("nan")}, "'rope_theta' is nan"),
        ({"rms_norm_eps": -1}, "'rms_norm_eps' is -1"),
    ],
)
def test_impossible_numbers_are_refused(change, message):
    with pytest.raises(ConfigError, match=message):
        LlamaSizes.read({**SIZES, **change})


def test_a_weight_of_another_shape_is_refused():
    shapes = NumpyLlama.weight_shapes(SIZES)
    with pytest.raises(WeightsError, match=r"model.embed_tokens.weight: has shape \[1, 32\]"):
        NumpyLlama(SIZES, lambda name: np.zeros((1, *shapes[name][1:])))
