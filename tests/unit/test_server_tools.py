"""Tools in chat completions: what is asked for, and calls in answers, streamed or whole."""

import json
from importlib.metadata import EntryPoint

import openai
import pytest
from server_helpers import FakeEngine, Sample, make_tokenizer, running

from cardan.core.discovery import PARSERS, Discovery
from cardan.core.interfaces.errors import PluginError
from cardan.core.interfaces.tool_parsing import ParsedText, ToolCallDelta, ToolParser
from cardan.plugins.tool_parsers.hermes import HermesParser
from cardan.server.tool_calls import ToolCallReader, ToolUse, add_calls
from cardan.server.tool_format import find_tool_format, load_tool_format

TEMPLATE = (
    "{% if tools %}<tool_call></tool_call>{{ tools | map(attribute='function') "
    "| map(attribute='name') | join(',') }}{% endif %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
)
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}
    for name in ("get_weather", "get_time")
]
FIRST = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich"}}\n</tool_call>'
SECOND = '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'
MESSAGES = [{"role": "user", "content": "Weather?"}]


@pytest.fixture(scope="module")
def shared():
    engine = FakeEngine(tokenizer=make_tokenizer(TEMPLATE))
    with running(engine) as server:
        yield server


@pytest.fixture
def server(shared):
    shared.engine.samples = [Sample.of(f"I look.\n{FIRST}\n{SECOND}")]
    shared.engine.requests.clear()
    return shared


def ask(server, stream=False, **fields):
    """The message and finish reason of each choice; streamed ones folded as clients do."""
    body = {"messages": MESSAGES, "tools": TOOLS, "stream": stream, **fields}
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        answer = client.chat.completions.create(model="tiny", **body)
        if not stream:
            return [
                (
                    choice.message.content,
                    [(c.id, c.function.name, c.function.arguments)
                     for c in choice.message.tool_calls or ()],
                    choice.finish_reason,
                )
                for choice in answer.choices
            ]  # fmt: skip
        found = {}
        for chunk in answer:
            for choice in chunk.choices:
                state = found.setdefault(choice.index, ["", [], None])
                state[0] += choice.delta.content or ""
                for call in choice.delta.tool_calls or ():
                    assert call.index == len(state[1])
                    assert call.type == "function"
                    state[1].append((call.id, call.function.name, call.function.arguments))
                state[2] = choice.finish_reason or state[2]
    return [(content or None, calls, end) for content, calls, end in found.values()]


@pytest.mark.parametrize("stream", [False, True])
def test_calls_are_told(server, stream):
    [(content, calls, end)] = ask(server, stream)
    assert (content, end) == ("I look.", "tool_calls")
    assert [(name, json.loads(arguments)) for _, name, arguments in calls] == [
        ("get_weather", {"city": "Zürich"}),
        ("get_time", {}),
    ]
    ids = [identity for identity, _, _ in calls]
    assert len(set(ids)) == 2
    assert all(identity.startswith("call_") for identity in ids)


@pytest.mark.parametrize("stream", [False, True])
def test_choices_are_read_apart(server, stream):
    server.engine.samples = [Sample.of(FIRST), Sample.of("No tool."), Sample.of(SECOND)]
    answers = ask(server, stream, n=3)
    assert [(content, [name for _, name, _ in calls], end) for content, calls, end in answers] == [
        (None, ["get_weather"], "tool_calls"),
        ("No tool.", [], "stop"),
        (None, ["get_time"], "tool_calls"),
    ]


def test_what_the_length_cuts_is_content(server):
    server.engine.samples = [Sample.of(FIRST[:40], finish_reason="length")]
    assert ask(server) == [(FIRST[:40], [], "length")]


def test_one_call_where_clients_take_one(server):
    [(_, calls, _)] = ask(server, parallel_tool_calls=False)
    assert [name for _, name, _ in calls] == ["get_weather"]


def test_the_model_sees_the_tools_and_the_parser_the_special_tokens(server):
    ask(server)
    [(prompt, params, *_)] = server.engine.requests
    assert list(prompt.tools) == TOOLS
    assert not params.skip_special_tokens


@pytest.mark.parametrize("stream", [False, True])
def test_no_calls_where_none_are_wanted(server, stream):
    [(content, calls, end)] = ask(server, stream, tool_choice="none")
    assert (content, calls, end) == (f"I look.\n{FIRST}\n{SECOND}", [], "stop")
    [(prompt, params, *_)] = server.engine.requests
    assert prompt.tools is None
    assert params.skip_special_tokens


NAMED = {"type": "function", "function": {"name": "get_time"}}


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"tool_choice": "required"}, "tool_choice", "a forced call needs output constraints"),
        ({"tool_choice": NAMED}, "tool_choice", "a forced call needs output constraints"),
        (
            {"tool_choice": {"type": "function", "function": {"name": "g"}}},
            "tool_choice",
            "names 'g', which is none of the tools",
        ),
        ({"tool_choice": "any"}, "tool_choice", "must be 'none', 'auto', 'required'"),
        ({"tool_choice": {"type": "function"}}, "tool_choice", "an object as its function"),
        ({"tools": None, "tool_choice": "auto"}, "tool_choice", "tool_choice needs tools"),
        ({"tools": []}, "tools", "at least 1"),
        ({"tools": [TOOLS[0], TOOLS[0]]}, "tools", "get_weather is there twice"),
        ({"tools": [{"type": "retrieval"}]}, "tools", "of type 'function'"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools", "1 to 64"),
        (
            {"tools": [{"type": "function", "function": {"name": "a", "parameters": []}}]},
            "tools",
            "a JSON schema",
        ),
    ],
)
def test_what_is_refused(server, fields, param, message):
    answer = server.post("/v1/chat/completions", {"messages": MESSAGES, "tools": TOOLS, **fields})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
    assert message in answer.json()["error"]["message"]


