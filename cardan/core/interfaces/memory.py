"""Device and host memory: KV pools, host pools, block copies, accounting, sleep."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from cardan.core.interfaces.attention import KVLayout
from cardan.core.interfaces.errors import UnsupportedError
from cardan.core.types.kv import KVCacheGroup

if TYPE_CHECKING:
    import torch

    from cardan.core.interfaces.device import Event, Stream


@dataclass(frozen=True, slots=True)
class MemoryInfo:
    """Bytes of a device at one moment; ``exact`` is False where they are an estimate."""

    total: int
    free: int
    exact: bool = True


@dataclass(frozen=True, slots=True)
class MemoryStats:
    """Bytes that this process holds on the device, by region tag (``weights``, ``kv``, ...)."""

    by_tag: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class WakeReport:
    """What must be rebuilt after waking up: any of ``weights``, ``kv``, ``graphs``, ``comm``."""

    lost: frozenset[str] = frozenset()


class KVPool(ABC):
    """All blocks of one KV group, for all its layers. Owned by the allocator that made it."""

    group: KVCacheGroup
    layout: KVLayout
    num_blocks: int

    @abstractmethod
    def view(self, layer_slot: int) -> "torch.Tensor":
        """Cache of the group's ``layer_slot``-th layer, in the layout's physical shape.

        Raises:
            UnsupportedError: the cache is opaque (``layout.opaque``).
        """

    @property
    @abstractmethod
    def num_bytes(self) -> int: ...


class HostPool(ABC):
    """A flat span of host memory for offloaded blocks and staging."""

    num_bytes: int

    @abstractmethod
    def buffer(self) -> memoryview:
        """Writable bytes of the pool."""

    @abstractmethod
    def close(self) -> None: ...


class MemoryAllocator(ABC):
    """Owner of a device's pools. Which block holds what is the core's business, not its."""

    @abstractmethod
    def kv_pool(self, group: KVCacheGroup, layout: KVLayout, num_blocks: int) -> KVPool:
        """Allocate zeroed blocks.

        Raises:
            OutOfMemoryError: they do not fit.
        """

    @abstractmethod
    def copy_blocks(
        self,
        source: KVPool,
        target: KVPool,
        pairs: "torch.Tensor",
        stream: "Stream | None" = None,
    ) -> "Event | None":
        """Copy whole blocks of every layer; ``pairs`` [n, 2] int64: source id, target id.

        The pools may be the same (copy-on-write) or of two devices. Returns an event to wait for
        where the copy runs on ``stream``, None where it is ordered on the current one.
        """

    @abstractmethod
    def stats(self) -> MemoryStats: ...

    @abstractmethod
    def close(self) -> None:
        """Free every pool. Idempotent."""

    def host_pool(self, num_bytes: int, pinned: bool = True) -> HostPool:
        """(optional) Host memory for offload. Default: unsupported."""
        raise UnsupportedError("this device offers no host pool")

    @abstractmethod
    def region(self, tag: str) -> AbstractContextManager[None]:
        """Attribute what is allocated inside the block to ``tag``."""

    def peak_of(self, work: Callable[[], None]) -> int | None:
        """(optional) Run ``work`` and wait for it; the most bytes held at once meanwhile.

        Counted beyond what was held before: results that stay, temporaries, what libraries and
        kernels set up. Default: None, this device cannot tell, and ``work`` is not run.
        """
        return None

    def sleep(self, level: int, tags: Sequence[str]) -> None:
        """(optional) Free device memory; level 1 keeps weights on the host. Default: no.

        Views of pools that were taken before are not used afterwards.
        """
        raise UnsupportedError("this device cannot sleep")

    def wake(self, tags: Sequence[str] | None = None) -> WakeReport:
        """(optional) Undo ``sleep``, for some tags or, by default, for all. Default: unsupported.

        Raises:
            OutOfMemoryError: it does not fit now; it can be called again.
        """
        raise UnsupportedError("this device cannot sleep")
