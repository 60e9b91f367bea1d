"""Products with stored blocks against the gguf package's decoding and float64, at every level of
instructions this CPU has."""

import os
import platform
import shutil
import threading
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from cardan.core.ops.catalogue import CATALOGUE
from cardan.core.ops.reference.block_inputs import random_blocks
from cardan.core.ops.self_check import LoadedKernel, self_check
from cardan.core.types.ggml import BLOCK_TYPES, block_format
from cardan.platforms.cpu import native
from cardan.platforms.cpu.cpu_info import instruction_sets
from cardan.platforms.cpu.native.block_providers import BLOCK_PROVIDERS
from cardan.platforms.cpu.native.isa import usable_levels
from cardan.platforms.cpu.native.library import open_library, unavailable_reason

pytestmark = pytest.mark.skipif(
    unavailable_reason() is not None, reason=f"no native kernels: {unavailable_reason()}"
)

OPS = {op.name: op for op in CATALOGUE}
FORMATS = tuple(BLOCK_TYPES)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LEVELS = [
    level.name for level in usable_levels(platform.machine(), instruction_sets(Path("/")), {})
]


def name_of(dtype):
    return str(dtype).removeprefix("torch.")


@pytest.fixture(scope="module", params=LEVELS)
def kernels(request, tmp_path_factory):
    """The operations, of a library without the other kernels, which take long to compile."""
    from cardan.platforms.cpu.native.blocks import BlockKernels

    folder = tmp_path_factory.mktemp(request.param)
    for pattern in ("pool.[ch]", "simd.h", "amx.h", "block_*.[ch]"):
        for file in Path(native.__file__).parent.glob(pattern):
            shutil.copy(file, folder)
    environment = {
        **os.environ,
        "CARDAN_CPU_ISA": request.param,
        "XDG_CACHE_HOME": str(folder),
    }
    library = open_library(environment, folder=folder)
    assert library.isa == request.param
    return BlockKernels(library)


@pytest.fixture(autouse=True)
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def decoded(weight, format):
    """The gguf package's values of stored rows, float32."""
    kind = getattr(gguf.GGMLQuantizationType, format.upper())
    return torch.from_numpy(gguf.dequantize(weight.numpy(), kind)).view(weight.shape[0], -1)


