"""Tensors as rows, and sizes of blocks."""

from torch import Tensor


def power_of_two(size: int) -> int:
    """The least power of two that is not below ``size``."""
    return 1 << max(0, size - 1).bit_length()


def as_rows(x: Tensor) -> Tensor:
    """x [..., H] as [rows, H] whose rows are dense; a copy only where strides do not allow a view.

    Kernels take a stride between rows, so parts of wider tensors are views here.
    """
    rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    return rows if rows.stride(-1) == 1 or rows.shape[-1] == 1 else rows.contiguous()


def num_warps(block: int) -> int:
    """Warps for a program over one row of ``block`` elements: 8 to 16 elements a thread."""
    return min(16, max(1, block // 512))