def test_a_model_whose_form_is_not_known():
    with running(FakeEngine(), tool_call_parser="none") as server:
        answer = server.post("/v1/chat/completions", {"messages": MESSAGES, "tools": TOOLS})
        assert answer.status_code == 400
        assert "--tool-call-parser" in answer.json()["error"]["message"]


# -- which parser ----------------------------------------------------------------------------------


class Failing(ToolParser):
    name = "a_failing"
    contract = (1, 0)

    @classmethod
    def detect(cls, chat_template):
        raise ValueError("no idea")

    def push(self, text):
        if "!" in text:
            raise ValueError("no exclamations")
        return ParsedText("", (ToolCallDelta(0, "f", text),))

    def finish(self):
        return ParsedText("the end")


def discovery(**targets):
    return Discovery([EntryPoint(name, target, PARSERS) for name, target in targets.items()])


HERMES = "cardan.plugins.tool_parsers.hermes:HermesParser"


def test_the_template_tells_the_parser(caplog):
    installed = discovery(a_failing=f"{__name__}:Failing", b_odd="os:sep", hermes=HERMES)
    assert find_tool_format("auto", TEMPLATE, installed) is HermesParser
    assert "tool parser a_failing is passed over: ValueError: no idea" in caplog.text
    assert "tool parser b_odd is passed over" in caplog.text
    assert find_tool_format("auto", "tools", installed) is None
    assert find_tool_format("auto", "<tool_call></tool_call>", installed) is None
    assert find_tool_format("auto", None, installed) is None
    assert find_tool_format("none", TEMPLATE, installed) is None
    assert find_tool_format("hermes", None, installed) is HermesParser


def test_names_that_are_no_parsers():
    installed = discovery(hermes=HERMES, odd=f"{__name__}:discovery")
    with pytest.raises(PluginError, match="did you mean hermes"):
        load_tool_format("hermess", installed)
    with pytest.raises(PluginError, match="states no contract"):
        load_tool_format("odd", installed)


# -- reading one answer ----------------------------------------------------------------------------


def test_a_parser_that_fails_hurts_no_answer(caplog):
    reader = ToolCallReader(ToolUse(Failing, True, None))
    assert reader.read("{", False)["tool_calls"][0]["function"] == {"name": "f", "arguments": "{"}
    assert reader.read("oh!", False) == {"content": "oh!"}
    assert reader.read(" more", True) == {"content": " more"}
    assert caplog.text.count("tool parser a_failing failed") == 1


class Pieces(ToolParser):
    """Tells a call's arguments in pieces."""

    name = "pieces"
    contract = (1, 0)

    def push(self, text):
        return ParsedText("", (ToolCallDelta(0, "f", ""), ToolCallDelta(0, None, text)))

    def finish(self):
        return ParsedText("", (ToolCallDelta(0, None, "}"), ToolCallDelta(1, "g", "{}")))


def test_calls_in_pieces_add_up():
    reader = ToolCallReader(ToolUse(Pieces, True, None))
    message = {}
    add_calls(message, reader.read('{"a": 1', False)["tool_calls"])
    last = reader.read("", True)["tool_calls"]
    assert last[0] == {"index": 0, "function": {"arguments": "}"}}
    add_calls(message, last)
    assert [call["function"] for call in message["tool_calls"]] == [
        {"name": "f", "arguments": '{"a": 1}'},
        {"name": "g", "arguments": "{}"},
    ]
    assert all(set(call) == {"id", "type", "function"} for call in message["tool_calls"])


def test_special_tokens_do_not_show(server):
    server.engine.samples = [Sample.of(f"Well<|end|>.{FIRST}")]
    [(content, calls, _)] = ask(server)
    assert (content, len(calls)) == ("Well.", 1)


# -- extra arguments -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["extra_args", "vllm_xargs"])
def test_extra_arguments_reach_the_engine(server, name):
    extra = {"size": 3, "words": ["a", "b"], "on": True, "rate": 0.5}
    answer = server.post("/v1/completions", {"prompt": "a", name: extra})
    assert answer.status_code == 200, answer.text
    assert server.engine.requests[0][1].extra_args == extra


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"extra_args": {"a": {"b": 1}}}, "must be a number, a string, a boolean or a list"),
        ({"extra_args": {"a": [None]}}, "must be a number, a string, a boolean or a list"),
        ({"extra_args": {str(i): i for i in range(65)}}, "at most 64 members"),
        ({"extra_args": {"": 1}}, "1 to 128 characters"),
        ({"extra_args": {"a": "x" * 4097}}, "at most 4096 characters"),
        ({"extra_args": {"a": [1] * 1025}}, "at most 1024 items"),
        ({"extra_args": {"a": 2**63}}, "between -2**63"),
        ({"extra_args": {"a": 1}, "vllm_xargs": {"a": 1}}, "either extra_args or vllm_xargs"),
    ],
)
def test_extra_arguments_have_limits(server, fields, message):
    answer = server.post("/v1/completions", {"prompt": "a", **fields})
    assert answer.status_code == 400
    assert message in answer.json()["error"]["message"]
