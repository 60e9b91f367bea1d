"""Compiles every Triton kernel for a GPU that is not here; prints a JSON line for each.

    python triton_ahead.py BACKEND ARCH WARP_SIZE SHARED_BYTES [FEATURE ...]

Kernels are launched as the engine launches them, on tensors of the host; a stand-in for the driver
names the target, and launches end after the compilation.
"""

import json
import os
import sys
import tempfile
from dataclasses import replace

os.environ["TRITON_INTERPRET"] = "0"
os.environ["TRITON_CACHE_DIR"] = tempfile.mkdtemp()

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from cardan.core.interfaces.attention import HeadRotation, KVLayout, LayerParams
from cardan.core.interfaces.capabilities import Capabilities, DeviceInfo
from cardan.core.interfaces.kernels import check_needs
from cardan.core.interfaces.torch_device import TorchDevice
from cardan.core.ops.catalogue import CATALOGUE
from cardan.core.ops.loading import load_provider
from cardan.platforms.shared.triton.attention import TritonAttention
from cardan.platforms.shared.triton.attention_tuning import DeviceSizes
from cardan.platforms.shared.triton.experts import mix_experts
from cardan.platforms.shared.triton.providers import TRITON_PROVIDERS
from cardan.testing.conformance.paged_batches import Geometry, PagedBatch, Placement

OPS = {op.name: op for op in CATALOGUE}
# Sizes of layers, and what these use.
COMMON = Geometry(heads=32, kv_heads=8, k_dim=128, v_dim=128, block_size=16, dtype="bfloat16")
ODD = Geometry(heads=6, kv_heads=2, k_dim=96, v_dim=96, block_size=16)
LONG = Geometry(heads=8, kv_heads=1, k_dim=256, v_dim=256, block_size=16, dtype="float16")
GEOMETRIES = (
    (COMMON, {}),
    (LONG, {"softcap": 30.0, "window": 64}),
    (ODD, {}),
)
# Caches in short dtypes; one mixed step of each.
SHORT_CACHES = (
    (replace(COMMON, kv_dtype="int8"), {}),
    (
        replace(COMMON, kv_dtype="float8_e4m3"),
        {"k_scale": torch.ones(1), "v_scale": torch.ones(8)},
    ),
    (replace(ODD, dtype="float16", kv_dtype="int8"), {}),
)
# Rows of steps: mixed, split, many, and prompts without earlier keys.
STEPS = ([(1, 40), (7, 20)], [(1, 40)], [(1, 20)] * 256, [(20, 20)])


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


def compile_experts(shared_bytes):
    """Tokens for each tile, of which one is for few of them; experts as in Qwen3-30B-A3B."""
    hidden, inner, num_experts = 2048, 768, 8
    steps = (("bfloat16", 1), ("bfloat16", 24), ("bfloat16", 128), ("float32", 24))
    for dtype, num_tokens in steps:
        mix_experts(
            torch.empty(num_tokens, hidden, dtype=getattr(torch, dtype)),
            torch.empty(num_experts, 3 * hidden * inner, dtype=getattr(torch, dtype)),
            torch.zeros(num_tokens, num_experts, dtype=torch.int32),
            torch.zeros(num_tokens, num_experts),
            shared_bytes,
        )


def check_vocabularies(found):
    """Sampling from a vocabulary of any size needs nothing that the check at start did not compile:
    requests would wait for it."""
    known = {kernel.hash for _, kernel in found}
    provider = next(item for item in TRITON_PROVIDERS if item.op == "choose_tokens")
    choose = load_provider(OPS["choose_tokens"], provider).run
    uniform, k = torch.rand(2, dtype=torch.float64), torch.tensor([5, 5])
    shares = torch.ones(2, 2, dtype=torch.float64)
    for vocab_size in (50257, 151936, 262208):
        logits = torch.zeros(3, vocab_size)
        choose(logits, None, None, None, None, None)
        choose(logits[:2], None, uniform, None, None, None)
        choose(logits, k - 4, uniform, torch.ones(2), k, shares)
    fresh = {name for name, kernel in found if kernel.hash not in known}
    assert not fresh, fresh


def compile_attention(arch, sizes, features):
    info = DeviceInfo(platform="test", index=0, name="test", arch=arch)
    device = TorchDevice(info, Capabilities(instruction_sets=features), "cpu", lambda: None)
    every = [(*layer, STEPS) for layer in GEOMETRIES]
    every += [(*layer, STEPS[:1]) for layer in SHORT_CACHES]
    for geometry, uses, steps in every:
        if not TritonAttention.accepts(geometry.need, info):
            continue
        backend = TritonAttention(geometry.spec, KVLayout(), device)
        backend._sizes = sizes
        for rows in steps:
            batch = PagedBatch(geometry, rows, 0, Placement())
            batch.run(backend, LayerParams(scale=geometry.k_dim**-0.5, **uses))
        compile_fused_write(geometry, backend, batch)
        if steps is STEPS:
            heads = torch.zeros(geometry.heads)
            layer = LayerParams(scale=1.0, sinks=heads, alibi_slopes=heads)
            batch = PagedBatch(geometry, [(2, 20)], 0, Placement())
            batch.run(backend, layer, torch.empty(2, geometry.heads))


def compile_fused_write(geometry, backend, batch):
    """With head norms, and without where a part of each head is not rotated."""
    parts = (batch.queries, batch.keys, batch.values)
    weight = torch.ones(geometry.k_dim, dtype=geometry.torch_dtype)
    for provider, norms, width in (
        ("triton.qk_norm_rope", {"q_weight": weight, "k_weight": weight, "eps": 1e-6}, 0),
        ("triton.rotary_embedding", {}, 16),
    ):
        rotation = HeadRotation(
            rotate=lambda *_: None,
            provider=provider,
            cos_sin=torch.ones(64, geometry.k_dim - width),
            **norms,
        )
        backend.rotate_and_write(
            tuple(batch.packed(part) for part in parts),
            batch.batch.positions,
            rotation,
            batch.cache,
            backend.plan(batch.batch),
        )


def dtype_of(signature):
    """That of the queries, or of the rows."""
    operand = signature.get("q") or signature.get("x")
    return "float32" if "fp32" in str(operand) else "short"


def main():
    backend, arch, warp_size, shared_bytes, *features = sys.argv[1:]
    target = GPUTarget(backend, int(arch) if arch.isdigit() else arch, int(warp_size))
    driver.set_active(StandIn(target))
    found = []
    compile_only(found)
    compile_operations()
    check_vocabularies(found)
    compile_experts(int(shared_bytes))
    name = f"sm_{arch}" if arch.isdigit() else arch
    compile_attention(name, DeviceSizes(132, int(shared_bytes)), tuple(features))
    seen = set()
    for name, kernel in found:
        if kernel.hash in seen:
            continue
        seen.add(kernel.hash)
        code = kernel.asm.get("ptx") or kernel.asm.get("amdgcn")
        line = {
            "kernel": name,
            "dtype": dtype_of(kernel.src.signature),
            "shared": kernel.metadata.shared,
            "warps": kernel.metadata.num_warps,
            "stages": kernel.metadata.num_stages,
            "matrix": any(word in code for word in ("mma.sync", "wgmma", "tcgen05", "mfma")),
            "binary": sorted(set(kernel.asm) & {"cubin", "hsaco"}),
        }
        print(json.dumps(line))


if __name__ == "__main__":
    main()
