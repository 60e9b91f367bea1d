"""What products with stored blocks in C have alone, at every level of instructions this CPU has."""

import pytest
import torch
from block_truth import (
    DTYPES,
    FORMATS,
    activations,
    assert_close,
    decoded,
    edge_blocks,
    name_of,
    rounded,
    stored,
)
from native_levels import LEVELS, compiled

from cardan.core.ops.catalogue import CATALOGUE
from cardan.core.ops.self_check import LoadedKernel, self_check
from cardan.core.types.ggml import block_format
from cardan.platforms.cpu.native.block_providers import BLOCK_PROVIDERS
from cardan.platforms.cpu.native.library import unavailable_reason

pytestmark = pytest.mark.skipif(
    unavailable_reason() is not None, reason=f"no native kernels: {unavailable_reason()}"
)

OPS = {op.name: op for op in CATALOGUE}


@pytest.fixture(scope="module", params=LEVELS)
def kernels(request, tmp_path_factory):
    """The operations, of a library without the other kernels, which take long to compile."""
    from cardan.platforms.cpu.native.blocks import BlockKernels

    library = compiled(tmp_path_factory.mktemp(request.param), request.param, "block_*.[ch]")
    return BlockKernels(library)


@pytest.fixture(autouse=True)
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("format", FORMATS)
def test_edge_blocks_multiply_as_they_decode(kernels, format):
    weight = edge_blocks(format)
    inputs = block_format(format).elements
    x = activations(3, inputs)
    packed = kernels.prepare_blocks(weight, format, inputs, weight.shape[0])
    assert_close(kernels.block_linear(x, packed, None, format), rounded(x), decoded(weight, format))


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
        (lambda: kernels.prepare_int8(weight), "an int8 matrix"),
        (lambda: kernels.prepare_int8(torch.zeros(1, 132105).char()), "in_features must be 1 to"),
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
