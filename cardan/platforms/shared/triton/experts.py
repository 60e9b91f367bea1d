"""Launches for mixtures of experts; arguments and results as ``route_experts`` and ``expert_mlp``
are defined.

For up to eight tokens each pair of a token and an expert reads the weights for itself. For more,
pairs are sorted by expert and multiplied in tiles. A row's result does not depend on the rows
beside it, but, in its last bits, on how many there are.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from cardan.platforms.shared.triton.dependent_launch import dependent
from cardan.platforms.shared.triton.device_target import device_sizes, product_options
from cardan.platforms.shared.triton.expert_tuning import (
    ProductSizes,
    most_tiles,
    product_tuning,
    tile_of,
)
from cardan.platforms.shared.triton.kernels.expert_products import (
    add_up_kernel,
    down_row_kernel,
    gate_up_row_kernel,
    grouped_kernel,
)
from cardan.platforms.shared.triton.kernels.expert_routing import (
    count_kernel,
    place_kernel,
    route_kernel,
)
from cardan.platforms.shared.triton.rows import as_rows, power_of_two
from cardan.platforms.shared.triton.targets import DeviceSizes

_FEW_TOKENS = 8
# Outputs and inputs of a program for few tokens.
_GATE_UP_WIDTH = 1
_GATE_UP_BLOCK = 1024
_DOWN_WIDTH = 1
_DOWN_BLOCK = 256
# Pairs that programs sort at once, and their warps: the least that hold all pairs; chunks of more.
_SORT_BLOCKS = ((512, 2), (2048, 8), (4096, 8))
_SORT_CHUNK = (8192, 8)
# Elements that are added up at once.
_ADD_BLOCK = 1024


def route_experts(logits: Tensor, top_k: int, renormalize: bool) -> tuple[Tensor, Tensor]:
    rows = as_rows(logits)
    num_rows, num_experts = rows.shape
    ids = torch.empty(num_rows, top_k, dtype=torch.int32, device=rows.device)
    weights = torch.empty(num_rows, top_k, dtype=torch.float32, device=rows.device)
    if num_rows:
        route_kernel[(num_rows,)](
            rows,
            ids,
            weights,
            rows.stride(0),
            num_experts,
            TOP_K=top_k,
            EXPERTS=power_of_two(num_experts),
            PLACES=power_of_two(top_k),
            RENORMALIZE=renormalize,
            num_warps=1,
            **dependent(rows, num_rows),
        )
    return ids, weights


def expert_mlp(x: Tensor, experts: Tensor, expert_ids: Tensor, weights: Tensor) -> Tensor:
    return mix_experts(x, experts, expert_ids, weights, _sizes(x.device))


def mix_experts(
    x: Tensor, experts: Tensor, expert_ids: Tensor, weights: Tensor, device: DeviceSizes
) -> Tensor:
    """``expert_mlp`` on a device of such sizes."""
    rows = as_rows(x)
    out = torch.empty(rows.shape, dtype=x.dtype, device=x.device)
    if not len(rows):
        return out
    mixture = _Mixture(rows, experts, expert_ids.contiguous(), weights.contiguous(), out)
    if len(rows) <= _FEW_TOKENS:
        _mix_few(mixture)
    else:
        _mix_sorted(mixture, device)
    return out


@dataclass(frozen=True, slots=True)
class _Mixture:
    """Arguments and the result of a call; rows of x are dense."""

    x: Tensor
    experts: Tensor
    ids: Tensor
    weights: Tensor
    out: Tensor

    @property
    def hidden(self) -> int:
        return self.x.shape[1]

    @property
    def inner(self) -> int:
        return self.experts.shape[1] // (3 * self.hidden)

    @property
    def top_k(self) -> int:
        return self.ids.shape[1]

    @property
    def down(self) -> Tensor:
        """The experts' down projections, where the first one begins."""
        return self.experts[:, 2 * self.inner * self.hidden :]

    @property
    def overlap(self) -> dict[str, Any]:
        """Named arguments of launches."""
        return dependent(self.x, len(self.x))

    def empty(self, width: int) -> Tensor:
        """Scratch of ``width`` for each pair."""
        return torch.empty(self.ids.numel(), width, dtype=self.x.dtype, device=self.x.device)