def stored(format, outputs, inputs, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return random_blocks(format, outputs, inputs, inputs**-0.5, generator)


def activations(rows, inputs, dtype=torch.float32, seed=1):
    generator = torch.Generator().manual_seed(seed)
    # Blocks of very different sizes, and one of zeros.
    x = torch.randn(rows, inputs, generator=generator)
    x = x * torch.exp2(
        torch.randint(-3, 3, (rows, inputs // 32), generator=generator)
    ).repeat_interleave(32, 1)
    x[:, :32] *= torch.arange(rows).fmod(2).unsqueeze(1)
    return x.to(dtype)


def rounded(x, block=32):
    """x as the kernels see it, in float64: 8 bits and a scale for each block."""
    blocks = x.float().reshape(x.shape[0], -1, block)
    most = blocks.abs().amax(-1, keepdim=True)
    inverse = torch.where(most > 2.0**-100, torch.tensor(127.0) / most, 0.0)
    codes = (blocks * inverse).round()
    return (codes.double() * (most / 127).double()).view(x.shape)


def assert_close(found, x, weight, bias=None, rounding=0.0):
    """Within 1e-5 of the sum of magnitudes, and the rounding of the result's dtype."""
    truth = x @ weight.double().T
    scale = x.abs() @ weight.double().abs().T
    if bias is not None:
        truth, scale = truth + bias.double(), scale + bias.double().abs()
    excess = (found.double() - truth).abs() - rounding * truth.abs()
    assert bool((excess <= 1e-5 * scale + 1e-30).all()), float((excess / scale).max())


@pytest.mark.parametrize("format", FORMATS)
def test_decoding_is_the_definitions_bit_for_bit(kernels, format):
    weight = stored(format, 29, 768)
    ids = torch.tensor([28, 0, 3, 3, 17])
    for table in (weight, edge_blocks(format)):
        chosen = ids % table.shape[0]
        truth = decoded(table, format)[chosen]
        for dtype in DTYPES:
            found = kernels.block_embedding(chosen, table, format, dtype)
            bits = torch.int32 if dtype is torch.float32 else torch.int16
            assert torch.equal(found.view(bits), truth.to(dtype).view(bits))
    wide = torch.zeros(29, weight.shape[1] + 6, dtype=torch.uint8)
    wide[:, 3:-3] = weight
    found = kernels.block_embedding(ids.view(5, 1), wide[:, 3:-3], format, torch.float32)
    assert torch.equal(found, decoded(weight, format)[ids].view(5, 1, -1))


def edge_blocks(format):
    """Rows of one block each: all bits of codes and scales clear or set, with the largest finite,
    subnormal, zero and negative factors."""
    size = block_format(format).nbytes
    halves = np.array([65504, -65504, 6e-8, -6e-8, 0.0, -0.0, 1.5, -3e-5], np.float16)
    rows = []
    for half in halves.view(np.uint16):
        for fill in (0x00, 0xFF, 0x80, 0x7F):
            row = np.full(size, fill, np.uint8)
            for at in {"q2_k": (80, 82), "q3_k": (108,), "q6_k": (208,)}.get(format, (0, 2)):
                if at == 0 or format not in ("q4_0", "q5_0", "q8_0", "iq4_nl"):
                    row[at : at + 2] = [half & 255, half >> 8]
            rows.append(row)
    return torch.from_numpy(np.stack(rows))


@pytest.mark.parametrize("format", FORMATS)
def test_edge_blocks_multiply_as_they_decode(kernels, format):
    weight = edge_blocks(format)
    inputs = block_format(format).elements
    x = activations(3, inputs)
    packed = kernels.prepare_blocks(weight, format, inputs, weight.shape[0])
    assert_close(kernels.block_linear(x, packed, None, format), rounded(x), decoded(weight, format))


@pytest.mark.parametrize("format", FORMATS)
def test_products_are_those_of_rounded_activations(kernels, format):
    """Ragged sizes: tiles and pairs of tiles that are not full, stretches that end early."""
    unit = block_format(format).elements
    sizes = ((1, 1, 1), (2, 7, 3), (3, 17, 17), (4, 32, 2), (5, 33, 5), (7, 8, 1), (67, 41, 9))
    for seed, (rows, outputs, units) in enumerate(sizes):
        inputs = unit * (units if unit == 32 else (units + 3) // 4)
        weight = stored(format, outputs, inputs, seed)
        x = activations(rows, inputs, seed=seed)
        bias = torch.randn(outputs, generator=torch.Generator().manual_seed(seed))
        packed = kernels.prepare_blocks(weight, format, inputs, outputs)
        values = decoded(weight, format)
        for used in (None, bias):
            assert_close(kernels.block_linear(x, packed, used, format), rounded(x), values, used)


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=name_of)
def test_short_types_are_rounded_once(kernels, dtype):
    weight = stored("q4_1", 50, 576)
    x = activations(5, 576, dtype)
    bias = torch.linspace(-2, 2, 50).to(dtype)
    packed = kernels.prepare_blocks(weight, "q4_1", 576, 50)
    found = kernels.block_linear(x, packed, bias, "q4_1")
    assert found.dtype is dtype
    assert_close(found, rounded(x), decoded(weight, "q4_1"), bias, rounding=2.0**-8)
    wide = kernels.block_linear(x.float(), packed, bias.float(), "q4_1")
    assert torch.equal(found, wide.to(dtype))


@pytest.mark.parametrize("format", FORMATS)
def test_a_row_does_not_depend_on_its_neighbours_or_on_threads(kernels, format):
    weight = stored(format, 300, 1280)
    x = activations(270, 1280)
    packed = kernels.prepare_blocks(weight, format, 1280, 300)
    together = kernels.block_linear(x, packed, None, format)
    for count in (1, 2, 3, 4, 5, 64, 67):
        alone = kernels.block_linear(x[7 : 7 + count], packed, None, format)
        assert torch.equal(alone, together[7 : 7 + count])
    torch.set_num_threads(1)
    assert torch.equal(kernels.block_linear(x, packed, None, format), together)


def test_shapes_and_strides(kernels):
    weight = stored("q4_0", 30, 64)
    x, bias = activations(12, 64), torch.arange(30.0)
    packed = kernels.prepare_blocks(weight, "q4_0", 64, 30)

    def linear(x, bias=bias):
        return kernels.block_linear(x, packed, bias, "q4_0")

    whole = linear(x)
    assert torch.equal(linear(x.view(3, 2, 2, 64)), whole.view(3, 2, 2, 30))
    assert torch.equal(linear(x[5]), whole[5])
    wide = torch.zeros(12, 100)
    wide[:, 31:95] = x
    assert torch.equal(linear(wide[:, 31:95]), whole)
    assert torch.equal(linear(x.t().contiguous().t()), whole)
    assert torch.equal(linear(x[:1].expand(3, 64)), whole[:1].expand(3, 30))
    assert torch.equal(linear(x, bias.repeat_interleave(2)[::2]), whole)
    empty = []
    # A thread that has no scratch memory yet.
    thread = threading.Thread(target=lambda: empty.append(linear(x[:0])))
    thread.start()
    thread.join()
    assert empty[0].shape == (0, 30)
    apart = torch.zeros(30, weight.shape[1] + 18, dtype=torch.uint8)
    apart[:, 18:] = weight
    again = kernels.prepare_blocks(apart[:, 18:], "q4_0", 64, 30)
    assert torch.equal(again.data, packed.data)


@pytest.mark.parametrize("format", ["q4_1", "q5_0", "q8_0", "q6_k"])
def test_what_is_not_finite_stays_in_its_row(kernels, format):
    weight = stored(format, 20, 512)
    x = activations(6, 512)
    clean = x.clone()
    x[1, 511], x[3, 40], x[4, 0] = torch.nan, torch.inf, -torch.inf
    packed = kernels.prepare_blocks(weight, format, 512, 20)
    truth = kernels.block_linear(clean, packed, None, format)
    for rows in ([0, 1, 2, 3, 4, 5], [1], [3], [4], [5, 3]):
        found = kernels.block_linear(x[rows], packed, None, format)
        for place, row in enumerate(rows):
            if row in (1, 3, 4):
                assert not found[place].isfinite().any()
            else:
                assert torch.equal(found[place], truth[row])


def test_tiny_activations_count_as_zero(kernels):
    weight = stored("q8_0", 9, 64)
    packed = kernels.prepare_blocks(weight, "q8_0", 64, 9)
    x = torch.full((2, 64), 1e-42)
    x[1, 32:] = 1.0
    found = kernels.block_linear(x, packed, None, "q8_0")
    assert torch.equal(found[0], torch.zeros(9))
    assert_close(found[1:], rounded(x[1:]), decoded(weight, "q8_0"))
    x[1, :32] = 3.4e38
    assert kernels.block_linear(x, packed, None, "q8_0").isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_int8_sums_are_exact(kernels, dtype):
    generator = torch.Generator().manual_seed(5)
    sizes = ((1, 1, 1), (1, 40, 33), (3, 17, 576), (4, 16, 31), (67, 41, 1000))
    for rows, outputs, inputs in sizes:
        weight = torch.randint(-128, 128, (outputs, inputs), generator=generator).to(torch.int8)
        scales = torch.rand(outputs, generator=generator) / 1000
        bias = torch.randn(outputs, generator=generator).to(dtype)
        x = torch.randn(rows, inputs, generator=generator).to(dtype)
        x[0] *= rows > 1
        packed = kernels.prepare_int8(weight, in_features=inputs, out_features=outputs)
        found = kernels.int8_linear(x, packed, scales, bias)
        values = weight.double() * scales.double().unsqueeze(1)
        rounding = {torch.float32: 0.0, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}[dtype]
        assert_close(found, rounded(x, inputs), values, bias, rounding + 1e-6)
        alone = kernels.int8_linear(x[-1], packed, scales, bias)
        assert torch.equal(alone, found[-1])
    x[2, 999] = torch.nan
    found = kernels.int8_linear(x, packed, scales, None)
    assert found[2].isnan().all()
    assert found[[0, 1, 3]].isfinite().all()


def test_errors_name_what_does_not_fit(kernels):
    weight = stored("q4_0", 8, 64)
    packed = kernels.prepare_blocks(weight, "q4_0", 64, 8)
    x = activations(2, 64)
    ids = torch.tensor([8])
    cases = (
        (lambda: kernels.prepare_blocks(weight, "q9_9", 64, 8), "no kernels for format 'q9_9'"),
        (lambda: kernels.prepare_blocks(weight, "q4_0", 96, 8), "rows of 36 bytes are not"),
        (lambda: kernels.prepare_blocks(weight[:, 1:], "q4_0", 64, 8), "rows of 35 bytes"),
        (lambda: kernels.prepare_blocks(weight, "q4_0", 64, 9), "has 8 rows, out_features is 9"),
        (lambda: kernels.prepare_blocks(weight.char(), "q4_0", 64, 8), "a uint8 matrix"),
        (lambda: kernels.prepare_int8(weight), "an int8 matrix"),
        (lambda: kernels.prepare_int8(torch.zeros(1, 132105).char()), "in_features must be 1 to"),
        (lambda: kernels.block_linear(x[:, :32], packed, None, "q4_0"), r"x must be .*, 64\)"),
        (lambda: kernels.block_linear(x.double(), packed, None, "q4_0"), "got torch.float64"),
        (lambda: kernels.block_linear(x, packed, x[0], "q4_0"), r"bias must be torch.float32 \(8,"),
        (lambda: kernels.int8_linear(x, packed, x[0], None), r"scales must be float32 \(8,\)"),
        (lambda: kernels.block_embedding(ids.int(), weight, "q4_0", x.dtype), "token_ids int64"),
    )
    for call, text in cases:
        with pytest.raises(ValueError, match=text):
            call()
    for bad in (ids, ids - 9):
        with pytest.raises(IndexError, match=r"token ids must lie in \[0, 8\)"):
            kernels.block_embedding(bad, weight, "q4_0", torch.float32)


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("provider", BLOCK_PROVIDERS, ids=lambda provider: provider.op)
def test_providers_pass_the_registrys_check(provider, dtype):
    """Against the definitions, which do not round activations, within the declared tolerance."""
    from cardan.platforms.cpu.native import blocks

    module, _, function = provider.load.partition(":")
    assert module == blocks.__name__
    prepare = getattr(blocks, provider.prepare.partition(":")[2]) if provider.prepare else None
    loaded = LoadedKernel(getattr(blocks, function), prepare)
    device = torch.device("cpu")
    found = self_check(OPS[provider.op], provider, loaded, name_of(dtype), OPS, device, ())
    assert found.ok, found.text
