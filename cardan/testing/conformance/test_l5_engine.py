"""L5: whole engines on tiny random models of every architecture, against transformers."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from cardan.core.interfaces.capabilities import Capabilities
from cardan.core.interfaces.errors import ConfigError, UnsupportedError
from cardan.core.interfaces.platform import Platform
from cardan.core.types.errors import RequestFailedError
from cardan.core.types.outputs import RequestOutput
from cardan.core.types.sampling_params import SamplingParams
from cardan.llm import LLM
from cardan.testing.conformance.engine_session import EngineSession
from cardan.testing.conformance.plugin import device_info_of, platform_of
from cardan.testing.conformance.results import not_supported
from cardan.testing.conformance.subject import Subject

if TYPE_CHECKING:
    from cardan.testing.conformance.model_truth import ModelTruth

LEVEL = "L5"

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
_VOCABULARY = 509
_MAX_MODEL_LEN = 128
# Models whose steps have different operations, or the same ones on different shapes of a cache.
# What sets further ones apart (how the core computes rotation tables, where it puts layers of a
# kind) is the core's own, whatever the platform.
_MODELS = (
    *("llama", "llama_tied_biased", "llama_yarn", "mistral", "qwen2", "qwen3_windows"),
    *("qwen3_moe", "mixtral", "gemma2_strong_caps", "gemma3"),
)
# Of them those with different caches: full, of windows, with experts between, of both kinds.
_ONE_OF_EACH = pytest.mark.parametrize(
    "truth",
    ["llama", "mistral", "qwen3_moe", "gemma3"],
    indirect=True,
    scope="module",
)


@dataclass(slots=True)
class Rig:
    """What every engine of this module is opened with, and how exact its answers are.

    One engine is open at a time, since some devices cannot be opened twice.
    """

    settings: dict[str, Any]
    gap: float
    runs_steps_itself: bool
    _held: ExitStack = field(default_factory=ExitStack)
    _shared: dict[str, EngineSession] = field(default_factory=dict)

    @contextmanager
    def open(self, model: str, **changes: Any) -> Iterator[EngineSession]:
        """An engine that must be idle in the end. The shared one ends before."""
        self.close()
        try:
            session = EngineSession(model, {**self.settings, **changes})
        except (ConfigError, UnsupportedError) as error:
            if self.runs_steps_itself:
                not_supported(str(error))
            raise
        with session:
            yield session
            check_idle(session)

    def share(self, model: str) -> EngineSession:
        """The engine of a model that stays open until another is asked for."""
        if model not in self._shared:
            self._shared[model] = self._held.enter_context(self.open(model))
        return self._shared[model]

    def close(self) -> None:
        """End the shared engine."""
        self._shared.clear()
        self._held.close()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Depths of asynchronous scheduling: none, and what the platform declares."""
    if "depth" in metafunc.fixturenames:
        platform, info = platform_of(metafunc.config), device_info_of(metafunc.config)
        metafunc.parametrize("depth", sorted({0, platform.capabilities(info).async_depth}))


@pytest.fixture(scope="module")
def rig(
    cardan_subject: Subject, cardan_platform: Platform, cardan_capabilities: Capabilities
) -> Iterator[Rig]:
    if not cardan_subject.entry:
        not_supported("engines find platforms by their entry points; install the package")
    try:
        from cardan.testing.conformance.model_truth import GAPS
    except ImportError as error:
        not_supported(f"{error.name} is missing; pip install 'cardan[conformance]'")
    dtypes = cardan_capabilities.dtypes
    dtype = "float32" if "float32" in dtypes else dtypes[0]
    if dtype not in GAPS:
        not_supported(f"the kit has no tolerance for models in {dtype}")
    index = cardan_subject.index
    settings = {
        "platform": cardan_subject.entry if index is None else f"{cardan_subject.entry}:{index}",
        "dtype": dtype,
        "num_blocks": 96,
        "max_num_seqs": 16,
        "max_model_len": _MAX_MODEL_LEN,
    }
    own = type(cardan_platform).executor is not Platform.executor
    rig = Rig(settings, GAPS[dtype], own)
    yield rig
    rig.close()


def _model_names() -> tuple[str, ...]:
    try:
        from cardan.testing.tiny_models import CASES
    except ImportError:  # the fixture rig says so
        return ("none",)
    return tuple(name for name in _MODELS if name in CASES)


