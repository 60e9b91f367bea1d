"""Greedy ids equal Hugging Face transformers (float32), however requests are scheduled."""

import asyncio
from collections.abc import Iterator

import pytest
from engine_probe import assert_idle
from prompts import NUM_TOKENS

from cardan import LLM, OutputKind, SamplingParams, TokenPrompt
from cardan.bootstrap import open_async_engine
from cardan.llm import config_from_settings

pytestmark = [pytest.mark.model, pytest.mark.slow]

GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
COMMON = {
    "dtype": "float32",
    "quantization": "none",
    "kv_cache_memory_bytes": 256 << 20,
    "max_model_len": 1024,
}


def check(llm: LLM, truth: list[tuple[list[int], list[int]]]) -> None:
    outputs = llm.generate([ids for ids, _ in truth], GREEDY)
    wrong = [
        (place, output.outputs[0].token_ids, expected)
        for place, (output, (_, expected)) in enumerate(zip(outputs, truth, strict=True))
        if output.outputs[0].token_ids != expected
    ]
    assert not wrong
    assert all(output.outputs[0].finish_reason == "length" for output in outputs)
    assert_idle(llm)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("demo", **COMMON) as llm:
        yield llm


def test_token_ids_of_prompts_equal_transformers(llm: LLM, hf) -> None:
    from prompts import PROMPTS

    for text in PROMPTS:
        assert llm.get_tokenizer().encode(text) == hf.tokenizer(text)["input_ids"]


# Of the ways that take a step for each token, a part of the prompts is enough in every run.
@pytest.mark.parametrize("count", [12, pytest.param(50, marks=pytest.mark.scheduled)])
def test_alone(llm: LLM, count: int, greedy_truth) -> None:
    for pair in greedy_truth[-count:]:
        llm.reset_prefix_cache()
        check(llm, [pair])


def test_in_one_mixed_batch_then_warm(llm: LLM, greedy_truth) -> None:
    llm.reset_prefix_cache()
    check(llm, greedy_truth)
    before = llm.get_metrics().prefix_hits
    check(llm, greedy_truth)
    assert llm.get_metrics().prefix_hits > before


def test_with_other_settings_in_the_batch(llm: LLM, greedy_truth) -> None:
    """Rows that sample, penalise and want log-probabilities change nothing for the others."""
    noisy = SamplingParams(
        temperature=1.3, top_p=0.9, repetition_penalty=1.2, logprobs=3, n=2, max_tokens=20, seed=3
    )
    pairs = greedy_truth[:20]
    prompts = [ids for ids, _ in pairs for _ in range(2)]
    outputs = llm.generate(prompts, [GREEDY, noisy] * len(pairs))
    for (_, expected), output in zip(pairs, outputs[::2], strict=True):
        assert output.outputs[0].token_ids == expected
    assert_idle(llm)


@pytest.mark.parametrize(
    ("budget", "count"),
    [
        (1, 10),
        (7, 30),
        (16, 50),
        pytest.param(1, 50, marks=pytest.mark.scheduled),
        pytest.param(7, 50, marks=pytest.mark.scheduled),
    ],
)
def test_chunked(budget: int, count: int, greedy_truth) -> None:
    settings = {**COMMON, "max_num_batched_tokens": budget, "block_size": 8}
    with LLM("demo", **settings) as llm:
        check(llm, greedy_truth[-count:])
        assert llm.get_metrics().num_steps > 0


def test_preempted_in_a_tiny_pool(greedy_truth) -> None:
    settings = {**COMMON, "kv_cache_memory_bytes": None, "num_blocks": 28, "block_size": 4}
    settings |= {"max_model_len": 96, "max_num_seqs": 16}
    with LLM("demo", **settings) as llm:
        check(llm, greedy_truth)
        assert llm.get_metrics().num_preemptions > 0


def test_streamed(greedy_truth) -> None:
    """Deltas put together equal the whole, in ids and in text."""

    async def run() -> None:
        engine = await open_async_engine(config_from_settings("demo", COMMON), in_process=True)
        delta = GREEDY.replace(output_kind=OutputKind.DELTA)

        async def stream(place: int, ids: list[int]) -> tuple[list[int], str]:
            got: list[int] = []
            text = ""
            prompt = TokenPrompt(token_ids=ids)
            async for output in engine.generate(prompt, delta, request_id=str(place)):
                for part in output.outputs:
                    got += part.token_ids
                    text += part.text
            return got, text

        streams = [stream(place, ids) for place, (ids, _) in enumerate(greedy_truth)]
        results = await asyncio.gather(*streams)
        for (got, text), (_, expected) in zip(results, greedy_truth, strict=True):
            assert got == expected
            assert text == engine.tokenizer.decode(expected)
        assert engine.num_live == 0
        await engine.close()

    asyncio.run(run())


def test_prompt_logprobs_equal_transformers_also_warm(llm: LLM, hf, greedy_truth) -> None:
    llm.reset_prefix_cache()
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=3, logprobs=3)
    for ids, _ in greedy_truth[-3:]:
        truth = hf.logprobs(ids)
        for _ in range(2):  # cold, then warm
            [output] = llm.generate([ids], params)
            assert output.prompt_logprobs is not None
            assert output.prompt_logprobs[0] is None
            assert len(output.prompt_logprobs) == len(ids)
            for place, table in enumerate(output.prompt_logprobs[1:], start=1):
                row = truth[place - 1]
                assert table is not None
                assert table[ids[place]].logprob == pytest.approx(row[ids[place]].item(), abs=1e-3)
                best = row.topk(3)
                for value, token in zip(best.values.tolist(), best.indices.tolist(), strict=True):
                    assert table[token].logprob == pytest.approx(value, abs=1e-3)
            sampled = output.outputs[0]
            assert sampled.logprobs is not None
            got = sampled.logprobs[0][sampled.token_ids[0]].logprob
            assert got == pytest.approx(truth[-1].max().item(), abs=1e-3)
    assert_idle(llm)


def test_logprobs_of_the_answer_equal_transformers(llm: LLM, hf, greedy_truth) -> None:
    params = GREEDY.replace(logprobs=5)
    pairs = greedy_truth[:8]
    outputs = llm.generate([ids for ids, _ in pairs], params)
    for (ids, expected), output in zip(pairs, outputs, strict=True):
        truth = hf.logprobs([*ids, *expected])[len(ids) - 1 : -1]
        answer = output.outputs[0]
        assert answer.logprobs is not None
        total = 0.0
        for row, table, token in zip(truth, answer.logprobs, expected, strict=True):
            assert len(table) == 5
            assert table[token].logprob == pytest.approx(row[token].item(), abs=1e-3)
            assert table[token].rank == 1
            total += table[token].logprob
        assert answer.cumulative_logprob == pytest.approx(total)
    assert_idle(llm)
