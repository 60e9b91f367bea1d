"""Times of every operation's definition and providers on a platform: one JSON line for each.

    python benchmarks/kernels.py [--platform cpu] [--dtype float32] [--sizes kit|model] [--op NAME]

`kit` are the conformance kit's inputs: small and odd, so that they show what a call costs. `model`
are the widths of a decoder of 135 M parameters with 1, 32 and 512 rows, for operations whose
arguments are a matter of shape. A time is the median over repeats of the mean of a burst of calls;
`bytes` are those of the arguments and the outputs, each counted once (of an embedding's table only
the rows that are looked up), `gb_per_s` follows from it.
"""

import argparse
import json
import statistics
import time

import torch

from cardan.bench.result import host_facts, source_commit
from cardan.core.discovery import Discovery
from cardan.core.interfaces.kernels import Case, check_needs
from cardan.core.ops.compare import copy_args
from cardan.core.platform_selection import installed_platforms, select_platform
from cardan.core.runtime import Runtime
from cardan.core.types.errors import CardanError
from cardan.testing.conformance.op_cases import (
    OpBench,
    computing_dtypes,
    provider_uses,
    reference_uses,
)

REPEATS = 9
# Calls are timed in bursts of at least this long, seconds, and at most so many.
BURST = 0.002
MAX_CALLS = 500
HIDDEN, INTERMEDIATE, VOCABULARY = 576, 1536, 49152
ROWS = (1, 32, 512)


def model_cases(op, dtype, seed):
    """Inputs at a model's widths; none for an operation that is not listed here."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(shape, generator=generator).to(dtype)

    name = str(dtype).removeprefix("torch.")
    makers = {
        "embedding": lambda rows: (
            (torch.randint(0, VOCABULARY, (rows,), generator=generator), draw(VOCABULARY, HIDDEN)),
            {"hidden": HIDDEN},
        ),
        "linear": lambda rows: (
            (draw(rows, HIDDEN), draw(INTERMEDIATE, HIDDEN), None),
            {"in_features": HIDDEN, "out_features": INTERMEDIATE},
        ),
        "rms_norm": lambda rows: (
            (draw(rows, HIDDEN), draw(HIDDEN), 1e-6),
            {"hidden": HIDDEN},
        ),
        "fused_add_rms_norm": lambda rows: (
            (draw(rows, HIDDEN), draw(rows, HIDDEN), draw(HIDDEN), 1e-6),
            {"hidden": HIDDEN},
        ),
        "silu_and_mul": lambda rows: ((draw(rows, 2 * INTERMEDIATE),), {"hidden": INTERMEDIATE}),
        "gelu_tanh_and_mul": lambda rows: (
            (draw(rows, 2 * INTERMEDIATE),),
            {"hidden": INTERMEDIATE},
        ),
    }
    if op not in makers:
        return []
    made = [makers[op](rows) for rows in ROWS]
    return [Case(args, {"dtype": name, **attributes}) for args, attributes in made]


def cases_of(bench, sizes, features):
    if sizes == "kit":
        return bench.cases(0)
    cases = model_cases(bench.use.op, getattr(torch, bench.use.dtype), 0)
    provider = bench.use.provider
    return [
        case
        for case in cases
        if not provider or check_needs(provider.needs, features, case.attributes)
    ]


def tensors_of(value):
    items = value if isinstance(value, list | tuple) else [value]
    return [item for item in items if isinstance(item, torch.Tensor)]


def bytes_of(op, args, outputs):
    read, written = (sum(item.nbytes for item in tensors_of(value)) for value in (args, outputs))
    return args[0].nbytes + 2 * written if "embedding" in op else read + written


def time_case(device, bench, case):
    """Seconds of a call for each repeat, and the bytes that one call takes in and gives out."""
    on_device, kernel = str(device.torch_device), bench.kernel
    with device.inference():
        args = bench.prepared(case, copy_args(case.args, on_device))
        moved = bytes_of(bench.op.name, case.args, kernel(*args))
        device.synchronize()
        began = time.perf_counter()
        kernel(*args)
        device.synchronize()
        once = max(time.perf_counter() - began, 1e-7)
        calls = max(1, min(MAX_CALLS, round(BURST / once)))
        seconds = []
        for _ in range(REPEATS):
            # Fresh copies: arguments that are written in place would drift away.
            args = bench.prepared(case, copy_args(case.args, on_device))
            device.synchronize()
            began = time.perf_counter()
            for _ in range(calls):
                kernel(*args)
            device.synchronize()
            seconds.append((time.perf_counter() - began) / calls)
    return seconds, moved


def line(use, case, seconds, moved):
    median = statistics.median(seconds)
    return {
        "op": use.op,
        "provider": use.provider.name if use.provider else "reference",
        "dtype": use.dtype,
        "sizes": [list(item.shape) for item in tensors_of(case.args)],
        "median_us": round(median * 1e6, 3),
        "min_us": round(min(seconds) * 1e6, 3),
        "max_us": round(max(seconds) * 1e6, 3),
        "bytes": moved,
        "gb_per_s": round(moved / median / 1e9, 3),
    }


def run(device, providers, options):
    """Print a line for each case of each use; what cannot run says why."""
    dtypes = [options.dtype] if options.dtype else computing_dtypes(device.capabilities)
    uses = [*reference_uses(dtypes), *provider_uses(providers, dtypes)]
    facts = {"commit": source_commit(), "device": device.info.name, "load_1m": None}
    for use in uses:
        if options.op and use.op not in options.op:
            continue
        try:
            bench = OpBench(device, use, providers)
        except CardanError as error:
            print(json.dumps({**facts, "op": use.op, "use": str(use), "error": str(error)}))
            continue
        for case in cases_of(bench, options.sizes, device.capabilities.instruction_sets):
            facts["load_1m"] = host_facts().get("load_1m")
            found = line(use, case, *time_case(device, bench, case))
            print(json.dumps({**facts, **found}), flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--platform", help="default: the best one present")
    parser.add_argument("--dtype", help="default: all that the device computes in")
    parser.add_argument("--sizes", choices=("kit", "model"), default="kit")
    parser.add_argument("--op", action="append", help="only this operation (several times)")
    parser.add_argument("--threads", type=int, help="host threads of torch")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    selection = select_platform(options.platform, installed_platforms(Discovery()))
    info = selection.devices[0]
    with Runtime() as runtime:
        device = runtime.open(selection.platform, info)
        run(device, tuple(selection.platform.kernels(info)), options)


if __name__ == "__main__":
    main()
