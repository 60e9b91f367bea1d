"""A complete device on top of any torch device: what a minimal platform opens."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from cardan.core.interfaces.attention import KVLayout
from cardan.core.interfaces.capabilities import Capabilities, DeviceInfo
from cardan.core.interfaces.communication import Communicator, GroupSpec
from cardan.core.interfaces.device import Device, Event, Stream
from cardan.core.interfaces.errors import OutOfMemoryError, UnsupportedError
from cardan.core.interfaces.memory import (
    KVPool,
    MemoryAllocator,
    MemoryInfo,
    MemoryStats,
    WakeReport,
)
from cardan.core.interfaces.torch_communicator import TorchCommunicator
from cardan.core.interfaces.torch_kv_content import torch_kv_dtype
from cardan.core.types.kv import KVCacheGroup, KVCacheSpec

_DEFAULT_TAG = "kv"
# Levels of ``sleep``: contents of weights are kept on the host; they are dropped.
_SLEEP_LEVELS = (1, 2)
_SLEEP_TAGS = frozenset({"weights", "kv"})
# What a torch device module has that counts its memory.
_PEAK_COUNT = (
    "memory_allocated",
    "max_memory_allocated",
    "reset_peak_memory_stats",
    "synchronize",
)


class TorchKVPool(KVPool):
    """One tensor ``[layer, *physical shape]``. Released by its allocator."""

    def __init__(self, group: KVCacheGroup, layout: KVLayout, tensor: Tensor) -> None:
        self.group = group
        self.layout = layout
        self.num_blocks = int(tensor.shape[1 + layout.order.index(0)])
        self._tensor: Tensor | None = tensor
        self._shape, self._dtype = tuple(tensor.shape), tensor.dtype

    def view(self, layer_slot: int) -> Tensor:
        return self._held()[layer_slot]

    def logical(self) -> Tensor:
        """All layers as ``[layer, block, kv, head, token, content]``, a view."""
        axes = [1 + self.layout.order.index(axis) for axis in range(5)]
        return self._held().permute(0, *axes)

    @property
    def num_bytes(self) -> int:
        return 0 if self._tensor is None else self._tensor.nbytes

    def release(self) -> None:
        """Give the memory back; views are invalid afterwards. Idempotent."""
        self._tensor = None

    def restore(self, device: torch.device) -> None:
        """Take memory of ``device`` again, zeroed; views have to be taken anew."""
        self._tensor = _zeros(self._shape, self._dtype, device)

    def _held(self) -> Tensor:
        if self._tensor is None:
            raise UnsupportedError("this KV pool sleeps, or was closed with its device")
        return self._tensor


class TorchMemoryAllocator(MemoryAllocator):
    """Pools as torch tensors on one device.

    Pools are accounted exactly. Whatever else is allocated inside ``region`` is what the process
    holds more afterwards: an estimate on the host, torch's own count elsewhere.
    """

    def __init__(self, device: torch.device, memory_info: Callable[[], MemoryInfo]) -> None:
        self._device = device
        self._memory_info = memory_info
        self._pools: list[tuple[str, TorchKVPool]] = []
        self._tags: list[str] = []
        self._others: dict[str, int] = {}
        self._asleep: frozenset[str] = frozenset()

    def kv_pool(self, group: KVCacheGroup, layout: KVLayout, num_blocks: int) -> TorchKVPool:
        if layout.opaque:
            raise UnsupportedError("this device keeps no opaque KV caches")
        if group.spec.kind == "recurrent":
            raise UnsupportedError("this device keeps no recurrent state")
        shape = (len(group.layers), *physical_shape(group.spec, layout, num_blocks))
        dtype = torch_kv_dtype(group.spec.dtype)
        needed = torch.Size(shape).numel() * dtype.itemsize
        available = self._memory_info().free
        if needed > available:
            raise OutOfMemoryError(_does_not_fit(needed, available, num_blocks))
        try:
            tensor = _zeros(shape, dtype, self._device)
        except (RuntimeError, MemoryError) as error:
            raise OutOfMemoryError(_does_not_fit(needed, available, num_blocks)) from error
        pool = TorchKVPool(group, layout, tensor)
        self._pools.append((self._tags[-1] if self._tags else _DEFAULT_TAG, pool))
        return pool

    def copy_blocks(
        self, source: KVPool, target: KVPool, pairs: Tensor, stream: Stream | None = None
    ) -> Event | None:
        if stream is None:
            _copy_blocks(source, target, pairs)
            return None
        with stream:
            _copy_blocks(source, target, pairs)
        return stream.record()

    def stats(self) -> MemoryStats:
        by_tag = dict(self._others)
        for tag, pool in self._pools:
            by_tag[tag] = by_tag.get(tag, 0) + pool.num_bytes
        return MemoryStats(by_tag)

    def close(self) -> None:
        for _, pool in self._pools:
            pool.release()
        self._pools.clear()
        self._others.clear()
        self._asleep = frozenset()

    def sleep(self, level: int, tags: Sequence[str]) -> None:
        """Pools give their memory back. Weights on the host stay where they are at level 1; at
        level 2 they are for their owner to drop.

        Raises:
            UnsupportedError: another level or tag, it sleeps already, or weights on a device.
        """
        wanted = self._check_sleep(level, tags)
        if "weights" in wanted and self._device.type != "cpu":
            raise UnsupportedError("this device cannot give up the memory of weights")
        for tag, pool in self._pools:
            if tag in wanted:
                pool.release()
        self._asleep = wanted

    def wake(self, tags: Sequence[str] | None = None) -> WakeReport:
        """Pools take their memory again, zeroed.

        Raises:
            UnsupportedError: none of ``tags`` sleeps.
            OutOfMemoryError: they do not fit; it can be called again.
        """
        wanted = self._check_wake(tags)
        asleep = [pool for tag, pool in self._pools if tag in wanted]
        for pool in asleep:
            if pool.num_bytes == 0:
                self._restore(pool)
        self._asleep -= wanted
        return WakeReport(frozenset({"kv", "graphs"} if asleep else {"graphs"}))

    def _restore(self, pool: TorchKVPool) -> None:
        try:
            pool.restore(self._device)
        except (RuntimeError, MemoryError) as error:
            raise OutOfMemoryError(self._cannot_wake()) from error

    def _check_sleep(self, level: int, tags: Sequence[str]) -> frozenset[str]:
        wanted = frozenset(tags)
        if level not in _SLEEP_LEVELS or not wanted or wanted - _SLEEP_TAGS:
            raise UnsupportedError(
                f"sleep(level={level}, tags={tuple(tags)}): levels are 1, which keeps weights on "
                "the host, and 2, which drops them; tags are weights and kv"
            )
        if self._asleep:
            raise UnsupportedError(f"{self._device} sleeps already; wake it first")
        return wanted

    def _check_wake(self, tags: Sequence[str] | None) -> frozenset[str]:
        wanted = self._asleep if tags is None else self._asleep & frozenset(tags)
        if not wanted:
            what = "" if not self._asleep else f" with {tuple(tags or ())}"
            raise UnsupportedError(f"{self._device} does not sleep{what}")
        return wanted

    def _cannot_wake(self) -> str:
        free = self._memory_info().free
        return (
            f"{self._device} cannot wake: only {free / 2**20:.0f} MiB are free; end what took "
            "its memory meanwhile and wake it again"
        )

    @contextmanager
    def region(self, tag: str) -> Iterator[None]:
        before = held_bytes(self._device) - self._attributed_bytes()
        self._tags.append(tag)
        try:
            yield
        finally:
            self._tags.pop()
            grown = held_bytes(self._device) - self._attributed_bytes() - before
            self._others[tag] = self._others.get(tag, 0) + max(0, grown)

    def peak_of(self, work: Callable[[], None]) -> int | None:
        """By torch's own count; None on the host, and where torch keeps none."""
        module = torch.get_device_module(self._device)
        if self._device.type == "cpu" or not all(hasattr(module, name) for name in _PEAK_COUNT):
            return None
        module.synchronize(self._device)
        module.reset_peak_memory_stats(self._device)
        before = module.memory_allocated(self._device)
        work()
        module.synchronize(self._device)
        return int(module.max_memory_allocated(self._device) - before)

    def _attributed_bytes(self) -> int:
        """Bytes of ``held_bytes`` that have a tag: those of inner regions, and of pools except on
        the host, where they count only when they are written."""
        pools = 0 if self._device.type == "cpu" else sum(p.num_bytes for _, p in self._pools)
        return pools + sum(self._others.values())


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros; on the host their pages are mapped when they are first written, not now."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    num_bytes = torch.Size(shape).numel() * dtype.itemsize
    return torch.from_numpy(np.zeros(num_bytes, np.uint8)).view(dtype).view(shape)


