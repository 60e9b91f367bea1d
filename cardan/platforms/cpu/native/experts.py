"""Mixtures of experts through ``experts.c``: one call for the routing, and one for all experts that
any row goes to, whose weights were packed once.

A row's result depends neither on the rows beside it nor on the number of threads.
"""

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from cardan.platforms.cpu.huge_pages import WeightMemory
from cardan.platforms.cpu.native.library import (
    NativeLibrary,
    Pointer,
    Size,
    check,
    library,
)

# Numbers of the types in ``simd.h``.
_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
# A status of ``experts.c``.
_BAD_EXPERT = 2
_ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class PackedExperts:
    """Gate, up and down projections of experts as the kernels of ``linear.c`` read them.

    Those of an expert lie ``expert_bytes`` behind those of the one before, and ``down_offset`` in
    there the down projection [hidden, inner]. ``data`` owns the memory.
    """

    data: Tensor
    dtype: torch.dtype
    num_experts: int
    hidden: int
    inner: int
    expert_bytes: int
    down_offset: int


class ExpertKernels:
    """The operations of these names by the kernels of ``native``, and what prepares for them; their
    definitions are the catalogue's."""

    def __init__(self, native: NativeLibrary) -> None:
        self._memory = WeightMemory()
        self._layout = native.function("cardan_linear_layout", Pointer, Size)
        self._pack = native.function("cardan_linear_pack", *[Pointer] * 2, *[Size] * 4)
        self._route = native.function("cardan_route_experts", *[Pointer] * 3, *[Size] * 7)
        self._mix = native.function("cardan_expert_mlp", *[Pointer] * 10, *[Size] * 9)
        self._tiles = {dtype: self._tile(kind) for dtype, kind in _TYPES.items()}

    def route_experts(self, logits: Tensor, top_k: int, renormalize: bool) -> tuple[Tensor, Tensor]:
        rows, num_experts = logits.shape
        if not 0 < top_k <= num_experts:
            raise ValueError(f"top_k must be 1 to {num_experts}, the experts; got {top_k}")
        if logits.stride(1) != 1:
            logits = logits.contiguous()
        ids = torch.empty(rows, top_k, dtype=torch.int32)
        weights = torch.empty(rows, top_k)
        self._route(
            ids.data_ptr(),
            weights.data_ptr(),
            logits.data_ptr(),
            rows,
            num_experts,
            logits.stride(0),
            top_k,
            renormalize,
            _TYPES[logits.dtype],
            torch.get_num_threads(),
        )
        return ids, weights

    def prepare_experts(
        self,
        experts: Tensor,
        hidden: int,
        intermediate: int,
        num_experts: int = 0,
        top_k: int = 0,
        dtype: str = "",
    ) -> PackedExperts:
        """Pack experts [E, 3 * intermediate * hidden]; their number and dtype are their own.

        Raises:
            ValueError: they do not have these sizes, or are of another dtype than kernels know.
        """
        if experts.dtype not in _TYPES or not experts.is_cpu:
            raise ValueError(f"experts are {experts.dtype} on {experts.device}")
        if experts.shape[1:] != (3 * intermediate * hidden,):
            raise ValueError(
                f"experts must be [E, {3 * intermediate * hidden}] for hidden size {hidden} and "
                f"intermediate size {intermediate}, got {list(experts.shape)}"
            )
        gate_up = self._packed_bytes(experts.dtype, 2 * intermediate, hidden)
        down = self._packed_bytes(experts.dtype, hidden, intermediate)
        packed = PackedExperts(
            self._memory.empty(len(experts) * (gate_up + down)),
            experts.dtype,
            len(experts),
            hidden,
            intermediate,
            gate_up + down,
            gate_up,
        )
        self._fill(packed, experts.contiguous())
        return packed

    def expert_mlp(
        self, x: Tensor, experts: Tensor | PackedExperts, expert_ids: Tensor, weights: Tensor
    ) -> Tensor:
        """Experts that were not prepared are packed for the call, which gives the same, slowly."""
        rows, hidden = x.shape
        if isinstance(experts, Tensor):
            experts = self.prepare_experts(experts, hidden, experts.shape[1] // (3 * hidden))
        if x.dtype is not experts.dtype or hidden != experts.hidden or not x.is_cpu:
            raise ValueError(
                f"x must be {experts.dtype} [T, {experts.hidden}] on the host, as the experts are; "
                f"got {x.dtype} {list(x.shape)} on {x.device}"
            )
        top_k = expert_ids.shape[1]
        x, ids = x.contiguous(), expert_ids.to(torch.int32).contiguous()
        weights = weights.contiguous()
        out = torch.empty_like(x)
        parts = x.new_empty(rows, top_k, hidden)
        gathered = torch.empty_like(x)
        gate_up = x.new_empty(rows, 2 * experts.inner)
        product = x.new_empty(rows, experts.inner)
        order = torch.empty(rows * top_k + experts.num_experts + 1, dtype=torch.int32)
        status = self._mix(
            *(tensor.data_ptr() for tensor in (out, x, experts.data, ids, weights)),
            *(tensor.data_ptr() for tensor in (parts, gathered, gate_up, product, order)),
            rows,
            experts.num_experts,
            top_k,
            hidden,
            experts.inner,
            experts.expert_bytes,
            experts.down_offset,
            _TYPES[x.dtype],
            torch.get_num_threads(),
        )
        if status == _BAD_EXPERT:
            raise IndexError(
                f"expert_ids must lie in [0, {experts.num_experts}), the experts; got "
                f"{int(ids.min())} to {int(ids.max())}"
            )
        check(status)
        return out

    def _tile(self, kind: int) -> tuple[int, int]:
        """Outputs and inputs to whose multiples packed weights are padded; zeros where they are
        read as they are stored."""
        tile = (ctypes.c_int64 * 2)()
        check(self._layout(ctypes.addressof(tile), kind))
        return tile[0], tile[1]

    def _packed_bytes(self, dtype: torch.dtype, outputs: int, inputs: int) -> int:
        numbers = 1
        for size, unit in zip((outputs, inputs), self._tiles[dtype], strict=True):
            numbers *= -(-size // unit) * unit if unit else size
        return -(-numbers * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT

    def _fill(self, packed: PackedExperts, experts: Tensor) -> None:
        hidden, inner, kind = packed.hidden, packed.inner, _TYPES[packed.dtype]
        is_packed = self._tiles[packed.dtype] != (0, 0)
        for expert, whole in enumerate(experts):
            begin = expert * packed.expert_bytes
            sizes = [2 * inner * hidden, inner * hidden]
            for weight, outputs, inputs, place in zip(
                whole.split(sizes),
                (2 * inner, hidden),
                (hidden, inner),
                (begin, begin + packed.down_offset),
                strict=True,
            ):
                if is_packed:
                    self._pack(
                        packed.data.data_ptr() + place,
                        weight.data_ptr(),
                        inputs,
                        outputs,
                        kind,
                        torch.get_num_threads(),
                    )
                else:
                    into = packed.data[place : place + weight.nbytes]
                    into.copy_(weight.view(torch.uint8))


_KERNELS = ExpertKernels(library())
route_experts = _KERNELS.route_experts
expert_mlp = _KERNELS.expert_mlp
prepare_experts = _KERNELS.prepare_experts
