"""Server-sent events from bytes that may be cut anywhere (WHATWG HTML, section 9.2)."""

from __future__ import annotations

import re

_LINE_END = re.compile(rb"\r\n|\n|\r")
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class EventParser:
    """Collects the data of events. Comments and fields other than ``data`` are skipped."""

    def __init__(self) -> None:
        self._rest = b""  # an unfinished line
        self._data: list[bytes] = []  # data lines of the unfinished event
        self._is_start = True

    def feed(self, data: bytes) -> list[bytes]:
        """The data of the events that `data` completes, in order."""
        text = self._rest + data
        if self._is_start:
            if len(text) < len(_BYTE_ORDER_MARK) and _BYTE_ORDER_MARK.startswith(text):
                self._rest = text
                return []
            text = text.removeprefix(_BYTE_ORDER_MARK)
            self._is_start = False
        # A CR at the end may be half of a line end, so it waits for the next byte.
        complete = text[:-1] if text.endswith(b"\r") else text
        *lines, rest = _LINE_END.split(complete)
        self._rest = rest + text[len(complete) :]
        events = []
        for line in lines:
            if line:
                self._take(line)
            elif self._data:
                events.append(b"\n".join(self._data))
                self._data.clear()
        return events

    def _take(self, line: bytes) -> None:
        name, _, value = line.partition(b":")
        if name == b"data":
            self._data.append(value.removeprefix(b" "))
