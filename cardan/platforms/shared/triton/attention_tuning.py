"""Sizes of the attention kernels' tiles, from the sizes of a layer and of the device."""

from dataclasses import dataclass

from cardan.platforms.shared.triton.rows import power_of_two

# Programs for each core that hide each other's waiting.
_PROGRAMS_PER_CORE = 4
_MOST_SPLITS = 32
# A row's keys are not cut into parts of fewer than this: adding parts up takes time, too.
_LEAST_PART = 256
# Rows times key heads from which on one warp a program is best: programs alone fill the device.
_MANY_PROGRAMS = 1024


@dataclass(frozen=True, slots=True)
class DeviceSizes:
    """What tiles depend on: cores, and bytes of memory that a program's threads can share."""

    num_cores: int
    shared_bytes: int


@dataclass(frozen=True, slots=True)
class HeadSizes:
    """Of one layer: query heads for each key head, head dims, and bytes of a cached element."""

    group: int
    k_dim: int
    v_dim: int
    num_bytes: int

    @property
    def k_block(self) -> int:
        return max(16, power_of_two(self.k_dim))

    @property
    def v_block(self) -> int:
        return max(16, power_of_two(self.v_dim))

    def tile_bytes(self, num_keys: int) -> int:
        """Of the keys and values of a tile."""
        return num_keys * (self.k_block + self.v_block) * self.num_bytes


@dataclass(frozen=True, slots=True)
class Tuning:
    """Keys of a tile, query tokens of a tile (1 in decode steps), heads with their padding, splits
    of the keys, and the compiler's numbers."""

    tile: int
    queries: int
    packed: int
    splits: int
    least_part: int
    num_warps: int
    num_stages: int


def decode_tuning(sizes: HeadSizes, num_programs: int, device: DeviceSizes) -> Tuning:
    """For rows of one query token; ``num_programs``: rows times key heads.

    Few warps a program, and many programs, read the cache fastest.
    """
    is_many = num_programs >= _MANY_PROGRAMS
    tile = _fitting_tile(sizes, 32 if is_many else 64, device.shared_bytes // 4)
    room = _PROGRAMS_PER_CORE * device.num_cores // max(1, num_programs)
    splits = 1 << min(_MOST_SPLITS, max(1, room)).bit_length() - 1
    return Tuning(
        tile=tile,
        queries=1,
        packed=max(16, power_of_two(sizes.group)),
        splits=splits,
        least_part=max(tile, _LEAST_PART),
        num_warps=1 if is_many else 2,
        num_stages=_fitting_stages(sizes, tile, 3, device.shared_bytes // 2),
    )


def ragged_tuning(sizes: HeadSizes, device: DeviceSizes) -> Tuning:
    """For rows of several query tokens, whose keys are gathered from the cache.

    The more heads share the gathered keys, the more rows a tile should have.
    """
    packed = power_of_two(sizes.group)
    if sizes.num_bytes > 2:
        return _ragged(sizes, device, (32, 32, 4, 2))
    if sizes.k_block > 128:
        return _ragged(sizes, device, (64, 64, 4, 3))
    return _ragged(sizes, device, (64, 64, 4, 2) if packed < 4 else (256, 64, 8, 3))


def fresh_tuning(sizes: HeadSizes, device: DeviceSizes) -> Tuning:
    """For rows of several query tokens without earlier keys, which lie side by side."""
    return _ragged(sizes, device, (128, 128, 8, 3))


def _ragged(sizes: HeadSizes, device: DeviceSizes, wanted: tuple[int, int, int, int]) -> Tuning:
    """``wanted``: queries times heads, keys, warps and stages, as far as they fit."""
    rows, tile, num_warps, num_stages = wanted
    packed = power_of_two(sizes.group)
    rows = max(rows, packed)
    while (
        rows > max(16, packed) and rows * sizes.k_block * sizes.num_bytes * 2 > device.shared_bytes
    ):
        rows //= 2
    room = device.shared_bytes - rows * sizes.k_block * sizes.num_bytes
    tile = _fitting_tile(sizes, tile, room // 2)
    return Tuning(
        tile=tile,
        queries=rows // packed,
        packed=packed,
        splits=1,
        least_part=0,
        num_warps=num_warps,
        num_stages=_fitting_stages(sizes, tile, num_stages, room),
    )


def _fitting_tile(sizes: HeadSizes, wanted: int, room: int) -> int:
    tile = wanted
    while tile > 16 and sizes.tile_bytes(tile) > room:
        tile //= 2
    return tile


def _fitting_stages(sizes: HeadSizes, tile: int, wanted: int, room: int) -> int:
    return max(1, min(wanted, room // sizes.tile_bytes(tile)))
