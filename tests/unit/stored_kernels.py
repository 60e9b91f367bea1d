"""Kernels for quantised weights that tests load by name: the definitions, over prepared weights."""

from dataclasses import dataclass

import torch

from cardan.core.interfaces.kernels import Needs, Provider
from cardan.core.ops.catalogue import CATALOGUE
from cardan.core.ops.reference import blocks
from cardan.core.ops.registry import KernelRegistry

FORMATS = frozenset({"q4_0", "q4_1", "q5_1", "q8_0", "q4_k", "q6_k"})


@dataclass
class Prepared:
    """A weight in a kernel's own form, and the attributes that it was prepared with."""

    data: torch.Tensor
    attributes: dict


def prepare(weight, **attributes):
    assert weight.is_contiguous()
    assert weight.shape[0] == attributes["out_features"]
    # Bytes in another order: a kernel that is given the stored ones is wrong.
    return Prepared(weight.flip(1), attributes)


def block_linear(x, weight, bias, format):
    assert weight.attributes["format"] == format
    return blocks.block_linear(x, weight.data.flip(1), bias, format)


def block_embedding(token_ids, weight, format, dtype):
    return blocks.block_embedding(token_ids, weight, format, dtype)


def int8_linear(x, weight, scales, bias):
    return blocks.int8_linear(x, weight.data.flip(1), scales, bias)


def rounding_block_linear(x, weight, bias, format):
    """Activations as 8-bit numbers in blocks of 32, as fast kernels take them."""
    groups = x.float().unflatten(-1, (-1, 32))
    steps = groups.abs().amax(dim=-1, keepdim=True) / 127
    rounded = (groups / steps.clamp_min(1e-30)).round() * steps
    return blocks.block_linear(rounded.flatten(-2).to(x.dtype), weight, bias, format)


def failing_prepare(weight, **attributes):
    raise ValueError("no room")


def provider(op="block_linear", name="test.stored", **changes):
    """A provider of this module, for ``FORMATS``."""
    values = {
        "load": f"stored_kernels:{op}",
        "prepare": "" if op == "block_embedding" else "stored_kernels:prepare",
        "needs": Needs(one_of={} if op == "int8_linear" else {"format": FORMATS}),
        **changes,
    }
    return Provider(op=op, name=name, **values)


def stored_ops(*providers):
    """The operations with these providers, by default all of this module."""
    served = providers or [provider(op) for op in ("block_linear", "block_embedding")]
    return KernelRegistry(CATALOGUE, served, device=torch.device("cpu"), features=())
