"""Log-probabilities in the shapes of the two completion APIs."""

from collections.abc import Sequence
from typing import Any

from cardan.core.text.tokenizer import Tokenizer
from cardan.core.types.outputs import LogprobTable

# Stands for minus infinity and NaN, which JSON cannot say.
MIN_LOGPROB = -9999.0


def finite(logprob: float) -> float:
    return logprob if logprob > MIN_LOGPROB else MIN_LOGPROB  # NaN fails the comparison


class TokenNames:
    """How tokens are shown: as text, or as ``token_id:N`` when the client wants exact ids."""

    def __init__(self, tokenizer: Tokenizer, *, as_ids: bool = False) -> None:
        self._tokenizer = tokenizer
        self._as_ids = as_ids

    def name(self, token_id: int) -> str:
        # A model may have more logits than its tokenizer has tokens.
        if self._as_ids or token_id >= self._tokenizer.vocab_size:
            return f"token_id:{token_id}"
        return self._tokenizer.token_text(token_id)

    def data(self, token_id: int) -> bytes:
        """UTF-8 bytes of the token, perhaps a part of a character."""
        if token_id >= self._tokenizer.vocab_size:
            return b""
        return self._tokenizer.token_bytes(token_id)


def chat_content(
    token_ids: Sequence[int], tables: Sequence[LogprobTable], num_top: int, names: TokenNames
) -> list[dict[str, Any]]:
    """Entries of ``choices[].logprobs.content``; ``num_top`` of -1 shows whole tables."""
    content = []
    for token_id, table in zip(token_ids, tables, strict=True):
        entry = _chat_entry(token_id, table, names)
        entry["top_logprobs"] = [
            _chat_entry(other, table, names) for other in _likeliest(table, num_top)
        ]
        content.append(entry)
    return content


def completion_logprobs(
    token_ids: Sequence[int],
    tables: Sequence[LogprobTable | None],
    text_offsets: Sequence[int],
    num_top: int,
    names: TokenNames,
) -> dict[str, Any]:
    """``choices[].logprobs`` of text completions: parallel lists, one entry a token.

    A position without a table (the first of a prompt) has nulls.
    """
    values: list[float | None] = []
    tops: list[dict[str, float] | None] = []
    for token_id, table in zip(token_ids, tables, strict=True):
        if table is None:
            values.append(None)
            tops.append(None)
            continue
        values.append(finite(table[token_id].logprob))
        shown = _likeliest(table, num_top)
        if token_id not in shown:
            shown.append(token_id)
        top: dict[str, float] = {}
        for other in shown:  # of tokens that look the same, the likelier one is kept
            top.setdefault(names.name(other), finite(table[other].logprob))
        tops.append(top)
    return {
        "tokens": [names.name(token_id) for token_id in token_ids],
        "token_logprobs": values,
        "top_logprobs": tops,
        "text_offset": list(text_offsets),
    }


def prompt_tables(
    tables: Sequence[LogprobTable | None], names: TokenNames
) -> list[dict[str, Any] | None]:
    """``prompt_logprobs``: one mapping from token id to entry a position, the first null."""
    return [None if table is None else _prompt_table(table, names) for table in tables]


def prompt_offsets(token_ids: Sequence[int], text: str, names: TokenNames) -> list[int]:
    """Where each prompt token begins in ``text``, characters.

    Tokens are matched with the text from the left; one that the text does not show (a begin
    token) takes no room, and where the tokenizer rewrote the text the offsets are approximate.
    """
    data = text.encode()
    offsets = []
    position = 0
    num_chars = 0  # characters that end at or before position
    for token_id in token_ids:
        offsets.append(num_chars)
        end = _match(data, position, names.data(token_id))
        num_chars += _chars_ended(data, position, end)
        position = end
    return offsets


def _match(data: bytes, position: int, token: bytes) -> int:
    """End of ``token`` in ``data`` at ``position``; tokenizers may add a space at the start."""
    if data.startswith(token, position):
        return position + len(token)
    if position > 0:
        return min(position + len(token), len(data))
    stripped = token.lstrip(b" ")
    return len(stripped) if data.startswith(stripped) else 0


def _chars_ended(data: bytes, start: int, end: int) -> int:
    """Characters whose last byte lies in ``data[start:end]``."""
    return sum(
        1 for index in range(start, end) if index + 1 == len(data) or data[index + 1] & 0xC0 != 0x80
    )


def _likeliest(table: LogprobTable, num_top: int) -> list[int]:
    order = sorted(table, key=lambda token_id: -finite(table[token_id].logprob))
    return order if num_top < 0 else order[:num_top]


def _chat_entry(token_id: int, table: LogprobTable, names: TokenNames) -> dict[str, Any]:
    return {
        "token": names.name(token_id),
        "logprob": finite(table[token_id].logprob),
        "bytes": list(names.data(token_id)),
    }


def _prompt_table(table: LogprobTable, names: TokenNames) -> dict[str, Any]:
    return {
        str(token_id): {
            "logprob": finite(entry.logprob),
            "rank": entry.rank,
            "decoded_token": names.name(token_id),
        }
        for token_id, entry in table.items()
    }
