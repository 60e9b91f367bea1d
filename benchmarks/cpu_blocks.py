"""Times of the CPU's products with quantised blocks beside its dense ones: JSON lines.

    python benchmarks/cpu_blocks.py [--threads N] [--repeats N] [--formats q4_1,q8_0]

``shape``: one line for each format, number of rows and shape of a decoder of 135 M parameters,
with the time of the same product in bfloat16 (``dense_us``). With one row, so many copies of a
weight are gone through that none of it is still in a cache: the limit is how fast weights are read
(``gb_per_s``). With more rows it is arithmetic (``gop_per_s``, a product and a sum being two).
``pack``: how fast weights are packed at load, in stored bytes. ``step``: all products of a step of
that decoder, 30 layers and the head (in q8_0), by the times of their shapes. Each time is the least
over repeats in which the contenders take turns, since on a shared machine everything else that runs
only adds; ``load`` is the machine's load while it was measured.
"""

import argparse
import json
import os
import time

import torch

from cardan.core.ops.reference.block_inputs import random_blocks
from cardan.core.types.ggml import BLOCK_TYPES
from cardan.platforms.cpu.native.blocks import block_linear, prepare_blocks
from cardan.platforms.cpu.native.library import native_status
from cardan.platforms.cpu.native.linear import linear, prepare_linear

# Fused q, k, v; their output; gate and up; down. Superblocks need multiples of 256.
LAYER = ((960, 576), (576, 576), (3072, 576), (576, 1536))
LAYERS = 30
HEAD = (49152, 576)
ROWS = (1, 2, 4, 16, 32, 128, 512)
# Larger than the last cache.
COLD_BYTES = 96 << 20


def stored_rows(format, outputs, inputs):
    """A weight of ``outputs`` rows, made of repeated ones."""
    few = random_blocks(format, 48, inputs, inputs**-0.5, torch.Generator().manual_seed(0))
    return few.repeat(-(-outputs // 48), 1)[:outputs].contiguous()


def least_times(calls, repeats):
    """Seconds of each call, by name."""
    least = dict.fromkeys(calls, float("inf"))
    for _ in range(repeats):
        for name, (call, count) in calls.items():
            started = time.perf_counter()
            for index in range(count):
                call(index)
            least[name] = min(least[name], (time.perf_counter() - started) / count)
    return least


def measure(format, rows, shape, repeats):
    """One line: the shape, and the times of both kinds of weights."""
    outputs, inputs = shape
    stored = stored_rows(format, outputs, inputs)
    size = stored.numel()
    copies = max(1, COLD_BYTES // size) if rows == 1 else 1
    blocks = [prepare_blocks(stored, format, inputs, outputs) for _ in range(copies)]
    dense = torch.randn(outputs, inputs).to(torch.bfloat16)
    dense = [prepare_linear(dense) for _ in range(max(1, copies * size // (2 * outputs * inputs)))]
    x = torch.randn(rows, inputs).to(torch.bfloat16)
    calls = {
        "blocks": (lambda index: block_linear(x, blocks[index], None, format), len(blocks)),
        "dense": (lambda index: linear(x, dense[index], None), len(dense)),
    }
    least = least_times(calls, repeats)
    seconds = least["blocks"]
    line = {"kind": "shape", "format": format, "rows": rows}
    line |= {"out_features": outputs, "in_features": inputs}
    line |= {"us": round(seconds * 1e6, 1), "dense_us": round(least["dense"] * 1e6, 1)}
    line["gb_per_s"] = round(size / seconds / 1e9, 1)
    line["gop_per_s"] = round(2e-9 * rows * outputs * inputs / seconds, 1)
    return line


def measure_packing(format, repeats):
    stored = stored_rows(format, 49152, 768)
    call = (lambda index: prepare_blocks(stored, format, 768, 49152), 1)
    seconds = least_times({"pack": call}, repeats)["pack"]
    gb_per_s = round(stored.numel() / seconds / 1e9, 2)
    return {"kind": "pack", "format": format, "gb_per_s": gb_per_s}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--formats", default="q4_1,q8_0")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)

    def show(line):
        print(json.dumps({**line, "load": os.getloadavg()[0]}), flush=True)

    show({"library": native_status(), "threads": args.threads})
    for format in args.formats.split(","):
        superblocks = BLOCK_TYPES[format] in [BLOCK_TYPES[f"q{n}_k"] for n in range(2, 7)]
        shapes = [(o, i // 256 * 256 if superblocks else i) for o, i in LAYER]
        show(measure_packing(format, 5))
        for rows in ROWS:
            lines = [measure(format, rows, shape, args.repeats) for shape in shapes]
            # The head sees the last token of each request only.
            head = measure("q8_0", min(rows, 4), HEAD, 3)
            for line in lines:
                show(line)
            for name in ("us", "dense_us"):
                layers = LAYERS * sum(line[name] for line in lines)
                show(
                    {
                        "kind": "step",
                        "format": format,
                        "rows": rows,
                        name: round(layers + head[name]),
                    }
                )


if __name__ == "__main__":
    with torch.inference_mode():
        main()
