"""What each rank of a group does in a test of collectives, and what it must find."""

import hashlib
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from cardan.core.interfaces.communication import Communicator, GroupSpec
from cardan.core.interfaces.device import Device
from cardan.core.interfaces.errors import UnsupportedError

_SHAPES: tuple[tuple[int, ...], ...] = ((1,), (37,), (64, 129), (100_000,))
_NUM_REPEATS = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """One rank as its cases see it.

    Tensors of other ranks are known from their seeds. ``folder`` is a place where further groups
    can meet. ``is_repeatable``: equal inputs have to give equal bits.
    """

    rank: int
    size: int
    group: Communicator
    device: Device
    where: torch.device
    seed: int
    folder: str
    is_repeatable: bool

    def of(self, rank: int, shape: tuple[int, ...], dtype: str) -> Tensor:
        """What ``rank`` brings, on the host."""
        rng = np.random.default_rng([self.seed, rank, zlib.crc32(repr(shape).encode())])
        values = torch.from_numpy(rng.standard_normal(shape) * 10)
        return values.to(getattr(torch, dtype))

    def everyone(self, shape: tuple[int, ...], dtype: str) -> list[Tensor]:
        return [self.of(rank, shape, dtype) for rank in range(self.size)]

    def mine(self, shape: tuple[int, ...], dtype: str) -> Tensor:
        """What this rank brings, on its device."""
        return self.of(self.rank, shape, dtype).to(self.where)

    def run(self, collective: Callable[[], Tensor]) -> Tensor:
        """Its result on the host. What made its arguments has ended, on whichever stream it was."""
        self.device.synchronize()
        with self.device.inference():
            result = collective()
        self.device.synchronize()
        return result.to("cpu")

    def meet(self, rank: int, size: int, name: str) -> Communicator:
        """Join another group of the same device."""
        return self.device.communicator(GroupSpec(rank, size, f"file://{self.folder}/{name}"))


# Takes the rank and a dtype, returns the results that have to have the same bits on every rank.
CollectiveCase = Callable[[Rank, str], Sequence[Tensor]]


