"""Prompts of benchmarks: lengths, sharing, repeatability, files."""

import hashlib
import json
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cardan.bench.arrivals import Arrivals
from cardan.bench.prompts import BenchRequest, request_body
from cardan.bench.serve_options import ServeOptions
from cardan.bench.sharegpt import count_words, read_custom, read_sharegpt
from cardan.bench.synthetic import SyntheticOptions, make_requests, make_text_requests
from cardan.bench.workload import make_workload
from cardan.bootstrap.model_source import read_model, read_tokenizer
from cardan.core.config.model import ModelConfig
from cardan.core.types.errors import ConfigError


def options(**more):
    return SyntheticOptions(**{"count": 8, "input_len": 20, "output_len": 10, **more})


class PairTokenizer:
    """Two letters are one token, and one token goes before a text."""

    def encode(self, text):
        return [0, *(text[begin : begin + 2] for begin in range(0, len(text), 2))]


class TestRandomIds:
    def test_lengths_are_exact(self):
        requests = make_requests(options())
        assert {len(request.token_ids) for request in requests} == {20}
        assert {request.prompt_len for request in requests} == {20}
        assert {request.max_tokens for request in requests} == {10}

    def test_lengths_are_spread_over_their_range(self):
        requests = make_requests(options(count=2000, range_ratio=0.5))
        lengths = Counter(len(request.token_ids) for request in requests)
        assert set(lengths) == set(range(10, 31))
        assert set(request.max_tokens for request in requests) == set(range(5, 16))
        assert max(lengths.values()) < 2 * min(lengths.values())

    def test_default_ids_are_in_every_common_vocabulary(self):
        ids = [i for request in make_requests(options(count=50)) for i in request.token_ids]
        assert 1000 <= min(ids) <= max(ids) < 30000

    @pytest.mark.parametrize("vocab_size", [2, 7, 500, 49152])
    def test_ids_are_below_the_vocabulary_size(self, vocab_size):
        requests = make_requests(options(count=50), vocab_size)
        assert max(i for request in requests for i in request.token_ids) < vocab_size

    def test_prefixes_are_shared_in_turn(self):
        requests = make_requests(options(prefix_len=6, num_prefixes=3))
        prefixes = [request.token_ids[:6] for request in requests]
        assert {len(request.token_ids) for request in requests} == {26}
        assert len(set(prefixes)) == 3
        assert all(prefixes[index] == prefixes[index % 3] for index in range(8))
        assert len({request.token_ids[6:] for request in requests}) == 8

    def test_a_seed_always_gives_the_same_bytes(self):
        bodies = [request_body(r, "completions") for r in make_requests(options(range_ratio=0.3))]
        again = [request_body(r, "completions") for r in make_requests(options(range_ratio=0.3))]
        assert bodies == again
        assert hashlib.sha256(b"".join(bodies)).hexdigest()[:16] == "da5cfe24764500af"

    def test_other_seeds_give_other_prompts_and_counts_do_not_matter(self):
        assert make_requests(options(count=3)) == make_requests(options(count=8))[:3]
        assert make_requests(options(seed=1))[0] != make_requests(options())[0]

    @pytest.mark.parametrize(
        ("more", "message"),
        [
            ({"count": 0}, "count is 0"),
            ({"input_len": 0}, "input_len is 0"),
            ({"output_len": 0}, "output_len is 0"),
            ({"num_prefixes": 0}, "num_prefixes is 0"),
            ({"prefix_len": -1}, "prefix_len is -1"),
            ({"range_ratio": 1.0}, "range_ratio is 1.0"),
            ({"range_ratio": -0.1}, "range_ratio is -0.1"),
        ],
    )
    def test_impossible_lengths_name_the_setting(self, more, message):
        with pytest.raises(ConfigError, match=message):
            make_requests(options(**more))

    def test_a_vocabulary_of_one_is_refused(self):
        with pytest.raises(ConfigError, match="vocab_size is 1"):
            make_requests(options(), 1)


class TestRandomText:
    def test_a_word_stands_for_a_token_without_a_tokenizer(self):
        requests = make_text_requests(options(prefix_len=5))
        assert {len(request.text.split()) for request in requests} == {25}
        assert {request.prompt_len for request in requests} == {None}
        assert len({tuple(request.text.split()[:5]) for request in requests}) == 1
        assert requests == make_text_requests(options(prefix_len=5))

    @given(input_len=st.integers(10, 200), seed=st.integers(0, 1000))
    def test_any_tokenizer_is_met_exactly(self, input_len, seed):
        tokenizer = PairTokenizer()
        load = options(count=1, input_len=input_len, seed=seed)
        [request] = make_text_requests(load, tokenizer)
        assert len(tokenizer.encode(request.text)) == request.prompt_len == input_len

    def test_what_no_text_can_have_is_refused(self):
        with pytest.raises(ConfigError, match="no text of 1 tokens could be made"):
            make_text_requests(options(input_len=1), PairTokenizer())

    @pytest.mark.model
    def test_exact_with_the_demo_tokenizer(self):
        config = ModelConfig(model="demo")
        tokenizer = read_tokenizer(config, read_model(config))
        load = ServeOptions(
            model="demo", prompt_kind="text", num_prompts=6, range_ratio=0.5, prefix_len=10
        )
        found = make_workload(load, "demo")
        assert found.notes == []
        for request in found.requests:
            assert len(tokenizer.encode(request.text)) == request.prompt_len
        assert all(266 <= request.prompt_len <= 778 for request in found.requests)


