"""L2: operations against their definitions in float64.

Inputs are drawn anew at each run, from the seed in the report.
"""

from collections.abc import Callable

import numpy as np
import pytest

from cardan.core.interfaces.capabilities import Capabilities, DeviceInfo
from cardan.core.interfaces.device import Device
from cardan.core.interfaces.errors import ConfigError
from cardan.core.interfaces.kernels import Case, Kernel, Provider
from cardan.core.interfaces.platform import Platform
from cardan.testing.conformance.op_cases import (
    OPS,
    VIEWED,
    OpBench,
    OpUse,
    computing_dtypes,
    provider_uses,
    reference_uses,
    same_bits,
)
from cardan.testing.conformance.plugin import device_info_of, platform_of
from cardan.testing.conformance.results import not_supported

LEVEL = "L2"

# Sets of random inputs for each use, and runs of one input that must agree.
DRAWS = 3
RUNS = 5

_NOTHING_PROVIDED = pytest.param(
    None, marks=pytest.mark.skip(reason="the platform provides no kernels"), id="none"
)

Bench = Callable[[OpUse], OpBench]


@pytest.fixture(scope="module")
def cardan_providers(cardan_platform: Platform, cardan_device_info: DeviceInfo) -> list[Provider]:
    """All of the platform's providers, in its order."""
    return list(cardan_platform.kernels(cardan_device_info))


@pytest.fixture
def op_bench(
    request: pytest.FixtureRequest,
    cardan_device: Device,
    cardan_capabilities: Capabilities,
    cardan_providers: list[Provider],
) -> Bench:
    """Makes the bench of a use, or says why there is none."""

    def make(use: OpUse) -> OpBench:
        if cardan_device.torch_device is None:
            not_supported("the platform runs whole steps itself and has no torch device")
        if use.op not in OPS:
            not_supported(f"{use.op} is no operation of this cardan")
        if use.dtype not in OPS[use.op].tolerances:
            own = use.provider.tolerances if use.provider else {}
            if use.dtype not in own:
                not_supported(f"neither {use.op} nor the provider states a tolerance")
        if use.dtype not in ("float32", *cardan_capabilities.dtypes):
            not_supported(f"the device does not compute in {use.dtype}")
        try:
            bench = OpBench(cardan_device, use, cardan_providers)
        except ConfigError as error:
            if "provided" not in request.fixturenames:
                not_supported(f"{use} cannot serve, as test_provider says")
            pytest.fail(str(error), pytrace=False)
        if not bench.cases(0):
            not_supported(f"no test input of {use.op} meets the needs of {use}")
        return bench

    return make


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One test for each operation, provider and dtype, known without opening the device."""
    names = {"reference", "provided", "served", "composite", "viewed"} & set(metafunc.fixturenames)
    for name in names:
        platform, info = platform_of(metafunc.config), device_info_of(metafunc.config)
        dtypes = computing_dtypes(platform.capabilities(info))
        references = reference_uses(dtypes)
        provided = provider_uses(platform.kernels(info), dtypes)
        uses = {
            "reference": references,
            "provided": provided,
            "served": [*references, *provided],
            "viewed": [use for use in (*references, *provided) if use.op in VIEWED],
            "composite": [use for use in references if OPS[use.op].parts],
        }[name]
        metafunc.parametrize(name, uses or [_NOTHING_PROVIDED], ids=str)


def check(bench: OpBench, kernel: Kernel, seeds: list[int]) -> None:
    """Compare on every case of every seed; fail with the worst element."""
    for seed in seeds:
        for case in bench.cases(seed):
            found = bench.judge(case, bench.run(case, kernel), bench.tolerance)
            if not found.ok:
                pytest.fail(f"{bench.use} {_sizes(case)} (inputs {seed}): {found}", pytrace=False)


def draws(rng: np.random.Generator, count: int = DRAWS) -> list[int]:
    return [int(seed) for seed in rng.integers(2**31, size=count)]


def test_definition(op_bench: Bench, reference: OpUse, cardan_rng: np.random.Generator) -> None:
    """The operation's plain definition is right on this device."""
    bench = op_bench(reference)
    check(bench, bench.kernel, draws(cardan_rng))


def test_provider(op_bench: Bench, provided: OpUse, cardan_rng: np.random.Generator) -> None:
    """The provider can be loaded, and is within tolerance of the definition."""
    bench = op_bench(provided)
    check(bench, bench.kernel, draws(cardan_rng))


def test_composite(op_bench: Bench, composite: OpUse, cardan_rng: np.random.Generator) -> None:
    """A composite operation of the parts that the engine would bind is within tolerance."""
    bench = op_bench(composite)
    check(bench, bench.bound_composite(), draws(cardan_rng))


def test_inputs_are_kept(op_bench: Bench, served: OpUse, cardan_rng: np.random.Generator) -> None:
    """Arguments that are not declared as written keep every bit."""
    bench = op_bench(served)
    [seed] = draws(cardan_rng, 1)
    for case in bench.cases(seed):
        written = bench.written_inputs(case, bench.run(case, bench.kernel))
        assert not written, f"{served} {_sizes(case)} (inputs {seed}) writes arguments {written}"


def test_equal_bits(
    op_bench: Bench,
    served: OpUse,
    cardan_capabilities: Capabilities,
    cardan_rng: np.random.Generator,
) -> None:
    """Runs on equal inputs give equal bits."""
    if cardan_capabilities.determinism == "none":
        not_supported("the platform promises no equal bits (determinism none)")
    bench = op_bench(served)
    [seed] = draws(cardan_rng, 1)
    for case in bench.cases(seed):
        first = bench.run(case, bench.kernel)
        for run in range(1, RUNS):
            again = bench.run(case, bench.kernel)
            equal = map(same_bits, first.outputs, again.outputs)
            assert all(equal), f"{served} {_sizes(case)} (inputs {seed}): run {run} differs"


def test_views(op_bench: Bench, viewed: OpUse, cardan_rng: np.random.Generator) -> None:
    """Inputs that are parts of a wider tensor give what contiguous ones give."""
    bench = op_bench(viewed)
    [seed] = draws(cardan_rng, 1)
    for case in bench.cases(seed):
        result = bench.run(case, bench.kernel, VIEWED[viewed.op])
        found = bench.judge(case, result, bench.tolerance)
        assert found.ok, f"{viewed} {_sizes(case)} (inputs {seed}), as views: {found}"


def _sizes(case: Case) -> str:
    return " ".join(f"{name}={value}" for name, value in case.attributes.items() if name != "dtype")