def _mix_few(mixture: _Mixture) -> None:
    hidden, inner, top_k = mixture.hidden, mixture.inner, mixture.top_k
    product = mixture.empty(inner)
    stride, overlap = mixture.experts.stride(0), mixture.overlap
    gate_up_row_kernel[(len(product), -(-inner // _GATE_UP_WIDTH))](
        mixture.x,
        mixture.experts,
        mixture.ids,
        product,
        mixture.x.stride(0),
        stride,
        TOP_K=top_k,
        HIDDEN=hidden,
        INNER=inner,
        WIDTH=_GATE_UP_WIDTH,
        BLOCK=min(_GATE_UP_BLOCK, power_of_two(hidden)),
        num_warps=4,
        **overlap,
    )
    down_row_kernel[(len(mixture.x), -(-hidden // _DOWN_WIDTH))](
        product,
        mixture.down,
        mixture.ids,
        mixture.weights,
        mixture.out,
        stride,
        TOP_K=top_k,
        PLACES=power_of_two(top_k),
        INNER=inner,
        HIDDEN=hidden,
        WIDTH=_DOWN_WIDTH,
        BLOCK=min(_DOWN_BLOCK, power_of_two(inner)),
        num_warps=4,
        **overlap,
    )


def _mix_sorted(mixture: _Mixture, device: DeviceSizes) -> None:
    hidden, inner = mixture.hidden, mixture.inner
    tiles = _sorted_tiles(mixture)
    product, parts = mixture.empty(inner), mixture.empty(hidden)
    num_bytes = mixture.x.element_size()
    sizes = ProductSizes(hidden, inner, num_bytes, projections=2)
    _multiply(mixture, tiles, sizes, (mixture.x, mixture.experts, product), device)
    sizes = ProductSizes(inner, hidden, num_bytes, projections=1)
    _multiply(mixture, tiles, sizes, (product, mixture.down, parts), device)
    block = min(_ADD_BLOCK, power_of_two(hidden))
    add_up_kernel[(len(mixture.x), -(-hidden // block))](
        parts, mixture.out, TOP_K=mixture.top_k, HIDDEN=hidden, BLOCK=block, **mixture.overlap
    )


@dataclass(frozen=True, slots=True)
class _Tiles:
    """Pairs [most, size] and experts [most + 1] of tiles, as ``place_kernel`` leaves them."""

    pairs: Tensor
    experts: Tensor
    size: int

    @property
    def most(self) -> int:
        return len(self.experts) - 1


def _sorted_tiles(mixture: _Mixture) -> _Tiles:
    ids, num_experts = mixture.ids, len(mixture.experts)
    num_pairs = ids.numel()
    size = tile_of(num_pairs, num_experts)
    most = most_tiles(num_pairs, num_experts, size)
    pairs = torch.empty(most * size, dtype=torch.int32, device=ids.device)
    experts = torch.empty(most + 1, dtype=torch.int32, device=ids.device)
    block, num_warps = next((item for item in _SORT_BLOCKS if num_pairs <= item[0]), _SORT_CHUNK)
    num_chunks = -(-num_pairs // block)
    padded = power_of_two(num_experts)
    counts = experts
    if num_chunks > 1:
        counts = torch.empty(num_chunks, padded, dtype=torch.int32, device=ids.device)
        count_kernel[(num_chunks,)](
            ids, counts, num_pairs, EXPERTS=padded, BLOCK=block, num_warps=num_warps
        )
    place_kernel[(num_experts, num_chunks)](
        ids,
        counts,
        pairs,
        experts,
        num_pairs,
        num_chunks,
        most,
        IS_COUNTED=num_chunks > 1,
        TILE=size,
        EXPERTS=padded,
        BLOCK=block,
        num_warps=num_warps,
        **mixture.overlap,
    )
    return _Tiles(pairs, experts, size)


def _multiply(
    mixture: _Mixture,
    tiles: _Tiles,
    sizes: ProductSizes,
    tensors: tuple[Tensor, Tensor, Tensor],
    device: DeviceSizes,
) -> None:
    """``tensors``: rows, weights and results; rows of x are shared by a token's pairs."""
    rows, weights, out = tensors
    tuning = product_tuning(sizes, tiles.size, device)
    is_gated = sizes.projections == 2
    grouped_kernel[(tiles.most * -(-sizes.outputs // tuning.width),)](
        rows,
        weights,
        tiles.pairs,
        tiles.experts,
        mixture.weights,
        out,
        mixture.ids.numel(),
        tiles.most,
        rows.stride(0),
        weights.stride(0),
        SHARERS=mixture.top_k if is_gated else 1,
        INPUTS=sizes.inputs,
        OUTPUTS=sizes.outputs,
        GATED=is_gated,
        TILE=tiles.size,
        WIDTH=tuning.width,
        BLOCK=tuning.block,
        GROUP=tuning.group,
        WEIGHTS_LEFT=tuning.weights_left,
        num_warps=tuning.num_warps,
        num_stages=tuning.num_stages,
        **product_options(rows.device),
        **mixture.overlap,
    )


@cache
def _sizes(device: torch.device) -> DeviceSizes:
    """Asked for in every layer of a step."""
    return device_sizes(device)
