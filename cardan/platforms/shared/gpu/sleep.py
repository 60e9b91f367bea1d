"""Device memory that is given back for a while.

Storages are emptied under the tensors that show them, and filled again later: models, caches and
views keep what they hold. Addresses change, so captured graphs are lost.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, UntypedStorage
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from cardan.core.interfaces.memory import HostPool


class StorageRecord(TorchDispatchMode):
    """Knows the storages on one device that operations allocate inside of it, while they live."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device
        self._known: dict[int, StorageWeakRef] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No: torch would import its compiler, for seconds, to see that nothing is compiled."""
        return False

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for item in result if isinstance(result, tuple | list) else (result,):
            if isinstance(item, Tensor) and item.device == self._device:
                ref = StorageWeakRef(item.untyped_storage())
                self._known[ref.cdata] = ref
        return result

    def storages(self) -> list[UntypedStorage]:
        """Those that still live."""
        self._known = {key: ref for key, ref in self._known.items() if not ref.expired()}
        # torch has no other way from a weak reference to its storage.
        make = UntypedStorage._new_with_weak_ptr  # noqa: SLF001
        found = (make(ref.cdata) for ref in self._known.values())
        return [storage for storage in found if storage is not None]


@dataclass(frozen=True, slots=True)
class _Laid:
    """A storage without memory; ``start``: where its bytes are on the host, None: nowhere."""

    storage: UntypedStorage
    num_bytes: int
    start: int | None


class SleepingStorages:
    """Storages without their memory, and where their contents are meanwhile."""

    def __init__(self, host_pool: Callable[[int], HostPool]) -> None:
        """``host_pool`` makes the memory that contents are kept in."""
        self._host_pool = host_pool
        self._laid: list[_Laid] = []
        self._pool: HostPool | None = None

    def lay(self, kept: Iterable[UntypedStorage], dropped: Iterable[UntypedStorage]) -> None:
        """Empty storages, those of ``kept`` after their bytes were copied to the host. The device
        must have no work queued. Where the host has too little memory nothing is emptied."""
        kept = [storage for storage in kept if storage.nbytes()]
        total = sum(storage.nbytes() for storage in kept)
        start = 0
        if total:
            self._pool = self._host_pool(total)
            host = _bytes_of(self._pool)
            for storage in kept:
                host[start : start + storage.nbytes()].copy_(_shown(storage))
                self._laid.append(_Laid(storage, storage.nbytes(), start))
                start += storage.nbytes()
        self._laid += [
            _Laid(storage, storage.nbytes(), None) for storage in dropped if storage.nbytes()
        ]
        for laid in self._laid:
            laid.storage.resize_(0)

    def raise_all(self) -> None:
        """Give all their memory again, with the contents that were kept, else zeros.

        Raises:
            torch.OutOfMemoryError: it does not fit; call again when it does.
        """
        host = None if self._pool is None else _bytes_of(self._pool)
        while self._laid:
            laid = self._laid[-1]
            laid.storage.resize_(laid.num_bytes)
            shown = _shown(laid.storage)
            if host is None or laid.start is None:
                shown.zero_()
            else:
                shown.copy_(host[laid.start : laid.start + laid.num_bytes])
            self._laid.pop()
        del host
        self.close()

    def close(self) -> None:
        """Give the host's memory back; contents in it are lost. Idempotent."""
        self._laid.clear()
        if self._pool is not None:
            self._pool.close()
            self._pool = None


def _shown(storage: UntypedStorage) -> Tensor:
    """The bytes of a storage as a tensor."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _bytes_of(pool: HostPool) -> Tensor:
    return torch.frombuffer(pool.buffer(), dtype=torch.uint8)
