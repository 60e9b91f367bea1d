"""Products with weights in codes, and decoding them, compiled by numba.

Codes are cut into planes of 4 bits: one, or two for codes of more bits. A word of 16 bits holds
four of a plane, of neighbouring inputs of one row of the weight. Rows lie side by side in tiles, so
that vectors hold words of neighbours. Activations are rounded to 8 bits in groups: 16 products
with numbers of 4 bits then fit into 16 bits.
"""

from typing import Any

import numpy as np
from numba import prange

from cardan.platforms.cpu.numba.compiler import array_at, parallel_kernel, part_of_kernel

# Rows of the weight in a tile.
LANES = 64
# Inputs whose products are summed in 16 bits, and the words that hold a plane of them.
_RUN, _RUN_WORDS = 16, 4


@part_of_kernel
def _four(word: Any, x0: Any, x1: Any, x2: Any, x3: Any) -> Any:
    """The sum of a word's products. Every step is cut to 16 bits, or vectors would be wider."""
    a = np.int16(np.int16(word & 15) * x0)
    b = np.int16(np.int16((word >> 4) & 15) * x1)
    c = np.int16(np.int16((word >> 8) & 15) * x2)
    d = np.int16(np.int16((word >> 12) & 15) * x3)
    return np.int16(np.int16(a + b) + np.int16(c + d))


@part_of_kernel
def _run_of_products(sums: Any, words: Any, x: Any) -> None:
    """The sums of ``_RUN`` inputs' products with LANES rows."""
    x0, x1, x2, x3, x4, x5, x6, x7 = x[0], x[1], x[2], x[3], x[4], x[5], x[6], x[7]
    x8, x9, x10, x11, x12, x13, x14, x15 = x[8], x[9], x[10], x[11], x[12], x[13], x[14], x[15]
    for lane in range(LANES):
        first = _four(words[lane], x0, x1, x2, x3)
        second = _four(words[LANES + lane], x4, x5, x6, x7)
        third = _four(words[2 * LANES + lane], x8, x9, x10, x11)
        fourth = _four(words[3 * LANES + lane], x12, x13, x14, x15)
        sums[lane] = np.int16(np.int16(first + second) + np.int16(third + fourth))


@part_of_kernel
def _round(x: Any, numbers: Any) -> Any:
    """Round a group to whole numbers from -127 to 127: the factor between them, NaN if a number is
    not finite, and the sum of the rounded group."""
    most, check = np.float32(0), np.float32(0)
    for i in range(len(x)):
        most = max(most, abs(x[i]))
        check += np.float32(0) * x[i]
    if check != check:
        numbers[:] = 0
        return np.float32(np.nan), np.float32(np.nan)
    inverse = np.float32(127) / most if most > np.float32(2.0**-100) else np.float32(0)
    total = np.int64(0)
    for i in range(len(x)):
        number = np.int16(np.rint(x[i] * inverse))
        numbers[i] = number
        total += number
    step = most / np.float32(127) if inverse else np.float32(0)
    return step, step * np.float32(total)


