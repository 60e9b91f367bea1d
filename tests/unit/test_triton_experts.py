"""Triton's mixtures of experts: tiles of every size, uneven routing, and how tiles are chosen."""

import pytest
import torch
from triton_interpreter import interpreted, interpreting

from cardan.core.interfaces.kernels import Case
from cardan.core.ops.catalogue import CATALOGUE
from cardan.core.ops.compare import compare_case
from cardan.platforms.shared.triton.expert_tuning import (
    ProductSizes,
    most_tiles,
    product_tuning,
    tile_of,
)
from cardan.platforms.shared.triton.targets import DeviceSizes

OPS = {op.name: op for op in CATALOGUE}
HIDDEN, INNER = 48, 32


def mixture(tokens, num_experts, top_k, dtype=torch.float32, favourite=False):
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, HIDDEN, generator=generator)
    experts = torch.randn(num_experts, 3 * HIDDEN * INNER, generator=generator) / HIDDEN**0.5
    scores = torch.rand(tokens, num_experts, generator=generator)
    if favourite:
        scores[:, -1] = 1.0
    weights, ids = scores.topk(top_k)
    return x.to(dtype), experts.to(dtype), ids.to(torch.int32), weights


def run(*args):
    with interpreting(), torch.inference_mode():
        return interpreted("experts").expert_mlp(*args)


@pytest.mark.parametrize(
    ("tokens", "num_experts", "top_k", "tile"),
    [(9, 6, 2, 16), (20, 3, 3, 32), (60, 3, 2, 64), (200, 2, 1, 128)],
)
@pytest.mark.parametrize("favourite", [False, True])
def test_tiles(tokens, num_experts, top_k, tile, favourite):
    """Also where one expert has every token, and others few or none."""
    assert tile_of(tokens * top_k, num_experts) == tile
    args = mixture(tokens, num_experts, top_k, favourite=favourite)
    op = OPS["expert_mlp"]
    kernel = interpreted("experts").expert_mlp
    with interpreting(), torch.inference_mode():
        found = compare_case(op, kernel, Case(args, {}), OPS, op.tolerances["float32"])
    assert found.ok, found


@pytest.mark.parametrize(
    ("tokens", "num_experts", "top_k", "dtype"), [(1, 4, 3, "bfloat16"), (2, 3, 1, "float32")]
)
def test_few_tokens(tokens, num_experts, top_k, dtype):
    """Numbers of experts for each token that are no powers of two, too."""
    args = mixture(tokens, num_experts, top_k, getattr(torch, dtype))
    op = OPS["expert_mlp"]
    kernel = interpreted("experts").expert_mlp
    with interpreting(), torch.inference_mode():
        found = compare_case(op, kernel, Case(args, {}), OPS, op.tolerances[dtype])
    assert found.ok, found


@pytest.mark.parametrize("num_pairs", [1, 64, 100, 1200])
def test_pairs_are_placed_by_expert(num_pairs):
    """In one chunk, which is not counted ahead, and in two or more."""
    num_experts, tile, block = 5, 16, 64
    routing = interpreted("kernels.expert_routing")
    ids = torch.randint(0, num_experts - 1, (num_pairs,), dtype=torch.int32)
    most, chunks = most_tiles(num_pairs, num_experts, tile), -(-num_pairs // block)
    counts = torch.full((chunks, 8), -1, dtype=torch.int32)
    pairs = torch.full((most, tile), -1, dtype=torch.int32)
    experts = torch.full((most + 1,), -1, dtype=torch.int32)
    with interpreting():
        routing.count_kernel[(chunks,)](ids, counts, num_pairs, EXPERTS=8, BLOCK=block)
        routing.place_kernel[(num_experts, chunks)](
            ids,
            counts,
            pairs,
            experts,
            num_pairs,
            chunks,
            most,
            IS_COUNTED=chunks > 1,
            TILE=tile,
            EXPERTS=8,
            BLOCK=block,
            OVERLAPS=False,
        )
    tiles, of_tiles = [], []
    for expert in range(num_experts):
        own = (ids == expert).nonzero()[:, 0].tolist()
        for start in range(0, len(own), tile):
            part = own[start : start + tile]
            tiles.append(part + [num_pairs] * (tile - len(part)))
            of_tiles.append(expert)
    assert experts[-1] == len(tiles) <= most
    assert experts[: len(tiles)].tolist() == of_tiles
    assert pairs[: len(tiles)].tolist() == tiles


def test_a_row_does_not_depend_on_its_neighbours():
    x, experts, ids, weights = mixture(9, 5, 2, torch.bfloat16)
    whole = run(x, experts, ids, weights)
    order = torch.tensor([3, 8, 0, 1, 7, 2, 6, 5, 4])
    assert torch.equal(run(x[order], experts, ids[order], weights[order]), whole[order])
    others = x.clone()
    others[1:] = 9.0
    assert torch.equal(run(others, experts, ids, weights)[0], whole[0])


def test_rows_of_a_wider_tensor():
    x, experts, ids, weights = mixture(9, 5, 2)
    wide = torch.full((9, 3 * HIDDEN), 7.0)
    wide[:, HIDDEN : 2 * HIDDEN] = x
    out = run(wide[:, HIDDEN : 2 * HIDDEN], experts, ids, weights)
    assert torch.equal(out, run(x, experts, ids, weights))


def test_no_rows():
    x, experts, ids, weights = mixture(3, 4, 2)
    assert run(x[:0], experts, ids[:0], weights[:0]).shape == (0, HIDDEN)
    with interpreting():
        ids, weights = interpreted("experts").route_experts(torch.zeros(0, 4), 2, True)
    assert ids.shape == weights.shape == (0, 2)


def test_routing_of_what_is_no_number():
    """Ids stay in range whatever the logits are."""
    logits = torch.tensor([[0.0, torch.nan, 3.0], [-torch.inf] * 3, [torch.inf, 1.0, 2.0]])
    with interpreting():
        ids, _ = interpreted("experts").route_experts(logits, 2, True)
    assert ids.tolist() == [[1, 2], [0, 1], [0, 2]]


@pytest.mark.parametrize("num_pairs", [1, 7, 8, 512, 2048, 65536])
def test_room_for_the_worst_routing(num_pairs):
    """Tiles needed if experts get as evenly, or as unevenly, many pairs as they can."""
    for num_experts in (1, 8, 128):
        tile = tile_of(num_pairs, num_experts)
        room = most_tiles(num_pairs, num_experts, tile)
        ones = min(num_pairs, num_experts)
        even = [num_pairs // ones + (index < num_pairs % ones) for index in range(ones)]
        skewed = [1] * (ones - 1) + [num_pairs - ones + 1]
        for counts in (even, skewed):
            assert sum(-(-count // tile) for count in counts) <= room


@pytest.mark.parametrize("shared_bytes", [48 << 10, 64 << 10, 99 << 10, 227 << 10])
@pytest.mark.parametrize("num_bytes", [2, 4])
@pytest.mark.parametrize("tile", [16, 32, 64, 128])
def test_tiles_fit_what_programs_share(tile, num_bytes, shared_bytes):
    for sizes in (
        ProductSizes(2048, 768, num_bytes, projections=2),
        ProductSizes(768, 2048, num_bytes, projections=1),
        ProductSizes(24, 20, num_bytes, projections=1),
    ):
        tuning = product_tuning(sizes, tile, DeviceSizes(132, shared_bytes))
        stage = (tuning.width * sizes.projections + tile) * tuning.block * num_bytes
        assert tuning.num_stages * stage <= shared_bytes
        assert min(tuning.width, tuning.block) >= 16
        assert tuning.num_stages >= 2
