"""Streams and events of one GPU."""

import torch

from cardan.core.interfaces.device import Event, Stream


class GpuEvent(Event):
    """Recorded on the stream that was current when it was made."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._event = torch.cuda.Event()
        self._event.record(stream)

    def query(self) -> bool:
        return bool(self._event.query())

    def synchronize(self) -> None:
        self._event.synchronize()

    def hold_back(self, stream: torch.cuda.Stream) -> None:
        """Make later work of ``stream`` wait."""
        stream.wait_event(self._event)


class GpuStream(Stream):
    """Entering it also makes its device the current one; it may be entered again inside."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.stream = stream
        self._entered: list[torch.cuda.StreamContext] = []

    def __enter__(self) -> "GpuStream":
        context = torch.cuda.stream(self.stream)
        context.__enter__()
        self._entered.append(context)
        return self

    def __exit__(self, *exc: object) -> None:
        self._entered.pop().__exit__(None, None, None)

    def wait(self, event: Event) -> None:
        if isinstance(event, GpuEvent):
            event.hold_back(self.stream)
        else:
            event.synchronize()  # of another device: only the host knows both

    def record(self) -> Event:
        return GpuEvent(self.stream)
