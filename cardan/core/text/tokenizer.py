"""Text to token ids and back, over the `tokenizers` library."""

import json
import threading
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from cardan.core.text.errors import TextError
from cardan.core.text.token_bytes import (
    SPM_SPACE,
    DecoderKind,
    DecoderShape,
    byte_level_bytes,
    decoder_shape,
    fallback_byte,
)


class Tokenizer:
    """A model's tokenizer: ids, text, bytes, special tokens and chat templates.

    Safe to share between threads. Ids run from 0 to `vocab_size - 1`; a model may have more logits
    than that (padded rows), which stand for no text.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        special_tokens: Mapping[str, str] | None = None,
        eos_token_ids: Iterable[int] = (),
        chat_templates: Mapping[str, str] | None = None,
        max_length: int | None = None,
    ) -> None:
        """Take ownership of `backend`.

        Args:
            backend: a tokenizer whose special tokens have been added already.
            special_tokens: role to text, such as ``bos_token`` to ``<s>``; seen by chat templates.
            eos_token_ids: ids that end a generation, beside the one of ``eos_token``.
            chat_templates: Jinja sources by name; "default" is the usual one.
            max_length: longest prompt in tokens that the tokenizer's files name.
        """
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._special_tokens = MappingProxyType(dict(special_tokens or {}))
        self._chat_templates = MappingProxyType(dict(chat_templates or {}))
        self._max_length = max_length
        added = backend.get_added_tokens_decoder()
        self._special_ids = frozenset(i for i, token in added.items() if token.special)
        self._added_ids = frozenset(added)
        # Added tokens of white space only (Gemma, Phi) are ordinary text, whoever writes them.
        self._control_ids = frozenset(i for i, token in added.items() if token.content.strip())
        self._vocab_size = _vocab_size(backend, self._added_ids)
        self._shape = _decoder_shape(backend)
        self._bos_token_id = self._special_id("bos_token")
        eos = self._special_id("eos_token")
        self._eos_token_ids = frozenset(eos_token_ids) | ({eos} if eos is not None else frozenset())
        self._unk_ids = _unk_ids(backend)
        self._bytes: dict[int, bytes] = {}
        self._plain_backend: Backend | None = None
        self._plain_lock = threading.Lock()

    @property
    def vocab_size(self) -> int:
        """Number of ids, added tokens included; the highest id is one less."""
        return self._vocab_size

    @property
    def bos_token_id(self) -> int | None:
        """Id of the token that begins a text, if the model has one."""
        return self._bos_token_id

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Ids that end a generation."""
        return self._eos_token_ids

    @property
    def special_token_ids(self) -> frozenset[int]:
        """Ids that `decode` leaves out by default."""
        return self._special_ids

    @property
    def added_token_ids(self) -> frozenset[int]:
        """Ids matched whole in a text before the model's own splitting, special or not."""
        return self._added_ids

    @property
    def special_tokens(self) -> Mapping[str, str]:
        """Role to text, for chat templates: ``bos_token``, ``eos_token``, ``pad_token``..."""
        return self._special_tokens

    @property
    def chat_template(self) -> str | None:
        """Source of the default chat template, None for a base model."""
        return self._chat_templates.get("default")

    @property
    def chat_templates(self) -> Mapping[str, str]:
        """Every chat template by name, such as "default", "tool_use", "rag"."""
        return self._chat_templates

    @property
    def max_length(self) -> int | None:
        """Longest prompt in tokens that the tokenizer's files name, None if they do not."""
        return self._max_length

    @property
    def decoder_shape(self) -> DecoderShape:
        """How this vocabulary spells text."""
        return self._shape

    def encode(
        self, text: str, add_special_tokens: bool = True, allow_special: bool = True
    ) -> list[int]:
        """Token ids of `text`.

        Args:
            text: any string without lone surrogates.
            add_special_tokens: add what the model wants around a text, such as a begin token.
            allow_special: whether the text of an added token, such as ``<|im_end|>``, becomes that
                token. False for text that a user wrote: it then stays ordinary text.

        Raises:
            TextError: `text` is no valid Unicode, or cannot be written without a control token.
        """
        return self.encode_batch([text], add_special_tokens, allow_special)[0]

    def encode_batch(
        self, texts: Sequence[str], add_special_tokens: bool = True, allow_special: bool = True
    ) -> list[list[int]]:
        """Token ids of several texts, each as `encode` gives them."""
        for index, text in enumerate(texts):
            _check_text(text, index)
        ids = _encode(self._backend, texts, add_special_tokens)
        if allow_special:
            return ids
        return [
            self._encode_plain(text, row, add_special_tokens)
            for text, row in zip(texts, ids, strict=True)
        ]

    def decode(
        self,
        ids: Sequence[int],
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> str:
        """Text of `ids`; bytes that are no UTF-8 become U+FFFD.

        Args:
            ids: token ids of this vocabulary.
            skip_special_tokens: leave special tokens out.
            spaces_between_special_tokens: False writes adjacent added tokens without the space that
                some decoders (WordPiece) put between them; byte-level ones never have any.

        Raises:
            ValueError: an id is out of range.
        """
        for token_id in ids:
            self._check_id(token_id)
        if spaces_between_special_tokens:
            return self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)
        tokens = self._joined_tokens(ids, skip_special_tokens)
        if self._backend.decoder is None:
            return " ".join(tokens)
        return str(self._backend.decoder.decode(tokens))

    def token_string(self, token_id: int) -> str:
        """The raw vocabulary string, such as ``Ġthe``; empty for an id without a token."""
        self._check_id(token_id)
        return self._backend.id_to_token(token_id) or ""

    def token_bytes(self, token_id: int) -> bytes:
        """The exact UTF-8 bytes that the token stands for inside a text.

        A token may hold part of a character only. A leading space is kept, whatever a decoder does
        at the start of a text.
        """
        data = self._bytes.get(token_id)
        if data is None:
            data = self._bytes[token_id] = self._compute_bytes(token_id)
        return data

    def token_text(self, token_id: int) -> str:
        r"""The token as text for a list of log-probabilities.

        Bytes that form no character are written ``\xf0``, so that different tokens stay different.
        """
        return self.token_bytes(token_id).decode("utf-8", "backslashreplace")

    def to_json(self) -> str:
        """The tokenizer in the ``tokenizer.json`` format."""
        return self._backend.to_str()

    def _special_id(self, role: str) -> int | None:
        text = self._special_tokens.get(role)
        return None if text is None else self._backend.token_to_id(text)

    def _check_id(self, token_id: int) -> None:
        if not 0 <= token_id < self._vocab_size:
            raise ValueError(
                f"token id {token_id} is out of range: this vocabulary has ids 0 to "
                f"{self._vocab_size - 1}"
            )

    def _compute_bytes(self, token_id: int) -> bytes:
        token = self.token_string(token_id)
        if token_id in self._added_ids:
            return token.encode("utf-8")
        kind = self._shape.kind
        if kind is DecoderKind.BYTE_LEVEL:
            return byte_level_bytes(token)
        if kind is DecoderKind.BYTE_FALLBACK:
            byte = fallback_byte(token)
            if byte is not None:
                return bytes([byte])
        if kind in (DecoderKind.BYTE_FALLBACK, DecoderKind.METASPACE):
            return token.replace(SPM_SPACE, " ").encode("utf-8")
        return self._backend.decode([token_id], skip_special_tokens=False).encode("utf-8")

    def _joined_tokens(self, ids: Sequence[int], skip_special_tokens: bool) -> list[str]:
        """Token strings, each run of adjacent added tokens joined to one."""
        tokens: list[str] = []
        after_added = False
        for token_id in ids:
            if skip_special_tokens and token_id in self._special_ids:
                continue
            token = self._backend.id_to_token(token_id)
            if token is None:
                continue
            added = token_id in self._added_ids
            if added and after_added:
                tokens[-1] += token
            else:
                tokens.append(token)
            after_added = added
        return tokens

    def _encode_plain(self, text: str, ids: list[int], add_special_tokens: bool) -> list[int]:
        """`ids` of `text` if no control token is in the text, else ids without any."""
        if add_special_tokens:
            inner = _encode(self._backend, [text], False)[0]
        else:
            inner = ids
        if self._control_ids.isdisjoint(inner):
            return ids
        backend = self._plain()
        literal = self._control_ids.intersection(_encode(backend, [text], False)[0])
        # The unknown token may also stand for characters that the vocabulary lacks.
        found = [i for i in literal - self._unk_ids if self.token_string(i) in text]
        if found:
            raise TextError(
                f"the text holds {self.token_string(min(found))!r}, which this vocabulary cannot "
                "write as ordinary text; remove it or allow special tokens"
            )
        return _encode(backend, [text], add_special_tokens)[0]

    def _plain(self) -> Backend:
        """A copy of the backend that matches no control token; made on first use."""
        with self._plain_lock:
            if self._plain_backend is None:
                backend = Backend.from_str(self._backend.to_str())
                added = self._backend.get_added_tokens_decoder()
                backend.add_special_tokens([_as_special(added[i]) for i in self._control_ids])
                backend.encode_special_tokens = True
                self._plain_backend = backend
            return self._plain_backend


