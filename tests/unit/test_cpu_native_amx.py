"""Kernels for tile registers: on emulated ones against float64 and against the same kernels without
them, compiled for real ones, and what happens where Linux refuses them."""

import errno
import logging
import os
import platform
import shlex
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from native_levels import compiled

from cardan.core.interfaces.kernels import Case
from cardan.core.ops.catalogue import CATALOGUE
from cardan.core.ops.compare import compare_case
from cardan.core.ops.reference.block_inputs import random_blocks
from cardan.core.types.ggml import BLOCK_TYPES, block_format
from cardan.platforms.cpu import native
from cardan.platforms.cpu.cpu_info import instruction_sets
from cardan.platforms.cpu.native import library
from cardan.platforms.cpu.native.amx import amx_refusal
from cardan.platforms.cpu.native.build import BASE_FLAGS, accepts, find_compiler
from cardan.platforms.cpu.native.isa import AMX, IsaLevel, choose_level
from cardan.platforms.cpu.native.library import open_library, unavailable_reason

FOLDER = Path(native.__file__).parent
TILES = Path(__file__).parents[1] / "emulation" / "amx_tiles.h"
OPS = {op.name: op for op in CATALOGUE}
LINEAR = OPS["linear"]
FORMATS = (*BLOCK_TYPES, "int8")

needs_library = pytest.mark.skipif(
    unavailable_reason() is not None, reason=f"no native kernels: {unavailable_reason()}"
)
needs_x86 = pytest.mark.skipif(
    platform.machine() != "x86_64", reason="tile registers are x86's, and so is their emulation"
)


# The kernels with emulated tile registers, and what is compared with them.
TILES_FLAGS = f"-O1 -include {shlex.quote(str(TILES))}"
PLAIN_FLAGS = "-O1"


def amx_level():
    features = (
        *("avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512dq", "avx512vl"),
        *("avx512_vnni", "avx512_bf16", *AMX),
    )
    return choose_level("x86_64", features, {})


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    from cardan.platforms.cpu.native.linear import LinearKernels

    if "avx2" not in instruction_sets(Path("/")):
        pytest.skip("this CPU has no AVX2")
    folder = tmp_path_factory.mktemp("linear")
    return LinearKernels(compiled(folder, "avx2", "linear*.[ch]", CARDAN_CPU_CFLAGS=TILES_FLAGS))


@pytest.fixture
def linear(kernels):
    """The operation with a weight that is prepared for it."""

    def prepared(x, weight, bias):
        return kernels.linear(x, kernels.prepare_linear(weight), bias)

    return prepared


@pytest.fixture(scope="module")
def blocks(tmp_path_factory):
    """The kernels with and without tile registers."""
    from cardan.platforms.cpu.native.blocks import BlockKernels

    return [
        BlockKernels(
            compiled(
                tmp_path_factory.mktemp("blocks"),
                "scalar",
                "block_*.[ch]",
                CARDAN_CPU_CFLAGS=flags,
            )
        )
        for flags in (TILES_FLAGS, PLAIN_FLAGS)
    ]


@pytest.fixture(autouse=True)
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def inputs(rows, outputs, width, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, width, generator=generator).bfloat16()
    weight = (torch.randn(outputs, width, generator=generator) * width**-0.5).bfloat16()
    return x, weight, torch.randn(outputs, generator=generator).bfloat16()


