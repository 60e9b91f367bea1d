"""Every operation's definition and every provider at hand, in every dtype, against float64.

Inputs are drawn from a fresh seed at each run; a failure names it.
"""

import random

import pytest
import torch

from cardan.core.interfaces.kernels import check_needs
from cardan.core.ops.catalogue import CATALOGUE
from cardan.core.ops.compare import compare_case, reference_kernel
from cardan.core.ops.registry import KernelRegistry
from cardan.platforms.cpu.platform import CpuPlatform

OPS = {op.name: op for op in CATALOGUE}
CPU = CpuPlatform()
INFO = CPU.devices()[0]
FEATURES = CPU.capabilities(INFO).instruction_sets
SEEDS = 5


def uses(names):
    return [
        pytest.param(name, dtype, id=f"{name}-{dtype}")
        for name in names
        for dtype in OPS[name].tolerances
    ]


def check(op, kernel, dtype, needs=None, tolerance=None):
    checked = 0
    for _ in range(SEEDS):
        seed = random.SystemRandom().randrange(2**31)
        for case in op.make_inputs(getattr(torch, dtype), torch.device("cpu"), seed):
            use = {**case.attributes, "dtype": dtype}
            if needs is not None and not check_needs(needs, FEATURES, use):
                continue
            found = compare_case(op, kernel, case, OPS, tolerance or op.tolerances[dtype])
            assert found.ok, f"{op.name} {dtype} {case.attributes} seed {seed}: {found}"
            checked += 1
    return checked


@pytest.mark.parametrize(("name", "dtype"), uses(OPS))
def test_definition_in_working_dtype(name, dtype):
    assert check(OPS[name], reference_kernel(OPS[name], OPS), dtype)


@pytest.mark.parametrize("provider", CPU.kernels(INFO), ids=lambda item: f"{item.op}:{item.name}")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_platform_provider(provider, dtype):
    if provider.needs.dtypes and dtype not in provider.needs.dtypes:
        pytest.skip(f"{provider.name} does not claim {dtype}")
    pins = [f"{provider.op}={provider.name}"]
    registry = KernelRegistry(
        CATALOGUE, CPU.kernels(INFO), device=torch.device("cpu"), features=FEATURES, pins=pins
    )
    op = OPS[provider.op]
    use = {**op.make_inputs(getattr(torch, dtype), "cpu", 0)[0].attributes, "dtype": dtype}
    kernel = registry.bind(op.name, **use)
    assert check(op, kernel, dtype, provider.needs, provider.tolerances.get(dtype))


@pytest.mark.parametrize("name", [op.name for op in CATALOGUE if op.parts])
def test_composite_of_bound_parts(name):
    registry = KernelRegistry(
        CATALOGUE, CPU.kernels(INFO), device=torch.device("cpu"), features=FEATURES
    )
    for dtype in OPS[name].tolerances:
        use = {**OPS[name].make_inputs(torch.float32, "cpu", 0)[0].attributes, "dtype": dtype}
        check(OPS[name], registry.bind(name, **use), dtype)
