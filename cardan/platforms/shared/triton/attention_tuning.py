"""Sizes of the attention kernels' tiles, from the sizes of a layer and of the device."""

from dataclasses import dataclass

from cardan.platforms.shared.triton.rows import power_of_two
from cardan.platforms.shared.triton.targets import DeviceSizes, Products

# Programs for each core that hide each other's waiting.
_PROGRAMS_PER_CORE = 4
_MOST_SPLITS = 32
# A row's keys are not cut into parts of fewer than this: adding parts up takes time, too.
_LEAST_PART = 256
# Rows times key heads from which on one warp a program is best: programs alone fill the device.
_MANY_PROGRAMS = 1024
# Rows times key heads that leave most cores idle, unless contexts are long and cut into parts: with
# 64 large tiles took 6.6 instead of 8.7 us of short contexts, but 203 instead of 135 of long ones.
_FEW_PROGRAMS = 8
# Bytes of shared memory for what the copies of tiles report to.
_BARRIERS = 256


@dataclass(frozen=True, slots=True)
class _Tiles:
    """As far as they fit. Of rows with one query token: keys, warps and stages; where there are
    many programs, and few. Of rows of several: queries (times heads), keys, warps and stages;
    where heads are long, and where elements have more than two bytes."""

    decode: tuple[int, int, int]
    decode_many: tuple[int, int, int]
    decode_few: tuple[int, int, int]
    decode_long: tuple[int, int, int]
    ragged: tuple[int, int, int, int]
    ragged_long: tuple[int, int, int, int]
    ragged_float32: tuple[int, int, int, int]


# ``mma``: measured on an H200 at 32 and 16 heads of 128 for 8 key heads, as are the numbers of
# long rows below. The others are not measured: they keep programs of 16-bit caches and heads of 128
# within the registers that there are, as compilers tell.
_TILES: dict[Products, _Tiles] = {
    "mma": _Tiles(
        decode=(64, 2, 3),
        decode_many=(32, 1, 3),
        decode_few=(256, 8, 1),
        decode_long=(64, 2, 3),
        ragged=(64, 64, 4, 2),
        ragged_long=(64, 64, 4, 3),
        ragged_float32=(32, 32, 4, 2),
    ),
    "mfma": _Tiles(
        decode=(64, 2, 2),
        decode_many=(32, 1, 2),
        decode_few=(128, 8, 1),
        decode_long=(64, 2, 2),
        ragged=(64, 64, 4, 2),
        ragged_long=(64, 32, 4, 2),
        ragged_float32=(32, 32, 4, 2),
    ),
    "wmma": _Tiles(
        decode=(32, 4, 1),
        decode_many=(32, 2, 1),
        decode_few=(64, 8, 1),
        decode_long=(16, 4, 1),
        ragged=(64, 16, 8, 1),
        ragged_long=(32, 16, 8, 1),
        ragged_float32=(16, 16, 8, 1),
    ),
}
# Queries, keys, warps and stages of long rows.
_PREFILL = (128, 128, 8, 3)
_PREFILL_MASKED = (128, 64, 8, 3)
_PREFILL_LONG = (128, 64, 8, 2)
_PREFILL_FLOAT32 = (32, 32, 4, 2)


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


@dataclass(frozen=True, slots=True)
class PrefillTuning:
    """Query tokens and keys of a tile, keys of the tiles at the ends of rows, and the compiler's
    numbers."""

    tile: int
    queries: int
    edge: int
    num_warps: int
    num_stages: int

    @property
    def masked_stages(self) -> int:
        """Where not all keys of a tile are seen. There is one such tile mostly; its keys and values
        are asked for at once, where registers and memory are enough for that."""
        return 2 if self.num_stages > 2 else 1


def decode_tuning(sizes: HeadSizes, num_programs: int, device: DeviceSizes) -> Tuning:
    """For rows of one query token; ``num_programs``: rows times key heads.

    Few warps a program, and many programs, read the cache fastest. Where there are few of them, all
    that counts is how long one waits: large tiles, whose keys are all asked for at once.
    """
    tiles = _TILES[device.products]
    is_long = sizes.num_bytes > 2 or sizes.k_block > 128
    wanted, num_warps, num_stages = tiles.decode_long if is_long else tiles.decode
    share, per_core = device.shared_bytes // 4, _PROGRAMS_PER_CORE
    if num_programs >= _MANY_PROGRAMS:
        wanted, num_warps, num_stages = tiles.decode_many
    elif num_programs <= _FEW_PROGRAMS:
        wanted, num_warps, num_stages = tiles.decode_few
        share, per_core = 3 * share, 1
    tile = _fitting_tile(sizes, wanted, share)
    room = per_core * device.num_cores // max(1, num_programs)
    splits = 1 << min(_MOST_SPLITS, max(1, room)).bit_length() - 1
    return Tuning(
        tile=tile,
        queries=1,
        packed=max(16, power_of_two(sizes.group)),
        splits=splits,
        least_part=max(tile, _LEAST_PART),
        num_warps=num_warps,
        num_stages=_fitting_stages(sizes, tile, (num_stages, device), device.shared_bytes // 2),
    )


def ragged_tuning(sizes: HeadSizes, device: DeviceSizes) -> Tuning:
    """For rows of several query tokens, whose keys are read page by page."""
    packed = power_of_two(sizes.group)
    tiles = _TILES[device.products]
    rows, tile, num_warps, num_stages = tiles.ragged
    if sizes.num_bytes > 2:
        rows, tile, num_warps, num_stages = tiles.ragged_float32
    elif sizes.k_block > 128:
        rows, tile, num_warps, num_stages = tiles.ragged_long
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
        num_stages=_fitting_stages(sizes, tile, (num_stages, device), room),
    )


def prefill_tuning(sizes: HeadSizes, device: DeviceSizes, is_plain: bool) -> PrefillTuning:
    """For long rows whose keys lie side by side; ``is_plain``: scores are products and no more, and
    there is no window."""
    queries, tile, num_warps, num_stages = _PREFILL if is_plain else _PREFILL_MASKED
    if sizes.num_bytes > 2:
        queries, tile, num_warps, num_stages = _PREFILL_FLOAT32
    elif sizes.k_block > 128:
        queries, tile, num_warps, num_stages = _PREFILL_LONG
    while queries > 16 and queries * sizes.k_block * sizes.num_bytes * 2 > device.shared_bytes:
        queries //= 2
    room = device.shared_bytes - queries * sizes.k_block * sizes.num_bytes - _BARRIERS
    tile = _fitting_tile(sizes, tile, room // 2)
    return PrefillTuning(
        tile=tile,
        queries=queries,
        edge=min(tile, 32),
        num_warps=num_warps,
        num_stages=_fitting_stages(sizes, tile, (num_stages, device), room),
    )


def _fitting_tile(sizes: HeadSizes, wanted: int, room: int) -> int:
    tile = wanted
    while tile > 16 and sizes.tile_bytes(tile) > room:
        tile //= 2
    return tile


def _fitting_stages(sizes: HeadSizes, tile: int, wanted: tuple[int, DeviceSizes], room: int) -> int:
    """``wanted``: how many, on which device."""
    num_stages, device = wanted
    return max(1, min(num_stages, room // sizes.tile_bytes(tile) + device.spare_stages))
