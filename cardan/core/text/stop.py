"""Stop strings in streamed text."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StopResult:
    """Outcome of one push: text that is final now, and the stop string that ended the text."""

    text_to_emit: str
    matched: str | None


class StopMatcher:
    """Finds the first stop string in a text that arrives in pieces.

    The match that ends first wins, because generation ends the moment that any stop string is
    complete; of several with the same end the longest wins. The outcome does not depend on how the
    text was cut into pieces. Only the longest tail that can still grow into a stop string is held
    back, hence never more than the longest stop string less one character.
    """

    def __init__(self, stops: Sequence[str], include_stop: bool) -> None:
        """Raise ValueError for an empty stop string.

        Args:
            stops: the stop strings; may be empty.
            include_stop: whether the text ends with the matched string or before it.
        """
        for index, stop in enumerate(stops):
            if not stop:
                raise ValueError(f"stop[{index}] is an empty string; remove it or give a character")
        self._stops = tuple(dict.fromkeys(stops))
        self._include_stop = include_stop
        self._held = ""
        self._matched: str | None = None

    @property
    def matched(self) -> str | None:
        """The stop string that ended the text, None as long as none has."""
        return self._matched

    def push(self, text: str) -> StopResult:
        """Add `text`; after a match every further push gives nothing."""
        if self._matched is not None:
            return StopResult("", self._matched)
        buffer = self._held + text
        match = self._first_match(buffer)
        if match is not None:
            end, stop = match
            self._held = ""
            self._matched = stop
            return StopResult(buffer[: end if self._include_stop else end - len(stop)], stop)
        cut = len(buffer) - self._open_tail(buffer)
        self._held = buffer[cut:]
        return StopResult(buffer[:cut], None)

    def flush(self) -> str:
        """End of the text: give out what was held back."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, buffer: str) -> tuple[int, str] | None:
        """End and string of the winning match."""
        best: tuple[int, str] | None = None
        for stop in self._stops:
            # A later match cannot win, so the search may end where the best one ends.
            start = buffer.find(stop, 0, None if best is None else best[0])
            if start < 0:
                continue
            end = start + len(stop)
            if best is None or (end, -len(stop)) < (best[0], -len(best[1])):
                best = (end, stop)
        return best

    def _open_tail(self, buffer: str) -> int:
        """Length of the longest tail of `buffer` that is a proper prefix of a stop string."""
        longest = 0
        for stop in self._stops:
            start = buffer.find(stop[0], max(0, len(buffer) - len(stop) + 1))
            while 0 <= start < len(buffer) - longest:
                if stop.startswith(buffer[start:]):
                    longest = len(buffer) - start
                    break
                start = buffer.find(stop[0], start + 1)
        return longest
