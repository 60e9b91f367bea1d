"""Answers on the terminal: one, or a conversation with a history."""

import asyncio
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TextIO

from cardan.cli.console import EXIT_INTERRUPTED, EXIT_OK, print_error, print_note
from cardan.core.types.errors import InputError, RequestFailedError
from cardan.core.types.prompt import ChatPrompt, Prompt, TextPrompt
from cardan.core.types.sampling_params import OutputKind, SamplingParams

if TYPE_CHECKING:
    from cardan.cli.engine_protocol import Engine

HELP = """\
/reset         forget the conversation
/system TEXT   set the system message (without TEXT: remove it) and forget the conversation
/exit          leave (also Ctrl-D)
A line that ends in \\ goes on in the next one. Ctrl-C stops an answer, a second one leaves."""


@dataclass(slots=True)
class Answer:
    """An answer as far as it has come. Times are seconds."""

    text: str = ""
    num_tokens: int = 0
    time_to_first_token: float = 0.0
    seconds: float = 0.0
    is_interrupted: bool = False

    @property
    def summary(self) -> str:
        """Tokens, speed after the first token, and the wait for it."""
        streaming = self.seconds - self.time_to_first_token
        parts = [f"{self.num_tokens} tokens"]
        if self.num_tokens > 1 and streaming > 0:
            parts.append(f"{(self.num_tokens - 1) / streaming:.1f} tok/s")
        if self.num_tokens:
            parts.append(f"first after {self.time_to_first_token:.2f} s")
        return ", ".join(parts) + (" (stopped)" if self.is_interrupted else "")


class Speaker:
    """Streams answers of an engine to a text stream. Borrows the engine and the runner."""

    def __init__(
        self, runner: asyncio.Runner, engine: "Engine", params: SamplingParams, out: TextIO
    ) -> None:
        self._runner = runner
        self._engine = engine
        self._params = params.replace(output_kind=OutputKind.DELTA)
        self._out = out
        self._count = 0

    def answer(self, prompt: Prompt) -> Answer:
        """Generate and write one answer; Ctrl-C ends it early and marks it so."""
        answer = Answer()
        try:
            self._runner.run(self._stream(prompt, answer))
        except KeyboardInterrupt:
            answer.is_interrupted = True
        self._out.write("\n")
        self._out.flush()
        if sys.stderr.isatty():
            print_note(answer.summary)
        return answer

    async def _stream(self, prompt: Prompt, answer: Answer) -> None:
        self._count += 1
        start = time.perf_counter()
        outputs = self._engine.generate(prompt, self._params, request_id=f"run-{self._count}")
        async for output in outputs:
            answer.seconds = time.perf_counter() - start
            if not answer.num_tokens:
                answer.time_to_first_token = answer.seconds
            answer.num_tokens = output.num_output_tokens
            for sequence in output.outputs:
                answer.text += sequence.text
                self._out.write(sequence.text)
            self._out.flush()


class Chat:
    """A conversation: reads lines, keeps the history, knows a few commands.

    ``read_line(prompt)`` gives the next line; it raises ``EOFError`` at the end of the input.
    With ``raw`` there is no history: each text is continued as it is.
    """

    def __init__(
        self, speaker: Speaker, system: str | None, raw: bool, read_line: Callable[[str], str]
    ) -> None:
        self._speaker = speaker
        self._system = system
        self._raw = raw
        self._read_line = read_line
        self._history: list[dict[str, str]] = []

    def talk(self) -> int:
        """Talk until the user leaves; returns the exit code."""
        print_note("/help shows the commands")
        while True:
            try:
                text = self._read_message()
                if text.startswith("/"):
                    if not self._obey(text):
                        return EXIT_OK
                elif text.strip():
                    self._turn(text)
            except EOFError:
                return EXIT_OK
            except KeyboardInterrupt:
                return EXIT_INTERRUPTED

    def _read_message(self) -> str:
        lines = [self._read_line("> ")]
        while lines[-1].endswith("\\"):
            lines[-1] = lines[-1][:-1]
            lines.append(self._read_line("  "))
        return "\n".join(lines)

    def _obey(self, text: str) -> bool:
        """Carry out a command; False: leave."""
        command, _, argument = text.partition(" ")
        match command:
            case "/exit":
                return False
            case "/reset":
                self._history.clear()
                print_note("forgotten")
            case "/system":
                self._system = argument.strip() or None
                self._history.clear()
                print_note("system message set" if self._system else "system message removed")
            case "/help":
                print_note(HELP)
            case _:
                print_note(f"no command {command}; /help shows all, a leading space sends it")
        return True

    def _turn(self, text: str) -> None:
        question = {"role": "user", "content": text}
        try:
            if self._raw:
                self._speaker.answer(TextPrompt(text=text))
                return
            answer = self._speaker.answer(chat_prompt([*self._history, question], self._system))
        except (InputError, RequestFailedError) as error:
            print_error(f"{error} (/reset forgets the conversation)", error)
            return
        self._history += [question, {"role": "assistant", "content": answer.text}]


def chat_prompt(messages: list[dict[str, str]], system: str | None) -> ChatPrompt:
    """A conversation with an optional system message before it."""
    first = [] if system is None else [{"role": "system", "content": system}]
    return ChatPrompt(messages=[*first, *messages])
