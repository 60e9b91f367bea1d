"""Which axis of a weight is cut where several devices share a model, by the weight's name.

As Megatron-LM does it (arXiv 1909.08053): the first product of a pair is cut by outputs, the second
by inputs, so that only sums cross between devices. It is no more than a hint: whatever is cut, XLA
computes the same and moves what it must, and what nobody knows is whole on every device.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

_BY_OUTPUTS = frozenset(
    {"qkv_proj", "q_proj", "k_proj", "v_proj", "gate_up_proj", "gate_proj", "up_proj"}
    | {"embed_tokens", "lm_head"}
)
_BY_INPUTS = frozenset({"o_proj", "down_proj"})
# Weights of a mixture's experts, all in one tensor: each device has some of the experts.
_EXPERTS = "stacked"


def split_axes(model: object) -> dict[int, int]:
    """The axis to cut, by ``id`` of a tensor of the model."""
    if not isinstance(model, nn.Module):
        return {}
    axes = {}
    for path, tensor in _named_tensors(model):
        axis = _axis(path, tensor.ndim)
        if axis is not None:
            axes[id(tensor)] = axis
    return axes


def _axis(path: tuple[str, ...], num_axes: int) -> int | None:
    if path[-1] == _EXPERTS or not _BY_OUTPUTS.isdisjoint(path):
        return 0
    return 1 if num_axes == 2 and not _BY_INPUTS.isdisjoint(path) else None


def _named_tensors(model: nn.Module) -> Iterator[tuple[tuple[str, ...], torch.Tensor]]:
    """Tensors of modules, and of the objects in which these keep weights."""
    for name, module in model.named_modules():
        path = tuple(name.split("."))
        held: dict[str, Any] = {**vars(module), **dict(module.named_parameters(recurse=False))}
        for attribute, value in held.items():
            if isinstance(value, torch.Tensor):
                yield (*path, attribute), value
            elif not isinstance(value, nn.Module) and hasattr(value, "__dict__"):
                inner = vars(value).items()
                yield from (
                    ((*path, attribute, key), item)
                    for key, item in inner
                    if isinstance(item, torch.Tensor)
                )