class TorchDevice(Device):
    """One torch device: memory, collectives over ``torch.distributed``, eager execution."""

    def __init__(
        self,
        info: DeviceInfo,
        capabilities: Capabilities,
        torch_device: str,
        memory_info: Callable[[], MemoryInfo],
    ) -> None:
        """``memory_info`` says what is total and free at the time of the call, in bytes."""
        self.info = info
        self.capabilities = capabilities
        self._torch_device = torch.device(torch_device)
        self._memory_info = memory_info
        self._communicators: list[Communicator] = []
        self.memory: MemoryAllocator = TorchMemoryAllocator(self._torch_device, memory_info)

    @property
    def torch_device(self) -> torch.device:
        return self._torch_device

    def memory_info(self) -> MemoryInfo:
        return self._memory_info()

    def synchronize(self) -> None:
        module = torch.get_device_module(self._torch_device)
        if hasattr(module, "synchronize"):
            module.synchronize()

    def communicator(self, group: GroupSpec) -> Communicator:
        communicator = TorchCommunicator(group, self._torch_device)
        self._communicators.append(communicator)
        return communicator

    def inference(self) -> AbstractContextManager[object]:
        """Autograd off, also for views and versions."""
        return torch.inference_mode()

    def close(self) -> None:
        for communicator in self._communicators:
            communicator.close()
        self._communicators.clear()
        self.memory.close()


