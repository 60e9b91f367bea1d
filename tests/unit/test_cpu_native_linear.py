"""The CPU's own matrix product against float64, at every level of instructions this CPU has."""

import threading

import pytest
import torch
from native_levels import LEVELS, compiled
from torch.nn import functional

from cardan.core.interfaces.kernels import Case
from cardan.core.ops.catalogue import CATALOGUE
from cardan.core.ops.compare import compare_case
from cardan.core.ops.loading import load_provider
from cardan.core.ops.self_check import LoadedKernel, self_check
from cardan.platforms.cpu.native.library import library, unavailable_reason
from cardan.platforms.cpu.native.providers import LINEAR_PROVIDERS

pytestmark = pytest.mark.skipif(
    unavailable_reason() is not None, reason=f"no native kernels: {unavailable_reason()}"
)

OPS = {op.name: op for op in CATALOGUE}
LINEAR = OPS["linear"]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# rows, outputs, inputs: whole tiles, remainders of each kind, several panels, several spans.
SIZES = (
    (1, 1, 1),
    (1, 49, 576),
    (2, 7, 3),
    (3, 50, 31),
    (4, 96, 64),
    (5, 97, 33),
    (6, 48, 100),
    (7, 200, 1000),
    (9, 47, 1025),
    (13, 51, 9000),
    (41, 25, 2100),
    (16, 576, 576),
    (485, 33, 70),
    *((rows, 25, 50) for rows in range(1, 71)),
)


def name_of(dtype):
    return str(dtype).removeprefix("torch.")


@pytest.fixture(scope="module", params=LEVELS)
def kernels(request, tmp_path_factory):
    """Those of a library without the others, which take long to compile."""
    from cardan.platforms.cpu.native.linear import LinearKernels

    folder = tmp_path_factory.mktemp(request.param)
    return LinearKernels(compiled(folder, request.param, "linear*.[ch]"))


@pytest.fixture
def linear(kernels):
    """The operation with a weight that is prepared for it."""

    def prepared(x, weight, bias):
        return kernels.linear(x, kernels.prepare_linear(weight), bias)

    return prepared


@pytest.fixture(autouse=True)
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def inputs(rows, outputs, width, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, width, generator=generator).to(dtype)
    weight = (torch.randn(outputs, width, generator=generator) * width**-0.5).to(dtype)
    return x, weight, torch.randn(outputs, generator=generator).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_agrees_with_float64(linear, dtype):
    tolerance = LINEAR.tolerances[name_of(dtype)]
    for seed, size in enumerate(SIZES):
        x, weight, bias = inputs(*size, dtype, seed)
        for args in ((x, weight, bias), (x, weight, None)):
            found = compare_case(LINEAR, linear, Case(args, {}), OPS, tolerance)
            assert found.ok, f"{size}: {found}"


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_a_row_does_not_depend_on_its_neighbours_or_on_threads(kernels, dtype):
    x, weight, bias = inputs(300, 101, 1500, dtype)
    weight = kernels.prepare_linear(weight)
    together = kernels.linear(x, weight, bias)
    for count in (*range(1, 20), 33, 70, 260):
        rows = slice(7, 7 + count)
        assert torch.equal(kernels.linear(x[rows], weight, bias), together[rows])
    torch.set_num_threads(1)
    assert torch.equal(kernels.linear(x, weight, bias), together)


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_what_is_not_a_number_or_infinite_stays_in_its_place(linear, dtype):
    x, weight, _ = inputs(5, 50, 70, dtype)
    x[1, 69] = torch.nan
    x[3, 0] = torch.inf
    out = linear(x, weight, None)
    truth = functional.linear(x.double(), weight.double())
    assert torch.equal(out.isnan(), truth.isnan())
    assert torch.equal(out[3].double(), truth[3])
    weight[49, 2] = torch.nan
    nan = linear(x[4:], weight, None).isnan()
    assert nan[0, 49]
    assert nan.sum() == 1


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_results_are_rounded_to_the_nearest_and_large_ones_overflow(linear, dtype):
    """Products with one are the values themselves, so that rounding alone is seen."""
    values = torch.tensor([1.0, 1.00390625, 1.01171875, 6.1e-5, 6e-8, 3e38, 65504.0, 65520.0, -0.5])
    weight = values.to(dtype).unsqueeze(1)
    out = linear(torch.ones(1, 1).to(dtype), weight, None)
    assert torch.equal(out[0], weight[:, 0])
    # One and a bias: their float32 sum, rounded once.
    bias = torch.linspace(-3, 70000, len(values)).to(dtype)
    out = linear(torch.ones(1, 1).to(dtype), weight, bias)
    assert torch.equal(out[0], (weight[:, 0].float() + bias.float()).to(dtype))


