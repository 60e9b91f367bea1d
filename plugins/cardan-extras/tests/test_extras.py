"""Each plugin once, through an engine where there is one, against a truth of its own."""

import json
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cardan_extras.granite import GraniteConfig
from cardan_extras.mistral import TOKEN, MistralParser
from cardan_extras.nf4 import levels
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from cardan.core.interfaces.errors import ConfigError, InputError
from cardan.core.interfaces.scheduling import RequestView
from cardan.core.types.sampling_params import SamplingParams
from cardan.llm import LLM

VOCAB = 199
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.15,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GRANITE: dict[str, Any] = {
    "embedding_multiplier": 0.4,
    "attention_multiplier": 0.2,
    "residual_multiplier": 1.3,
    "logits_scaling": 1.5,
}
PROMPT = [5, 17, 99, 42, 7, 150, 23]
SETTINGS: dict[str, Any] = {"dtype": "float32", "platform": "cpu", "kv_cache_memory_bytes": 1 << 22}


def make_model(folder: Path, model_type: str, **changes: Any) -> PreTrainedModel:
    """A random model in float32, saved with a tokenizer of one word an id."""
    config = AutoConfig.for_model(model_type, **{**SIZES, **changes})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        made = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        model: PreTrainedModel = made.eval()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim == 1:
                    parameter.add_(torch.randn(parameter.shape), alpha=0.2)
    model.save_pretrained(folder)
    words = {f"w{index}": index for index in range(VOCAB)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    return model


def greedy(model: PreTrainedModel, length: int = 24, **options: Any) -> list[int]:
    """What transformers goes on with."""
    with torch.inference_mode():
        ids = model.generate(
            torch.tensor([PROMPT]),
            max_new_tokens=length,
            min_new_tokens=length,
            do_sample=False,
            **options,
        )
    return ids[0, len(PROMPT) :].tolist()


def params(length: int = 24, **options: Any) -> SamplingParams:
    return SamplingParams(
        temperature=0.0, max_tokens=length, min_tokens=length, ignore_eos=True, **options
    )


def ids_of(llm: LLM, settings: SamplingParams) -> list[int]:
    return llm.generate([PROMPT], settings, use_tqdm=False)[0].outputs[0].token_ids


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    folder = tmp_path_factory.mktemp("llama")
    return folder, make_model(folder, "llama")


@pytest.mark.parametrize(
    "changes",
    [{"tie_word_embeddings": True}, {"attention_bias": True, "mlp_bias": True, "head_dim": 24}],
    ids=["tied", "biased"],
)
def test_granite_is_transformers_granite(tmp_path: Path, changes: dict[str, Any]) -> None:
    theirs = make_model(tmp_path, "granite", **GRANITE, **changes)
    expected = greedy(theirs)
    assert len(set(expected)) > 6  # a degenerate model would agree with anything
    with LLM(str(tmp_path), **SETTINGS) as llm:
        assert llm.info.architecture == "GraniteForCausalLM"
        assert ids_of(llm, params()) == expected


def test_granite_refuses_what_it_lacks(tmp_path: Path) -> None:
    rope = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
    make_model(tmp_path, "granite", rope_parameters=rope)
    with pytest.raises(ConfigError, match="rope_type is 'linear'"):
        LLM(str(tmp_path), **SETTINGS)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_type is 'linear'"),
        ({"num_hidden_layers": None}, "'num_hidden_layers' is None"),
    ],
)
def test_granite_refuses_a_config(entry: dict[str, Any], message: str) -> None:
    sizes = ("vocab_size", "hidden_size", "intermediate_size")
    config = dict.fromkeys((*sizes, "num_hidden_layers", "num_attention_heads"), 8)
    with pytest.raises(ConfigError, match=message):
        GraniteConfig.read({**config, **entry})


def nearest_level(weight: np.ndarray) -> np.ndarray:
    """NF4 by brute force: every weight against every published level."""
    published = np.array(
        [-1.0, -0.69619280, -0.52507305, -0.39491749, -0.28444138, -0.18477343, -0.09105004, 0.0,
         0.07958030, 0.16093020, 0.24611230, 0.33791524, 0.44070983, 0.56261700, 0.72295684, 1.0]
    )  # fmt: skip
    blocks = weight.reshape(-1, 64)
    scales = np.abs(blocks).max(1, keepdims=True)
    distance = np.abs(blocks[..., None] / scales[..., None] - published)
    return (published[distance.argmin(-1)] * scales).reshape(weight.shape)


