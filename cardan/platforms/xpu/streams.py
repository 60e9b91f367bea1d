"""Streams and events of one of Intel's GPUs."""

import torch

from cardan.core.interfaces.device import Event, Stream


class XpuEvent(Event):
    """Recorded on ``stream`` when it was made."""

    def __init__(self, stream: torch.xpu.Stream) -> None:
        self._event = torch.xpu.Event()
        self._event.record(stream)

    def query(self) -> bool:
        return bool(self._event.query())

    def synchronize(self) -> None:
        self._event.synchronize()

    def hold_back(self, stream: torch.xpu.Stream) -> None:
        """Make later work of ``stream`` wait."""
        stream.wait_event(self._event)


class XpuStream(Stream):
    """Entering it also makes its device the current one; it may be entered again inside."""

    def __init__(self, stream: torch.xpu.Stream) -> None:
        self.stream = stream
        self._entered: list[torch.xpu.StreamContext] = []

    def __enter__(self) -> "XpuStream":
        context = torch.xpu.stream(self.stream)
        context.__enter__()
        self._entered.append(context)
        return self

    def __exit__(self, *exc: object) -> None:
        self._entered.pop().__exit__(None, None, None)

    def wait(self, event: Event) -> None:
        if isinstance(event, XpuEvent):
            event.hold_back(self.stream)
        else:
            event.synchronize()  # of another device: only the host knows both

    def record(self) -> Event:
        return XpuEvent(self.stream)
