"""``cardan run``: one answer, stdin, and conversations, against a scripted engine."""

import asyncio
import io
import os
import signal
import sys
import threading
from types import SimpleNamespace

import pytest

from cardan.cli.chat import Answer, Chat, Speaker, chat_prompt
from cardan.cli.main import main
from cardan.core.observability.logging import reset_logging
from cardan.core.types.errors import EngineDeadError, InputError
from cardan.core.types.outputs import CompletionOutput, RequestOutput
from cardan.core.types.prompt import ChatPrompt, TextPrompt
from cardan.core.types.sampling_params import OutputKind, SamplingParams


@pytest.fixture(autouse=True)
def _clean_logging():
    yield
    reset_logging()


class ScriptedEngine:
    """Answers each prompt with the next script: pieces of text, or an error to raise.

    ``"<interrupt>"`` sends this process an interrupt and waits for it to arrive.
    """

    def __init__(self, *scripts, recommended=0.7):
        given = {} if recommended is None else {"temperature": recommended}
        self.info = SimpleNamespace(generation_config=given)
        self.scripts = list(scripts)
        self.prompts = []
        self.params = []
        self.ids = []
        self.was_cancelled = False
        self.is_closed = False

    def default_sampling_params(self):
        return SamplingParams(**self.info.generation_config)

    async def close(self):
        self.is_closed = True

    async def generate(self, prompt, params, *, request_id, priority=0, cache_salt=None):
        self.prompts.append(prompt)
        self.params.append(params)
        self.ids.append(request_id)
        script = self.scripts.pop(0)
        if isinstance(script, Exception):
            raise script
        for count, piece in enumerate(script, start=1):
            if piece == "<interrupt>":
                os.kill(os.getpid(), signal.SIGINT)
                try:
                    await asyncio.sleep(30)
                except asyncio.CancelledError:
                    self.was_cancelled = True
                    raise
            output = CompletionOutput(index=0, text=piece, token_ids=[count])
            yield RequestOutput(request_id, None, [1], [output], False, num_output_tokens=count)


@pytest.fixture
def run(monkeypatch):
    def call(engine, *arguments):
        async def open_async_engine(config, *, in_process):
            assert in_process is True
            engine.config = config
            return engine

        module = type("Bootstrap", (), {"open_async_engine": staticmethod(open_async_engine)})
        monkeypatch.setitem(sys.modules, "cardan.bootstrap", module)
        return main(["run", "demo", *arguments])

    return call


def test_one_answer(run, capsys):
    engine = ScriptedEngine(["Hel", "lo"])
    arguments = ("-p", "Hi", "--system", "Be brief", "--max-tokens", "9", "--temperature", "0")
    assert run(engine, *arguments, "--top-p", "0.5", "--top-k", "3") == 0
    captured = capsys.readouterr()
    assert captured.out == "Hello\n"
    assert captured.err == ""
    assert engine.is_closed
    assert engine.prompts == [
        ChatPrompt(
            messages=[
                {"role": "system", "content": "Be brief"},
                {"role": "user", "content": "Hi"},
            ]
        )
    ]
    (params,) = engine.params
    assert (params.max_tokens, params.temperature, params.top_p, params.top_k) == (9, 0.0, 0.5, 3)
    assert params.output_kind is OutputKind.DELTA
    assert engine.config.model.model == "demo"


def test_defaults_come_from_the_model(run):
    engine = ScriptedEngine(["x"])
    assert run(engine, "-p", "Hi") == 0
    assert (engine.params[0].temperature, engine.params[0].top_p) == (0.7, 1.0)


def test_a_model_without_a_temperature_gets_a_low_one(run):
    engine = ScriptedEngine(["x"], ["y"], recommended=None)
    assert run(engine, "-p", "Hi") == 0
    assert (engine.params[0].temperature, engine.params[0].top_p) == (0.2, 0.9)
    assert run(engine, "-p", "Hi", "--temperature", "1.5") == 0
    assert engine.params[1].temperature == 1.5


def test_raw_text(run):
    engine = ScriptedEngine(["x"])
    assert run(engine, "-p", "Once upon", "--raw") == 0
    assert engine.prompts == [TextPrompt(text="Once upon")]


def test_stdin_is_the_prompt(run, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.StringIO("two\nlines\n"))
    engine = ScriptedEngine(["x"])
    assert run(engine) == 0
    assert engine.prompts[0].messages == [{"role": "user", "content": "two\nlines"}]


