"""Errors of text work."""

from cardan.core.types.errors import InputError


class TextError(InputError):
    """A text, template or tokenizer cannot be used; the message names what and the remedy."""
