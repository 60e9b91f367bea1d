"""Settings out of range are refused with the field's name."""

import pytest

from cardan import InputError, SamplingParams


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 0),
        ("n", True),
        ("temperature", -0.1),
        ("temperature", 2.1),
        ("temperature", float("nan")),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_k", -2),
        ("min_p", 1.5),
        ("presence_penalty", 2.5),
        ("frequency_penalty", -2.5),
        ("repetition_penalty", 0.0),
        ("seed", 2**63),
        ("stop", ""),
        ("stop", ["a"] * 65),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", list(range(257))),
        ("max_tokens", -1),
        ("max_tokens", 0),
        ("logprobs", -2),
        ("logit_bias", {"x": 1}),
        ("logit_bias", {1: 101}),
        ("allowed_token_ids", []),
        ("truncate_prompt_tokens", 0),
        ("stream_interval", 0),
        ("repetition_penalty", 1e-300),
        ("top_k", 2**63),
        ("stream_interval", 2**70),
        ("truncate_prompt_tokens", 2**70),
    ],
)
def test_out_of_range_names_the_field(field, value):
    with pytest.raises(InputError) as caught:
        SamplingParams(**{field: value})
    assert caught.value.field == field


def test_unknown_name_suggests_the_nearest():
    with pytest.raises(InputError, match="did you mean temperature"):
        SamplingParams.from_dict({"temprature": 1})


def test_relations():
    with pytest.raises(InputError, match="min_tokens"):
        SamplingParams(min_tokens=3, max_tokens=2)
    with pytest.raises(InputError, match="detokenize"):
        SamplingParams(stop="x", detokenize=False)


@pytest.mark.parametrize("params", [{"temperature": 0}, {"top_k": 1}, {"temperature": 1e-6}])
def test_greedy_spellings(params):
    assert SamplingParams(**params).is_greedy
