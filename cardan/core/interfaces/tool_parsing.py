"""Tool calls in the text of an answer."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """A piece of the ``index``-th call of an answer, counted from 0.

    The first piece of a call has its ``name``. ``arguments`` of all its pieces, one behind the
    other, are the text of a JSON object.
    """

    index: int
    name: str | None = None
    arguments: str = ""


@dataclass(frozen=True, slots=True)
class ParsedText:
    """What some text of an answer says: ``content``, which is no part of a call, and pieces."""

    content: str = ""
    calls: tuple[ToolCallDelta, ...] = ()


class ToolParser(ABC):
    """Tells calls from content, found by name in the group ``cardan.parsers``.

    One object, made without arguments, reads one answer. All that it tells, put together, is the
    same however the text was cut.
    """

    name: ClassVar[str]
    contract: ClassVar[tuple[int, int]]

    @classmethod
    def detect(cls, chat_template: str) -> bool:
        """(optional) Whether models with this template write calls in this form. Default: no."""
        return False

    @abstractmethod
    def push(self, text: str) -> ParsedText:
        """The next text of the answer, special tokens included; what may yet become a call is
        held back."""

    @abstractmethod
    def finish(self) -> ParsedText:
        """The answer has ended: what was held back. A call that is cut off is content."""
