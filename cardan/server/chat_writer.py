"""Chat completions in OpenAI's form."""

from collections.abc import Iterable
from typing import Any

from cardan.core.text.tokenizer import Tokenizer
from cardan.core.types.outputs import CompletionOutput, RequestOutput
from cardan.server.answer import Chunk
from cardan.server.logprobs import TokenNames, chat_content, prompt_tables
from cardan.server.protocol.chat import ChatCompletionRequest
from cardan.server.tool_calls import ToolCallReader, ToolUse, add_calls

_ONCE = ("prompt_token_ids", "prompt_text", "prompt_logprobs")


class ChatWriter:
    """Writes the choices of one conversation."""

    chunk_object = "chat.completion.chunk"
    answer_object = "chat.completion"

    def __init__(
        self,
        request: ChatCompletionRequest,
        role: str,
        echo: str,
        tokenizer: Tokenizer,
        tools: ToolUse | None = None,
    ) -> None:
        """``echo``: text that each answer begins with, before anything generated."""
        self._request = request
        self._role = role
        self._echo = echo
        self._tokenizer = tokenizer
        self._names = TokenNames(tokenizer, as_ids=request.return_tokens_as_token_ids)
        self._has_started = False
        self._readers = (
            {} if tools is None else {i: ToolCallReader(tools) for i in range(request.n)}
        )

    def chunks(self, prompt_index: int, output: RequestOutput) -> list[Chunk]:
        chunks = []
        if not self._has_started:
            self._has_started = True
            chunks += self._opening(output)
        for piece in output.outputs:
            choice = self._choice(piece)
            if choice is not None:
                chunks.append({"choices": [choice]})
        return chunks

    def fold(self, chunks: Iterable[Chunk]) -> dict[str, Any]:
        choices: dict[int, dict[str, Any]] = {}
        once: dict[str, Any] = {}
        for chunk in chunks:
            once.update((name, chunk[name]) for name in _ONCE if name in chunk)
            for choice in chunk["choices"]:
                index = choice["index"]
                if index not in choices:
                    choices[index] = _empty_choice(index, choice["delta"]["role"])
                _add(choices[index], choice)
        for whole in choices.values():
            if "tool_calls" in whole["message"]:
                # The field's clients tell calls alone by this.
                whole["message"]["content"] = whole["message"]["content"] or None
        return {
            "choices": [choices[index] for index in sorted(choices)],
            "service_tier": None,
            **once,
        }

    def _opening(self, output: RequestOutput) -> list[Chunk]:
        """The role event of each choice, and its echo."""
        role = {"role": self._role, "content": ""}
        chunks: list[Chunk] = [
            {"choices": [_chunk_choice(index, role)]} for index in range(self._request.n)
        ]
        if self._echo:
            chunks += [
                {"choices": [_chunk_choice(index, {"content": self._echo})]}
                for index in range(self._request.n)
            ]
        chunks[0].update(self._prompt_facts(output))
        return chunks

    def _prompt_facts(self, output: RequestOutput) -> dict[str, Any]:
        facts: dict[str, Any] = {}
        if self._request.return_token_ids:
            facts["prompt_token_ids"] = list(output.prompt_token_ids)
        if self._request.return_prompt_text:
            text = output.prompt
            if text is None:
                text = self._tokenizer.decode(output.prompt_token_ids, skip_special_tokens=False)
            facts["prompt_text"] = text
        if self._request.prompt_logprobs is not None:
            facts["prompt_logprobs"] = prompt_tables(output.prompt_logprobs or [], self._names)
        return facts

    def _choice(self, piece: CompletionOutput) -> dict[str, Any] | None:
        request = self._request
        reader = self._readers.get(piece.index)
        if reader is None:
            delta = {"content": piece.text} if piece.text else {}
        else:
            delta = reader.read(piece.text, piece.finished())
        choice = _chunk_choice(piece.index, delta)
        if request.logprobs and piece.token_ids:
            content = chat_content(
                piece.token_ids, piece.logprobs or [], request.top_logprobs, self._names
            )
            choice["logprobs"] = {"content": content}
        if request.return_token_ids and piece.token_ids:
            choice["token_ids"] = list(piece.token_ids)
        if piece.finished():
            called = reader is not None and reader.has_called and piece.finish_reason == "stop"
            choice["finish_reason"] = "tool_calls" if called else piece.finish_reason
            choice["stop_reason"] = piece.stop_reason
        elif not delta and choice["logprobs"] is None and "token_ids" not in choice:
            return None
        return choice


def _chunk_choice(index: int, delta: dict[str, Any]) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}


def _empty_choice(index: int, role: str) -> dict[str, Any]:
    message = {
        "role": role,
        "content": "",
        "refusal": None,
        "annotations": None,
        "audio": None,
        "function_call": None,
        "reasoning": None,
    }
    return {
        "index": index,
        "message": message,
        "logprobs": None,
        "finish_reason": None,
        "stop_reason": None,
    }


def _add(total: dict[str, Any], choice: dict[str, Any]) -> None:
    """Append a chunk's part to what came before."""
    message = total["message"]
    message["content"] += choice["delta"].get("content", "")
    if "tool_calls" in choice["delta"]:
        add_calls(message, choice["delta"]["tool_calls"])
    logprobs = choice["logprobs"]
    if logprobs is not None and total["logprobs"] is None:
        total["logprobs"] = {"content": []}
    if logprobs is not None:
        total["logprobs"]["content"] += logprobs["content"]
    if "token_ids" in choice:
        total["token_ids"] = total.get("token_ids", []) + choice["token_ids"]
    if choice["finish_reason"] is not None:
        total["finish_reason"] = choice["finish_reason"]
        total["stop_reason"] = choice["stop_reason"]
