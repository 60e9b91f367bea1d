"""What tests of a kernel-tier device need: its torch device, pools, and work of known result."""

import time

import torch
from torch import Tensor

from cardan.core.interfaces.attention import KVLayout
from cardan.core.interfaces.device import Device
from cardan.core.interfaces.errors import UnsupportedError
from cardan.core.interfaces.memory import KVPool
from cardan.core.types.kv import KVCacheGroup, KVCacheSpec
from cardan.testing.conformance.results import not_supported

SPEC = KVCacheSpec(
    kind="full", block_size=4, num_kv_heads=3, k_head_dim=8, v_head_dim=8, dtype="float32"
)
_SIDE = 256
_LONG_S = 0.15
_MOST_ROUNDS = 20_000


class DeviceBench:
    """One opened device with torch tensors; its opener closes it."""

    def __init__(self, device: Device) -> None:
        """Ends the test as not supported where the device has no torch tensors."""
        if device.torch_device is None:
            not_supported("executor tier: the device has no torch tensors, only whole steps")
        self.device = device
        self.where: torch.device = device.torch_device
        self._rounds = 0

    def pool(
        self,
        spec: KVCacheSpec = SPEC,
        num_blocks: int = 8,
        num_layers: int = 2,
        layout: KVLayout | None = None,
    ) -> KVPool:
        """A new pool. A layout other than the reference one may be refused, with a reason."""
        group = KVCacheGroup(tuple(range(num_layers)), spec)
        if layout is None:
            return self.device.memory.kv_pool(group, KVLayout(), num_blocks)
        try:
            return self.device.memory.kv_pool(group, layout, num_blocks)
        except UnsupportedError as error:
            not_supported(f"layout {layout.order}: {error}")

    def fill(self, pool: KVPool, first: float) -> None:
        """Give block b of layer i the value ``first + 100 * i + b`` everywhere."""
        axis = pool.layout.order.index(0)
        with self.device.inference():
            for layer in range(len(pool.group.layers)):
                view = pool.view(layer)
                for block in range(pool.num_blocks):
                    view.select(axis, block).fill_(first + 100 * layer + block)

    def blocks(self, pool: KVPool) -> list[list[float]]:
        """What each block of each layer holds: its value, NaN where it holds several."""
        axis = pool.layout.order.index(0)
        self.device.synchronize()
        held = []
        for layer in range(len(pool.group.layers)):
            rows = pool.view(layer).to("cpu").double().movedim(axis, 0).flatten(1)
            same = (rows == rows[:, :1]).all(1)
            held.append(torch.where(same, rows[:, 0], torch.nan).tolist())
        return held

    def check_blocks(self, pool: KVPool, want: list[list[float]]) -> None:
        """Fail the running test, naming the first block that does not hold what it should."""
        for layer, (found, wanted) in enumerate(zip(self.blocks(pool), want, strict=True)):
            for block, (value, due) in enumerate(zip(found, wanted, strict=True)):
                assert value == due, f"layer {layer}, block {block} holds {value}, not {due}"

    def pairs(self, *pairs: tuple[int, int]) -> Tensor:
        """Pairs of ``copy_blocks`` on the device."""
        return torch.tensor(pairs, dtype=torch.int64).reshape(-1, 2).to(self.where)

    def copy(self, source: KVPool, target: KVPool, *pairs: tuple[int, int]) -> None:
        """Copy blocks on the current stream."""
        with self.device.inference():
            event = self.device.memory.copy_blocks(source, target, self.pairs(*pairs))
        if event is not None:
            event.synchronize()

    def start_long_work(self, out: Tensor, value: float) -> None:
        """Queue work that takes about 0.15 s and then writes ``value`` into ``out``.

        Call it inside ``inference()``. The matrix has equal entries 1/n, a power of 2, so that
        every power of it is itself, exactly.
        """
        rounds = self._rounds or self._calibrate()
        out.copy_(self._power(rounds)[0, 0].expand_as(out))
        out.mul_(_SIDE * value)

    def _power(self, rounds: int) -> Tensor:
        matrix = torch.full((_SIDE, _SIDE), 1 / _SIDE, device=self.where)
        power = matrix
        for _ in range(rounds):
            power = power @ matrix
        return power

    def _calibrate(self) -> int:
        """Rounds that occupy the device long enough. ``item`` waits whatever events do."""
        rounds = 16
        while True:
            start = time.perf_counter()
            self._power(rounds)[0, 0].item()
            took = time.perf_counter() - start
            if took >= _LONG_S or rounds >= _MOST_ROUNDS:
                self._rounds = rounds
                return rounds
            rounds *= 2