def in_the_order_of_tiles(x, weight):
    """Sums in float32: of 32 inputs even and odd ones apart, then both, then what was before."""
    steps = -(-x.shape[1] // 32)
    pad = (0, steps * 32 - x.shape[1])
    wide, other = (
        torch.nn.functional.pad(t.float(), pad).double().numpy()[:, None] for t in (x, weight)
    )
    products = (wide * other.transpose(1, 0, 2)).reshape(len(x), len(weight), steps, 16, 2)
    total = np.zeros(products.shape[:2], np.float32)
    for step in range(steps):
        parts = np.zeros((*products.shape[:2], 2), np.float32)
        for pair in range(16):
            parts = (parts + products[:, :, step, pair]).astype(np.float32)
        total = total + (parts[..., 0] + parts[..., 1])
    return torch.from_numpy(total)


@needs_library
@needs_x86
def test_linear_agrees_with_float64(linear):
    # Tiles of rows, of outputs and of inputs that are not full; several spans and panels.
    sizes = [(rows, 33, 70) for rows in range(1, 71)]
    sizes += [(1, 1, 1), (2, 31, 31), (5, 32, 32), (16, 17, 513), (17, 65, 1025), (33, 100, 520)]
    sizes += [(485, 20, 45), (256, 48, 64), (257, 7, 33), (3, 200, 1000), (70, 47, 600)]
    for seed, size in enumerate(sizes):
        x, weight, bias = inputs(*size, seed)
        for case in ((x, weight, bias), (x, weight, None)):
            found = compare_case(LINEAR, linear, Case(case, {}), OPS, LINEAR.tolerances["bfloat16"])
            assert found.ok, f"{size}: {found}"


@needs_library
@needs_x86
@pytest.mark.parametrize("rows", [1, 3, 20, 37])
def test_linear_sums_in_the_order_of_the_processor(linear, rows):
    x, weight, bias = inputs(rows, 37, 1111, rows)
    sums = in_the_order_of_tiles(x, weight)
    assert torch.equal(linear(x, weight, None), sums.bfloat16())
    assert torch.equal(linear(x, weight, bias), (sums + bias.float()).bfloat16())


@needs_library
@needs_x86
def test_a_row_of_linear_does_not_depend_on_its_neighbours_or_on_threads(linear):
    x, weight, bias = inputs(300, 101, 700)
    together = linear(x, weight, bias)
    for count in (*range(1, 19), 31, 32, 33, 100, 257):
        assert torch.equal(linear(x[7 : 7 + count], weight, bias), together[7 : 7 + count])
    torch.set_num_threads(1)
    assert torch.equal(linear(x, weight, bias), together)


@needs_library
@needs_x86
def test_what_is_not_finite_stays_in_its_place(linear):
    x, weight, _ = inputs(21, 50, 70)
    x[1, 69], x[20, 0], weight[49, 2] = torch.nan, torch.inf, torch.nan
    truth = x.double() @ weight.double().T
    for rows in (slice(None), slice(0, 2), slice(20, 21)):
        out = linear(x[rows], weight, None)
        assert torch.equal(out.isnan(), truth[rows].isnan())
        assert torch.equal(out.isinf(), truth[rows].isinf())


@needs_library
@needs_x86
def test_weights_are_read_as_they_are_stored_by_tiles_and_packed_for_others(kernels):
    x, weight, bias = inputs(5, 50, 70)
    prepared = kernels.prepare_linear(weight)
    assert torch.equal(prepared.data, weight)
    assert torch.equal(kernels.linear(x, weight, bias), kernels.linear(x, prepared, bias))
    wide = kernels.prepare_linear(weight.float())
    assert wide.data.dtype is torch.uint8
    truth = torch.nn.functional.linear(x.float(), weight.float(), bias.float())
    torch.testing.assert_close(kernels.linear(x.float(), wide, bias.float()), truth)


@needs_library
@needs_x86
def test_unaligned_and_strided_views(linear):
    x, weight, bias = inputs(20, 30, 40)
    whole = linear(x, weight, bias)
    unaligned = torch.empty(30 * 40 + 1, dtype=x.dtype)[1:].view(30, 40).copy_(weight)
    wide = torch.zeros(20, 100, dtype=x.dtype)
    wide[:, 31:71] = x
    assert torch.equal(linear(wide[:, 31:71], unaligned, bias), whole)
    assert linear(x[:0], weight, bias).shape == (0, 30)
    assert linear(x, weight[:0], None).shape == (20, 0)


@needs_library
@needs_x86
@pytest.mark.parametrize("format", FORMATS)
def test_products_of_blocks_are_the_same_bits_as_without_tiles(blocks, format):
    unit = 32 if format == "int8" else block_format(format).elements
    sizes = ((7, 9, 1), (8, 8, 3), (9, 17, 2), (16, 33, 5), (23, 7, 17), (70, 41, 9), (300, 5, 1))
    for seed, (rows, outputs, units) in enumerate(sizes):
        width = unit * (units if unit == 32 else (units + 3) // 4)
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(rows, width, generator=generator)
        x[:, :32] *= torch.arange(rows).fmod(2).unsqueeze(1)
        bias = torch.randn(outputs, generator=generator)
        if format == "int8":
            # Rows end within a block; the largest codes of both signs.
            width -= 5
            x = x[:, :width]
            weight = torch.randint(-128, 128, (outputs, width), generator=generator).to(torch.int8)
            weight[0], x[0] = -128, -1.0
            scales = torch.rand(outputs, generator=generator)
            results = [
                kernels.int8_linear(x, kernels.prepare_int8(weight), scales, bias)
                for kernels in blocks
            ]
        else:
            weight = random_blocks(format, outputs, width, width**-0.5, generator)
            results = [
                kernels.block_linear(
                    x, kernels.prepare_blocks(weight, format, width, outputs), bias, format
                )
                for kernels in blocks
            ]
        assert torch.equal(results[0], results[1]), (rows, outputs, width)


@needs_library
@needs_x86
@pytest.mark.parametrize("format", ["q4_1", "q6_k", "q8_0", "int8"])
def test_a_row_of_blocks_does_not_depend_on_its_neighbours_or_on_threads(blocks, format):
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(90, 512, generator=generator)
    x[13, 511] = torch.nan
    kernels = blocks[0]
    if format == "int8":
        weight = torch.randint(-128, 128, (50, 512), generator=generator).to(torch.int8)
        packed = kernels.prepare_int8(weight)
        scales = torch.rand(50, generator=generator)
    else:
        weight = random_blocks(format, 50, 512, 512**-0.5, generator)
        packed = kernels.prepare_blocks(weight, format, 512, 50)

    def multiply(rows):
        if format == "int8":
            return kernels.int8_linear(rows, packed, scales, None)
        return kernels.block_linear(rows, packed, None, format)

    together = multiply(x)
    assert torch.equal(together.isnan().any(1), torch.arange(90) == 13)
    bits = together.view(torch.int32)
    for count in (1, 2, 3, 7, 8, 9, 15, 16, 17, 40):
        assert torch.equal(multiply(x[7 : 7 + count]).view(torch.int32), bits[7 : 7 + count])
    torch.set_num_threads(1)
    assert torch.equal(multiply(x).view(torch.int32), bits)


@needs_library
@needs_x86
@pytest.mark.parametrize(
    ("file", "instructions"),
    [
        ("linear_amx.c", ("ldtilecfg", "tileloadd", "tdpbf16ps", "tilestored", "tilerelease")),
        ("block_linear.c", ("ldtilecfg", "tileloadd", "tdpbsud", "tilestored", "tilerelease")),
    ],
)
def test_the_level_compiles_to_tile_instructions(tmp_path, file, instructions):
    level = amx_level()
    compiler = find_compiler(os.environ)
    flags = (*BASE_FLAGS, *level.flags)
    if not accepts(compiler, flags):
        pytest.skip(f"{compiler.command[0]} is too old for {' '.join(level.flags)}")
    text = tmp_path / "kernels.s"
    command = [*compiler.command, *flags, "-S", "-o", str(text), str(FOLDER / file)]
    subprocess.run(command, check=True, capture_output=True)
    found = text.read_text()
    assert [name for name in instructions if name not in found] == []


def test_the_level_needs_all_of_amx():
    level = amx_level()
    assert level.name == "amx"
    assert {"-mamx-tile", "-mamx-bf16", "-mamx-int8", "-mavx512bf16"} <= set(level.flags)
    for feature in AMX:
        assert choose_level("x86_64", sorted(level.features - {feature}), {}).name == "avx512_bf16"
    lower = {"CARDAN_CPU_ISA": "avx512_bf16"}
    assert choose_level("x86_64", sorted(level.features), lower).name == "avx512_bf16"


def test_linux_is_asked_for_the_registers():
    asked = []

    def grant(code, argument):
        asked.append((code, argument))
        return 0

    assert amx_refusal(grant) is None
    assert asked == [(0x1023, 18)]
    assert amx_refusal(lambda *_: errno.EINVAL) == (
        "Linux refuses the tile registers: Invalid argument"
    )

    def elsewhere(*_):
        raise OSError("only 64-bit Linux on x86 grants tile registers")

    assert amx_refusal(elsewhere) == "only 64-bit Linux on x86 grants tile registers"


def test_a_machine_without_the_registers_refuses():
    if set(instruction_sets(Path("/"))) >= AMX:
        assert amx_refusal() is None
    else:
        assert amx_refusal() is not None


@needs_library
@pytest.mark.parametrize("refusal", [None, "Linux refuses the tile registers: No space"])
def test_where_they_are_refused_the_level_below_serves(tmp_path, monkeypatch, caplog, refusal):
    (tmp_path / "answer.c").write_text("int answer(void);\nint answer(void) { return 42; }\n")
    levels = (IsaLevel("amx", AMX, ()), IsaLevel("below", frozenset(), ()))
    monkeypatch.setattr(library, "usable_levels", lambda *_: levels)
    monkeypatch.setattr(library, "amx_refusal", lambda: refusal)
    where = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    with caplog.at_level(logging.INFO):
        found = open_library(where, folder=tmp_path)
    assert found.isa == ("below" if refusal else "amx")
    assert ("amx cannot be used: Linux refuses" in caplog.text) == bool(refusal)