@pytest.fixture(scope="module", params=_model_names())
def truth(
    rig: Rig, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> "ModelTruth":
    """Each tiny model in turn."""
    from cardan.testing.conformance.model_truth import ModelTruth

    return ModelTruth(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def llama(rig: Rig, tmp_path_factory: pytest.TempPathFactory) -> "ModelTruth":
    """The plainest model."""
    from cardan.testing.conformance.model_truth import ModelTruth

    return ModelTruth("llama", tmp_path_factory.mktemp("plain"))


@pytest.fixture
def session(rig: Rig, truth: "ModelTruth") -> EngineSession:
    """One engine for the tests of a model that need no settings of their own."""
    return rig.share(truth.directory)


Prompts = Callable[..., list[list[int]]]


@pytest.fixture
def prompts(cardan_rng: np.random.Generator) -> Prompts:
    """Makes random prompts of given lengths."""

    def make(*lengths: int) -> list[list[int]]:
        return [cardan_rng.integers(3, _VOCABULARY, size=length).tolist() for length in lengths]

    return make


def run_greedy(
    session: EngineSession,
    truth: "ModelTruth",
    rig: Rig,
    prompts: list[list[int]],
    params: SamplingParams = GREEDY,
) -> list[RequestOutput]:
    """Answers to all prompts at once, each checked; nothing may be held afterwards."""
    outputs = session.generate([(prompt, params) for prompt in prompts])
    for prompt, output in zip(prompts, outputs, strict=True):
        [answer] = output.outputs
        assert len(answer.token_ids) == params.max_tokens, f"{len(answer.token_ids)} tokens came"
        fault = truth.greedy_fault(prompt, answer.token_ids, rig.gap)
        if fault:
            pytest.fail(f"{truth.name}: {fault}", pytrace=False)
    check_idle(session)
    return outputs


def check_idle(session: EngineSession) -> None:
    """Nothing may be held once all answers are given."""
    left = session.left_when_idle()
    assert not left, f"not given back when idle: {left}"


def test_alone(session: EngineSession, truth: "ModelTruth", rig: Rig, prompts: Prompts) -> None:
    """Greedy tokens of one request at a time are transformers'."""
    for prompt in prompts(1, 7, 33, 90):
        run_greedy(session, truth, rig, [prompt])


def test_batched(session: EngineSession, truth: "ModelTruth", rig: Rig, prompts: Prompts) -> None:
    """Greedy tokens of many requests at once are transformers'."""
    batch = prompts(1, 2, 5, 16, 17, 31, 40, 64)
    run_greedy(session, truth, rig, [*batch, batch[4]])


def test_prefix_cached(
    session: EngineSession, truth: "ModelTruth", rig: Rig, prompts: Prompts
) -> None:
    """What comes from the prefix cache changes no token."""
    block = session.block_size
    if 2 * block + 5 + 12 > _MAX_MODEL_LEN:
        not_supported(f"blocks of {block} tokens are too long for the tiny models' contexts")
    [prompt] = prompts(2 * block + 5)
    session.reset_prefix_cache()
    run_greedy(session, truth, rig, [prompt])
    other = [*prompt[: block + 1], *prompts(4)[0]]
    again = run_greedy(session, truth, rig, [prompt, other])
    cached = [output.num_cached_tokens for output in again]
    assert cached == [2 * block, block], f"{cached} tokens of the prompts came from the cache"


def test_logprobs(session: EngineSession, truth: "ModelTruth", rig: Rig, prompts: Prompts) -> None:
    """Log-probabilities of answers are transformers'."""
    batch = prompts(3, 22, 41)
    outputs = session.generate([(prompt, replace(GREEDY, logprobs=4)) for prompt in batch])
    for prompt, output in zip(batch, outputs, strict=True):
        fault = truth.logprobs_fault(prompt, output.outputs[0], rig.gap)
        if fault:
            pytest.fail(f"{truth.name}: {fault}", pytrace=False)


def test_prompt_logprobs(
    session: EngineSession, truth: "ModelTruth", rig: Rig, prompts: Prompts
) -> None:
    """Log-probabilities of prompts are transformers', whether or not the prompt is cached."""
    if "prompt_logprobs" not in session.features:
        not_supported("the executor computes no prompt_logprobs")
    batch = prompts(3, 22, 41)
    for _ in range(2):
        outputs = session.generate(
            [(prompt, replace(GREEDY, prompt_logprobs=2)) for prompt in batch]
        )
        for prompt, output in zip(batch, outputs, strict=True):
            fault = truth.prompt_logprobs_fault(prompt, output.prompt_logprobs, rig.gap)
            if fault:
                pytest.fail(f"{truth.name}: {fault}", pytrace=False)


@_ONE_OF_EACH
def test_chunked(truth: "ModelTruth", rig: Rig, prompts: Prompts) -> None:
    """Prompts split over steps, beside running answers, give the same tokens."""
    with rig.open(truth.directory, max_num_batched_tokens=13, max_num_seqs=8) as session:
        run_greedy(session, truth, rig, prompts(50, 3, 29, 64, 14, 1))


@_ONE_OF_EACH
def test_preempted(session: EngineSession, truth: "ModelTruth", rig: Rig, prompts: Prompts) -> None:
    """Requests that lose their blocks and start again give the same tokens."""
    block = session.block_size
    # Each request starts with one block and ends with as many as its context allows.
    most = min(4, _MAX_MODEL_LEN // block)
    if most < 2:
        not_supported(f"blocks of {block} tokens are too long for the tiny models' contexts")
    greedy = replace(GREEDY, max_tokens=(most - 1) * block)
    changes = {"num_blocks": most + 4, "max_model_len": most * block}
    with rig.open(truth.directory, **changes) as small:
        run_greedy(small, truth, rig, prompts(*[block - 4] * 6), greedy)
        assert small.stats().num_preemptions, "nothing was preempted"


def test_samples(llama: "ModelTruth", rig: Rig, prompts: Prompts) -> None:
    """n samples with a seed are what n requests with the following seeds give."""
    [prompt, *others] = prompts(20, 9, 30)
    params = SamplingParams(temperature=0.9, seed=11, max_tokens=10, ignore_eos=True)
    noise = replace(params, temperature=1.3, seed=None)
    session = rig.share(llama.directory)
    [together] = session.generate([(prompt, replace(params, n=3))])
    singles = [(prompt, replace(params, seed=11 + index)) for index in range(3)]
    alone = session.generate([*singles, *((other, noise) for other in others)])[:3]
    got = [answer.token_ids for answer in together.outputs]
    assert got == [output.outputs[0].token_ids for output in alone]
    assert len({tuple(tokens) for tokens in got}) > 1, "all samples are the same"
    check_idle(session)


def test_filters(llama: "ModelTruth", rig: Rig, prompts: Prompts) -> None:
    """Sampled tokens are among those that top-k leaves."""
    batch = prompts(6, 21, 35)
    params = SamplingParams(temperature=2.0, top_k=3, max_tokens=20, ignore_eos=True)
    session = rig.share(llama.directory)
    try:
        outputs = session.generate([(prompt, params) for prompt in batch])
    except RequestFailedError as error:
        if not rig.runs_steps_itself:
            raise
        not_supported(str(error))
    ranks: list[int] = []
    for prompt, output in zip(batch, outputs, strict=True):
        tokens = output.outputs[0].token_ids
        rows = llama.logprobs([*prompt, *tokens])[len(prompt) - 1 : -1]
        for row, token in zip(rows, tokens, strict=True):
            ranks.append(int((row > row[token] + rig.gap).sum()))
    assert max(ranks) < 3, f"a token of rank {max(ranks) + 1} was sampled with top_k 3"
    assert len(set(ranks)) > 1, "only the likeliest tokens were sampled at temperature 2"
    check_idle(session)


def test_stop_token(llama: "ModelTruth", rig: Rig, prompts: Prompts) -> None:
    """A stop token ends the answer, and is its last token."""
    [prompt] = prompts(15)
    session = rig.share(llama.directory)
    [full] = run_greedy(session, llama, rig, [prompt])
    tokens = full.outputs[0].token_ids
    stop = tokens[6]
    params = replace(GREEDY, stop_token_ids=(stop,))
    [output] = session.generate([(prompt, params)])
    [answer] = output.outputs
    assert answer.token_ids == tokens[: tokens.index(stop) + 1]
    assert (answer.finish_reason, answer.stop_reason) == ("stop", stop)
    check_idle(session)


def test_aborted(llama: "ModelTruth", rig: Rig, prompts: Prompts) -> None:
    """Aborted and abandoned requests leave nothing behind, and the engine goes on."""
    long = replace(GREEDY, max_tokens=80)
    session = rig.share(llama.directory)
    ended = session.abort_after([(prompt, long) for prompt in prompts(5, 18, 40)], 3)
    reasons = [output.outputs[0].finish_reason for output in ended]
    assert reasons == ["abort"] * 3, f"the requests ended with {reasons}"
    session.leave_after([(prompt, replace(long, n=2)) for prompt in prompts(5, 18)], 3)
    left = session.left_when_idle()
    assert not left, f"not given back after aborts: {left}"
    run_greedy(session, llama, rig, prompts(11, 12))


def test_async_depth(llama: "ModelTruth", rig: Rig, depth: int, prompts: Prompts) -> None:
    """Steps planned ahead change no token."""
    try:
        with rig.open(llama.directory, async_depth=depth) as session:
            run_greedy(session, llama, rig, prompts(1, 30, 17, 5))
    except ConfigError as error:
        if "async_depth" in str(error):
            not_supported(str(error))
        raise


def test_offline_api(llama: "ModelTruth", rig: Rig, prompts: Prompts) -> None:
    """The offline API opens the platform by its name, and gives the same tokens."""
    batch = prompts(4, 25)
    rig.close()
    with LLM(llama.directory, **rig.settings) as llm:
        assert llm.info.platform == rig.settings["platform"].partition(":")[0]
        outputs = llm.generate(batch, GREEDY)
    for prompt, output in zip(batch, outputs, strict=True):
        fault = llama.greedy_fault(prompt, output.outputs[0].token_ids, rig.gap)
        assert not fault, fault
