"""The tokenizer that a GGUF file carries in its metadata."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from cardan.core.text.errors import TextError
from cardan.core.text.gguf_keys import GGUFKeys
from cardan.core.text.split_patterns import split_rule
from cardan.core.text.token_bytes import BYTE_ALPHABET, SPM_SPACE, byte_level_token
from cardan.core.text.tokenizer import Tokenizer
from cardan.core.types.errors import shown

# Values of tokenizer.ggml.token_type.
_CONTROL = 3
_USER_DEFINED = 4

_ROLES = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}
# Further ids that end a turn.
_EOS_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
# Control tokens that end a turn in every model that has them; files often name only one of several.
_END_OF_TURN = frozenset({"<|im_end|>", "<|eot_id|>", "<end_of_turn>"})


@dataclass(frozen=True, slots=True)
class _Vocabulary:
    """The lists of a GGUF tokenizer; `scores` and `types` may be empty, else one for each token."""

    tokens: Sequence[str]
    types: Sequence[int]
    scores: Sequence[float]
    merges: Sequence[str]

    def of_type(self, token_type: int) -> Iterator[str]:
        for token, kind in zip(self.tokens, self.types, strict=False):
            if kind == token_type:
                yield token


def tokenizer_from_gguf(metadata: Mapping[str, object]) -> Tokenizer:
    """Build the tokenizer that the ``tokenizer.*`` keys of GGUF metadata describe.

    ``gpt2`` is byte-level BPE from tokens and merges; ``llama`` is SentencePiece BPE, whose merges
    follow from tokens and scores. Keys: the GGUF specification, section "Tokenizer".

    Raises:
        TextError: a key is missing, malformed, or names something unknown.
    """
    keys = GGUFKeys(metadata)
    model = keys.text("model")
    builders: dict[str, Callable[[GGUFKeys, _Vocabulary, bool], tuple[Backend, bool]]] = {
        "gpt2": _byte_level_backend,
        "llama": _sentencepiece_backend,
    }
    builder = builders.get(str(model))
    if builder is None:
        raise TextError(
            f"tokenizer.ggml.model is {shown(model)}; known are {', '.join(builders)}. Use the "
            "model's directory with a tokenizer.json instead"
        )
    vocabulary = _vocabulary(keys)
    is_gemma = str(metadata.get("general.architecture", "")).startswith("gemma")
    backend, adds_bos = builder(keys, vocabulary, is_gemma)
    roles = _roles(keys, vocabulary)
    _add_special_tokens(backend, vocabulary, roles)
    _set_post_processor(backend, keys, roles, adds_bos)
    return Tokenizer(
        backend,
        special_tokens=roles,
        eos_token_ids=_eos_token_ids(keys, vocabulary),
        chat_templates=_chat_templates(metadata),
    )


def _vocabulary(keys: GGUFKeys) -> _Vocabulary:
    tokens = keys.strings("tokens")
    if not tokens:
        raise TextError("tokenizer.ggml.tokens is missing: this GGUF file holds no tokenizer")
    types, scores = keys.integers("token_type"), keys.numbers("scores")
    for name, count in (("token_type", len(types)), ("scores", len(scores))):
        if count and count != len(tokens):
            raise TextError(
                f"tokenizer.ggml.{name} has {count} entries for {len(tokens)} tokens; "
                "the file is damaged"
            )
    return _Vocabulary(tokens, types, scores, keys.strings("merges"))


def _byte_level_backend(
    keys: GGUFKeys, vocabulary: _Vocabulary, is_gemma: bool
) -> tuple[Backend, bool]:
    """Byte-level BPE, and whether its family puts a begin token first."""
    if not vocabulary.merges:
        raise TextError("tokenizer.ggml.merges is missing; byte-level BPE cannot do without")
    rule = split_rule(keys.text("pre") or "default")
    whole = {*vocabulary.of_type(_CONTROL), *vocabulary.of_type(_USER_DEFINED)}
    vocab: dict[str, int] = {}
    for index, token in enumerate(vocabulary.tokens):
        vocab.setdefault(_byte_level_spelling(token, whole), index)
    backend = _bpe(vocab, _file_merges(vocabulary), ignore_merges=rule.ignore_merges)
    backend.pre_tokenizer = rule.pre_tokenizer()
    backend.decoder = decoders.ByteLevel()
    return backend, rule.adds_bos


def _bpe(vocab: dict[str, int], merges: list[tuple[str, str]], **options: bool) -> Backend:
    try:
        return Backend(models.BPE(vocab=vocab, merges=merges, **options))
    except Exception as error:  # The library raises bare Exception for a pair it does not know.
        reason = " ".join(str(error).split())
        raise TextError(f"tokenizer.ggml.merges do not fit the tokens: {reason}") from error


def _byte_level_spelling(token: str, whole: set[str]) -> str:
    """An ordinary token in the byte alphabet; some files write a few as plain text."""
    if token in whole or BYTE_ALPHABET.issuperset(token):
        return token
    return byte_level_token(token.encode("utf-8"))


def _sentencepiece_backend(
    keys: GGUFKeys, vocabulary: _Vocabulary, is_gemma: bool
) -> tuple[Backend, bool]:
    """SentencePiece BPE with byte fallback, which puts a begin token first."""
    tokens = [_spm_spelling(token) for token in vocabulary.tokens]
    vocab: dict[str, int] = {}
    for index, token in enumerate(tokens):
        vocab.setdefault(token, index)
    if vocabulary.merges:
        merges = _file_merges(vocabulary)
    elif is_gemma or not vocabulary.scores:
        # Gemma's scores do not follow the order in which its merges were learned; its ids do.
        merges = _implied_merges(vocab, range(0, -len(tokens), -1))
    else:
        merges = _implied_merges(vocab, vocabulary.scores)
    backend = _bpe(vocab, merges, fuse_unk=True, byte_fallback=True)
    prefix = keys.flag("add_space_prefix", not is_gemma)
    backend.pre_tokenizer = pre_tokenizers.Metaspace(
        replacement=SPM_SPACE, prepend_scheme="first" if prefix else "never", split=False
    )
    steps = [decoders.Replace(SPM_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefix:
        steps.append(decoders.Strip(content=" ", left=1))
    backend.decoder = decoders.Sequence(steps)
    return backend, True


def _spm_spelling(token: str) -> str:
    """Files for Gemma write a token of several spaces as such, not with U+2581."""
    return SPM_SPACE * len(token) if token and not token.strip(" ") else token


def _file_merges(vocabulary: _Vocabulary) -> list[tuple[str, str]]:
    merges = []
    for merge in vocabulary.merges:
        left, space, right = merge.partition(" ")
        if not space:
            raise TextError(f"tokenizer.ggml.merges has {shown(merge)}, which is no pair of tokens")
        merges.append((left, right))
    return merges


def _implied_merges(vocab: Mapping[str, int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Merges of a SentencePiece BPE vocabulary: every pair that makes a token, best score first.

    Several pairs can make one token; the pair of the earlier tokens goes first, as it was there
    first when the vocabulary was learned.
    """
    ranked: list[tuple[float, int, int, str, str]] = []
    for token, index in vocab.items():
        for cut in range(1, len(token)):
            left = vocab.get(token[:cut])
            if left is None:
                continue
            right = vocab.get(token[cut:])
            if right is not None:
                ranked.append((-scores[index], left, right, token[:cut], token[cut:]))
    ranked.sort()
    return [(left, right) for *_, left, right in ranked]


