"""Reference memory: pools as torch tensors, on any torch device."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from cardan.core.interfaces.attention import KVLayout
from cardan.core.interfaces.device import Event, Stream
from cardan.core.interfaces.errors import OutOfMemoryError, UnsupportedError
from cardan.core.interfaces.memory import KVPool, MemoryAllocator, MemoryInfo, MemoryStats
from cardan.core.types.kv import KVCacheGroup


class TorchKVPool(KVPool):
    """One tensor [layers, *physical shape of a layer]; block ids index the block axis."""

    def __init__(
        self, group: KVCacheGroup, layout: KVLayout, num_blocks: int, device: torch.device
    ) -> None:
        spec = group.spec
        self.group = group
        self.layout = layout
        self.num_blocks = num_blocks
        content = max(spec.k_head_dim, spec.v_head_dim)
        logical = (num_blocks, 2, spec.num_kv_heads, spec.block_size, content)
        shape = [logical[axis] for axis in layout.order]
        # Zeroed, because a masked key of an unwritten slot must not be NaN.
        self.data = torch.zeros(
            len(group.layers), *shape, dtype=getattr(torch, spec.dtype), device=device
        )
        # Axis of the block ids in ``data``.
        self.block_axis = 1 + layout.order.index(0)

    def view(self, layer_slot: int) -> torch.Tensor:
        return self.data[layer_slot]

    @property
    def num_bytes(self) -> int:
        return self.data.nbytes


class TorchAllocator(MemoryAllocator):
    """Owner of pools on one torch device. Weights are counted by what regions report."""

    def __init__(self, device: torch.device, memory_info: Callable[[], MemoryInfo]) -> None:
        self._device = device
        self._memory_info = memory_info
        self._pools: list[TorchKVPool] = []
        self._by_tag: dict[str, int] = {}

    def kv_pool(self, group: KVCacheGroup, layout: KVLayout, num_blocks: int) -> TorchKVPool:
        needed = num_blocks * group.bytes_per_block
        free = self._memory_info().free
        if needed > free:
            raise OutOfMemoryError(_no_room(needed, free))
        try:
            pool = TorchKVPool(group, layout, num_blocks, self._device)
        except (RuntimeError, MemoryError) as error:
            raise OutOfMemoryError(f"{_no_room(needed, free)} ({error})") from error
        self._pools.append(pool)
        return pool

    def copy_blocks(
        self,
        source: KVPool,
        target: KVPool,
        pairs: torch.Tensor,
        stream: Stream | None = None,
    ) -> Event | None:
        if not isinstance(source, TorchKVPool) or not isinstance(target, TorchKVPool):
            raise UnsupportedError("blocks are copied between torch pools only")
        if source.layout != target.layout:
            raise UnsupportedError("blocks are copied between pools of one layout only")
        # The sources are read before anything is written, so chains of pairs are safe.
        blocks = source.data.index_select(source.block_axis, pairs[:, 0])
        target.data.index_copy_(target.block_axis, pairs[:, 1], blocks.to(target.data.device))
        return None

    @contextmanager
    def region(self, tag: str) -> Iterator[None]:
        before = self._memory_info().free
        try:
            yield
        finally:
            used = max(before - self._memory_info().free, 0)
            self._by_tag[tag] = self._by_tag.get(tag, 0) + used

    def stats(self) -> MemoryStats:
        kv = sum(pool.num_bytes for pool in self._pools)
        return MemoryStats({**self._by_tag, "kv": kv})

    def close(self) -> None:
        self._pools.clear()
        self._by_tag.clear()


def _no_room(needed: int, free: int) -> str:
    return (
        f"the KV cache needs {needed / 2**20:.0f} MiB, {free / 2**20:.0f} MiB are free. Remedies: "
        "a smaller --kv-cache-memory-bytes or --max-model-len, or free memory"
    )
