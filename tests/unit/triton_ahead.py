"""Compiles every Triton kernel for a GPU that is not here; prints a JSON line for each.

    python triton_ahead.py PORTION BACKEND ARCH WARP_SIZE SHARED_BYTES [FEATURE ...]

PORTION is ``all``, or ``few``: the layers of common models. Kernels are launched as the engine
launches them, on tensors of the host; a stand-in for the driver names the target, and launches end
after the compilation.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import replace

os.environ["TRITON_INTERPRET"] = "0"
os.environ["TRITON_DEFAULT_FP_FUSION"] = "1"
os.environ["TRITON_CACHE_DIR"] = tempfile.mkdtemp()

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from cardan.core.interfaces.attention import HeadRotation, KVLayout, LayerParams
from cardan.core.interfaces.capabilities import Capabilities, DeviceInfo
from cardan.core.interfaces.kernels import check_needs
from cardan.core.interfaces.torch_device import TorchDevice
from cardan.core.ops.catalogue import CATALOGUE
from cardan.core.ops.loading import load_provider
from cardan.platforms.shared.triton import dependent_launch, device_target
from cardan.platforms.shared.triton.attention import TritonAttention
from cardan.platforms.shared.triton.experts import mix_experts
from cardan.platforms.shared.triton.launched import Launched
from cardan.platforms.shared.triton.providers import TRITON_PROVIDERS
from cardan.platforms.shared.triton.targets import DeviceSizes, target_named
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
# Caches in short dtypes; a mixed step and a chunk of each.
SHORT_CACHES = (
    (
        replace(COMMON, kv_dtype="float8_e4m3"),
        {"k_scale": torch.ones(1), "v_scale": torch.ones(8)},
    ),
    (replace(COMMON, kv_dtype="int8"), {}),
    (replace(ODD, dtype="float16", kv_dtype="int8"), {}),
)
# Rows of steps: mixed, a long chunk, split, many, and prompts without earlier keys.
STEPS = ([(1, 40), (7, 20)], [(260, 300)], [(1, 40)], [(1, 20)] * 256, [(70, 70)])
# What instructions that multiply matrices begin with.
MATRIX_WORDS = ("mma.sync", "wgmma", "tcgen05", "v_mfma", "v_wmma")
# Kernels whose programs take about as many registers as there are.
WITH_STACK = {"prefill_kernel", "gather_kernel"}


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
    Launched.__getitem__ = lambda self, grid: self.jit[grid]


def compile_operations():
    """Each operation on a third of its inputs, in bfloat16 where it takes that."""
    for provider in TRITON_PROVIDERS:
        dtype = min(provider.needs.dtypes)
        kernel = load_provider(OPS[provider.op], provider).run
        made = OPS[provider.op].make_inputs(getattr(torch, dtype), torch.device("cpu"), 0)
        for case in made[::3]:
            if check_needs(provider.needs, (), {"dtype": dtype, **case.attributes}):
                kernel(*case.args)
    linear = load_provider(OPS["linear"], TRITON_PROVIDERS[0]).run
    weight = torch.zeros(1024, 1024, dtype=torch.bfloat16)
    for num_rows in (1, 8, 32):
        linear(torch.zeros(num_rows, 1024, dtype=torch.bfloat16), weight, None)


def compile_experts(sizes, portion):
    """Tokens for each tile, of which one is for few of them; experts as in Qwen3-30B-A3B."""
    hidden, inner, num_experts = 2048, 768, 8
    steps = (("bfloat16", 1), ("bfloat16", 128), ("bfloat16", 24), ("float32", 24))
    for dtype, num_tokens in steps[:2] if portion == "few" else steps:
        mix_experts(
            torch.empty(num_tokens, hidden, dtype=getattr(torch, dtype)),
            torch.empty(num_experts, 3 * hidden * inner, dtype=getattr(torch, dtype)),
            torch.zeros(num_tokens, num_experts, dtype=torch.int32),
            torch.zeros(num_tokens, num_experts),
            sizes,
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


def layers_of(portion):
    """Geometries, what layers use, and steps."""
    if portion == "few":
        return [(*GEOMETRIES[0], STEPS), (*SHORT_CACHES[0], STEPS[:1])]
    every = [(*layer, STEPS) for layer in GEOMETRIES]
    return every + [(*layer, STEPS[:2]) for layer in SHORT_CACHES]


def compile_attention(arch, sizes, features, portion):
    info = DeviceInfo(platform="test", index=0, name="test", arch=arch)
    device = TorchDevice(info, Capabilities(instruction_sets=features), "cpu", lambda: None)
    for geometry, uses, steps in layers_of(portion):
        if not TritonAttention.accepts(geometry.need, info):
            continue
        backend = TritonAttention(geometry.spec, KVLayout(), device)
        backend._sizes = sizes
        for rows in steps:
            batch = PagedBatch(geometry, rows, 0, Placement())
            batch.run(backend, LayerParams(scale=geometry.k_dim**-0.5, **uses))
        compile_fused_write(geometry, backend, batch)
        if steps is STEPS and portion != "few":
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


def waits_first(kernel, code):
    """Of a kernel that may begin before the one before it ended: whether it waits before all that
    it stores. None of others."""
    if not getattr(kernel.metadata, "launch_pdl", False):
        return None
    stores = [place.start() for place in re.finditer(r"(st|atom|red)\.[a-z.]*global", code)]
    # That for constants is not in all launches.
    least = 2 if "is_fixed" in kernel.src.fn.arg_names else 1
    return "griddepcontrol.launch_dependents" in code and (
        code.count("griddepcontrol.wait", 0, min(stores)) >= least
    )


def stack_bytes(kernel):
    """Of each thread, where registers do not do; None where it is not known."""
    if "cubin" not in kernel.asm:
        return None
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        tool = triton.knobs.nvidia.cuobjdump.path
        told = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True)
    return int(re.search(r"STACK:(\d+)", told.stdout)[1])


def spilled(code):
    """Registers of a thread that went to memory; None where assembly does not tell."""
    told = re.search(r"\.vgpr_spill_count:\s*(\d+)", code)
    return int(told[1]) if told else None


def settles(code, instruction):
    """Of a program whose parts other programs add up: whether each wave waits for its stores before
    they are counted. None of others."""
    head, atomic, _ = code.partition("global_atomic_add")
    if not instruction or not atomic:
        return None
    stores = [place.start() for place in re.finditer(r"(buffer|global)_store_", head)]
    return head.rfind(instruction) > max(stores)


def short_caches(kernel):
    """Of its operands, those whose elements have one byte, and numbers of float8 alone."""
    types = {str(kind) for kind in kernel.src.signature.values()}
    return sorted(types & {"*i8", "*fp8e4nv"})


def main():
    portion, backend, arch, warp_size, shared_bytes, *features = sys.argv[1:]
    target = GPUTarget(backend, int(arch) if arch.isdigit() else arch, int(warp_size))
    driver.set_active(StandIn(target))
    found = []
    compile_only(found)
    if "dependent_launches" in features:
        dependent_launch.can_overlap = lambda device: True
    known = target_named(target.arch)
    device_target.target_of = lambda device: known
    sizes = DeviceSizes(132, int(shared_bytes), known.products, known.copies_directly)
    assert known.shared_bytes in (None, sizes.shared_bytes)
    compile_operations()
    check_vocabularies(found)
    compile_experts(sizes, portion)
    name = f"sm_{arch}" if arch.isdigit() else arch
    compile_attention(name, sizes, tuple(features), portion)
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
            "caches": short_caches(kernel),
            "matrix": sorted(word for word in MATRIX_WORDS if word in code),
            "float8": sorted(set(re.findall(r"v_cvt_\w*(?:fp8|bf8)\w*", code))),
            "spills": spilled(code),
            "settles": settles(code, known.settling),
            "stack": stack_bytes(kernel) if name in WITH_STACK else None,
            "waits": waits_first(kernel, code),
            "binary": sorted(set(kernel.asm) & {"cubin", "hsaco"}),
        }
        print(json.dumps(line))


if __name__ == "__main__":
    main()
