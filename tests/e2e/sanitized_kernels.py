"""Runs the native kernels on random inputs; a sanitizer in the library ends the process on a fault.

Every provider is tried as the engine tries it at first use, with all dtypes; attention, the cache
and replays by a tiny model's answers, with each dtype of the cache; rotation with the write to the
cache also with each dtype of the heads, which fill no whole vectors.
"""

import sys
import tempfile
from itertools import product
from pathlib import Path

import torch

from cardan import LLM, SamplingParams
from cardan.core.interfaces.attention import HeadRotation
from cardan.core.ops.catalogue import CATALOGUE
from cardan.core.ops.registry import KernelRegistry
from cardan.core.types.kv import KV_DTYPES
from cardan.platforms.cpu.native.attention import NativeAttention
from cardan.platforms.cpu.platform import CpuPlatform
from cardan.testing.conformance.paged_batches import Geometry, PagedBatch, Placement
from cardan.testing.tiny_models import make_tiny_model, prompt_ids


def check_operations() -> int:
    platform = CpuPlatform()
    device = platform.devices()[0]
    features = platform.capabilities(device).instruction_sets
    native = [item for item in platform.kernels(device) if ".native_" in item.name]
    count = 0
    for dtype in ("float32", "bfloat16", "float16"):
        registry = KernelRegistry(
            CATALOGUE, native, device=torch.device("cpu"), features=features, strict=True
        )
        for resolution in registry.table(dtype):
            assert "failed" not in resolution.self_check, resolution
            count += resolution.provider.startswith("cpu.native_")
    return count


def rotate_and_write() -> None:
    device = CpuPlatform().devices()[0]
    for dtype, kv_dtype in product(("float32", "bfloat16", "float16"), KV_DTYPES):
        geometry = Geometry(k_dim=37, v_dim=21, dtype=dtype, kv_dtype=kv_dtype)
        layout = NativeAttention.layout(geometry.spec, device)
        backend = NativeAttention(geometry.spec, layout, None)
        batch = PagedBatch(geometry, [(1, 9), (70, 90)], 1, Placement(layout=layout, padding=2))
        heads = tuple(batch.packed(x) for x in (batch.queries, batch.keys, batch.values))
        weight = torch.ones(37, dtype=geometry.torch_dtype)
        rotation = HeadRotation(
            rotate=lambda q, k, positions: (q, k),
            provider="cpu.native_qk_norm_rope",
            cos_sin=torch.ones(90, 26),
            q_weight=weight,
            k_weight=weight,
        )
        plan = backend.plan(batch.batch)
        backend.rotate_and_write(heads, batch.batch.positions, rotation, batch.cache, plan)


def answer(folder: Path) -> None:
    params = SamplingParams(temperature=0.8, top_p=0.9, logprobs=2, max_tokens=12, seed=1)
    prompts = [prompt_ids(n, n) for n in (1, 17, 70, 110)]
    for kv_dtype in KV_DTYPES:
        settings = {"kv_cache_dtype": kv_dtype, "num_blocks": 64, "max_num_batched_tokens": 64}
        with LLM(str(folder), platform="cpu", **settings) as llm:
            outputs = llm.generate(prompts, params)
        assert all(len(output.outputs[0].token_ids) == 12 for output in outputs)


def main() -> None:
    torch.set_num_threads(2)
    count = check_operations()
    rotate_and_write()
    with tempfile.TemporaryDirectory() as name:
        make_tiny_model("qwen3", Path(name))
        answer(Path(name))
    print(f"{count} uses of native kernels", file=sys.stderr)
    assert count > 20


if __name__ == "__main__":
    main()
