"""Products with stored blocks, in C at every level of instructions this CPU has and by numba,
against the gguf package's decoding and float64."""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

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

from cardan.core.types.ggml import block_format
from cardan.platforms.cpu.native.library import unavailable_reason
from cardan.platforms.cpu.numba.availability import missing_reason
from cardan.platforms.cpu.numba.codes import CODE_FORMATS


@dataclass(frozen=True)
class BlockProvider:
    """``seen(x, format)``: the activations that products are of. ``most``: the largest that one may
    be. ``signs_zeros``: decoded zeros have the definition's sign."""

    kernels: Any
    seen: Callable[[torch.Tensor, str], torch.Tensor]
    most: float
    signs_zeros: bool

    def prepare(self, weight, format, inputs, outputs):
        return self.kernels.prepare_blocks(weight, format, inputs, outputs)

    def linear(self, x, packed, bias, format):
        return self.kernels.block_linear(x, packed, bias, format)

    def embedding(self, ids, table, format, dtype):
        return self.kernels.block_embedding(ids, table, format, dtype)


def seen_by_numba(x, format):
    """Many rows are multiplied as they are."""
    return x if len(x) >= 8 else rounded(x, CODE_FORMATS[format].group)


@pytest.fixture(scope="module", params=[*LEVELS, "numba"])
def provider(request, tmp_path_factory):
    reason = missing_reason() if request.param == "numba" else unavailable_reason()
    if reason is not None:
        pytest.skip(reason)
    if request.param == "numba":
        from cardan.platforms.cpu.numba import blocks

        return BlockProvider(blocks, seen_by_numba, 1e36, signs_zeros=False)
    from cardan.platforms.cpu.native.blocks import BlockKernels

    library = compiled(tmp_path_factory.mktemp(request.param), request.param, "block_*.[ch]")
    return BlockProvider(BlockKernels(library), lambda x, _: rounded(x), 3.4e38, signs_zeros=True)


@pytest.fixture(autouse=True)
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("format", FORMATS)
def test_decoding_is_the_definitions(provider, format):
    weight = stored(format, 29, 768)
    ids = torch.tensor([28, 0, 3, 3, 17])
    for table in (weight, edge_blocks(format)):
        chosen = ids % table.shape[0]
        truth = decoded(table, format)[chosen]
        for dtype in DTYPES:
            found = provider.embedding(chosen, table, format, dtype)
            bits = torch.int32 if dtype is torch.float32 else torch.int16
            assert torch.equal(found, truth.to(dtype))
            if provider.signs_zeros:
                assert torch.equal(found.view(bits), truth.to(dtype).view(bits))
    wide = torch.zeros(29, weight.shape[1] + 6, dtype=torch.uint8)
    wide[:, 3:-3] = weight
    found = provider.embedding(ids.view(5, 1), wide[:, 3:-3], format, torch.float32)
    assert torch.equal(found, decoded(weight, format)[ids].view(5, 1, -1))


@pytest.mark.parametrize("format", FORMATS)
def test_products_are_those_of_the_activations_that_are_seen(provider, format):
    """Ragged sizes: tiles and pairs of tiles that are not full, stretches that end early."""
    unit = block_format(format).elements
    sizes = (
        *((1, 1, 1), (2, 7, 3), (3, 17, 17), (3, 64, 17), (4, 32, 2), (4, 65, 2)),
        *((5, 33, 5), (5, 129, 5), (7, 8, 1), (7, 300, 1), (67, 41, 9)),
    )
    for seed, (rows, outputs, units) in enumerate(sizes):
        inputs = unit * (units if unit == 32 else (units + 3) // 4)
        weight = stored(format, outputs, inputs, seed)
        x = activations(rows, inputs, seed=seed)
        bias = torch.randn(outputs, generator=torch.Generator().manual_seed(seed))
        packed = provider.prepare(weight, format, inputs, outputs)
        values, seen = decoded(weight, format), provider.seen(x, format)
        for used in (None, bias):
            assert_close(provider.linear(x, packed, used, format), seen, values, used)


@pytest.mark.parametrize("rows", [5, 9])
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=name_of)
def test_short_types_are_rounded_once(provider, dtype, rows):
    weight = stored("q4_1", 50, 576)
    x = activations(rows, 576, dtype)
    bias = torch.linspace(-2, 2, 50).to(dtype)
    packed = provider.prepare(weight, "q4_1", 576, 50)
    found = provider.linear(x, packed, bias, "q4_1")
    assert found.dtype is dtype
    seen = provider.seen(x, "q4_1")
    assert_close(found, seen, decoded(weight, "q4_1"), bias, rounding=2.0**-8)
    wide = provider.linear(x.float(), packed, bias.float(), "q4_1")
    assert torch.equal(found, wide.to(dtype))


