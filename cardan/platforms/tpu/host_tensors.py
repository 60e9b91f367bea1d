"""Torch tensors of the host that a traced computation meets, as inputs of the program."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch._C import DisableTorchFunction
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._mode_utils import no_dispatch

# numpy knows no bfloat16; such numbers travel as integers of the same width.
_AS_INTEGERS = {torch.bfloat16: (torch.int16, jnp.bfloat16)}


def jax_dtype(dtype: torch.dtype) -> Any:
    """The dtype that stands for torch's; jax counts in 32 bits."""
    names = {torch.int64: "int32", torch.float64: "float32"}
    return jnp.dtype(names.get(dtype, str(dtype).removeprefix("torch.")))


def as_numpy(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """The numbers of a tensor of the host, in the dtype that jax gives them; no copy if possible.

    bfloat16 is ml_dtypes' dtype of that name.
    """
    tensor = tensor.detach()
    if tensor.dtype in _AS_INTEGERS:
        integers, dtype = _AS_INTEGERS[tensor.dtype]
        found: np.ndarray[Any, Any] = tensor.contiguous().view(integers).numpy().view(dtype)
        return found
    numbers: np.ndarray[Any, Any] = tensor.numpy().astype(jax_dtype(tensor.dtype), copy=False)
    return numbers


class HostTensors(TorchFunctionMode):
    """While it is entered, inside torchax's environment, tensors of the host are traced values.

    Those whose ``id`` is in ``values`` stand for what is there; others are taken note of in
    ``found``, in the order in which they are met, and stand for zeros. What torch makes anew on the
    host while tracing is a constant.
    """

    def __init__(self, environment: Any, values: Mapping[int, jax.Array]) -> None:
        super().__init__()
        self._environment = environment
        self._values = values
        self.found: dict[int, torch.Tensor] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        args, kwargs = pytree.tree_map_only(torch.Tensor, self._traced, (args, dict(kwargs or {})))
        if "device" in kwargs or _has_tensor((args, kwargs)):
            result = func(*args, **kwargs)
        else:
            # Of dtypes or numbers alone; torchax would look for such functions in vain.
            with DisableTorchFunction(), no_dispatch():
                result = func(*args, **kwargs)
        return pytree.tree_map_only(torch.Tensor, self._constant, result)

    def _is_traced(self, tensor: torch.Tensor) -> bool:
        return type(tensor) not in (torch.Tensor, torch.nn.Parameter)

    def _traced(self, tensor: torch.Tensor) -> torch.Tensor:
        if self._is_traced(tensor):
            return tensor
        value = self._values.get(id(tensor))
        if value is None:
            self.found[id(tensor)] = tensor
            value = jnp.zeros(tuple(tensor.shape), jax_dtype(tensor.dtype))
        traced: torch.Tensor = self._environment.j2t_iso(value)
        return traced

    def _constant(self, tensor: torch.Tensor) -> torch.Tensor:
        if self._is_traced(tensor):
            return tensor
        constant: torch.Tensor = self._environment.j2t_iso(jnp.asarray(as_numpy(tensor)))
        return constant


def _has_tensor(tree: Any) -> bool:
    return any(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(tree))
