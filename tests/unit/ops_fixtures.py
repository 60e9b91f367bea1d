"""Kernels that providers of the registry tests load by name: right, wrong and broken ones."""

import torch
from torch.nn import functional


def good_rms_norm(x, weight, eps):
    return functional.rms_norm(x.float(), weight.shape, weight.float(), eps).to(x.dtype)


def wrong_rms_norm(x, weight, eps):
    return good_rms_norm(x, weight, eps) * 1.5


def wide_rms_norm(x, weight, eps):
    return good_rms_norm(x, weight, eps).double()


def raising_rms_norm(x, weight, eps):
    raise RuntimeError("no such engine")


def nan_rms_norm(x, weight, eps):
    return torch.full_like(x, torch.nan)


def renamed_rms_norm(x, gamma, eps):
    return good_rms_norm(x, gamma, eps)


def demanding_rms_norm(x, weight, eps, *, stream):
    return good_rms_norm(x, weight, eps)


def optional_rms_norm(x, weight, eps, *, blocks=4):
    return good_rms_norm(x, weight, eps)


def good_fused_add_rms_norm(x, residual, weight, eps):
    total = x + residual
    return good_rms_norm(total, weight, eps), total


def parts_fused_add_rms_norm(parts, x, residual, weight, eps):
    return good_fused_add_rms_norm(x, residual, weight, eps)


not_a_function = 7