class TestBody:
    def test_completions(self):
        request = BenchRequest(token_ids=(1, 2), max_tokens=3, extra_body={"seed": 5})
        body = json.loads(request_body(request, "completions", {"model": "m", "seed": 1}))
        assert body == {
            "model": "m",
            "prompt": [1, 2],
            "max_tokens": 3,
            "seed": 5,
            "stream": True,
            "stream_options": {"include_usage": True},
        }

    def test_chat_wraps_a_text_and_keeps_messages(self):
        body = json.loads(request_body(BenchRequest(text="hi", max_tokens=1), "chat"))
        assert body["messages"] == [{"role": "user", "content": "hi"}]
        messages = ({"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"})
        body = json.loads(request_body(BenchRequest(messages=messages, max_tokens=1), "chat"))
        assert body["messages"] == list(messages)

    def test_what_an_endpoint_cannot_take(self):
        with pytest.raises(ConfigError, match="chat takes no token ids"):
            request_body(BenchRequest(token_ids=(1,), max_tokens=1), "chat")
        with pytest.raises(ConfigError, match="completions takes no messages"):
            request_body(BenchRequest(messages=({"role": "user"},), max_tokens=1), "completions")


def write(tmp_path, content):
    path = tmp_path / "data"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def conversation(*turns):
    return {"conversations": [{"from": who, "value": text} for who, text in turns]}


class TestShareGPT:
    def test_first_questions_with_the_length_of_their_answers(self, tmp_path):
        path = write(
            tmp_path,
            [
                conversation(("human", "one?"), ("gpt", "a b c d e f"), ("human", "more?")),
                conversation(("gpt", "unasked"), ("human", "two?")),
                conversation(("human", "alone?")),
                conversation(("human", " "), ("gpt", "answer")),
                conversation(("user", "three?"), ("gpt", "a b c")),
            ],
        )
        found = {r.text: r.max_tokens for r in read_sharegpt(path, 0, lambda text: len(text))}
        assert found == {"one?": 11, "three?": 5}
        assert {r.max_tokens for r in read_sharegpt(path, 0)} == {8, 4}
        assert {r.max_tokens for r in read_sharegpt(path, 0, output_len=9)} == {9}

    def test_the_order_depends_on_the_seed_alone(self, tmp_path):
        pairs = [conversation(("human", f"{i}?"), ("gpt", "yes")) for i in range(30)]
        path = write(tmp_path, pairs)
        orders = [[r.text for r in read_sharegpt(path, seed)] for seed in (0, 0, 1)]
        assert orders[0] == orders[1] != orders[2]
        assert sorted(orders[0]) == sorted(orders[2])

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            ("[{", "no valid JSON"),
            ({"conversations": []}, "holds no JSON array; for JSON lines use custom"),
            ([conversation(("human", "a"), ("gpt", "b")), {"text": "x"}], "entry 1: has no list"),
            ([{"conversations": [{"from": "human"}]}], "entry 0: a turn needs"),
            ([conversation(("gpt", "a"))], "no conversation has a question and an answer"),
        ],
    )
    def test_bad_files_name_the_place(self, tmp_path, content, message):
        with pytest.raises(ConfigError, match=message):
            read_sharegpt(write(tmp_path, content), 0)

    def test_words_are_three_quarters_of_the_tokens(self):
        assert count_words("a b c d e f") == 8
        assert count_words("") == 1


