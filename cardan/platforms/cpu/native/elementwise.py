"""Embeddings, norms, rotation, gated activations, the soft cap, the likeliest tokens and what
follows the last layer through ``embedding.c``, ``elementwise.c``, ``rotation.c``, ``greedy.c`` and
``hidden.c``: one call each, float32 arithmetic, one rounding.

A row's result depends neither on the rows beside it nor on the number of threads. Threads are
used from about 65,000 elements on (for activations from 11,000), below which waking them costs
more than they take over.
"""

import torch
from torch import Tensor

from cardan.platforms.cpu.native.library import (
    NativeLibrary,
    Pointer,
    Real,
    Size,
    library,
)
from cardan.platforms.cpu.native.rotation import (
    ROTATION_FIELDS,
    HeadNorm,
    RotationCall,
    position_beyond,
)
from cardan.platforms.cpu.native.tensors import dense_weight, type_code

# Numbers of the gates in ``elementwise.c``.
_SILU, _GELU_TANH = 0, 1


class ElementwiseKernels:
    """The operations of these names by the kernels of ``native``; their definitions are the
    catalogue's."""

    def __init__(self, native: NativeLibrary) -> None:
        self._norm = native.function(
            "cardan_rms_norm", *[Pointer] * 5, Size, Size, Real, *[Size] * 3
        )
        self._rotate = native.function("cardan_rotate", *ROTATION_FIELDS)
        self._gated = native.function("cardan_gated", *[Pointer] * 2, *[Size] * 5)
        self._cap = native.function("cardan_soft_cap", *[Pointer] * 2, Size, Size, Real, Size, Size)
        self._greedy = native.function("cardan_greedy", *[Pointer] * 2, *[Size] * 4)
        self._widen = native.function("cardan_widen", *[Pointer] * 2, *[Size] * 3)
        self._finite = native.function("cardan_finite_rows", *[Pointer] * 2, *[Size] * 4)
        self._embedding = native.function("cardan_embedding", *[Pointer] * 3, *[Size] * 4)

    def embedding(self, token_ids: Tensor, weight: Tensor) -> Tensor:
        """Ids outside the table raise IndexError."""
        if token_ids.dtype is not torch.int64:
            token_ids = token_ids.to(torch.int64)
        token_ids, weight = token_ids.contiguous(), weight.contiguous()
        rows, hidden = weight.shape
        out = torch.empty((*token_ids.shape, hidden), dtype=weight.dtype)
        status = self._embedding(
            out.data_ptr(),
            token_ids.data_ptr(),
            weight.data_ptr(),
            token_ids.numel(),
            rows,
            hidden * weight.element_size(),
            torch.get_num_threads(),
        )
        if status:
            raise IndexError(
                f"token_ids must lie in [0, {rows}), the rows of weight; got "
                f"{int(token_ids.min())} to {int(token_ids.max())}"
            )
        return out

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        x = x.contiguous()
        hidden = x.shape[-1]
        weight, wide = dense_weight(weight, x, hidden)
        out = torch.empty_like(x)
        self._norm(
            out.data_ptr(),
            0,
            x.data_ptr(),
            0,
            weight.data_ptr(),
            x.numel() // hidden if hidden else 0,
            hidden,
            eps,
            type_code(x),
            wide,
            torch.get_num_threads(),
        )
        return out

    def fused_add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        if x.shape != residual.shape or x.dtype is not residual.dtype:
            raise ValueError(
                f"residual must be as x, {x.dtype} {tuple(x.shape)}, "
                f"got {residual.dtype} {tuple(residual.shape)}"
            )
        x, residual = x.contiguous(), residual.contiguous()
        hidden = x.shape[-1]
        weight, wide = dense_weight(weight, x, hidden)
        out, new_residual = torch.empty_like(x), torch.empty_like(x)
        self._norm(
            out.data_ptr(),
            new_residual.data_ptr(),
            x.data_ptr(),
            residual.data_ptr(),
            weight.data_ptr(),
            x.numel() // hidden if hidden else 0,
            hidden,
            eps,
            type_code(x),
            wide,
            torch.get_num_threads(),
        )
        return out, new_residual

    def rotary_embedding(
        self, q: Tensor, k: Tensor, cos_sin: Tensor, positions: Tensor
    ) -> tuple[Tensor, Tensor]:
        return self._rotated(q, k, HeadNorm(), cos_sin, positions)

    def qk_norm_rope(
        self,
        q: Tensor,
        k: Tensor,
        q_weight: Tensor,
        k_weight: Tensor,
        eps: float,
        cos_sin: Tensor,
        positions: Tensor,
    ) -> tuple[Tensor, Tensor]:
        return self._rotated(q, k, HeadNorm(q_weight, k_weight, eps), cos_sin, positions)

    def silu_and_mul(self, x: Tensor) -> Tensor:
        return self._gate(x, _SILU)

    def gelu_tanh_and_mul(self, x: Tensor) -> Tensor:
        return self._gate(x, _GELU_TANH)

    def soft_cap(self, x: Tensor, cap: float) -> Tensor:
        x = x.contiguous()
        out = torch.empty_like(x)
        width = x.shape[-1]
        rows = x.numel() // width if width else 0
        threads = torch.get_num_threads()
        self._cap(out.data_ptr(), x.data_ptr(), rows, width, cap, type_code(x), threads)
        return out

    def to_float32(self, x: Tensor) -> Tensor:
        if x.dtype is torch.float32:
            return x
        x = x.contiguous()
        out = torch.empty(x.shape, dtype=torch.float32)
        self._widen(out.data_ptr(), x.data_ptr(), x.numel(), type_code(x), torch.get_num_threads())
        return out

    def finite_rows(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        rows, hidden = x.shape
        out = torch.empty(rows, dtype=torch.bool)
        threads = torch.get_num_threads()
        self._finite(out.data_ptr(), x.data_ptr(), rows, hidden, type_code(x), threads)
        return out

    def greedy_tokens(self, logits: Tensor) -> Tensor:
        if logits.dtype is not torch.float32 or logits.dim() != 2 or not logits.shape[1]:
            raise ValueError(
                f"logits must be float32 [N, V] with V > 0, got {logits.dtype} "
                f"{tuple(logits.shape)}"
            )
        if logits.stride(1) != 1:
            logits = logits.contiguous()
        rows, vocab_size = logits.shape
        out = torch.empty(rows, dtype=torch.int64)
        self._greedy(
            out.data_ptr(),
            logits.data_ptr(),
            rows,
            vocab_size,
            logits.stride(0),
            torch.get_num_threads(),
        )
        return out

    def _gate(self, x: Tensor, gate: int) -> Tensor:
        x = x.contiguous()
        hidden, odd = divmod(x.shape[-1], 2)
        if odd:
            raise ValueError(
                f"the last dimension of x holds gate and up, so it is even; got {x.shape[-1]}"
            )
        out = torch.empty((*x.shape[:-1], hidden), dtype=x.dtype)
        rows = out.numel() // hidden if hidden else 0
        threads = torch.get_num_threads()
        self._gated(out.data_ptr(), x.data_ptr(), rows, hidden, gate, type_code(x), threads)
        return out

    def _rotated(
        self,
        q: Tensor,
        k: Tensor,
        norm: HeadNorm,
        cos_sin: Tensor,
        positions: Tensor,
    ) -> tuple[Tensor, Tensor]:
        q_out = torch.empty(q.shape, dtype=q.dtype)
        k_out = torch.empty(k.shape, dtype=k.dtype)
        call = RotationCall.of((q, k), (q_out, k_out), norm, cos_sin, positions)
        if self._rotate(*call.values):
            raise position_beyond(cos_sin, positions)
        return q_out, k_out


_KERNELS = ElementwiseKernels(library())
embedding = _KERNELS.embedding
rms_norm = _KERNELS.rms_norm
fused_add_rms_norm = _KERNELS.fused_add_rms_norm
rotary_embedding = _KERNELS.rotary_embedding
qk_norm_rope = _KERNELS.qk_norm_rope
silu_and_mul = _KERNELS.silu_and_mul
gelu_tanh_and_mul = _KERNELS.gelu_tanh_and_mul
soft_cap = _KERNELS.soft_cap
to_float32 = _KERNELS.to_float32
finite_rows = _KERNELS.finite_rows
greedy_tokens = _KERNELS.greedy_tokens