def digest(results: Sequence[Tensor]) -> str:
    """Identifies the bits of host tensors."""
    found = hashlib.sha256()
    for result in results:
        found.update(result.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def all_reduce_sum(rank: Rank, dtype: str) -> list[Tensor]:
    found = []
    for shape in _SHAPES:
        tensor = rank.mine(shape, dtype)
        found.append(rank.run(lambda tensor=tensor: rank.group.all_reduce(tensor)))  # type: ignore[misc]
        _check_sum(found[-1], rank.everyone(shape, dtype))
    return found


def all_reduce_max(rank: Rank, dtype: str) -> list[Tensor]:
    tensor = rank.mine((64, 129), dtype)
    found = rank.run(partial(rank.group.all_reduce, tensor, "max"))
    _check_equal(found, torch.stack(rank.everyone((64, 129), dtype)).amax(0))
    return [found]


def all_gather(rank: Rank, dtype: str) -> list[Tensor]:
    shape, results = (3, 4, 5), []
    for dim in (0, 1, 2, -1):
        tensor = rank.mine(shape, dtype)
        found = rank.run(partial(rank.group.all_gather, tensor, dim))
        _check_equal(found, torch.cat(rank.everyone(shape, dtype), dim))
        results.append(found)
    return results


def reduce_scatter(rank: Rank, dtype: str) -> list[Tensor]:
    shape = (2 * rank.size, 3 * rank.size, 5)
    for dim in (0, 1, -2):
        tensor = rank.mine(shape, dtype)
        found = rank.run(partial(rank.group.reduce_scatter, tensor, dim))
        parts = [part.chunk(rank.size, dim)[rank.rank] for part in rank.everyone(shape, dtype)]
        _check_sum(found, parts)
    return []


def all_to_all(rank: Rank, dtype: str) -> list[Tensor]:
    """Rank s sends (s + 2 r) % 4 rows to rank r, some of them none."""
    counts = [[(s + 2 * r) % 4 for r in range(rank.size)] for s in range(rank.size)]
    send, receive = counts[rank.rank], [row[rank.rank] for row in counts]
    rows = rank.mine((sum(send), 7), dtype)
    found = rank.run(lambda: rank.group.all_to_all(rows, send, receive))
    want = [
        rank.of(s, (sum(row), 7), dtype)[sum(row[: rank.rank]) :][: row[rank.rank]]
        for s, row in enumerate(counts)
    ]
    _check_equal(found, torch.cat(want))
    return []


def broadcast(rank: Rank, dtype: str) -> list[Tensor]:
    results = []
    for root in range(rank.size):
        tensor = rank.mine((33, 3), dtype)
        found = rank.run(partial(rank.group.broadcast, tensor, root))
        _check_equal(found, rank.of(root, (33, 3), dtype))
        results.append(found)
    return results


def send_recv(rank: Rank, dtype: str) -> list[Tensor]:
    """Neighbours exchange; messages of one pair keep their order."""
    peer = rank.rank ^ 1
    first, second = rank.mine((17,), dtype), rank.mine((2, 8), dtype)
    into = [torch.zeros_like(first), torch.zeros_like(second)]

    def send() -> None:
        rank.group.send(first, peer)
        rank.group.send(second, peer)

    def receive() -> None:
        rank.group.recv(into[0], peer)
        rank.group.recv(into[1], peer)

    rank.device.synchronize()
    with rank.device.inference():
        for act in (send, receive) if rank.rank < peer else (receive, send):
            act()
    rank.device.synchronize()
    for out, shape in zip(into, ((17,), (2, 8)), strict=True):
        _check_equal(out.to("cpu"), rank.of(peer, shape, dtype))
    return []


def split(rank: Rank, dtype: str) -> list[Tensor]:
    """All ranks in reverse, one alone, and two halves at once."""
    backwards = list(range(rank.size))[::-1]
    halves = [[r for r in range(rank.size) if r % 2 == parity] for parity in (0, 1)]
    for ranks in (backwards, [1], halves[rank.rank % 2]):
        part = rank.group.split(ranks)
        if rank.rank not in ranks:
            assert part is None, f"split({ranks}) gave rank {rank.rank} a communicator"
            continue
        assert part is not None, f"split({ranks}) gave rank {rank.rank} none"
        place = (part.rank, part.world_size)
        assert place == (ranks.index(rank.rank), len(ranks)), f"split({ranks}) gave {place}"
        tensor = rank.mine((9,), dtype)
        found = rank.run(partial(part.all_gather, tensor))
        _check_equal(found, torch.cat([rank.of(r, (9,), dtype) for r in ranks]))
        part.close()
    return all_gather(rank, dtype)


def second_group(rank: Rank, dtype: str) -> list[Tensor]:
    """Two groups of one device, with ranks in another order, in turns; and a group of one."""
    other = rank.meet(rank.size - 1 - rank.rank, rank.size, "second")
    alone = rank.meet(0, 1, f"alone{rank.rank}")
    for _ in range(3):
        found = all_gather(rank, dtype)
        tensor = rank.mine((5,), dtype)
        turned = rank.run(partial(other.all_gather, tensor))
        _check_equal(turned, torch.cat(rank.everyone((5,), dtype)[::-1]))
        own = rank.run(partial(alone.all_reduce, tensor.clone()))
        _check_equal(own, rank.of(rank.rank, (5,), dtype))
    other.close()
    alone.close()
    return found


def repeats(rank: Rank, dtype: str) -> list[Tensor]:
    """Equal inputs give equal bits, in sums too."""
    if not rank.is_repeatable:
        raise UnsupportedError("neither the device nor the communicator declares determinism")
    seen: dict[str, list[Tensor]] = {}
    for _ in range(_NUM_REPEATS):
        tensor = rank.mine((64, 129), dtype)
        found = rank.run(partial(rank.group.all_reduce, tensor))
        seen[digest([found])] = [found]
    assert len(seen) == 1, f"{_NUM_REPEATS} sums of equal inputs have {len(seen)} different bits"
    return next(iter(seen.values()))


def misuse(rank: Rank, dtype: str) -> list[Tensor]:
    """A wrong call is an error at once, and the group goes on."""
    odd = rank.mine((2 * rank.size + 1,), dtype)
    _expect_error(
        "reduce_scatter of uneven shares", lambda: rank.run(lambda: rank.group.reduce_scatter(odd))
    )
    _expect_error(
        "a rank above the world size", lambda: rank.meet(rank.size, rank.size, f"no{rank.rank}")
    )
    _expect_error(
        "a malformed rendezvous", lambda: rank.device.communicator(GroupSpec(0, 1, "nowhere"))
    )
    return all_gather(rank, dtype)


def close(rank: Rank, dtype: str) -> list[Tensor]:
    """Closing twice is no error, using a closed communicator is one. The last of all cases."""
    rank.group.close()
    rank.group.close()
    tensor = rank.mine((4,), dtype)
    _expect_error("a closed communicator", lambda: rank.run(lambda: rank.group.all_reduce(tensor)))
    return []


def _expect_error(what: str, act: Callable[[], object]) -> None:
    try:
        act()
    except Exception as error:
        if str(error).strip():
            return
        raise AssertionError(f"{what} raises {type(error).__name__} without a text") from error
    raise AssertionError(f"{what} is no error")


def _check_equal(found: Tensor, want: Tensor) -> None:
    assert found.dtype == want.dtype, f"dtype {found.dtype}, should be {want.dtype}"
    assert found.shape == want.shape, f"shape {list(found.shape)}, should be {list(want.shape)}"
    different = int((found != want).sum())
    assert not different, f"{different} of {want.numel()} elements are wrong"


def _check_sum(found: Tensor, parts: Sequence[Tensor]) -> None:
    """Against a float64 sum, within what rounding after each addition may cost."""
    exact = torch.stack([part.double() for part in parts])
    assert found.dtype == parts[0].dtype, f"dtype {found.dtype}, should be {parts[0].dtype}"
    assert found.shape == exact.shape[1:], f"shape {list(found.shape)} of a sum"
    bound = len(parts) * torch.finfo(found.dtype).eps * exact.abs().sum(0)
    error = (found.double() - exact.sum(0)).abs()
    wrong = int((error > bound).sum())
    assert not wrong, (
        f"{wrong} of {found.numel()} sums of {len(parts)} ranks are wrong, "
        f"by up to {float(error.max()):.3g}"
    )


CASES: dict[str, CollectiveCase] = {
    case.__name__: case
    for case in (
        all_reduce_sum,
        all_reduce_max,
        all_gather,
        reduce_scatter,
        all_to_all,
        broadcast,
        send_recv,
        split,
        second_group,
        repeats,
        misuse,
        close,
    )
}