def test_shapes_and_strides(linear):
    x, weight, bias = inputs(12, 30, 40, torch.bfloat16)
    whole = linear(x, weight, bias)
    assert torch.equal(linear(x.view(3, 2, 2, 40), weight, bias), whole.view(3, 2, 2, 30))
    assert torch.equal(linear(x[5], weight, bias), whole[5])
    wide = torch.zeros(12, 100, dtype=x.dtype)
    wide[:, 31:71] = x
    assert torch.equal(linear(wide[:, 31:71], weight, bias), whole)
    assert torch.equal(linear(x.t().contiguous().t(), weight, bias), whole)
    unaligned = torch.empty(30 * 40 + 1, dtype=x.dtype)[1:].view(30, 40).copy_(weight)
    assert torch.equal(linear(x, unaligned, bias), whole)
    assert linear(x[:0], weight, bias).shape == (0, 30)
    assert linear(x, weight[:0], None).shape == (12, 0)
    empty = linear(x[:, :0], weight[:, :0], bias)
    assert torch.equal(empty, bias.expand(12, 30))
    strided = weight.t().contiguous().t()
    assert torch.equal(linear(x, strided, bias), whole)


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_a_weight_that_was_not_prepared_gives_the_same_result(kernels, linear, dtype):
    x, weight, bias = inputs(7, 50, 70, dtype)
    assert torch.equal(kernels.linear(x, weight, bias), linear(x, weight, bias))
    strided = weight.t().contiguous().t()
    assert torch.equal(kernels.linear(x, strided, None), linear(x, weight, None))


def test_preparing_does_not_write_to_the_weight_nor_keep_it(kernels):
    x, weight, _ = inputs(2, 30, 40, torch.float32)
    before = weight.clone()
    prepared = kernels.prepare_linear(weight, in_features=40, out_features=30, dtype="float32")
    assert torch.equal(weight, before)
    assert (prepared.in_features, prepared.out_features) == (40, 30)
    assert prepared.address == prepared.data.data_ptr() != weight.data_ptr()
    truth = kernels.linear(x, prepared, None)
    weight.zero_()
    assert torch.equal(kernels.linear(x, prepared, None), truth)


def test_a_prepared_weight_is_about_as_large_as_the_stored_one(kernels):
    for dtype in DTYPES:
        weight = inputs(1, 480, 640, dtype)[1]
        assert kernels.prepare_linear(weight).data.nbytes == weight.nbytes


def test_one_thread_prepares_what_two_do(kernels):
    weight = inputs(1, 1000, 1100, torch.float16)[1]
    by_two = kernels.prepare_linear(weight).data.view(torch.uint8)
    torch.set_num_threads(1)
    assert torch.equal(kernels.prepare_linear(weight).data.view(torch.uint8), by_two)


def test_what_the_kernels_do_not_know_is_torchs(kernels):
    x, weight, bias = inputs(2, 3, 4, torch.float32)
    linear = kernels.linear
    wide = kernels.prepare_linear(weight.double())
    double = linear(x.double(), wide, bias.double())
    assert torch.equal(double, functional.linear(x.double(), weight.double(), bias.double()))
    for bad in (
        (x[:, :3], weight, bias),
        (x, weight.double(), None),
        (x, weight, bias[:2]),
        (x, weight, bias.double()),
    ):
        with pytest.raises(RuntimeError):
            linear(*bad)


def test_what_does_not_fit_a_prepared_weight_is_refused(kernels):
    x, weight, bias = inputs(2, 3, 4, torch.float32)
    prepared = kernels.prepare_linear(weight)
    for activations in (x[:, :3], x.double(), torch.tensor(1.0)):
        with pytest.raises(ValueError, match=r"x must be torch.float32 \(..., 4\) on the host"):
            kernels.linear(activations, prepared, bias)
    for other in (bias[:2], bias.double()):
        with pytest.raises(ValueError, match=r"bias must be torch.float32 \(3,\) on the host"):
            kernels.linear(x, prepared, other)


def test_a_recorded_call_says_where_its_prepared_weight_is():
    from cardan.platforms.cpu.native.linear import linear, prepare_linear

    x, weight, _ = inputs(2, 48, 64, torch.bfloat16)
    prepared = prepare_linear(weight)
    recorder = library().recorder
    with recorder.record():
        linear(x, prepared, None)
        *_, call = recorder.take()
    assert call.reads == (prepared.address, weight.nbytes)


def test_several_threads_of_python_share_the_pool(kernels):
    x, weight, bias = inputs(3, 960, 640, torch.bfloat16)
    weight = kernels.prepare_linear(weight)
    truth = kernels.linear(x, weight, bias)
    wrong = []

    def repeat():
        wrong.extend(not torch.equal(kernels.linear(x, weight, bias), truth) for _ in range(30))

    threads = [threading.Thread(target=repeat) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == [False] * 120


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_the_provider_passes_the_registrys_check(dtype):
    (provider,) = LINEAR_PROVIDERS
    loaded = load_provider(LINEAR, provider)
    assert isinstance(loaded, LoadedKernel)
    device = torch.device("cpu")
    found = self_check(LINEAR, provider, loaded, name_of(dtype), OPS, device, ())
    assert found.ok, found.text
    assert found.text.startswith("passed: 3 cases")
