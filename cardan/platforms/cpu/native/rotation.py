"""What calls of ``rotation.c`` are given: queries and keys, the norms of their heads, positions."""

from dataclasses import dataclass

import torch
from torch import Tensor

from cardan.platforms.cpu.native.library import Pointer, Real, Size
from cardan.platforms.cpu.native.tensors import dense_weight, type_code

_PART = (Pointer, Pointer, Size, Size, Size, Pointer, Size)
# Fields of ``struct rotate_call`` (``rotation.h``).
ROTATION_FIELDS = (*_PART, *_PART, Real, Pointer, Size, Size, Pointer, *[Size] * 4)


@dataclass(frozen=True, slots=True)
class HeadNorm:
    """Weights [head dim] that the heads of queries and keys are normed with; None: they are not."""

    q_weight: Tensor | None = None
    k_weight: Tensor | None = None
    eps: float = 0.0


@dataclass(frozen=True, slots=True)
class RotationCall:
    """``values`` of the fields of one call. ``kept`` owns what they point to, of which some is
    made for the call: hold it until the call has been made."""

    values: tuple[float, ...]
    kept: tuple[Tensor | None, ...]

    @classmethod
    def of(
        cls,
        heads: tuple[Tensor, Tensor],
        outs: tuple[Tensor, Tensor | None],
        norm: HeadNorm,
        cos_sin: Tensor,
        positions: Tensor,
    ) -> "RotationCall":
        """``heads`` are q and k, ``outs`` dense tensors for what becomes of them; None where keys
        go elsewhere.

        Raises:
            ValueError: shapes or dtypes do not agree.
        """
        q, k = heads
        _check(q, k, cos_sin, positions)
        dim = q.shape[2]
        if cos_sin.dtype is not torch.float32 or not cos_sin.is_contiguous():
            cos_sin = cos_sin.to(torch.float32).contiguous()
        if positions.stride(0) != 1:
            positions = positions.contiguous()
        q_part, *q_kept = _part(q, outs[0], norm.q_weight)
        k_part, *k_kept = _part(k, outs[1], norm.k_weight)
        values = (
            *q_part,
            *k_part,
            norm.eps,
            cos_sin.data_ptr(),
            cos_sin.shape[0],
            cos_sin.shape[1] // 2,
            positions.data_ptr(),
            q.shape[0],
            dim,
            type_code(q),
            torch.get_num_threads(),
        )
        return cls(values, (*q_kept, *k_kept, cos_sin, positions))


def position_beyond(cos_sin: Tensor, positions: Tensor) -> IndexError:
    return IndexError(
        f"positions must lie in [0, {cos_sin.shape[0]}), the rows of cos_sin; got "
        f"{int(positions.min())} to {int(positions.max())}"
    )


def _part(
    x: Tensor, out: Tensor | None, weight: Tensor | None
) -> tuple[tuple[int, ...], Tensor, Tensor | None]:
    """``struct rotate_part``, and the tensors made for it."""
    # The elements of a head one after the other.
    x = x if x.stride(2) == 1 else x.contiguous()
    wide = 0
    if weight is not None:
        weight, wide = dense_weight(weight, x, x.shape[2])
    fields = (
        0 if out is None else out.data_ptr(),
        x.data_ptr(),
        x.shape[1],
        x.stride(0),
        x.stride(1),
        0 if weight is None else weight.data_ptr(),
        wide,
    )
    return fields, x, weight


def _check(q: Tensor, k: Tensor, cos_sin: Tensor, positions: Tensor) -> None:
    tokens, _, dim = q.shape
    is_alike = k.shape[0] == tokens and k.shape[2] == dim and k.dtype is q.dtype
    if not is_alike or cos_sin.shape[1] > dim:
        raise ValueError(
            f"q {q.dtype} {tuple(q.shape)}, k {k.dtype} {tuple(k.shape)} and cos_sin "
            f"{tuple(cos_sin.shape)} must agree in tokens, dtype and head dim"
        )
    if positions.shape != (tokens,) or positions.dtype is not torch.int64:
        raise ValueError(
            f"positions must be int64 ({tokens},), got {positions.dtype} {tuple(positions.shape)}"
        )
