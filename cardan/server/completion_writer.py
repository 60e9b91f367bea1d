"""Text completions in OpenAI's form."""

from collections.abc import Iterable
from typing import Any

from cardan.core.text.tokenizer import Tokenizer
from cardan.core.types.outputs import CompletionOutput, LogprobTable, RequestOutput
from cardan.server.answer import Chunk
from cardan.server.logprobs import (
    TokenNames,
    completion_logprobs,
    prompt_offsets,
    prompt_tables,
)
from cardan.server.protocol.completions import CompletionRequest


class CompletionWriter:
    """Writes the choices of all prompts: index = prompt * n + sample."""

    chunk_object = "text_completion"
    answer_object = "text_completion"

    def __init__(
        self, request: CompletionRequest, prompt_texts: list[str | None], tokenizer: Tokenizer
    ) -> None:
        """``prompt_texts``: what to echo for each prompt; None: the text of its token ids."""
        self._request = request
        self._prompt_texts = prompt_texts
        self._tokenizer = tokenizer
        self._names = TokenNames(tokenizer, as_ids=request.return_tokens_as_token_ids)
        self._shifts: dict[int, int] = {}  # prompt -> characters that its echo takes

    def chunks(self, prompt_index: int, output: RequestOutput) -> list[Chunk]:
        chunks = []
        if prompt_index not in self._shifts:
            chunks += self._opening(prompt_index, output)
        first = prompt_index * self._request.n
        shift = self._shifts[prompt_index]
        for piece in output.outputs:
            choice = self._choice(piece, shift)
            if choice is not None:
                chunks.append({"choices": [{"index": first + piece.index, **choice}]})
        return chunks

    def fold(self, chunks: Iterable[Chunk]) -> dict[str, Any]:
        choices: dict[int, dict[str, Any]] = {}
        for chunk in chunks:
            for choice in chunk["choices"]:
                index = choice["index"]
                if index in choices:
                    _add(choices[index], choice)
                else:
                    choices[index] = {"index": index, **choice}
        return {"choices": [choices[index] for index in sorted(choices)]}

    def _opening(self, prompt_index: int, output: RequestOutput) -> list[Chunk]:
        """What comes before the first token of each sample: echo and facts of the prompt."""
        request = self._request
        opening: dict[str, Any] = {}
        self._shifts[prompt_index] = 0
        if request.echo:
            text = self._echo(prompt_index, output)
            self._shifts[prompt_index] = len(text)
            opening = {"text": text, "logprobs": self._echo_logprobs(text, output)}
        if request.return_token_ids:
            opening["prompt_token_ids"] = list(output.prompt_token_ids)
        if request.prompt_logprobs is not None:
            opening["prompt_logprobs"] = prompt_tables(output.prompt_logprobs or [], self._names)
        if not opening:
            return []
        empty = {"text": "", "logprobs": None, "finish_reason": None, "stop_reason": None}
        first = prompt_index * request.n
        return [
            {"choices": [{"index": first + sample, **empty, **opening}]}
            for sample in range(request.n)
        ]

    def _echo(self, prompt_index: int, output: RequestOutput) -> str:
        text = self._prompt_texts[prompt_index]
        if text is None:
            text = self._tokenizer.decode(
                output.prompt_token_ids, skip_special_tokens=self._request.skip_special_tokens
            )
        return text

    def _echo_logprobs(self, text: str, output: RequestOutput) -> dict[str, Any] | None:
        num_top = self._request.logprobs
        if num_top is None or output.prompt_logprobs is None:
            return None
        ids = output.prompt_token_ids
        offsets = prompt_offsets(ids, text, self._names)
        return completion_logprobs(ids, output.prompt_logprobs, offsets, num_top, self._names)

    def _choice(self, piece: CompletionOutput, shift: int) -> dict[str, Any] | None:
        request = self._request
        logprobs = None
        if request.logprobs is not None and piece.token_ids:
            tables: list[LogprobTable | None] = [*(piece.logprobs or [])]
            offsets = [shift + offset for offset in piece.text_offsets]
            logprobs = completion_logprobs(
                piece.token_ids, tables, offsets, request.logprobs, self._names
            )
        shows_tokens = request.return_token_ids and bool(piece.token_ids)
        if not (piece.text or logprobs or shows_tokens or piece.finished()):
            return None
        choice: dict[str, Any] = {
            "text": piece.text,
            "logprobs": logprobs,
            "finish_reason": piece.finish_reason,
            "stop_reason": piece.stop_reason,
        }
        if request.return_token_ids:
            choice["token_ids"] = list(piece.token_ids)
        return choice


def _add(total: dict[str, Any], choice: dict[str, Any]) -> None:
    """Append a choice's part to what came before; samples share their echo, so lists are new."""
    total["text"] += choice["text"]
    before, added = total["logprobs"], choice["logprobs"]
    if before is not None and added is not None:
        total["logprobs"] = {name: before[name] + added[name] for name in before}
    else:
        total["logprobs"] = before or added
    for name in ("finish_reason", "stop_reason"):
        total[name] = choice[name]
    if "token_ids" in choice:
        total["token_ids"] = total.get("token_ids", []) + choice["token_ids"]
