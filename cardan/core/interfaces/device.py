"""One opened accelerator."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from cardan.core.interfaces.capabilities import Capabilities, DeviceInfo
from cardan.core.interfaces.communication import Communicator, GroupSpec
from cardan.core.interfaces.errors import UnsupportedError
from cardan.core.interfaces.graphs import Graph
from cardan.core.interfaces.memory import MemoryAllocator, MemoryInfo

if TYPE_CHECKING:
    import torch


class Event(ABC):
    """A point on a stream's time line."""

    @abstractmethod
    def query(self) -> bool:
        """Whether the point has been reached; does not wait."""

    @abstractmethod
    def synchronize(self) -> None:
        """Make the host wait for the point."""


class Stream(ABC):
    """An ordered queue of device work; entering it makes it the current one."""

    @abstractmethod
    def __enter__(self) -> "Stream": ...

    @abstractmethod
    def __exit__(self, *exc: object) -> None: ...

    @abstractmethod
    def wait(self, event: Event) -> None:
        """Make later work of this stream wait for ``event``; the host goes on."""

    @abstractmethod
    def record(self) -> Event:
        """An event after all work queued so far."""


class Device(ABC):
    """An accelerator that was opened by ``Platform.open``. The opener closes it.

    Kernel-tier devices have a ``torch_device`` and compute eagerly where the core tells them to;
    executor-tier devices may have none.
    """

    info: DeviceInfo
    capabilities: Capabilities
    memory: MemoryAllocator

    @property
    @abstractmethod
    def torch_device(self) -> "torch.device | None":
        """Where tensors of this device live; None: no torch tensors (executor tier)."""

    @abstractmethod
    def memory_info(self) -> MemoryInfo:
        """Total and free bytes right now."""

    @abstractmethod
    def synchronize(self) -> None:
        """Make the host wait for all work queued on this device."""

    @abstractmethod
    def communicator(self, group: GroupSpec) -> Communicator:
        """Join a group of ranks; blocks until all have joined."""

    @abstractmethod
    def close(self) -> None:
        """Free what the device holds. Idempotent."""

    def stream(self, priority: int = 0) -> Stream:
        """(optional) A further stream. Default: unsupported; there is one implicit stream."""
        raise UnsupportedError("this device has a single implicit stream")

    def event(self) -> Event:
        """(optional) An event on the current stream. Default: unsupported."""
        raise UnsupportedError("this device has no events")

    def capture(self, launch: Callable[[], None], pool: Graph | None = None) -> Graph:
        """(optional) Record what ``launch`` queues, sharing ``pool``'s memory if given.

        Default: unsupported. The core then runs eagerly and says so once.
        """
        raise UnsupportedError("this device does not capture graphs")

    def inference(self) -> AbstractContextManager[object]:
        """(optional) Context that every step runs in. Default: none."""
        return nullcontext()
