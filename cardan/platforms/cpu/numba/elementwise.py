"""Norms, rotation and the gated activation for few rows of float32, each in one call; what is
larger torch computes, which uses its threads and loses less to its calls then."""

import torch
from torch import Tensor
from torch.nn import functional

from cardan.platforms.cpu import kernels
from cardan.platforms.cpu.numba.elementwise_kernel import gate, norm, rotate

# Elements from which on torch's threads save more than its calls cost.
_MANY = 1 << 14


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    if x.numel() >= _MANY:
        return kernels.rms_norm(x, weight, eps)
    x, weight = _dense(x, "x"), _norm_weight(weight, x)
    out = torch.empty_like(x)
    hidden = x.shape[-1]
    rows = x.numel() // hidden if hidden else 0
    norm(out.data_ptr(), 0, x.data_ptr(), 0, weight.data_ptr(), rows, hidden, eps)
    return out


def fused_add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    if x.shape != residual.shape:
        raise ValueError(f"residual must be as x, {tuple(x.shape)}, got {tuple(residual.shape)}")
    if x.numel() >= _MANY:
        total = x + residual
        return kernels.rms_norm(total, weight, eps), total
    x, residual = _dense(x, "x"), _dense(residual, "residual")
    weight = _norm_weight(weight, x)
    out, total = torch.empty_like(x), torch.empty_like(x)
    hidden = x.shape[-1]
    norm(
        out.data_ptr(),
        total.data_ptr(),
        x.data_ptr(),
        residual.data_ptr(),
        weight.data_ptr(),
        x.numel() // hidden if hidden else 0,
        hidden,
        eps,
    )
    return out, total


def rotary_embedding(
    q: Tensor, k: Tensor, cos_sin: Tensor, positions: Tensor
) -> tuple[Tensor, Tensor]:
    tokens, dim = positions.shape[0], q.shape[2]
    if q.shape[0] != tokens or k.shape[0] != tokens or k.shape[2] != dim or cos_sin.shape[1] > dim:
        raise ValueError(
            f"q {tuple(q.shape)}, k {tuple(k.shape)}, cos_sin {tuple(cos_sin.shape)} and positions "
            f"{tuple(positions.shape)} must agree in tokens and head dim"
        )
    if positions.dtype is not torch.int64:
        raise ValueError(f"positions must be int64, got {positions.dtype}")
    if q.numel() >= _MANY:
        return kernels.rotary_embedding(q, k, cos_sin, positions)
    q, k = _heads(q), _heads(k)
    table, positions = cos_sin.to(torch.float32).contiguous(), positions.contiguous()
    q_out, k_out = torch.empty(q.shape), torch.empty(k.shape)
    q_strides, k_strides = q.stride(), k.stride()
    fault = rotate(
        q_out.data_ptr(),
        q.data_ptr(),
        q_strides[0],
        q_strides[1],
        q.shape[1],
        k_out.data_ptr(),
        k.data_ptr(),
        k_strides[0],
        k_strides[1],
        k.shape[1],
        dim,
        table.data_ptr(),
        table.shape[0],
        table.shape[1] // 2,
        positions.data_ptr(),
        tokens,
    )
    if fault:
        raise IndexError(
            f"positions must lie in [0, {table.shape[0]}), the rows of cos_sin; got "
            f"{int(positions.min())} to {int(positions.max())}"
        )
    return q_out, k_out


def silu_and_mul(x: Tensor) -> Tensor:
    hidden, odd = divmod(x.shape[-1], 2)
    if odd:
        raise ValueError(
            f"the last dimension of x holds gate and up, so it is even; got {x.shape[-1]}"
        )
    if x.numel() >= _MANY:
        return functional.silu(x[..., :hidden]).mul_(x[..., hidden:])
    x = _dense(x, "x")
    out = torch.empty((*x.shape[:-1], hidden))
    gate(out.data_ptr(), x.data_ptr(), out.numel() // hidden if hidden else 0, hidden)
    return out


def _heads(x: Tensor) -> Tensor:
    """x [tokens, heads, dim] with the elements of a head one after the other."""
    _check_float(x, "q and k")
    return x if x.stride(2) == 1 else x.contiguous()


def _norm_weight(weight: Tensor, x: Tensor) -> Tensor:
    if weight.shape != x.shape[-1:]:
        raise ValueError(f"weight must be ({x.shape[-1]},), got {tuple(weight.shape)}")
    return weight.to(torch.float32).contiguous()


def _dense(x: Tensor, name: str) -> Tensor:
    _check_float(x, name)
    return x.contiguous()


def _check_float(x: Tensor, name: str) -> None:
    if x.dtype is not torch.float32 or not x.is_cpu:
        raise ValueError(f"{name} must be float32 on the host, got {x.dtype} on {x.device}")