def test_shapes_and_strides(provider):
    weight = stored("q4_0", 130, 64)
    x, bias = activations(6, 64), torch.arange(130.0)
    packed = provider.prepare(weight, "q4_0", 64, 130)

    def linear(x, bias=bias):
        return provider.linear(x, packed, bias, "q4_0")

    whole = linear(x)
    assert torch.equal(linear(x.view(3, 1, 2, 64)), whole.view(3, 1, 2, 130))
    assert torch.equal(linear(x[5]), whole[5])
    wide = torch.zeros(6, 100)
    wide[:, 31:95] = x
    assert torch.equal(linear(wide[:, 31:95]), whole)
    assert torch.equal(linear(x.t().contiguous().t()), whole)
    assert torch.equal(linear(x[:1].expand(3, 64)), whole[:1].expand(3, 130))
    assert torch.equal(linear(x, bias.repeat_interleave(2)[::2]), whole)
    empty = []
    # A thread that has no scratch memory yet.
    thread = threading.Thread(target=lambda: empty.append(linear(x[:0])))
    thread.start()
    thread.join()
    assert empty[0].shape == (0, 130)
    for threads in (1, 5):
        torch.set_num_threads(threads)
        assert torch.equal(linear(x), whole)


def test_rows_of_a_weight_may_lie_apart(provider):
    weight = stored("q4_0", 130, 64)
    apart = torch.zeros(130, weight.shape[1] + 18, dtype=torch.uint8)
    apart[:, 18:] = weight
    packed = [provider.prepare(part, "q4_0", 64, 130) for part in (weight, apart[:, 18:])]
    for field in ("data", "words", "factors"):
        values = [getattr(part, field, None) for part in packed]
        assert values[0] is values[1] is None or torch.equal(*values)


@pytest.mark.parametrize("format", ["q4_1", "q5_0", "q8_0", "q6_k"])
def test_what_is_not_finite_stays_in_its_row(provider, format):
    weight = stored(format, 20, 512)
    x = activations(10, 512)
    clean = x.clone()
    x[1, 511], x[3, 40], x[4, 0] = torch.nan, torch.inf, -torch.inf
    packed = provider.prepare(weight, format, 512, 20)
    for rows in (range(6), [1], [3], [4], [5, 3], range(10)):
        truth = provider.linear(clean[list(rows)], packed, None, format)
        found = provider.linear(x[list(rows)], packed, None, format)
        for place, row in enumerate(rows):
            if row in (1, 3, 4):
                assert not found[place].isfinite().any()
            else:
                assert torch.equal(found[place], truth[place])


def test_tiny_activations_count_as_zero(provider):
    weight = stored("q8_0", 9, 64)
    packed = provider.prepare(weight, "q8_0", 64, 9)
    x = torch.full((2, 64), 1e-42)
    x[1, 32:] = 1.0
    found = provider.linear(x, packed, None, "q8_0")
    assert torch.equal(found[0], torch.zeros(9))
    assert_close(found[1:], provider.seen(x[1:], "q8_0"), decoded(weight, "q8_0"))
    x[1, :32] = provider.most
    assert provider.linear(x, packed, None, "q8_0").isfinite().all()


def test_errors_name_what_does_not_fit(provider):
    weight = stored("q4_0", 8, 64)
    packed = provider.prepare(weight, "q4_0", 64, 8)
    cases = (
        ((weight, "q9_9", 64, 8), "no kernels for format 'q9_9'; known: q4_0"),
        ((weight, "q4_0", 96, 8), "rows of 36 bytes are not in_features=96 in q4_0"),
        ((weight[:, 1:], "q4_0", 64, 8), "rows of 35 bytes"),
        ((weight, "q4_0", 64, 9), "weight has 8 rows, out_features is 9"),
        ((weight.char(), "q4_0", 64, 8), "weight must be a uint8 matrix on the host"),
    )
    for given, text in cases:
        with pytest.raises(ValueError, match=text):
            provider.prepare(*given)
    for x in (torch.zeros(2, 32), torch.zeros(2, 64).double()):
        with pytest.raises(ValueError, match=r"x must be .* \(\.\.\., 64\) on the host, got"):
            provider.linear(x, packed, None, "q4_0")
