"""Engines on the tpu platform, on a host that poses as four devices, against transformers."""

import time

import numpy as np
import pytest

from cardan import LLM, SamplingParams, TokenPrompt
from cardan.platforms.tpu.attention import PallasKernels
from cardan.platforms.tpu.executor import TpuExecutor
from cardan.testing.conformance.model_truth import ModelTruth
from cardan.testing.tiny_models import prompt_ids

GAP = 1e-3
LENGTHS = (1, 5, 17, 40, 33)
GREEDY = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True, logprobs=4)
SETTINGS = {
    "platform": "tpu",
    "dtype": "float32",
    "max_model_len": 128,
    "num_blocks": 64,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 32,
}


@pytest.fixture(scope="module")
def truths(tmp_path_factory):
    made = {}

    def truth(name):
        if name not in made:
            made[name] = ModelTruth(name, tmp_path_factory.mktemp(name))
        return made[name]

    return truth


@pytest.fixture
def interpreted(monkeypatch):
    """What TPUs run, without one."""

    def kernels(executor):
        return PallasKernels(executor._block_size, executor._device.placement, interpret=True)

    monkeypatch.setattr(TpuExecutor, "_kernels", kernels)


def executor_of(llm):
    return llm._client._loop._engine._executor


def check(truth, **changes):
    """Prompts of many lengths, of which the scheduler mixes some with the answers of others."""
    with LLM(truth.directory, **{**SETTINGS, **changes}) as llm:
        prompts = [prompt_ids(length, seed=length) for length in LENGTHS]
        outputs = llm.generate([TokenPrompt(token_ids=ids) for ids in prompts], GREEDY)
        for prompt, output in zip(prompts, outputs, strict=True):
            answer = output.outputs[0]
            assert len(answer.token_ids) == GREEDY.max_tokens
            assert truth.greedy_fault(prompt, answer.token_ids, GAP) == ""
            assert truth.logprobs_fault(prompt, answer, GAP) == ""


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("llama", marks=pytest.mark.scheduled),
        pytest.param("gemma2_strong_caps", marks=pytest.mark.scheduled),
        "qwen3_windows",
    ],
)
def test_kernels_of_tpus(name, truths, interpreted):
    check(truths(name))


@pytest.mark.parametrize(
    ("name", "ranks"),
    [
        ("llama", 4),
        ("qwen3_moe", 2),
        *(
            pytest.param(name, ranks, marks=pytest.mark.scheduled)
            for name, ranks in (("llama", 2), ("gemma3", 2), ("gemma3", 4), ("qwen3_moe", 4))
        ),
    ],
)
def test_cut_over_a_mesh(name, ranks, truths):
    """Of two key heads each has its device, or all devices have both."""
    check(truths(name), tensor_parallel_size=ranks)


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.scheduled)])
def test_kernels_of_tpus_on_a_mesh(ranks, truths, interpreted):
    check(truths("llama"), tensor_parallel_size=ranks)


def test_a_mesh_holds_each_weight_once(truths):
    with (
        LLM(truths("llama").directory, **SETTINGS) as whole,
        LLM(truths("llama").directory, tensor_parallel_size=2, **SETTINGS) as cut,
    ):
        sizes = []
        for llm in (whole, cut):
            executor = executor_of(llm)
            arrays = [*executor._loaded.traced.weights, *executor._state.caches]
            sizes.append(sum(array.addressable_shards[0].data.nbytes for array in arrays))
    # Norms and the table of rotations are on both.
    assert sizes[1] < 0.6 * sizes[0]


def test_too_many_devices_are_refused(truths):
    with pytest.raises(Exception, match="tensor_parallel_size is 5"):
        LLM(truths("llama").directory, tensor_parallel_size=5, **SETTINGS)


def test_each_shape_is_compiled_once(truths):
    with LLM(truths("llama").directory, **SETTINGS) as llm:
        executor = executor_of(llm)
        # Warmed up: rows of one token each, of the shortest table.
        assert executor.num_programs == 1
        plain = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)

        def run(length, params=plain):
            llm.reset_prefix_cache()
            llm.generate(TokenPrompt(token_ids=prompt_ids(length)), params)
            return executor.num_programs

        # A prompt's step has 16 tokens or 32; settings with edits or tables have programs too.
        assert [run(9), run(12), run(1)] == [2, 2, 2]
        assert [run(30), run(60), run(17)] == [3, 3, 3]
        assert run(9, plain.replace(temperature=0.7, top_k=5, seed=1)) == 3
        penalised = plain.replace(repetition_penalty=1.5)
        assert [run(9, penalised), run(9, penalised)] == [5, 5]
        # Tables and bad words have few sizes.
        assert [run(9, plain.replace(logprobs=n)) for n in (2, 5, 0)] == [7, 7, 7]
        forbidden = [plain.replace(bad_words=words) for words in (["a"], ["b", "c d e"])]
        assert [run(9, params) for params in forbidden] == [9, 9]
        assert [run(9, plain.replace(prompt_logprobs=n)) for n in (0, 3)] == [10, 10]


def test_samples_share_their_prompt(truths):
    """Blocks are copied where one of several samples writes behind the prompt they share."""
    prompt = TokenPrompt(token_ids=prompt_ids(21))
    params = SamplingParams(temperature=1.5, seed=40, max_tokens=12, ignore_eos=True)
    with LLM(truths("llama").directory, **SETTINGS) as llm:
        [together] = llm.generate(prompt, params.replace(n=3))
        alone = [llm.generate(prompt, params.replace(seed=40 + i))[0] for i in range(3)]
    answers = [answer.token_ids for answer in together.outputs]
    assert answers == [output.outputs[0].token_ids for output in alone]
    assert len({tuple(answer) for answer in answers}) == 3


def test_nothing_is_left_of_requests_that_go(truths):
    rng = np.random.default_rng(7)
    with LLM(truths("llama").directory, **{**SETTINGS, "num_blocks": 24}) as llm:
        for _ in range(2):
            prompts = [
                TokenPrompt(token_ids=prompt_ids(int(length), seed=int(length)))
                for length in rng.integers(1, 60, 12)
            ]
            params = [
                SamplingParams(
                    temperature=float(rng.choice([0.0, 1.0])),
                    max_tokens=int(rng.integers(1, 30)),
                    logprobs=int(rng.integers(0, 3)) or None,
                    presence_penalty=float(rng.choice([0.0, 0.5])),
                    seed=3,
                )
                for _ in prompts
            ]
            llm.generate(prompts, params)
        # The engine frees the last rows with its next step.
        deadline = time.monotonic() + 20
        while executor_of(llm).num_live_rows and time.monotonic() < deadline:
            time.sleep(0.01)
        assert executor_of(llm).num_live_rows == 0
        metrics = llm.get_metrics()
        assert (metrics.num_running, metrics.num_waiting, metrics.kv_usage) == (0, 0, 0)
