"""Times of the CPU's own attention and elementwise kernels against torch's: JSON lines.

    python benchmarks/cpu_attention.py [--threads N] [--repeats N]

Shapes are those of a decoder of 135 M parameters (9 heads on 3 key heads of 64, hidden size 576).
``run_us``: one layer; ``plan_us``: once a step; ``write_us``: storing a layer's keys and values.
Each time is the least over repeats in which the contenders take turns, since on a shared machine
everything else that runs only adds; with one thread it is the thread's own time. ``load`` is the
machine's load while it was measured.
"""

import argparse
import json
import os
import time

import torch

from cardan.core.interfaces.attention import LayerParams
from cardan.core.interfaces.capabilities import DeviceInfo
from cardan.core.ops.reference import activation, norm
from cardan.core.ops.reference.sampling_draw import greedy_tokens
from cardan.platforms.cpu import kernels as torch_kernels
from cardan.platforms.cpu.attention import CpuAttention
from cardan.platforms.cpu.native import elementwise
from cardan.platforms.cpu.native.attention import NativeAttention
from cardan.platforms.cpu.native.library import native_status
from cardan.testing.conformance.paged_batches import Geometry, PagedBatch, Placement

BATCHES = {
    "decode 1 x 256": [(1, 256)],
    "decode 32 x 384": [(1, 384)] * 32,
    "decode 1 x 4096": [(1, 4096)],
    "verify 4 of 8 x 384": [(4, 384)] * 8,
    "prefill 128": [(128, 128)],
    "prefill 512": [(512, 512)],
    "mixed": [(1, 384)] * 16 + [(256, 1024)],
}
DTYPES = ("float32", "bfloat16")
# Computing dtype, and that of the cache.
CACHES = (("float32", "float32"), ("bfloat16", "bfloat16"), ("float32", "int8"))
ROWS = (1, 32)
# A measurement calls a function for about so long.
SECONDS = 0.01


def least_times(calls, repeats, clock):
    """Microseconds of one call, by name."""
    counts = {}
    for name, call in calls.items():
        call()
        started = time.perf_counter()
        call()
        counts[name] = max(1, int(SECONDS / (time.perf_counter() - started)))
    least = dict.fromkeys(calls, float("inf"))
    for _ in range(repeats):
        for name, call in calls.items():
            started = clock()
            for _ in range(counts[name]):
                call()
            least[name] = min(least[name], (clock() - started) / counts[name])
    return {name: round(seconds * 1e6, 1) for name, seconds in least.items()}


def attention_calls(dtype, kv_dtype, rows):
    """What to time of each backend: functions by kind of time, then by name of the backend."""
    device = DeviceInfo(platform="cpu", index=0, name="cpu", arch="cpu")
    layer = LayerParams(scale=0.125)
    geometry = Geometry(
        heads=9, kv_heads=3, k_dim=64, v_dim=64, block_size=16, dtype=dtype, kv_dtype=kv_dtype
    )
    calls = {"run_us": {}, "plan_us": {}, "write_us": {}}
    for backend_class in (NativeAttention, CpuAttention):
        layout = backend_class.layout(geometry.spec, device)
        batch = PagedBatch(geometry, rows, 1, Placement(layout=layout, order=3))
        q, k, v = (batch.packed(part) for part in (batch.queries, batch.keys, batch.values))
        backend = backend_class(geometry.spec, layout, None)
        plan = backend.plan(batch.batch)
        backend.write(k, v, batch.cache, plan)
        name = backend_class.name

        def run(backend=backend, q=q, batch=batch, plan=plan):
            backend.run(q, batch.cache, plan, layer)

        def make_plan(backend=backend, batch=batch):
            backend.plan(batch.batch)

        def write(backend=backend, k=k, v=v, batch=batch, plan=plan):
            backend.write(k, v, batch.cache, plan)

        calls["run_us"][name] = run
        calls["plan_us"][name] = make_plan
        calls["write_us"][name] = write
    return calls


def elementwise_calls(dtype, rows):
    """Functions by operation, then by who serves it."""
    x, weight = torch.randn(rows, 576).to(dtype), torch.randn(576).to(dtype)
    gate_up, logits = torch.randn(rows, 3072).to(dtype), torch.randn(rows, 49152)
    q, k, _ = torch.randn(rows, 15, 64).to(dtype).split([9, 3, 3], dim=1)
    rotation = torch.rand(2048, 64), torch.arange(rows)
    torch_norm = torch_kernels.rms_norm if dtype is torch.float32 else norm.rms_norm
    parts = {"rms_norm": torch_norm}
    return {
        "rms_norm": {
            "native": lambda: elementwise.rms_norm(x, weight, 1e-5),
            "torch": lambda: torch_norm(x, weight, 1e-5),
        },
        "fused_add_rms_norm": {
            "native": lambda: elementwise.fused_add_rms_norm(x, x, weight, 1e-5),
            "torch": lambda: norm.fused_add_rms_norm(parts, x, x, weight, 1e-5),
        },
        "rotary_embedding": {
            "native": lambda: elementwise.rotary_embedding(q, k, *rotation),
            "torch": lambda: torch_kernels.rotary_embedding(q, k, *rotation),
        },
        "silu_and_mul": {
            "native": lambda: elementwise.silu_and_mul(gate_up),
            "torch": lambda: activation.silu_and_mul(gate_up),
        },
        "greedy_tokens": {
            "native": lambda: elementwise.greedy_tokens(logits),
            "torch": lambda: greedy_tokens(logits),
        },
    }


def report(**values):
    print(json.dumps({**values, "load": round(os.getloadavg()[0], 2)}), flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    clock = time.thread_time if options.threads == 1 else time.perf_counter
    report(library=native_status(), threads=options.threads, torch=torch.__version__)
    with torch.inference_mode():
        for dtype, kv_dtype in CACHES:
            for name, rows in BATCHES.items():
                times = {
                    kind: least_times(calls, options.repeats, clock)
                    for kind, calls in attention_calls(dtype, kv_dtype, rows).items()
                }
                report(attention=name, dtype=dtype, kv_dtype=kv_dtype, **times)
        for dtype in DTYPES:
            for rows in ROWS:
                for op, calls in elementwise_calls(getattr(torch, dtype), rows).items():
                    times = least_times(calls, options.repeats, clock)
                    report(op=op, rows=rows, dtype=dtype, us=times)


if __name__ == "__main__":
    main()