def _roles(keys: GGUFKeys, vocabulary: _Vocabulary) -> dict[str, str]:
    roles = {}
    for role, key in _ROLES.items():
        token_id = keys.token_id(key, len(vocabulary.tokens))
        if token_id is not None:
            roles[role] = vocabulary.tokens[token_id]
    return roles


def _add_special_tokens(
    backend: Backend, vocabulary: _Vocabulary, roles: Mapping[str, str]
) -> None:
    """Control tokens become special; user-defined ones are matched whole as well."""
    special = dict.fromkeys((*vocabulary.of_type(_CONTROL), *roles.values()))
    backend.add_special_tokens(
        [AddedToken(token, normalized=False, special=True) for token in special if token]
    )
    backend.add_tokens(
        [
            AddedToken(_known_spelling(token, backend), normalized=False, special=False)
            for token in dict.fromkeys(vocabulary.of_type(_USER_DEFINED))
            if token and token not in special
        ]
    )


def _known_spelling(token: str, backend: Backend) -> str:
    return token if backend.token_to_id(token) is not None else _spm_spelling(token)


def _set_post_processor(
    backend: Backend, keys: GGUFKeys, roles: Mapping[str, str], adds_bos: bool
) -> None:
    """Put the begin and end tokens that the file asks for around a text."""
    bos, eos = roles.get("bos_token"), roles.get("eos_token")
    with_bos = keys.flag("add_bos_token", adds_bos) and bos is not None
    with_eos = keys.flag("add_eos_token", False) and eos is not None
    pieces = [bos if with_bos else None, "$A", eos if with_eos else None]
    around = {token for token in (pieces[0], pieces[2]) if token is not None}
    if around:
        backend.post_processor = processors.TemplateProcessing(
            single=[piece for piece in pieces if piece is not None],
            special_tokens=[(token, backend.token_to_id(token)) for token in sorted(around)],
        )


def _eos_token_ids(keys: GGUFKeys, vocabulary: _Vocabulary) -> frozenset[int]:
    limit = len(vocabulary.tokens)
    named = {keys.token_id(key, limit) for key in _EOS_KEYS}
    usual = {
        index
        for index, (token, kind) in enumerate(
            zip(vocabulary.tokens, vocabulary.types, strict=False)
        )
        if kind == _CONTROL and token in _END_OF_TURN
    }
    return frozenset(usual | {token_id for token_id in named if token_id is not None})


def _chat_templates(metadata: Mapping[str, object]) -> dict[str, str]:
    """``tokenizer.chat_template`` and its named variants ``tokenizer.chat_template.NAME``."""
    prefix = "tokenizer.chat_template"
    templates = {}
    for key, value in metadata.items():
        if key != prefix and not key.startswith(f"{prefix}."):
            continue
        if not isinstance(value, str):
            raise TextError(f"{key} is {shown(value)}, which is not a string; the file is damaged")
        templates[key[len(prefix) + 1 :] or "default"] = value
    return templates