class TestCustom:
    def test_all_forms(self, tmp_path):
        lines = [
            {"prompt": "hello", "max_tokens": 4},
            {"prompt": [1, 2, 3], "output_len": 5},
            {"messages": [{"role": "user", "content": "hi"}], "extra_body": {"seed": 1}},
        ]
        path = write(tmp_path, "\n\n".join(map(json.dumps, lines)))
        first, second, third = read_custom(path, output_len=7)
        assert (first.text, first.max_tokens) == ("hello", 4)
        assert (second.token_ids, second.prompt_len, second.max_tokens) == ((1, 2, 3), 3, 5)
        assert third.messages == ({"role": "user", "content": "hi"},)
        assert (third.max_tokens, third.extra_body) == (7, {"seed": 1})

    @pytest.mark.parametrize(
        ("line", "message"),
        [
            ("{", "line 2: no valid JSON"),
            ("[]", "line 2: must be a JSON object"),
            ('{"prompt": "a"}', "line 2: names no max_tokens; add it, or give --output-len"),
            ('{"max_tokens": 1}', "line 2: needs either prompt or messages"),
            ('{"prompt": "a", "messages": [], "max_tokens": 1}', "either prompt or messages"),
            ('{"prompt": "", "max_tokens": 1}', "line 2: prompt must be"),
            ('{"prompt": ["a"], "max_tokens": 1}', "line 2: prompt must be"),
            ('{"prompt": [true], "max_tokens": 1}', "line 2: prompt must be"),
            ('{"messages": ["a"], "max_tokens": 1}', "line 2: messages must be"),
            ('{"prompt": "a", "max_tokens": 0}', "line 2: max_tokens is 0"),
            ('{"prompt": "a", "max_tokens": true}', "line 2: max_tokens is True"),
            ('{"prompt": "a", "max_tokens": 1, "output_len": 1}', "line 2: .* not both"),
            ('{"prompt": "a", "max_tokens": 1, "extra_body": 1}', "line 2: extra_body"),
            ('{"prompt": "a", "max_tokens": 1, "temp": 1}', "line 2: unknown field temp"),
        ],
    )
    def test_bad_lines_are_named(self, tmp_path, line, message):
        path = write(tmp_path, f'{{"prompt": "fine", "max_tokens": 1}}\n{line}\n')
        with pytest.raises(ConfigError, match=message):
            read_custom(path)

    def test_missing_and_empty_files(self, tmp_path):
        with pytest.raises(ConfigError, match=r"dataset .*gone"):
            read_custom(tmp_path / "gone")
        with pytest.raises(ConfigError, match="holds no requests"):
            read_custom(write(tmp_path, "\n"))


class TestWorkload:
    def test_the_warmup_shares_nothing_with_the_run(self):
        load = ServeOptions(num_prompts=5, warmup=3, prefix_len=4)
        found = make_workload(load, "some")
        assert len(found.requests) == 5
        assert len(found.warmup) == 3
        prompts = {request.token_ids[:4] for request in found.requests}
        assert prompts.isdisjoint(request.token_ids[:4] for request in found.warmup)

    def test_a_small_dataset_repeats_and_says_so(self, tmp_path):
        path = write(tmp_path, '{"prompt": "a", "max_tokens": 1}\n{"prompt": "b", "max_tokens": 1}')
        load = ServeOptions(dataset="custom", dataset_path=path, num_prompts=5)
        found = make_workload(load, "some")
        assert [request.text for request in found.requests] == ["a", "b", "a", "b", "a"]
        assert "has 2 requests for 5" in found.notes[0]

    def test_words_without_a_tokenizer_are_noted(self):
        [note] = make_workload(ServeOptions(endpoint="chat"), "org/not-here").notes
        assert "approximate" in note

    def test_a_trace_limits_the_requests(self, tmp_path):
        load = ServeOptions(trace=write(tmp_path, "3\n1\n2\n"))
        found = make_workload(load, "some")
        assert len(found.requests) == 3
        assert found.due_times == [0.0, 1.0, 2.0]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"max_concurrency": 0}, "max_concurrency is 0"),
        ({"warmup": -1}, "warmup is -1"),
        ({"duration": 0.0}, "duration is 0"),
        ({"timeout": float("inf")}, "timeout is inf"),
        ({"temperature": -1.0}, "temperature is -1"),
        ({"dataset": "custom"}, "dataset_path: custom needs a file"),
        ({"dataset_path": "x"}, "dataset_path: random needs no file"),
        ({"save_text": True}, "save_text"),
        ({"endpoint": "chat", "prompt_kind": "ids"}, "prompt_kind: chat takes no token ids"),
        ({"goodput": ("ttft",)}, "goodput"),
        ({"percentiles": (101.0,)}, "percentiles"),
        ({"num_prompts": 0}, "num_prompts is 0"),
    ],
)
def test_options_that_cannot_be(more, message):
    with pytest.raises(ConfigError, match=message):
        ServeOptions(**more).check()


def test_the_config_names_what_had_an_effect():
    def load(**more):
        values = ServeOptions(api_key="sk-1", headers={"a": "b"}, **more).config()["load"]
        return {name: value for name, value in values.items() if value is not None}

    assert load()["request_rate"] == "inf"
    assert "request_rate" not in load(max_concurrency=2)
    steady = load(arrivals=Arrivals(rate=2.0, pattern="constant"))
    assert (steady["request_rate"], steady["arrivals"]) == (2.0, "constant")
    assert not {"burstiness", "burst_size", "ramp_seconds", "extra_body"} & set(steady)
    ramp = load(arrivals=Arrivals(rate=2.0, ramp_to=5.0), extra_body={"top_k": 3})
    assert (ramp["burstiness"], ramp["ramp_to"], ramp["ramp_seconds"]) == (1.0, 5.0, 60.0)
    assert ramp["extra_body"] == {"top_k": 3}
    assert not {"api_key", "headers", "base_url", "model", "label"} & set(ramp)
    assert load(trace=Path("/some/where/trace.txt"))["trace"] == "trace.txt"