@part_of_kernel
def _multiply_tiles(out: Any, x: Any, words: Any, factors: Any, sizes: Any, tiles: Any) -> None:
    numbers, steps, totals = x
    rows, inputs, outputs, planes, group = sizes
    groups = inputs // group
    in_group = planes * group // 4 * LANES
    few = np.empty(LANES, np.int16)
    own = np.empty(LANES, np.int32)
    sums = np.empty(LANES, np.float32)
    for tile in range(tiles[0], tiles[1]):
        for row in range(rows):
            sums[:] = 0
            for place in range(groups):
                at = tile * groups + place
                own[:] = 0
                for run in range(planes * group // _RUN):
                    start = at * in_group + run * _RUN_WORDS * LANES
                    first = row * inputs + place * group + run // planes * _RUN
                    some = words[start : start + _RUN_WORDS * LANES]
                    _run_of_products(few, some, numbers[first : first + _RUN])
                    # Planes of a run follow each other, the lowest bits first.
                    weight = np.int32(16) if run % planes else np.int32(1)
                    for lane in range(LANES):
                        own[lane] += np.int32(few[lane]) * weight
                scales = factors[2 * at * LANES : (2 * at + 1) * LANES]
                minima = factors[(2 * at + 1) * LANES : (2 * at + 2) * LANES]
                step, total = steps[row * groups + place], totals[row * groups + place]
                for lane in range(LANES):
                    sums[lane] += np.float32(own[lane]) * (scales[lane] * step)
                    sums[lane] += minima[lane] * total
            for lane in range(min(LANES, outputs - tile * LANES)):
                out[row * outputs + tile * LANES + lane] = sums[lane]


@parallel_kernel(f"void({', '.join(['int64'] * 10)})")
def multiply(  # noqa: PLR0913 (addresses and sizes of a call)
    parts: int,
    out: int,
    x: int,
    words: int,
    factors: int,
    rows: int,
    inputs: int,
    outputs: int,
    planes: int,
    group: int,
) -> None:
    """float32 [rows, outputs] at ``out``: the product of float32 [rows, inputs] at ``x`` with a
    weight that `blocks.prepare_blocks` made."""
    tiles = (outputs + LANES - 1) // LANES
    groups = inputs // group
    given = array_at(x, rows * inputs, np.float32)
    numbers = np.empty(rows * inputs, np.int16)
    steps = np.empty(rows * groups, np.float32)
    totals = np.empty(rows * groups, np.float32)
    for place in range(rows * groups):
        span = slice(place * group, (place + 1) * group)
        steps[place], totals[place] = _round(given[span], numbers[span])
    for part in prange(parts):
        _multiply_tiles(
            array_at(out, rows * outputs, np.float32),
            (numbers, steps, totals),
            array_at(words, tiles * LANES * inputs * planes // 4, np.int16),
            array_at(factors, 2 * tiles * LANES * groups, np.float32),
            (rows, inputs, outputs, planes, group),
            (part * tiles // parts, (part + 1) * tiles // parts),
        )


@part_of_kernel
def _decode_run(values: Any, stride: int, words: Any, factors: Any, planes: int) -> None:
    """``_RUN`` inputs of LANES rows; ``stride``: between inputs in ``values``."""
    scales, minima = factors
    for i in range(_RUN):
        target = values[i * stride : i * stride + LANES]
        low = words[i // 4 * LANES : (i // 4 + 1) * LANES]
        shift = 4 * (i % 4)
        if planes == 1:
            for lane in range(LANES):
                code = np.float32((low[lane] >> shift) & 15)
                target[lane] = code * scales[lane] + minima[lane]
        else:
            high = words[(_RUN_WORDS + i // 4) * LANES : (_RUN_WORDS + i // 4 + 1) * LANES]
            for lane in range(LANES):
                code = ((low[lane] >> shift) & 15) + 16 * ((high[lane] >> shift) & 15)
                target[lane] = np.float32(code) * scales[lane] + minima[lane]


@part_of_kernel
def _decode_tiles(values: Any, words: Any, factors: Any, sizes: Any, tiles: Any) -> None:
    inputs, stride, planes, group = sizes
    in_run = planes * _RUN_WORDS * LANES
    for tile in range(tiles[0], tiles[1]):
        for run in range(inputs // _RUN):
            at = tile * (inputs // group) + run * _RUN // group
            start = (tile * (inputs // _RUN) + run) * in_run
            _decode_run(
                values[run * _RUN * stride + tile * LANES :],
                stride,
                words[start : start + in_run],
                (
                    factors[2 * at * LANES : (2 * at + 1) * LANES],
                    factors[(2 * at + 1) * LANES : (2 * at + 2) * LANES],
                ),
                planes,
            )


@parallel_kernel(f"void({', '.join(['int64'] * 8)})")
def decode(  # noqa: PLR0913 (addresses and sizes of a call)
    parts: int,
    values: int,
    words: int,
    factors: int,
    inputs: int,
    tiles: int,
    planes: int,
    group: int,
) -> None:
    """float32 [inputs, tiles * LANES] at ``values``: as many tiles of a weight, transposed."""
    for part in prange(parts):
        _decode_tiles(
            array_at(values, inputs * tiles * LANES, np.float32),
            array_at(words, tiles * LANES * inputs * planes // 4, np.int16),
            array_at(factors, 2 * tiles * LANES * (inputs // group), np.float32),
            (inputs, tiles * LANES, planes, group),
            (part * tiles // parts, (part + 1) * tiles // parts),
        )