def test_nf4_is_the_papers(llama: tuple[Path, PreTrainedModel], tmp_path: Path) -> None:
    folder, model = llama
    assert levels()[7] == 0.0
    assert levels()[8:10] == pytest.approx((0.07958030, 0.16093020), abs=1e-6)
    rounded = make_model(tmp_path, "llama")
    with torch.no_grad():
        for name, parameter in rounded.named_parameters():
            if name.endswith("_proj.weight"):
                values = nearest_level(parameter.numpy().astype(np.float64))
                parameter.copy_(torch.from_numpy(values))
    expected = greedy(rounded)
    assert expected != greedy(model)
    with LLM(str(folder), quantization="nf4", kv_cache_dtype="float32", **SETTINGS) as llm:
        assert ids_of(llm, params()) == expected


def test_no_ngram_comes_twice(llama: tuple[Path, PreTrainedModel]) -> None:
    folder, model = llama
    with LLM(str(folder), **SETTINGS) as llm:
        for size in (1, 2, 3):
            got = ids_of(llm, params(extra_args={"no_repeat_ngram_size": size}))
            assert got == greedy(model, no_repeat_ngram_size=size)
        with pytest.raises(InputError, match="no_repeat_ngram_size is 0"):
            ids_of(llm, params(extra_args={"no_repeat_ngram_size": 0}))


def test_short_requests_go_first(llama: tuple[Path, PreTrainedModel]) -> None:
    lengths = [30, 8, 20, 2]
    order: dict[str, list[int]] = {}
    for policy in ("fcfs", "aged_shortest"):
        with LLM(str(llama[0]), policy=policy, max_num_seqs=1, **SETTINGS) as llm:
            outputs = llm.generate(
                [PROMPT] * len(lengths), [params(length) for length in lengths], use_tqdm=False
            )
        ends = [output.metrics.finished_time for output in outputs if output.metrics]
        order[policy] = [lengths[i] for i in np.argsort(ends)]
    assert order == {"fcfs": lengths, "aged_shortest": sorted(lengths)}


def test_nobody_waits_for_ever() -> None:
    from cardan_extras.aged_shortest import AgedShortestPolicy

    policy = AgedShortestPolicy()
    long, short = (RequestView("", 0, 0, 0.0, 900, 100), RequestView("", 0, 1, 51.0, 10, 10))
    assert policy.sort_key(long) < policy.sort_key(short)


@pytest.fixture
def server() -> Iterator[socket.socket]:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as listening:
        listening.bind(("127.0.0.1", 0))
        listening.settimeout(5)
        yield listening


def test_the_sink_gets_every_step(
    llama: tuple[Path, PreTrainedModel], server: socket.socket
) -> None:
    address = f"127.0.0.1:{server.getsockname()[1]}"
    options = {"statsd.address": address}
    with LLM(str(llama[0]), options=options, required=("statsd",), **SETTINGS) as llm:
        ids_of(llm, params(10))
    tokens = 0
    # The prompt, and each token but the last, which nothing follows.
    while tokens < len(PROMPT) + 9:
        text = server.recv(4096).decode()
        assert re.search(r"^cardan\.num_running:[01]\|g$", text, re.MULTILINE)
        counted = re.search(r"^cardan\.num_batched_tokens:(\d+)\|c$", text, re.MULTILINE)
        tokens += int(counted[1]) if counted else 0
    assert tokens == len(PROMPT) + 9


CALLS = [{"name": "sum", "arguments": {"a": 1, "text": "<é>"}}, {"name": "now", "arguments": {}}]
ANSWERS = {
    f"Let me [see]. {TOKEN} {json.dumps(CALLS)}": ("Let me [see]. ", CALLS),
    f"{TOKEN}{json.dumps(CALLS)}": ("", CALLS),
    "No [TOOL call [TOOL_CALLS": ("No [TOOL call [TOOL_CALLS", []),
    f"Cut. {TOKEN}[{{": (f"Cut. {TOKEN}[{{", []),
    f'{TOKEN}[{{"name": 3, "arguments": {{}}}}]': (
        f'{TOKEN}[{{"name": 3, "arguments": {{}}}}]',
        [],
    ),
}


@pytest.mark.parametrize("step", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize("text", ANSWERS)
def test_calls_are_found_however_the_text_is_cut(text: str, step: int) -> None:
    parser = MistralParser()
    told = [parser.push(text[at : at + step]) for at in range(0, len(text), step)]
    told.append(parser.finish())
    calls: dict[int, list[str]] = {}
    for delta in (delta for part in told for delta in part.calls):
        found = calls.setdefault(delta.index, [delta.name or "", ""])
        found[1] += delta.arguments
    content, expected = ANSWERS[text]
    assert [{"name": n, "arguments": json.loads(a)} for n, a in calls.values()] == expected
    assert "".join(part.content for part in told) == content


def test_the_parser_knows_its_templates() -> None:
    assert MistralParser.detect(f"{{{{ '{TOKEN}' }}}}")
    assert not MistralParser.detect("{{ messages }}")
