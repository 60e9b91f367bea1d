"""The exception family that callers may see. Anything else that escapes is a defect of cardan."""

import reprlib


def shown(value: object) -> str:
    """A value of unknown origin for a message: short, on one line, without control characters."""
    brief = reprlib.Repr()
    brief.maxstring = brief.maxother = 80
    return " ".join(brief.repr(value).split())


class CardanError(Exception):
    """Root of all errors that cardan raises on purpose."""


class InputError(CardanError, ValueError):
    """The caller asked for something invalid; an HTTP edge answers 400 and names ``field``."""

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class NotFoundError(InputError):
    """What the caller named (a model, a request) does not exist; an HTTP edge answers 404."""


class ConfigError(CardanError, ValueError):
    """A configuration that cannot work; the message names the setting, the limit, the remedy."""


class QueueFullError(CardanError):
    """A queue cap is reached; an HTTP edge answers 503 with Retry-After."""


class RequestFailedError(CardanError):
    """This one request could not be computed (for instance NaN logits); others go on."""


class EngineAsleepError(CardanError):
    """The engine sleeps, or is about to; an HTTP edge answers 503. Waking it up helps."""


class EngineDeadError(CardanError):
    """The engine has died or is shutting down; nothing submitted to it will finish."""
