"""Numbers in ways that numba has not, or has not for vectors."""

from typing import Any

import numpy as np
from numba import types
from numba.extending import intrinsic

from cardan.platforms.cpu.numba.compiler import part_of_kernel


@intrinsic  # type: ignore[untyped-decorator]
def _float_of(_context: Any, _bits: Any) -> Any:
    def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], context.get_value_type(types.float32))

    return types.float32(types.int32), generate


@part_of_kernel
def exponential(x: Any) -> Any:
    """exp of a float32, of which vectors can be computed at once: 2^n times a polynomial of
    the rest, within 2 units in the last place; 0 below -87 and at most exp(88)."""
    bounded = min(max(x, np.float32(-87)), np.float32(88))
    n = np.int32(np.floor(bounded * np.float32(1.44269504) + np.float32(0.5)))
    # ln 2 in two parts, of which the first has few bits.
    rest = bounded - np.float32(n) * np.float32(0.693359375)
    rest += np.float32(n) * np.float32(2.12194440e-4)
    value = np.float32(1 / 720)
    for factor in (1 / 120, 1 / 24, 1 / 6, 0.5, 1.0, 1.0):
        value = value * rest + np.float32(factor)
    found = value * _float_of(np.int32((n + 127) << 23))
    if x < np.float32(-87):
        return np.float32(0)
    return found if x == x else x


@part_of_kernel
def widen_half(halves: Any, out: Any) -> None:
    """Numbers of 16 bits (IEEE 754 binary16, as uint16) to float32."""
    bits = out.view(np.uint32)
    for i in range(len(out)):
        half = np.uint32(halves[i])
        bits[i] = ((half & 0x8000) << 16) | ((half & 0x7FFF) << 13)
    for i in range(len(out)):
        # The exponent's bias is moved by a product, which is right for subnormal numbers too.
        value = out[i] * np.float32(2.0**112)
        if abs(value) >= np.float32(65536):
            value = value * np.inf if abs(value) == np.float32(65536) else np.float32(np.nan)
        out[i] = value
