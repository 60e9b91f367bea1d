"""From a prompt to the token ids and settings that the engine takes."""

import itertools
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any

from cardan.core.sampling.validation import check_token_ids
from cardan.core.text.chat_template import ChatTemplate
from cardan.core.text.errors import TextError
from cardan.core.text.tokenizer import Tokenizer
from cardan.core.types.engine_info import EngineInfo
from cardan.core.types.errors import InputError
from cardan.core.types.prompt import ChatPrompt, Prompt, TextPrompt, TokenPrompt
from cardan.core.types.request import EngineRequest
from cardan.core.types.sampling_params import SamplingParams

# Stand-ins for control strings in user text while a template renders: private-use characters.
_PLACEHOLDER_BASE = 0xF0000
_PLACEHOLDER_LIMIT = 0xFFFFD


class Preprocessor:
    """Renders, tokenizes, checks. Holds no state of requests besides the next free key."""

    def __init__(
        self, tokenizer: Tokenizer, info: EngineInfo, chat_template: str | None = None
    ) -> None:
        self._tokenizer = tokenizer
        self._info = info
        self._eos_token_ids = tuple(sorted(tokenizer.eos_token_ids))
        self._override = chat_template
        self._templates: dict[str, ChatTemplate] = {}
        self._keys = itertools.count(1)
        strings = [tokenizer.token_string(token_id) for token_id in tokenizer.special_token_ids]
        controls = sorted((text for text in strings if text.strip()), key=len, reverse=True)
        self._control_pattern = re.compile("|".join(map(re.escape, controls))) if controls else None

    # -- prompts to ids ------------------------------------------------------------------------

    def encode(self, prompt: Prompt, params: SamplingParams | None = None) -> list[int]:
        """Token ids of ``prompt``, cut as ``params.truncate_prompt_tokens`` asks.

        Raises:
            InputError: no chat template, a template error, an id out of range, an empty prompt.
        """
        match prompt:
            case TextPrompt():
                ids = self._tokenizer.encode(prompt.text, prompt.add_special_tokens)
            case TokenPrompt():
                ids = self._checked_ids(prompt.token_ids)
            case ChatPrompt():
                ids = self._encode_chat(prompt)
        limit = params.truncate_prompt_tokens if params else None
        if limit is not None:
            ids = ids[-(self._info.max_model_len - 1 if limit == -1 else limit) :]
        if not ids:
            raise InputError("the prompt holds no tokens", "prompt")
        return ids

    def _checked_ids(self, token_ids: Sequence[int]) -> list[int]:
        """A list of the ids, each an integer of the vocabulary."""
        size = self._info.vocab_size
        # Of long prompts this is half of the time that the loop takes, which finds the first fault.
        is_right = set(map(type, token_ids)) == {int}
        if is_right and min(token_ids) >= 0 and max(token_ids) < size:
            return list(token_ids)
        for token_id in token_ids:
            if isinstance(token_id, bool) or not isinstance(token_id, int):
                raise InputError(f"token id {token_id!r} is not an integer", "prompt")
            if not 0 <= token_id < size:
                raise InputError(
                    f"token id {token_id} is out of range: the vocabulary has {size} ids", "prompt"
                )
        return list(token_ids)

    def render(self, prompt: ChatPrompt) -> str:
        """The text that the chat template makes of a conversation."""
        return self._render(prompt, prompt.messages)

    def _render(self, prompt: ChatPrompt, messages: Sequence[Mapping[str, Any]]) -> str:
        if not messages:
            raise InputError("messages must not be empty", "messages")
        if prompt.continue_final_message and prompt.add_generation_prompt:
            raise InputError(
                "continue_final_message and add_generation_prompt exclude each other",
                "continue_final_message",
            )
        return self._template(prompt).render(
            messages,
            tools=prompt.tools,
            documents=prompt.documents,
            add_generation_prompt=prompt.add_generation_prompt,
            continue_final_message=prompt.continue_final_message,
            **prompt.template_kwargs,
        )

    def _template(self, prompt: ChatPrompt) -> ChatTemplate:
        templates = self._tokenizer.chat_templates
        source = prompt.chat_template or self._override
        if source is None and prompt.tools and "tool_use" in templates:
            source = templates["tool_use"]
        source = source or self._tokenizer.chat_template
        if source is None:
            raise InputError(
                "this model has no chat template; use /v1/completions, or start with "
                "--chat-template FILE",
                "messages",
            )
        if source not in self._templates:
            if len(self._templates) >= 32:
                self._templates.clear()
            self._templates[source] = ChatTemplate(source, self._tokenizer.special_tokens)
        return self._templates[source]

    def _encode_chat(self, prompt: ChatPrompt) -> list[int]:
        """Ids equal to the template's text tokenized whole, unless a message holds control strings.

        Such a string is what the user typed, not a control token; it is tokenized as plain text.
        """
        found: list[str] = []
        messages = [self._masked(message, found) for message in prompt.messages]
        if not found:
            text = self._render(prompt, prompt.messages)
            return self._tokenizer.encode(text, prompt.add_special_tokens)
        text = self._render(prompt, messages)
        ids: list[int] = []
        for place, piece in enumerate(_split_placeholders(text)):
            if isinstance(piece, str):
                add_special = prompt.add_special_tokens and place == 0
                ids += self._tokenizer.encode(piece, add_special) if piece or add_special else []
            else:
                ids += self._tokenizer.encode(found[piece], False, allow_special=False)
        return ids

    def _masked(self, value: Any, found: list[str]) -> Any:
        """A copy of a message with control strings in its texts replaced by placeholders."""
        if isinstance(value, str):
            return self._mask_text(value, found)
        if isinstance(value, Mapping):
            return {
                key: item if key == "role" else self._masked(item, found)
                for key, item in value.items()
            }
        if isinstance(value, list | tuple):
            return [self._masked(item, found) for item in value]
        return value

    def _mask_text(self, text: str, found: list[str]) -> str:
        if self._control_pattern is None:
            return text

        def replace(match: re.Match[str]) -> str:
            if _PLACEHOLDER_BASE + len(found) > _PLACEHOLDER_LIMIT:
                raise TextError("the messages hold too many control strings; remove them")
            found.append(match.group())
            return chr(_PLACEHOLDER_BASE + len(found) - 1)

        if any(_PLACEHOLDER_BASE <= ord(char) <= _PLACEHOLDER_LIMIT for char in text):
            return text
        return self._control_pattern.sub(replace, text)

    # -- requests ------------------------------------------------------------------------------

    def to_request(
        self,
        token_ids: list[int],
        params: SamplingParams,
        *,
        request_id: str,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> EngineRequest:
        """A checked request with fresh keys.

        Raises:
            InputError: the prompt leaves no room, or a setting does not fit this model.
        """
        bad_words = self._bad_words(params)
        check_token_ids(params, self._info.vocab_size, bad_words)
        self._check_logprobs(params)
        key = next(self._keys)
        for _ in range(params.n - 1):
            next(self._keys)
        return EngineRequest(
            key=key,
            request_id=request_id,
            prompt_token_ids=token_ids,
            params=params,
            max_tokens=self._max_tokens(len(token_ids), params),
            arrival_time=time.monotonic(),
            eos_token_ids=self._eos_token_ids,
            bad_words_token_ids=bad_words,
            priority=priority,
            cache_salt=cache_salt,
        )

    def _max_tokens(self, num_prompt: int, params: SamplingParams) -> int:
        limit = self._info.max_model_len
        wanted = params.max_tokens
        if num_prompt > limit or (num_prompt == limit and wanted != 0):
            raise InputError(
                f"the prompt has {num_prompt} tokens; the context holds {limit} tokens of prompt "
                "and answer together. Shorten the prompt or set truncate_prompt_tokens",
                "prompt",
            )
        if wanted is None:
            wanted = limit - num_prompt
            if params.min_tokens > wanted:
                raise InputError(
                    f"min_tokens ({params.min_tokens}) is more than the {wanted} tokens that the "
                    f"context of {limit} leaves after {num_prompt} prompt tokens",
                    "min_tokens",
                )
        if num_prompt + wanted > limit:
            raise InputError(
                f"max_tokens is {wanted} and the prompt has {num_prompt} tokens, together "
                f"{num_prompt + wanted}; the context holds {limit}. Set max_tokens to "
                f"{limit - num_prompt} or less",
                "max_tokens",
            )
        return wanted

    def _check_logprobs(self, params: SamplingParams) -> None:
        limit = self._info.max_logprobs
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(params, name)
            if value is not None and limit != -1 and (value > limit or value == -1):
                raise InputError(
                    f"{name} is {value}, this server allows at most {limit} (--max-logprobs)", name
                )

    def _bad_words(self, params: SamplingParams) -> tuple[tuple[int, ...], ...]:
        """Each word at the start of a text and after a space, as tokens."""
        words: dict[tuple[int, ...], None] = {}
        for word in params.bad_words:
            for text in (word, " " + word.lstrip()):
                ids = tuple(self._tokenizer.encode(text, False))
                if ids:
                    words[ids] = None
        return tuple(words)


def _split_placeholders(text: str) -> list[str | int]:
    """Alternating plain pieces and numbers of placeholders."""
    pieces: list[str | int] = []
    start = 0
    for place, char in enumerate(text):
        if _PLACEHOLDER_BASE <= ord(char) <= _PLACEHOLDER_LIMIT:
            pieces += [text[start:place], ord(char) - _PLACEHOLDER_BASE]
            start = place + 1
    return [*pieces, text[start:]]