@pytest.mark.parametrize(
    ("arguments", "code", "expected"),
    [
        (("-p", ""), 1, "the prompt is empty"),
        (("-p", "x", "--raw", "--system", "y"), 2, "leave out --raw"),
        (("-p", "x", "--temperature", "9"), 1, "temperature must be in"),
    ],
)
def test_bad_input(run, capsys, arguments, code, expected):
    engine = ScriptedEngine()
    assert run(engine, *arguments) == code
    assert expected in capsys.readouterr().err
    assert engine.prompts == []


def test_the_engine_is_closed_after_an_error(run, capsys):
    engine = ScriptedEngine(EngineDeadError("it died"))
    assert run(engine, "-p", "x") == 1
    assert "error: it died" in capsys.readouterr().err
    assert engine.is_closed


def test_an_interrupt_ends_the_answer_and_the_command(run, capsys):
    engine = ScriptedEngine(["par", "<interrupt>", "never"])
    assert threading.current_thread() is threading.main_thread()
    assert run(engine, "-p", "x") == 130
    assert capsys.readouterr().out == "par\n"
    assert engine.was_cancelled
    assert engine.is_closed


def test_speed_is_shown_on_a_terminal(run, capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("NO_COLOR", "1")
    assert run(ScriptedEngine(["a", "b", "c"]), "-p", "x") == 0
    err = capsys.readouterr().err
    assert err.startswith("3 tokens, ")
    assert "tok/s, first after 0.0" in err


def test_summary():
    assert Answer().summary == "0 tokens"
    answer = Answer("x", 5, time_to_first_token=1.0, seconds=3.0, is_interrupted=True)
    assert answer.summary == "5 tokens, 2.0 tok/s, first after 1.00 s (stopped)"


def talk(engine, *lines, system=None, raw=False):
    """A conversation with typed lines; exceptions among them are raised. Gives (code, output)."""
    typed = list(lines)

    def read_line(prompt):
        if not typed:
            raise EOFError
        line = typed.pop(0)
        if isinstance(line, BaseException):
            raise line
        return line

    out = io.StringIO()
    with asyncio.Runner() as runner:
        speaker = Speaker(runner, engine, SamplingParams(), out)
        code = Chat(speaker, system, raw, read_line).talk()
    return code, out.getvalue()


def contents(prompt):
    return [message["content"] for message in prompt.messages]


def test_a_conversation_has_a_history():
    engine = ScriptedEngine(["one"], ["two"])
    assert talk(engine, "a", "", "b", "/exit", "c", system="S") == (0, "one\ntwo\n")
    assert contents(engine.prompts[1]) == ["S", "a", "one", "b"]
    assert [message["role"] for message in engine.prompts[1].messages] == [
        "system",
        "user",
        "assistant",
        "user",
    ]
    assert engine.ids == ["run-1", "run-2"]


def test_lines_that_go_on():
    engine = ScriptedEngine(["x"])
    talk(engine, "a\\", "b\\", "c")
    assert contents(engine.prompts[0]) == ["a\nb\nc"]


def test_commands(capsys):
    engine = ScriptedEngine(["one"], ["two"], ["three"])
    talk(engine, "a", "/reset", "b", "/system Be kind", "c", "/nonsense", "/help")
    assert contents(engine.prompts[1]) == ["b"]
    assert contents(engine.prompts[2]) == ["Be kind", "c"]
    err = capsys.readouterr().err
    assert "no command /nonsense" in err
    assert "/reset" in err


def test_a_leading_space_sends_a_slash():
    engine = ScriptedEngine(["x"])
    talk(engine, " /etc/passwd?")
    assert contents(engine.prompts[0]) == [" /etc/passwd?"]


def test_a_refused_request_does_not_end_the_conversation(capsys):
    engine = ScriptedEngine(InputError("too long"), ["fine"])
    code, out = talk(engine, "a", "b")
    assert (code, out) == (0, "fine\n")
    assert contents(engine.prompts[1]) == ["b"]
    assert "error: too long" in capsys.readouterr().err


def test_interrupting_an_answer_keeps_the_conversation():
    engine = ScriptedEngine(["par", "<interrupt>"], ["whole"])
    code, out = talk(engine, "a", "b", KeyboardInterrupt())
    assert code == 130
    assert out == "par\nwhole\n"
    assert engine.was_cancelled
    assert contents(engine.prompts[1]) == ["a", "par", "b"]


def test_raw_conversations_have_no_history():
    engine = ScriptedEngine(["x"], ["y"])
    talk(engine, "a", "b", raw=True)
    assert engine.prompts == [TextPrompt(text="a"), TextPrompt(text="b")]


def test_chat_prompt_without_a_system_message():
    assert chat_prompt([{"role": "user", "content": "x"}], None).messages == [
        {"role": "user", "content": "x"}
    ]
