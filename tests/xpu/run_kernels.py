"""Runs the Triton kernels, as SPIR-V on an OpenCL device for CPUs, against float64; prints a JSON
line for each operation and dtype, and for each attention.

    python run_kernels.py [NAME ...]
"""

import json
import sys
from dataclasses import replace

import intel_triton
import numpy as np
import torch
from opencl_cpu import CpuDevice

from cardan.core.interfaces.capabilities import Capabilities, DeviceInfo
from cardan.core.interfaces.torch_device import TorchDevice
from cardan.core.ops.catalogue import CATALOGUE
from cardan.core.ops.loading import load_provider
from cardan.core.ops.self_check import self_check
from cardan.platforms.cpu.platform import CpuPlatform
from cardan.platforms.shared.triton.attention import TritonAttention
from cardan.platforms.shared.triton.providers import TRITON_PROVIDERS
from cardan.platforms.shared.triton.targets import DeviceSizes
from cardan.testing.conformance.attention_bench import AttentionBench, LayerCase
from cardan.testing.conformance.paged_batches import Geometry, PagedBatch

OPS = {op.name: op for op in CATALOGUE}
DTYPES = ("float32", "float16")
INFO = DeviceInfo(platform="test", index=0, name="test", arch="xe2_hpg")
PLAIN = Geometry(heads=4, kv_heads=2, k_dim=16, v_dim=16, block_size=16)
# One core, so that rows are not split, and little memory, so that tiles are small.
SIZES = DeviceSizes(1, 8 << 10)
STEPS = {
    "decode": [(1, 40), (1, 1), (1, 77)],
    "mixed": [(1, 40), (5, 5), (20, 33), (3, 70)],
}
FEATURES = {
    "plain": {},
    "all": {"window": 9, "softcap": 2.0, "sinks": True, "alibi": True, "lse": True},
}


def check_operations(names):
    cpu = torch.device("cpu")
    for provider in TRITON_PROVIDERS:
        op = OPS[provider.op]
        for dtype in DTYPES:
            if provider.needs.dtypes and dtype not in provider.needs.dtypes:
                continue
            if names and provider.op not in names:
                continue
            loaded = load_provider(op, provider)
            result = self_check(op, provider, loaded, dtype, OPS, cpu, ("fp64",))
            tell(provider.op, dtype, result.ok, result.text)


def check_attention():
    """Rows are not split: the kernel for that is none for this compiler."""
    device = TorchDevice(INFO, Capabilities(), "cpu", lambda: None)
    bench = AttentionBench(TritonAttention, CpuPlatform(), device, torch.device("cpu"))
    for dtype in DTYPES:
        for step, rows in STEPS.items():
            for kind, features in FEATURES.items():
                geometry = replace(PLAIN, dtype=dtype)
                case = replace(LayerCase(geometry=geometry), **features)
                batch = PagedBatch(geometry, rows, 5, bench.placement(geometry))
                layer = case.layer(bench.torch_device, np.random.default_rng(1))
                fault = bench.fault(batch, layer, case.lse)
                tell(f"attention {step} {kind}", dtype, not fault, str(fault or "passed"))


def tell(name, dtype, ok, text):
    print(json.dumps({"name": name, "dtype": dtype, "ok": ok, "text": text}), flush=True)


def main():
    names = set(sys.argv[1:])
    device = CpuDevice()
    intel_triton.set_target(matrix=False)

    def launched(fn, kernel, grid, values):
        if isinstance(kernel, Exception):
            raise kernel
        device.launch(kernel, grid, values)

    intel_triton.hand_on(launched)
    check_operations(names)
    if not names or "attention" in names:
        from cardan.platforms.shared.triton import attention

        attention.device_sizes = lambda device: SIZES
        check_attention()


if __name__ == "__main__":
    main()
