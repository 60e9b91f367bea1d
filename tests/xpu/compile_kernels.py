"""Compiles every Triton kernel to SPIR-V; prints a JSON line for each.

python compile_kernels.py plain|matrix
"""

import json
import sys

import intel_triton
import triton_ahead

from cardan.platforms.shared.triton.targets import DeviceSizes

SHARED_BYTES = 64 << 10
CORES = 32


def main():
    intel_triton.set_target(sys.argv[1] == "matrix")
    seen = set()

    def launched(fn, kernel, grid, values):
        name = fn.fn.__name__
        if isinstance(kernel, Exception):
            line = {"kernel": name, "refused": str(kernel), "split": values.get("IS_SPLIT", False)}
            print(json.dumps(line))
        elif kernel.hash not in seen:
            seen.add(kernel.hash)
            print(json.dumps(facts(name, kernel)))

    intel_triton.hand_on(launched)
    triton_ahead.compile_operations()
    triton_ahead.compile_experts(DeviceSizes(CORES, SHARED_BYTES), "all")
    for cores in (CORES, 1):
        triton_ahead.compile_attention("xe2_hpg", DeviceSizes(cores, SHARED_BYTES), (), "all")


def facts(name, kernel):
    return {
        "kernel": name,
        "dtype": triton_ahead.dtype_of(kernel.src.signature),
        "shared": kernel.metadata.shared,
        "matrix": "triton_intel_gpu.dpas" in kernel.asm["ttgir"] or "#mma" in kernel.asm["ttgir"],
        "words": kernel.asm["spv"][:4].hex(),
    }


if __name__ == "__main__":
    main()
