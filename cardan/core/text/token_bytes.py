"""What the raw strings of a vocabulary stand for in bytes.

Two spellings cover nearly all language models. *Byte-level BPE* (GPT-2) writes each byte as one
printable character. *SentencePiece BPE with byte fallback* writes a space as U+2581 and a byte that
has no token of its own as ``<0x0A>``. Any other decoder is left to the tokenizers library.
"""

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

SPM_SPACE = "\u2581"


def _byte_alphabet() -> tuple[str, ...]:
    """One printable character for each byte, as GPT-2 published it.

    Printable Latin-1 characters stand for themselves; the other bytes take, in order, the
    characters from U+0100 on.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = iter(range(0x100, 0x200))
    return tuple(chr(byte if byte in printable else next(spare)) for byte in range(256))


BYTE_TO_CHAR = _byte_alphabet()
BYTE_ALPHABET = frozenset(BYTE_TO_CHAR)
CHAR_TO_BYTE: Mapping[str, int] = {char: byte for byte, char in enumerate(BYTE_TO_CHAR)}


class DecoderKind(enum.Enum):
    """How token strings become text."""

    BYTE_LEVEL = "byte_level"
    BYTE_FALLBACK = "byte_fallback"
    METASPACE = "metaspace"
    OTHER = "other"


@dataclass(frozen=True, slots=True)
class DecoderShape:
    """What has to be known of a decoder to run it token by token.

    `strip_left` is the number of spaces taken off the very start of a text, which is how
    SentencePiece removes the space that it put in front of the prompt (BYTE_FALLBACK only).
    """

    kind: DecoderKind
    strip_left: int = 0


def decoder_shape(spec: Mapping[str, Any] | None) -> DecoderShape:
    """Recognise a decoder from its entry in a ``tokenizer.json`` (None: it has no decoder)."""
    steps = _flatten(spec)
    names = [step.get("type") for step in steps]
    if names == ["ByteLevel"]:
        return DecoderShape(DecoderKind.BYTE_LEVEL)
    if names == ["Metaspace"] and steps[0].get("replacement") == SPM_SPACE:
        return DecoderShape(DecoderKind.METASPACE)
    if names[:3] == ["Replace", "ByteFallback", "Fuse"] and _replaces_space(steps[0]):
        if len(steps) == 3:
            return DecoderShape(DecoderKind.BYTE_FALLBACK)
        strip = steps[3]
        if names[3:] == ["Strip"] and strip.get("content") == " " and not strip.get("stop"):
            return DecoderShape(DecoderKind.BYTE_FALLBACK, int(strip.get("start", 0)))
    return DecoderShape(DecoderKind.OTHER)


def _flatten(spec: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    if spec is None:
        return []
    if spec.get("type") == "Sequence":
        return [step for part in spec.get("decoders", ()) for step in _flatten(part)]
    return [spec]


def _replaces_space(step: Mapping[str, Any]) -> bool:
    return step.get("pattern") == {"String": SPM_SPACE} and step.get("content") == " "


def byte_level_bytes(token: str) -> bytes:
    """Bytes of a byte-level token; a string outside the byte alphabet stands for itself."""
    try:
        return bytes([CHAR_TO_BYTE[char] for char in token])
    except KeyError:
        return token.encode("utf-8")


def byte_level_token(data: bytes) -> str:
    """The byte-level spelling of `data`."""
    return "".join(BYTE_TO_CHAR[byte] for byte in data)


def fallback_byte(token: str) -> int | None:
    """The byte that a ``<0x0A>`` token stands for, None for every other token."""
    if len(token) != 6 or not token.startswith("<0x") or token[5] != ">":
        return None
    digits = token[3:5]
    if not all(digit in "0123456789abcdefABCDEF" for digit in digits):
        return None
    return int(digits, 16)
