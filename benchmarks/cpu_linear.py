"""Times of the CPU's own matrix product against torch's: one JSON line for each shape.

    python benchmarks/cpu_linear.py [--threads N] [--repeats N]

One row is what a decode step asks of each layer, and its limit is how fast weights are read: so
many copies of a weight are gone through that none of it is still in a cache (``gb_per_s``, bytes of
weights). With more rows the limit is arithmetic (``gflop_per_s``). Shapes are those of a decoder of
135 M parameters. Each time is the least over repeats in which the two take turns, since on a shared
machine everything else that runs only adds; ``load`` is the machine's load while it was measured.
"""

import argparse
import json
import os
import time

import torch
from torch.nn.functional import linear as torch_linear

from cardan.platforms.cpu.native.library import native_status
from cardan.platforms.cpu.native.linear import linear as native_linear
from cardan.platforms.cpu.native.linear import prepare_linear

SHAPES = ((576, 576), (1536, 576), (576, 1536), (49152, 576))
DTYPES = (torch.bfloat16, torch.float32, torch.float16)
ROWS = (1, 4, 16, 32, 128, 512, 2048)
# Larger than the last cache.
COLD_BYTES = 96 << 20
# Each with what brings a weight into the form that it takes.
KERNELS = {
    "native": (native_linear, prepare_linear),
    "torch": (torch_linear, lambda weight: weight),
}


def least_times(x, weights, repeats):
    """Seconds of one product, by kernel."""
    least = dict.fromkeys(KERNELS, float("inf"))
    prepared = {name: [prepare(w) for w in weights] for name, (_, prepare) in KERNELS.items()}
    for _ in range(repeats):
        for name, (kernel, _) in KERNELS.items():
            started = time.perf_counter()
            for weight in prepared[name]:
                kernel(x, weight, None)
            least[name] = min(least[name], (time.perf_counter() - started) / len(weights))
    return least


def measure(dtype, rows, shape, repeats):
    """One line: the shape, and by kernel microseconds and the rate that limits it."""
    outputs, inputs = shape
    weight = torch.randn(outputs, inputs).to(dtype)
    size = weight.numel() * weight.element_size()
    copies = max(1, COLD_BYTES // size) if rows == 1 else 1
    weights = [weight, *(weight.clone() for _ in range(copies - 1))]
    times = least_times(torch.randn(rows, inputs).to(dtype), weights, repeats)
    work = size / 1e9 if rows == 1 else 2e-9 * rows * weight.numel()
    rate = "gb_per_s" if rows == 1 else "gflop_per_s"
    line = {"dtype": str(dtype).removeprefix("torch."), "rows": rows}
    line |= {"out_features": outputs, "in_features": inputs}
    for name, seconds in times.items():
        line[name] = {"us": round(seconds * 1e6, 1), rate: round(work / seconds, 1)}
    return line


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=10)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    print(json.dumps({"library": native_status(), "threads": args.threads}))
    for dtype in DTYPES:
        for rows in ROWS:
            # The head is applied to few rows only.
            for shape in SHAPES if rows <= 4 else SHAPES[1:2]:
                line = measure(dtype, rows, shape, args.repeats)
                print(json.dumps({**line, "load": os.getloadavg()[0]}), flush=True)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
