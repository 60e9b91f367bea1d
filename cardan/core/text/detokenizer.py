"""Token ids to text, as they arrive."""

import codecs
import itertools
from collections.abc import Sequence
from typing import Protocol

from cardan.core.text.token_bytes import (
    SPM_SPACE,
    DecoderKind,
    byte_level_bytes,
    fallback_byte,
)
from cardan.core.text.tokenizer import Tokenizer

# Visible tokens kept as left context: enough to tell the inside of a text from its start.
_CONTEXT_TOKENS = 8
# Decoders that are known only through the library: tokens that may wait for the rest of a character
# before they are written as they are.
_MAX_WAITING_TOKENS = 8


class _Stream(Protocol):
    """Turns visible token ids into text that is final."""

    def push(self, token_id: int) -> str: ...

    def flush(self) -> str: ...


class Detokenizer:
    """Streams the text of one sequence of output tokens.

    The pushes and the flush together give exactly the text of decoding all output ids at once
    behind the prompt: no space is taken off the start when there is a prompt. Half a character
    waits for its rest; bytes that form none come out as the one-shot decoding has them. For byte
    fallback vocabularies this means that a run of byte tokens waits for its end, since one wrong
    byte turns the whole run into U+FFFD. A character never spans prompt and output.

    The work for a token does not depend on how many came before. Ids above the vocabulary (padded
    logits rows) have no text.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
        prompt_token_ids: Sequence[int] = (),
    ) -> None:
        """Start behind `prompt_token_ids`, of which the last few suffice."""
        self._limit = tokenizer.vocab_size
        self._hidden = tokenizer.special_token_ids if skip_special_tokens else frozenset()
        self._text_length = 0
        visible = (token_id for token_id in reversed(prompt_token_ids) if self._visible(token_id))
        prompt = list(itertools.islice(visible, _CONTEXT_TOKENS))[::-1]
        self._stream: _Stream
        kind = tokenizer.decoder_shape.kind
        if kind is DecoderKind.BYTE_LEVEL:
            self._stream = _ByteLevelStream(tokenizer)
        elif kind is DecoderKind.BYTE_FALLBACK:
            self._stream = _ByteFallbackStream(tokenizer, prompt)
        else:
            self._stream = _WindowStream(tokenizer, prompt, spaces_between_special_tokens)

    @property
    def text_length(self) -> int:
        """Characters given out so far: before a push, the offset of that token's text."""
        return self._text_length

    def push(self, ids: Sequence[int]) -> str:
        """Add output tokens and return the text that became final."""
        text = "".join([self._stream.push(token_id) for token_id in ids if self._visible(token_id)])
        self._text_length += len(text)
        return text

    def flush(self) -> str:
        """End of the sequence: the text of what was waiting."""
        text = self._stream.flush()
        self._text_length += len(text)
        return text

    def _visible(self, token_id: int) -> bool:
        if token_id < 0:
            raise ValueError(f"token id {token_id} is negative")
        return token_id < self._limit and token_id not in self._hidden


class _ByteLevelStream:
    """Byte-level BPE: the text is the UTF-8 of all tokens' bytes in a row."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        return self._decoder.decode(byte_level_bytes(self._tokenizer.token_string(token_id)))

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class _ByteFallbackStream:
    """SentencePiece BPE: words with U+2581 for a space, and runs of byte tokens."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._run = bytearray()
        self._strip_left = tokenizer.decoder_shape.strip_left
        # Spaces are taken off the start of the whole text; characters of the prompt settle it.
        for token_id in prompt:
            if not self._strip_left:
                break
            self.push(token_id)
        if self._run:
            self._strip_left = 0
            self._run.clear()

    def push(self, token_id: int) -> str:
        token = self._tokenizer.token_string(token_id)
        byte = fallback_byte(token)
        if byte is not None:
            self._run.append(byte)
            return ""
        return self._strip(self._end_run() + token.replace(SPM_SPACE, " "))

    def flush(self) -> str:
        return self._strip(self._end_run())

    def _end_run(self) -> str:
        """Text of the byte tokens in a row: all valid, or U+FFFD for each of them."""
        if not self._run:
            return ""
        try:
            text = self._run.decode("utf-8")
        except UnicodeDecodeError:
            text = "\ufffd" * len(self._run)
        self._run.clear()
        return text

    def _strip(self, text: str) -> str:
        if not self._strip_left or not text:
            return text
        spaces = len(text) - len(text.lstrip(" "))
        taken = min(self._strip_left, spaces)
        self._strip_left = self._strip_left - taken if taken == len(text) else 0
        return text[taken:]


class _WindowStream:
    """Any other decoder: decode the new tokens behind the last ones, and take the difference."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], spaces: bool) -> None:
        self._tokenizer = tokenizer
        self._spaces = spaces
        self._context = list(prompt)
        self._context_text = self._decode(self._context)
        self._waiting: list[int] = []

    def push(self, token_id: int) -> str:
        self._waiting.append(token_id)
        text = self._decode(self._context + self._waiting)
        if text.endswith("\ufffd") and len(self._waiting) < _MAX_WAITING_TOKENS:
            return ""
        return self._settle(text)

    def flush(self) -> str:
        return self._settle(self._decode(self._context + self._waiting)) if self._waiting else ""

    def _settle(self, text: str) -> str:
        new = text[len(self._context_text) :]
        # A token without text cannot be the context: what follows it would be first in the text.
        self._context = (self._waiting if new else self._context + self._waiting)[-_CONTEXT_TOKENS:]
        self._context_text = self._decode(self._context)
        self._waiting = []
        return new

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, False, self._spaces)
