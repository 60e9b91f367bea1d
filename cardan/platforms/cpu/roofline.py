"""Peaks of the CPU, measured with NumPy when asked for; imports no torch."""

import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from cardan.core.interfaces.roofline import Efficiency, Roofline

# Read by each thread in one go; beyond any cache.
_READ_BYTES = 64 << 20
_PRODUCT_SIZE = 1024
_SECONDS = 0.4
# How many times faster than float32 vectors of the same width multiply: 8-bit numbers are four to
# a float32, bfloat16 are two; tiles (AMX) do more.
_INT8 = 4.0
_INT8_TILES = 32.0
_BFLOAT16 = {"avx512_bf16": 2.0, "bf16": 2.0, "amx_bf16": 16.0}
_EFFICIENCY = Efficiency(
    weights=0.95,
    cache=0.70,
    products={"float32": 0.75, "bfloat16": 0.75, "float16": 0.75, "int8": 0.30},
    attention=0.40,
    layer_s=20e-6,
    source="SmolLM2-135M in bfloat16 and in 4-bit blocks on two cores of an AVX2 EPYC",
)


def cpu_roofline(
    rates: tuple[float, float] | None, features: Sequence[str], reserved_bytes: int
) -> Roofline:
    """``rates`` are bytes and float32 operations a second, as measured; None: unknown.

    From the CPU's instruction sets, ``features``, follow the rates of other dtypes.
    """
    if rates is None:
        return Roofline(source="not measured", reserved_bytes=reserved_bytes)
    bytes_per_s, single = rates
    bfloat16 = max((_BFLOAT16.get(name, 1.0) for name in features), default=1.0)
    int8 = _INT8_TILES if "amx_int8" in features else _INT8
    return Roofline(
        bytes_per_s=bytes_per_s,
        flop_per_s={
            "float32": single,
            "float16": single,
            "bfloat16": bfloat16 * single,
            "int8": int8 * single,
        },
        source=f"measured: {bytes_per_s / 1e9:.0f} GB/s, {single / 1e9:.0f} GFLOP/s in float32; "
        "other dtypes by the width of vectors",
        reserved_bytes=reserved_bytes,
        efficiency=_EFFICIENCY,
    )


def measured_rates(num_threads: int) -> tuple[float, float]:
    """Bytes read a second by ``num_threads``, and float32 operations by NumPy's own threads, each
    in the best of some rounds; takes about a second."""
    import numpy as np

    blocks = np.ones((num_threads, _READ_BYTES // 4), np.int32)
    square = np.ones((_PRODUCT_SIZE, _PRODUCT_SIZE), np.float32)
    with ThreadPoolExecutor(num_threads) as pool:
        reading = _best_s(lambda: list(pool.map(np.max, blocks)))
    multiplying = _best_s(lambda: square @ square)
    return blocks.nbytes / reading, 2.0 * _PRODUCT_SIZE**3 / multiplying


def _best_s(work: Callable[[], object]) -> float:
    """Seconds of the fastest call, the first one aside."""
    work()
    best = math.inf
    end = time.perf_counter() + _SECONDS
    while math.isinf(best) or time.perf_counter() < end:
        began = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - began)
    return best
