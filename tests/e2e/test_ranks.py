"""Tensor parallelism over processes: the same answers as one rank, and no rank left behind."""

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import pytest
from engine_probe import assert_idle
from server_process import Server, serving

from cardan import LLM, SamplingParams, TokenPrompt
from cardan.bootstrap import open_async_engine
from cardan.core.types.errors import CardanError, ConfigError
from cardan.llm import config_from_settings
from cardan.testing.tiny_models import make_tiny_model, prompt_ids

# Every architecture; among them fewer key-value heads than ranks, tied tables, windows.
FAMILIES = [
    "llama_yarn",
    "mistral",
    "qwen2_windows",
    "qwen3_windows",
    "qwen3_moe",
    "gemma2",
    "gemma3",
]
COMMON = {"platform": "cpu", "dtype": "float32", "num_threads": 2, "kv_cache_memory_bytes": 1 << 22}
GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, logprobs=2)
# Logits of two ranks are sums in another order.
TIE = 1e-4

pytestmark = pytest.mark.slow


def check_same(outputs, truth, tie: float = TIE) -> None:
    """Equal tokens, or a first difference where the truth's two best are equally likely."""
    for output, wanted in zip(outputs, truth, strict=True):
        found, expected = output.outputs[0], wanted.outputs[0]
        pairs = zip(found.token_ids, expected.token_ids, strict=True)
        first = next((place for place, (a, b) in enumerate(pairs) if a != b), None)
        if first is None:
            continue
        best, second = sorted(t.logprob for t in expected.logprobs[first].values())[:-3:-1]
        assert best - second < tie, (first, found.token_ids, expected.token_ids)


def rank_processes() -> list[psutil.Process]:
    """Further ranks that this process started."""
    return [
        child
        for child in psutil.Process().children(recursive=True)
        if child.status() != psutil.STATUS_ZOMBIE and "rank_main" in " ".join(child.cmdline())
    ]


@contextmanager
def two_ranks(model: str | Path, **settings) -> Iterator[LLM]:
    with LLM(str(model), **{**COMMON, "tensor_parallel_size": 2, **settings}) as llm:
        ranks = rank_processes()
        assert len(ranks) == settings.get("tensor_parallel_size", 2) - 1
        usable = psutil.Process().cpu_affinity()
        if len(ranks) == 1 and len(usable) > 1:
            # Bound to CPUs of its own, not to those of rank 0, which started it.
            assert usable[0] not in ranks[0].cpu_affinity()
        yield llm
    assert not rank_processes()


@pytest.mark.parametrize("name", FAMILIES)
def test_greedy_ids_are_those_of_one_rank(name: str, tmp_path: Path) -> None:
    make_tiny_model(name, tmp_path)
    prompts = [prompt_ids(24), prompt_ids(9), prompt_ids(24)]
    with LLM(str(tmp_path), **COMMON) as llm:
        truth = llm.generate(prompts, GREEDY)
    with two_ranks(tmp_path) as llm:
        check_same(llm.generate(prompts, GREEDY), truth)
        before = llm.get_metrics().prefix_hits
        check_same(llm.generate(prompts, GREEDY), truth)
        assert llm.get_metrics().prefix_hits > before
        assert_idle(llm)


def test_preempted_chunked_sampled(tmp_path: Path) -> None:
    """A tiny pool, tiny steps, and rows whose settings only rank 0 knows."""
    make_tiny_model("llama", tmp_path)
    noisy = SamplingParams(
        temperature=0.9, top_p=0.9, repetition_penalty=1.2, seed=5, max_tokens=20, ignore_eos=True
    )
    prompts = [prompt_ids(20 + place) for place in range(8)]
    params = [GREEDY, noisy.replace(logprobs=2)] * 4
    wanted = GREEDY.replace(prompt_logprobs=1, max_tokens=1)
    settings = {"num_blocks": 14, "block_size": 8, "max_model_len": 64, "max_num_seqs": 8}
    settings |= {"max_num_batched_tokens": 16, "kv_cache_memory_bytes": None}
    with LLM(str(tmp_path), **COMMON) as llm:
        truth = llm.generate(prompts, params)
        [probed] = llm.generate([prompts[0]], wanted)
    with two_ranks(tmp_path, **settings) as llm:
        check_same(llm.generate(prompts, params), truth)
        assert llm.get_metrics().num_preemptions > 0
        [output] = llm.generate([prompts[0]], wanted)
        for found, expected in zip(output.prompt_logprobs, probed.prompt_logprobs, strict=True):
            if expected is not None:
                assert found.keys() == expected.keys()
                for token, entry in expected.items():
                    assert found[token].logprob == pytest.approx(entry.logprob, abs=1e-3)
        assert_idle(llm)


