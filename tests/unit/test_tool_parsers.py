"""The in-tree tool parsers on transcripts in the forms that the models' makers published."""

import json

import pytest

from cardan.core.discovery import PARSERS, Discovery
from cardan.plugins.tool_parsers.hermes import HermesParser
from cardan.plugins.tool_parsers.llama3_json import Llama3JsonParser

PARIS = {"city": "Paris", "unit": "°C", "days": [1, {"a": '}]{"\\'}]}


def call(name, arguments, key="arguments", **dump):
    return json.dumps({"name": name, key: arguments}, **dump)


def tagged(text):
    return f"<tool_call>\n{text}\n</tool_call>"


HERMES = {
    "none": ("Just text, 1 < 2 and <tool> too.  ", "Just text, 1 < 2 and <tool> too.  ", []),
    "one": (tagged(call("get_weather", PARIS)), "", [("get_weather", PARIS)]),
    # Qwen 2.5 and 3 put a line break between calls, and may think aloud before.
    "parallel": (
        f"I look.\n\n{tagged(call('a', {}))}\n{tagged(call('b', PARIS, ensure_ascii=False))}\n",
        "I look.",
        [("a", {}), ("b", PARIS)],
    ),
    "indented": (tagged(call("a", PARIS, indent=2)), "", [("a", PARIS)]),
    "one line": (f"<tool_call>{call('a', {})}</tool_call>", "", [("a", {})]),
    "no arguments": ('<tool_call>{"name": "a"}</tool_call>', "", [("a", {})]),
    "quoted arguments": (tagged(call("a", json.dumps(PARIS))), "", [("a", PARIS)]),
    "text behind": (f"{tagged(call('a', {}))}\n\nDone. ", "Done. ", [("a", {})]),
    "cut": ('Yes <tool_call>{"name": "a"', 'Yes <tool_call>{"name": "a"', []),
    "broken": ("<tool_call>{a}</tool_call> x", "<tool_call>{a}</tool_call> x", []),
    "no name": (f"b {tagged('{}')}", f"b {tagged('{}')}", []),
    "list as arguments": (tagged(call("a", [1])), tagged(call("a", [1])), []),
    "broken, then right": (
        f"x <tool_call>?</tool_call> {tagged(call('a', {}))}",
        "x <tool_call>?</tool_call>",
        [("a", {})],
    ),
}
LLAMA = {
    "none": (" Just {text}; ok ", " Just {text}; ok ", []),
    "one": (call("get_weather", PARIS, "parameters"), "", [("get_weather", PARIS)]),
    "behind the tag": (
        f"<|python_tag|>{call('a', PARIS, 'parameters', ensure_ascii=False)}",
        "",
        [("a", PARIS)],
    ),
    "several": (
        f"\n{call('a', {}, 'parameters')}; {call('b', PARIS, 'parameters')};\n",
        "",
        [("a", {}), ("b", PARIS)],
    ),
    "several lines": (f"{call('a', {})}\n{call('b', {})}", "", [("a", {}), ("b", {})]),
    "text behind": (f"{call('a', {})} Done.", "Done.", [("a", {})]),
    "cut": ('{"name": "a", "parameters": {', '{"name": "a", "parameters": {', []),
    "cut later": (f'{call("a", {})}; {{"na', '{"na', [("a", {})]),
    "other JSON": ('{"answer": 42} and more', '{"answer": 42} and more', []),
    "code": ("<|python_tag|>print({})", "<|python_tag|>print({})", []),
    "half a tag": ("<|pyth", "<|pyth", []),
    "braces that do not fit": ("{]} {", "{]} {", []),
    "nothing": ("", "", []),
}
TRANSCRIPTS = [
    pytest.param(parser, *case, id=f"{parser.name} {name}")
    for parser, cases in ((HermesParser, HERMES), (Llama3JsonParser, LLAMA))
    for name, case in cases.items()
]


def read(parser, text, step):
    told = [parser.push(text[at : at + step]) for at in range(0, len(text), step)]
    told.append(parser.finish())
    calls = {}
    for delta in (delta for part in told for delta in part.calls):
        assert (delta.name is not None) == (delta.index not in calls)
        found = calls.setdefault(delta.index, [delta.name, ""])
        found[1] += delta.arguments
    assert list(calls) == list(range(len(calls)))
    content = "".join(part.content for part in told)
    return content, [(name, json.loads(arguments)) for name, arguments in calls.values()]


@pytest.mark.parametrize(("parser", "text", "content", "calls"), TRANSCRIPTS)
def test_calls_are_found_however_the_text_is_cut(parser, text, content, calls):
    for step in range(1, len(text) + 2):
        assert read(parser(), text, step) == (content, calls), step


@pytest.mark.parametrize("parser", [HermesParser, Llama3JsonParser])
def test_content_is_not_held_back(parser):
    reader = parser()
    assert reader.push("Hello").content == "Hello"
    assert (reader.push(" a").content + reader.push(" b").content).startswith(" a")


@pytest.mark.parametrize("parser", [HermesParser, Llama3JsonParser])
def test_long_calls_and_deep_nonsense(parser):
    name, arguments = "write", {"text": 'x{}"' * 20000}
    assert read(
        parser(),
        tagged(call(name, arguments)) if parser is HermesParser else call(name, arguments),
        7,
    )[1] == [(name, arguments)]
    deep = '{"name": "a", "arguments": ' + '{"a": ' * 100_000
    assert read(parser(), deep, 1000) == (deep, [])
    closed = deep + "1" + "}" * 100_001
    closed = tagged(closed) if parser is HermesParser else closed
    assert read(parser(), closed, 1000) == (closed, [])


def test_templates_are_told_apart():
    qwen = "return JSON within <tool_call></tool_call> XML tags {%- for tool in tools %}"
    llama = 'Respond in the format {"name": function name, "parameters": dictionary of ...}'
    assert HermesParser.detect(qwen)
    assert not HermesParser.detect(llama)
    assert Llama3JsonParser.detect(llama)
    assert not Llama3JsonParser.detect(qwen)


def test_they_are_installed():
    found = Discovery()
    assert {"hermes", "llama3_json"} <= set(found.names(PARSERS))
    assert found.load(PARSERS, "hermes") is HermesParser
