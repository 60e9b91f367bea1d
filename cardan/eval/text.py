"""The text that models are tried on: a file of the user's, or the one in the package."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from cardan.core.text.tokenizer import Tokenizer
from cardan.core.types.errors import ConfigError

SHIPPED = "alice.txt"


@dataclass(frozen=True, slots=True)
class Text:
    """A text and what it is called in results."""

    name: str
    content: str

    @property
    def digest(self) -> str:
        """Tells texts of one name apart."""
        return hashlib.sha256(self.content.encode()).hexdigest()[:12]


def read_text(path: Path | None) -> Text:
    """The text of a UTF-8 file, or the shipped one.

    Raises:
        ConfigError: the file cannot be read, is not text, or is empty.
    """
    if path is None:
        shipped = files("cardan.eval") / "texts" / SHIPPED
        return Text(SHIPPED, shipped.read_text(encoding="utf-8"))
    try:
        content = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path}: is not UTF-8 (byte {error.start}); convert it, or choose another text"
        ) from None
    if not content.strip():
        raise ConfigError(f"{path}: is empty; give a text of at least one window (--context)")
    return Text(path.name, content)


def encode_text(tokenizer: Tokenizer, text: Text) -> list[int]:
    """Token ids of a text; what looks like a control token in it stays ordinary text."""
    return tokenizer.encode(text.content, add_special_tokens=False, allow_special=False)


def begin_token(tokenizer: Tokenizer) -> int | None:
    """The token that this model wants before every text, if it wants one."""
    added = tokenizer.encode("a")[:1]
    return tokenizer.bos_token_id if added == [tokenizer.bos_token_id] else None