def test_aborted_requests_leave_the_others_alone(tmp_path: Path) -> None:
    make_tiny_model("qwen3", tmp_path)
    prompts = [prompt_ids(12 + place) for place in range(4)]
    with LLM(str(tmp_path), **COMMON) as llm:
        truth = llm.generate(prompts, GREEDY)

    async def run() -> list:
        config = config_from_settings(str(tmp_path), {**COMMON, "tensor_parallel_size": 2})
        engine = await open_async_engine(config, in_process=True)

        async def ask(place: int, leaves: bool):
            last = None
            prompt = TokenPrompt(token_ids=prompts[place])
            async for output in engine.generate(prompt, GREEDY, request_id=f"{place}{leaves}"):
                last = output
                if leaves and len(output.outputs[0].token_ids) > 3:
                    break
            return last

        asks = [ask(place, leaves) for place in range(4) for leaves in (True, False)]
        results = await asyncio.gather(*asks)
        assert engine.num_live == 0
        await engine.close()
        return results[1::2]

    check_same(asyncio.run(run()), truth)
    assert not rank_processes()


@pytest.mark.model
def test_demo_model_on_three_ranks() -> None:
    """Its nine heads can be shared by three; more ranks than CPUs is right, too, if slow."""
    prompts = ["The capital of France is", "def fibonacci(n):", "Once upon a time"]
    settings = {"max_model_len": 256, "kv_cache_memory_bytes": 32 << 20, "num_threads": 3}
    # Sums in another order flip roundings of activations, which kernels for blocks have.
    settings["quantization"] = "none"
    with LLM("demo", **{**COMMON, **settings}) as llm:
        truth = llm.generate(prompts, GREEDY)
    with two_ranks("demo", tensor_parallel_size=3, **settings) as llm:
        check_same(llm.generate(prompts, GREEDY), truth, tie=1e-3)
        assert_idle(llm)


@pytest.mark.model
def test_heads_that_cannot_be_shared_out() -> None:
    with pytest.raises(
        ConfigError, match=r"tensor_parallel_size is 2, which does not divide .* \(9\)"
    ):
        LLM("demo", **{**COMMON, "tensor_parallel_size": 2})
    assert not rank_processes()


def test_more_ranks_than_threads(tmp_path: Path) -> None:
    make_tiny_model("llama", tmp_path)
    with pytest.raises(ConfigError, match=r"tensor_parallel_size is set to 4, but platform cpu"):
        LLM(str(tmp_path), **{**COMMON, "tensor_parallel_size": 4})


def test_a_killed_rank_ends_the_engine_with_its_name(tmp_path: Path) -> None:
    make_tiny_model("llama", tmp_path)
    with two_ranks(tmp_path) as llm:
        llm.generate([prompt_ids(9)], GREEDY)
        [rank] = rank_processes()
        rank.kill()
        with pytest.raises(CardanError, match="rank 1 was ended by SIGKILL"):
            llm.generate([prompt_ids(9)], GREEDY)


def test_a_served_engine_and_its_ranks_end_together(tmp_path: Path) -> None:
    model = tmp_path / "model"
    make_tiny_model("llama", model)
    arguments = ["--tensor-parallel-size", "2", "--threads", "2", "--kv-cache-memory-bytes", "4M"]
    arguments += ["--platform", "cpu", "--dtype", "float32", "--max-engine-restarts", "1"]
    arguments += ["--enable-sleep-mode"]
    body = {"prompt": prompt_ids(9), "max_tokens": 5, "temperature": 0, "return_token_ids": True}
    with serving(tmp_path / "log", *arguments, model=model) as server:
        ask = server.url + "/v1/completions"
        first = httpx.post(ask, json=body, timeout=60).json()["choices"][0]["token_ids"]
        for level in (1, 2):
            check_sleep(server, level, body)
            again = httpx.post(ask, json=body, timeout=60).json()["choices"][0]["token_ids"]
            assert again == first
        [rank] = server.engine.children()
        rank.kill()
        failed = httpx.post(ask, json=body, timeout=60)
        assert failed.status_code >= 500
        assert "rank 1 was ended by SIGKILL" in failed.text
        again = await_answer(server, body)
        assert again["choices"][0]["token_ids"] == first
        assert not rank.is_running()
        # Nor does a rank outlive an engine that cannot end it.
        ranks = server.engine.children()
        assert len(ranks) == 1
        server.engine.kill()
        _gone, alive = psutil.wait_procs(ranks, timeout=15)
        assert not alive


def check_sleep(server: Server, level: int, body: dict) -> None:
    """The server sleeps, and says so wherever it is asked, and wakes up."""
    assert httpx.post(f"{server.url}/sleep?level={level}", timeout=60).status_code == 200
    assert server.get("/is_sleeping").json() == {"is_sleeping": True}
    assert server.get("/health").status_code == 200
    assert server.get("/ready").status_code == 503
    refused = httpx.post(server.url + "/v1/completions", json=body, timeout=60)
    assert refused.status_code == 503
    assert "/wake_up" in refused.json()["error"]["message"]
    assert httpx.post(f"{server.url}/wake_up", timeout=60).status_code == 200
    assert server.get("/ready").status_code == 200


def await_answer(server: Server, body: dict) -> dict:
    deadline = time.monotonic() + 60
    while True:
        answer = httpx.post(server.url + "/v1/completions", json=body, timeout=60)
        if answer.status_code == 200:
            return answer.json()
        assert time.monotonic() < deadline, answer.text
        time.sleep(0.2)