def _as_special(token: AddedToken) -> AddedToken:
    return AddedToken(token.content, special=True, normalized=token.normalized)


def _encode(backend: Backend, texts: Sequence[str], add_special_tokens: bool) -> list[list[int]]:
    try:
        if len(texts) == 1:
            return [backend.encode(texts[0], add_special_tokens=add_special_tokens).ids]
        encodings = backend.encode_batch(list(texts), add_special_tokens=add_special_tokens)
    except Exception as error:  # The library raises bare Exception where a vocabulary has holes.
        reason = " ".join(str(error).split())
        raise TextError(f"the tokenizer of this model cannot write the text: {reason}") from error
    return [encoding.ids for encoding in encodings]


def _check_text(text: str, index: int) -> None:
    if not isinstance(text, str):
        raise TextError(f"text {index} is a {type(text).__name__}; give a string")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise TextError(
            f"text {index} is no valid Unicode: lone surrogate at character {error.start}"
        ) from error


def _vocab_size(backend: Backend, added_ids: Iterable[int]) -> int:
    size = max(backend.get_vocab_size(with_added_tokens=True), max(added_ids, default=-1) + 1)
    # A base vocabulary with unused ids ends above its count.
    while backend.id_to_token(size) is not None:
        size += 1
    return size


def _unk_ids(backend: Backend) -> frozenset[int]:
    """The id that the model itself gives to what it cannot write, as far as it is known."""
    text = getattr(backend.model, "unk_token", None)
    token_id = None if text is None else backend.token_to_id(text)
    return frozenset() if token_id is None else frozenset({token_id})


def _decoder_shape(backend: Backend) -> DecoderShape:
    decoder = backend.decoder
    if decoder is None:
        return decoder_shape(None)
    # Pickling a decoder gives its JSON, without writing out the vocabulary.
    return decoder_shape(json.loads(decoder.__getstate__()))