def physical_shape(spec: KVCacheSpec, layout: KVLayout, num_blocks: int) -> tuple[int, ...]:
    """Shape of one layer's cache: the logical axes (block, kv, head, token, content) permuted.

    Content is the larger of the two head dims, and the scales of a cache that has them. A latent
    cache (``v_head_dim`` 0) has no values, so its kv axis has size 1.
    """
    logical = (
        num_blocks,
        2 if spec.v_head_dim else 1,
        spec.num_kv_heads,
        spec.block_size,
        spec.content_size,
    )
    return tuple(logical[axis] for axis in layout.order)


def held_bytes(device: torch.device) -> int:
    """Bytes that this process holds on ``device``; 0 where that cannot be known."""
    if device.type == "cpu":
        statm = Path("/proc/self/statm")
        if not statm.exists():
            return 0
        return int(statm.read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
    allocated = getattr(torch.get_device_module(device), "memory_allocated", None)
    return 0 if allocated is None else int(allocated(device))


def _copy_blocks(source: KVPool, target: KVPool, pairs: Tensor) -> None:
    if not isinstance(source, TorchKVPool) or not isinstance(target, TorchKVPool):
        raise UnsupportedError("blocks are copied only between pools of torch tensors")
    a, b = source.logical(), target.logical()
    if a.shape[:1] + a.shape[2:] != b.shape[:1] + b.shape[2:] or a.dtype != b.dtype:
        raise UnsupportedError("blocks are copied only between pools of equal layers and dtype")
    source_ids, target_ids = pairs.unbind(1)
    if a.element_size() == 1:  # few operations know dtypes that short
        a, b = a.view(torch.uint8), b.view(torch.uint8)
    blocks = a.index_select(1, source_ids.to(a.device))
    b.index_copy_(1, target_ids.to(b.device), blocks.to(b.device))


def _does_not_fit(needed: int, available: int, num_blocks: int) -> str:
    return (
        f"a KV pool of {num_blocks} blocks needs {needed / 2**20:.1f} MiB, "
        f"{available / 2**20:.1f} MiB are available; lower cache.num_blocks, "
        "cache.kv_cache_memory_bytes or cache.memory_utilization, or model.max_model_len"
    )
