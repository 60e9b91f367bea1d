"""Log formats and phases."""

import io
import json
import logging
import re

import pytest

from cardan.core.observability.logging import configure_logging, is_debugging, reset_logging
from cardan.core.observability.timing import Phases
from cardan.core.types.errors import ConfigError

logger = logging.getLogger("cardan.test")


@pytest.fixture(autouse=True)
def _clean_logging():
    yield
    reset_logging()


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_json_lines_carry_the_request_id_and_the_error():
    stream = io.StringIO()
    configure_logging("info", "json", stream)
    logger.info("two %s", "words\nand a line", extra={"request_id": "r-1"})
    try:
        raise ValueError("oh")
    except ValueError:
        logger.exception("failed")
    first, second = map(json.loads, stream.getvalue().splitlines())
    assert first["message"] == "two words\nand a line"
    assert first["request_id"] == "r-1"
    assert first["level"] == "info"
    assert first["logger"] == "cardan.test"
    assert "ValueError: oh" in second["error"]
    assert "request_id" not in second


def test_plain_lines():
    stream = io.StringIO()
    configure_logging("info", "auto", stream)
    logger.info("hello", extra={"request_id": "r-2"})
    logger.debug("unseen")
    (line,) = stream.getvalue().splitlines()
    assert line.endswith("Z INFO cardan.test: hello [r-2]")


def test_rich_on_a_terminal_does_not_read_markup():
    stream = Terminal()
    configure_logging("warning", "auto", stream)
    logger.warning("a [red]word[/red]", extra={"request_id": "r-3"})
    text = re.sub(r"\x1b\[[0-9;]*m", "", stream.getvalue())
    assert "a [red]word[/red] [r-3]" in text


def test_a_second_call_replaces_the_first():
    first, second = io.StringIO(), io.StringIO()
    configure_logging("debug", "plain", first)
    assert is_debugging()
    configure_logging("error", "plain", second)
    assert not is_debugging()
    logger.error("once")
    assert first.getvalue() == ""
    assert second.getvalue().count("once") == 1


def test_reset_gives_records_back_to_the_application(caplog):
    configure_logging("error", "plain", io.StringIO())
    reset_logging()
    with caplog.at_level(logging.INFO):
        logger.info("for the application")
    assert "for the application" in caplog.text


@pytest.mark.parametrize(("level", "form"), [("loud", "auto"), ("info", "xml")])
def test_unknown_level_or_format(level, form):
    with pytest.raises(ConfigError, match="is none of"):
        configure_logging(level, form)


def test_phases_add_up_also_when_they_raise():
    now = iter([0.0, 1.0, 3.0, 3.0, 10.0, 12.0, 20.0, 20.0]).__next__
    phases = Phases(clock=now)
    with phases.phase("load"):
        pass
    with pytest.raises(KeyError), phases.phase("warm up"):
        raise KeyError
    with phases.phase("load"):
        pass
    phases.add("probe", 0.5)
    assert phases.seconds == {"load": 10.0, "warm up": 7.0, "probe": 0.5}
    assert str(phases) == "20.00 s (load 10.00 s, warm up 7.00 s, probe 0.50 s)"


def test_no_phases():
    assert str(Phases(clock=lambda: 1.0)) == "0.00 s"
