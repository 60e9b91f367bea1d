"""``cardan diff`` on planted faults, which it must find in the right layer and operation."""

import json

import pytest
import torch
from drifting_kernels import PROVIDERS

from cardan.cli.diff_report import layer_of, verdict
from cardan.core.config.device import DeviceConfig
from cardan.core.config.engine import EngineConfig
from cardan.core.config.model import ModelConfig
from cardan.core.interfaces.attention import LayerParams
from cardan.core.types.errors import ConfigError
from cardan.core.types.outputs import TokenLogprobs
from cardan.core.types.prompt import TokenPrompt
from cardan.diff.answers import Answer, compare_answers
from cardan.diff.replay import replay
from cardan.diff.requests import DiffRequest, read_requests
from cardan.diff.run import DiffOptions, DiffResult, logprob_error, run_diff
from cardan.diff.saved_call import load_call, save_call
from cardan.diff.truth import attend
from cardan.testing.conformance.attention_truth import attend_row
from cardan.testing.fake.faulty_kernels import providers
from cardan.testing.fake.platform import FakePlatform
from cardan.testing.tiny_models import make_tiny_model

# Longer than the window of the layers that have one, and than a block of the cache.
REQUEST = DiffRequest(TokenPrompt(token_ids=list(range(30, 48))), max_tokens=2)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Layers 0 and 2 have a window of 11 tokens."""
    path = tmp_path_factory.mktemp("windows")
    make_tiny_model("qwen3_windows", path)
    return str(path)


def compared(model: str, subject: str, dtype: str = "float32", unchecked=False) -> DiffResult:
    def config(platform):
        return EngineConfig(
            model=ModelConfig(model=model, dtype=dtype), device=DeviceConfig(platform=platform)
        )

    options = DiffOptions(requests=(REQUEST,), unchecked=unchecked)
    return run_diff(config(subject), config("cpu"), options, lambda text: None)


def test_a_platform_against_itself(model):
    found = compared(model, "cpu")
    assert found.is_equal
    assert verdict(found) == "equal"
    calls = found.calls.calls[0]
    # Two steps of an embedding, nine calls a layer, a norm, and the head.
    assert len(calls) == 2 * (1 + 3 * 9 + 2)
    assert all(call.propagated == 0.0 for call in calls)
    assert found.calls.logprob_errors == [0.0]


def test_rounding_is_no_fault(model, monkeypatch):
    monkeypatch.setenv("CARDAN_FAKE", "1")
    found = compared(model, "fake", "bfloat16")
    assert found.is_equal
    assert max(call.error.ratio for call in found.calls.calls[0]) > 0.1
    assert {call.dtype for call in found.calls.calls[0]} == {"bfloat16"}


def test_a_kernel_that_fails_its_check_is_not_used_unless_asked(model, monkeypatch):
    monkeypatch.setenv("CARDAN_FAKE", "fault=wrong_op")
    found = compared(model, "fake")
    assert found.is_equal
    assert "fake.wrong_op" not in {call.provider for call in found.calls.calls[0]}


def test_wrong_windows_and_tables_are_found_where_they_are(model, monkeypatch, tmp_path):
    monkeypatch.setenv("CARDAN_FAKE", "fault=window_off_by_one fault=stale_block")
    found = compared(model, "fake")
    first = found.calls.first.diff
    assert (first.step, first.path, first.op) == (0, "layers.0.self_attn", "attention")
    layers = {layer_of(call.path) for call in found.calls.faulty if call.step == 0}
    assert layers == {"layers.0", "layers.2"}
    # There is a table to be stale from the second step on, in every layer.
    assert {(call.op, call.step) for call in found.calls.faulty if "rs.1" in call.path} == {
        ("attention", 1)
    }
    # In the first one layer 1 is right by itself, though what comes to it is not.
    steps = [call for call in found.calls.calls[0] if call.step == 0]
    after = [call for call in steps if call.path == "layers.1.self_attn"]
    assert max(call.error.ratio for call in after) < 1 < max(call.propagated for call in after)
    assert "attention in layers.0.self_attn by fake" in verdict(found)

    save_call(found, found.calls.first, tmp_path)
    call = load_call(tmp_path)
    again = replay(call, None)
    assert not again.is_equal
    assert again.error.ratio == pytest.approx(first.error.ratio, rel=0.05)
    assert again.body_error.ok
    assert replay(call, "cpu").is_equal


def test_a_wrong_kernel_is_found_and_replayed(model, monkeypatch, tmp_path):
    monkeypatch.setenv("CARDAN_FAKE", "fault=wrong_op")
    found = compared(model, "fake", unchecked=True)
    first = found.calls.first.diff
    assert (first.path, first.op) == ("layers.0.input_layernorm", "rms_norm")
    assert first.provider == "fake.wrong_op"
    composite = next(call for call in found.calls.faulty if call.op == "fused_add_rms_norm")
    assert composite.faulty_part.provider == "fake.wrong_op"
    save_call(found, found.calls.first, tmp_path)
    again = replay(load_call(tmp_path), "fake")
    assert (again.provider, again.is_equal) == ("fake.wrong_op", False)
    assert again.error.ratio == pytest.approx(first.error.ratio)
    other = replay(load_call(tmp_path), "cpu")
    assert other.is_equal
    assert "saved of fake.wrong_op" in other.note


def drifting(monkeypatch, *wrong):
    """The fake platform with kernels that are off by less than is accepted, but for ``wrong``."""
    monkeypatch.setenv("CARDAN_FAKE", "1")
    served = [item for item in PROVIDERS if item.op not in {other.op for other in wrong}]
    monkeypatch.setattr(FakePlatform, "kernels", lambda self, info: (*served, *wrong))


def test_errors_that_add_up_are_no_wrong_kernel(model, monkeypatch):
    drifting(monkeypatch)
    found = compared(model, "fake", "bfloat16")
    calls = found.calls.calls[0]
    assert {item.name for item in PROVIDERS} <= {call.provider for call in calls}
    assert found.calls.faulty == []
    assert found.calls.first is None
    assert found.drifts
    assert not found.is_equal
    assert max(found.calls.logprob_errors) > 2 * found.logprob_tolerance
    assert "errors add up over the layers" in verdict(found)
    # Where to look: they grow from layer to layer.
    worst = [
        max(call.propagated for call in calls if layer_of(call.path) == f"layers.{layer}")
        for layer in range(3)
    ]
    assert worst[0] < worst[1] < worst[2]


def test_a_wrong_kernel_among_errors_that_add_up(model, monkeypatch):
    drifting(monkeypatch, *providers({"wrong_op"}))
    found = compared(model, "fake", "bfloat16", unchecked=True)
    assert found.drifts
    guilty = {(call.faulty_part or call).provider for call in found.calls.faulty}
    # Attention as well, on keys that the wrong norm made.
    assert guilty == {"fake.wrong_op", "fake"}
    assert found.calls.first.diff.provider == "fake.wrong_op"
    assert "the first call out of tolerance is rms_norm in layers.0.input_" in verdict(found)
    assert "add up" not in verdict(found)


def test_whole_steps_are_compared_by_their_answers(model, monkeypatch, tmp_path):
    make_tiny_model("llama", tmp_path)
    monkeypatch.setenv("CARDAN_FAKE", "tier=executor")
    found = compared(str(tmp_path), "fake")
    assert "runs whole steps itself" in found.calls.note
    assert found.is_equal
    assert not found.calls.calls


def test_attention_truth_is_the_formula():
    generator = torch.Generator().manual_seed(3)
    q = torch.randn(5, 4, 8, generator=generator)
    k, v = (torch.randn(9, 2, 8, generator=generator) for _ in range(2))
    sinks, slopes = torch.randn(4, generator=generator), torch.rand(4, generator=generator)
    for layer in (
        LayerParams(scale=0.3),
        LayerParams(scale=0.3, window=4, softcap=2.0, sinks=sinks, alibi_slopes=slopes),
    ):
        want, _ = attend_row(q, k, v, layer)
        assert torch.allclose(attend(q, k.double(), v.double(), layer), torch.from_numpy(want))


def answer(tokens, logprob=-0.5):
    tables = [TokenLogprobs([token, 9], [logprob, -0.6], [1, 2]) for token in tokens]
    return Answer([1], list(tokens), tables)


def test_answers_are_compared_up_to_the_first_difference():
    same = compare_answers(0, answer([1, 2]), answer([1, 2]))
    assert (same.first, same.logprob_error, same.is_equal(0.0)) == (None, 0.0, True)
    near = compare_answers(0, answer([1, 9, 3]), answer([1, 2, 3]))
    assert (near.first, near.num_tokens) == (1, 3)
    assert near.margin == pytest.approx(0.1)
    assert near.is_equal(0.06)
    assert not near.is_equal(0.04)
    far = compare_answers(0, answer([1, 7]), answer([1, 2]))
    assert far.margin == float("inf")
    short = compare_answers(0, answer([1]), answer([1, 2]))
    assert (short.first, short.is_equal(9.0)) == (1, False)
    off = compare_answers(0, answer([1], -0.7), answer([1]))
    assert off.logprob_error == pytest.approx(0.2)


def test_unlikely_tokens_do_not_count_and_bad_numbers_do():
    reference = torch.tensor([[0.0, -1.0, -40.0]])
    assert logprob_error(torch.tensor([[0.0, -1.0, -30.0]]), reference) < 1e-9
    assert logprob_error(torch.tensor([[0.0, torch.nan, 0.0]]), reference) == float("inf")


def test_request_files(tmp_path):
    path = tmp_path / "requests.jsonl"
    bodies = [
        {"prompt": "a b", "temperature": 1, "max_tokens": 3},
        {"prompt": [4, 5]},
        {"messages": [{"role": "user", "content": "hi"}]},
    ]
    path.write_text("\n\n".join(map(json.dumps, bodies)))
    text, tokens, chat = read_requests(path)
    assert (text.prompt.text, text.max_tokens) == ("a b", 3)
    assert (tokens.prompt.token_ids, tokens.max_tokens) == ([4, 5], None)
    assert chat.prompt.messages[0]["content"] == "hi"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "holds no request"),
        ("{", "line 1: is not JSON"),
        ("[]", "must be an object"),
        ("{}", "needs either prompt or messages"),
        ('{"prompt": []}', "neither may be empty"),
        ('{"prompt": "a", "max_tokens": 0}', "max_tokens is 0"),
    ],
)
def test_request_files_that_are_none(tmp_path, line, message):
    path = tmp_path / "requests.jsonl"
    path.write_text(line)
    with pytest.raises(ConfigError, match=message):
        read_requests(path)


def test_replay_of_nothing(tmp_path):
    with pytest.raises(ConfigError, match="holds no call saved by"):
        load_call(tmp_path)
    (tmp_path / "call.json").write_text('{"format": 99}')
    torch.save({}, tmp_path / "tensors.pt")
    with pytest.raises(ConfigError, match="format 99 is not 1"):
        load_call(tmp_path)
