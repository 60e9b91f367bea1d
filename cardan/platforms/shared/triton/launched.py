"""Launches of compiled kernels without what Triton does before each of them.

Triton binds the arguments of a launch, works out what they are specialized for, and makes a key of
all that, which takes a slow host several times as long as the launch. Here the part of it that can
differ from launch to launch is looked at, and the rest is known since the first one.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor
from triton.runtime import driver
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

# What Triton specializes on: addresses and whole numbers that this divides, and the number 1.
_ALIGNMENT = 16
_INT32 = range(-(1 << 31), 1 << 31)
_INT64 = range(-(1 << 63), 1 << 63)

Grid = tuple[int, ...]


def launched(kernel: Any) -> Any:
    """``kernel`` as a ``Launched``; what the interpreter runs stays as it is."""
    return Launched(kernel) if isinstance(kernel, JITFunction) else kernel


class Launched:
    """A kernel that is launched as Triton's own: ``kernel[grid](*arguments, NAME=value)``.

    Arguments by position come first in the kernel's own order; the others are given by name. A grid
    is a tuple. Only devices of the backend ``cuda`` take the short way: others specialize kernels
    on more than is looked at here.

    Attributes:
        jit: the kernel as Triton knows it.
    """

    def __init__(self, kernel: JITFunction) -> None:
        self.jit = kernel
        self._names = tuple(kernel.arg_names)
        self._is_specialized = tuple(not param.do_not_specialize for param in kernel.params)
        self._defaults = {param.name: param.default for param in kernel.params if param.has_default}
        self._found: dict[tuple[Any, ...], Any] = {}
        self._is_short: bool | None = None

    def __getitem__(self, grid: Grid) -> Callable[..., Any]:
        return partial(self._launch, grid)

    def _launch(self, grid: Grid, *args: Any, **named: Any) -> Any:
        if self._is_short is None:
            self._is_short = driver.active.get_current_target().backend == "cuda"
        if not self._is_short or self.jit.pre_run_hooks:
            return self.jit[grid](*args, **named)
        device = driver.active.get_current_device()
        key = (device, *traits(args, self._is_specialized), *named, *named.values())
        compiled = self._found.get(key)
        if compiled is None:
            compiled = self._found[key] = self.jit[grid](*args, **named)
            return compiled
        rest = self._names[len(args) :]
        if rest:
            defaults = self._defaults
            args = (*args, *[named[name] if name in named else defaults[name] for name in rest])
        compiled[(*grid, 1, 1)](*args, stream=driver.active.get_current_stream(device))
        return compiled


def traits(args: Sequence[Any], is_specialized: Sequence[bool]) -> list[Any]:
    """What a kernel may be compiled for, of each argument given by position."""
    found: list[Any] = []
    for arg, special in zip(args, is_specialized, strict=False):
        if isinstance(arg, Tensor):
            is_aligned = arg.data_ptr() % _ALIGNMENT == 0
            found.append(arg.dtype if is_aligned else (arg.dtype,))
        elif type(arg) is int:
            found.append(_of_number(arg) if special else _width(arg))
        elif arg is None or isinstance(arg, float):
            found.append(type(arg))
        elif isinstance(arg, TensorDescriptor):
            found.append((arg.base.dtype, *arg.block_shape))
        else:
            # A flag, or a constant given by position; True and 1 are equal, and are not alike.
            found.append((type(arg), arg))
    return found


def _of_number(number: int) -> tuple[int, bool] | int:
    """Whether it is 1, whether it is divided by what Triton asks for, and its width."""
    if number not in _INT32:
        return (_width(number), number % _ALIGNMENT == 0)
    return 1 if number == 1 else 2 if number % _ALIGNMENT == 0 else 3


def _width(number: int) -> int:
    """Of the type that Triton passes it in: int32, int64 or uint64."""
    return 32 if number in _INT32 else 64 if number in _INT64 else 65
