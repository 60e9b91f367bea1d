"""The contract of tool parsers, as discovery keeps it."""

import pytest

from cardan.core.discovery import PARSERS, Discovery
from cardan.core.interfaces.errors import PluginError
from cardan.core.interfaces.tool_parsing import ParsedText, ToolParser


class EchoParser(ToolParser):
    name = "echo"
    contract = (1, 0)

    def push(self, text: str) -> ParsedText:
        return ParsedText(text)

    def finish(self) -> ParsedText:
        return ParsedText()


def test_the_smallest_parser():
    parser = EchoParser()
    assert parser.push("some text") == ParsedText("some text", ())
    assert parser.finish() == ParsedText()
    assert not EchoParser.detect("any template")


def test_a_parser_that_states_no_contract_is_refused(site):
    site.install("odd", {PARSERS: {"odd": "odd_parser:Odd"}}, {"odd_parser": "class Odd: ..."})
    with pytest.raises(PluginError, match="states no contract"):
        Discovery().load(PARSERS, "odd")
