"""Compiles every Triton kernel for a GPU that is not here; prints a JSON line for each.

    python triton_ahead.py BACKEND ARCH WARP_SIZE SHARED_BYTES [FEATURE ...]

Kernels are launched as the engine launches them, on tensors of the host; a stand-in for the driver
names the target, and launches end after the compilation.
"""

import json
import os
import sys
import tempfile

os.environ["TRITON_INTERPRET"] = "0"
os.environ["TRITON_CACHE_DIR"] = tempfile.mkdtemp()

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from cardan.core.interfaces.attention import KVLayout, LayerParams
from cardan.core.interfaces.capabilities import Capabilities, DeviceInfo
from cardan.core.interfaces.kernels import check_needs
from cardan.core.interfaces.torch_device import TorchDevice
from cardan.core.ops.catalogue import CATALOGUE
from cardan.core.ops.loading import load_provider
from cardan.platforms.shared.triton.attention import TritonAttention
from cardan.platforms.shared.triton.attention_tuning import DeviceSizes
from cardan.platforms.shared.triton.providers import TRITON_PROVIDERS
from cardan.testing.conformance.paged_batches import Geometry, PagedBatch, Placement

OPS = {op.name: op for op in CATALOGUE}
# (dtype, query heads, key heads, head dim), and what layers of it use.
GEOMETRIES = (
    ("bfloat16", 32, 8, 128, {}),
    ("float16", 8, 1, 256, {"softcap": 30.0, "window": 64}),
    ("float32", 6, 2, 96, {}),
)
# Rows of steps: split, mixed, many, and prompts without earlier keys.
STEPS = ([(1, 40)], [(1, 40), (7, 20)], [(1, 20)] * 256, [(20, 20)])


class StandIn:
    """Names the target, as a driver would."""

    def __init__(self, target):
        self.target = target

    def get_current_target(self):
        return self.target

    def get_current_device(self):
        return 0

    def get_current_stream(self, device=None):
        return 0

    def get_device_interface(self):
        return torch.cpu

    def get_active_torch_device(self):
        return torch.device("cpu")


def compile_only(found):
    """Replace launches by compilations, which ``found`` collects."""
    launch = JITFunction.run

    def run(self, *args, grid, warmup, **kwargs):
        kernel = launch(self, *args, grid=grid, warmup=True, **kwargs)
        found.append((self.fn.__name__, kernel))
        return kernel

    JITFunction.run = run


def compile_operations():
    """Each operation on a third of its inputs, in bfloat16 where it takes that."""
    for provider in TRITON_PROVIDERS:
        dtype = min(provider.needs.dtypes)
        kernel = load_provider(OPS[provider.op], provider).run
        made = OPS[provider.op].make_inputs(getattr(torch, dtype), torch.device("cpu"), 0)
        for case in made[::3]:
            if check_needs(provider.needs, (), {"dtype": dtype, **case.attributes}):
                kernel(*case.args)
    load_provider(OPS["linear"], TRITON_PROVIDERS[0]).run(
        torch.zeros(1, 1024, dtype=torch.bfloat16),
        torch.zeros(64, 1024, dtype=torch.bfloat16),
        None,
    )


def compile_attention(sizes, features):
    info = DeviceInfo(platform="test", index=0, name="test", arch="test")
    device = TorchDevice(info, Capabilities(instruction_sets=features), "cpu", lambda: None)
    for dtype, heads, kv_heads, dim, uses in GEOMETRIES:
        geometry = Geometry(
            heads=heads, kv_heads=kv_heads, k_dim=dim, v_dim=dim, block_size=16, dtype=dtype
        )
        backend = TritonAttention(geometry.spec, KVLayout(), device)
        backend._sizes = sizes
        for rows in STEPS:
            batch = PagedBatch(geometry, rows, 0, Placement())
            batch.run(backend, LayerParams(scale=dim**-0.5, **uses))
        sums = torch.empty(2, heads)
        layer = LayerParams(scale=1.0, sinks=torch.zeros(heads), alibi_slopes=torch.zeros(heads))
        PagedBatch(geometry, [(2, 20)], 0, Placement()).run(backend, layer, sums)


def main():
    backend, arch, warp_size, shared_bytes, *features = sys.argv[1:]
    target = GPUTarget(backend, int(arch) if arch.isdigit() else arch, int(warp_size))
    driver.set_active(StandIn(target))
    found = []
    compile_only(found)
    compile_operations()
    compile_attention(DeviceSizes(132, int(shared_bytes)), tuple(features))
    seen = set()
    for name, kernel in found:
        if kernel.hash in seen:
            continue
        seen.add(kernel.hash)
        code = kernel.asm.get("ptx") or kernel.asm.get("amdgcn")
        line = {
            "kernel": name,
            "dtype": "float32" if "fp32" in str(kernel.src.signature.get("q")) else "short",
            "shared": kernel.metadata.shared,
            "warps": kernel.metadata.num_warps,
            "stages": kernel.metadata.num_stages,
            "matrix": any(word in code for word in ("mma.sync", "wgmma", "tcgen05", "mfma")),
            "binary": sorted(set(kernel.asm) & {"cubin", "hsaco"}),
        }
        print(json.dumps(line))


if __name__ == "__main__":
    main()
