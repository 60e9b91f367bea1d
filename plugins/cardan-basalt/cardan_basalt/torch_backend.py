"""The torch device ``basalt``: tensors that live on the chip, and how torch's calls reach it.

torch keeps one place for devices that it does not know (PrivateUse1). A backend in Python fills
it with a subclass of Tensor that has a shape, a device, and no memory in torch's eyes. The chip is
emulated: its memory is the host's, in the tensor that each BasaltTensor holds.
"""

from collections.abc import Callable
from functools import cache, partial
from operator import attrgetter
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from cardan.core.interfaces.errors import UnsupportedError

NAME = "basalt"
_HOST = torch.device("cpu")
_aten = torch.ops.aten
# Calls that may mix tensors of the host and of the chip, as on other devices.
_CROSSING = frozenset({_aten.copy_, _aten.index, _aten.index_put_})
# What makes tensors of sizes that follow from values. Other makers call the first two.
_FACTORIES = (
    *("empty.memory_format", "empty_strided", "arange", "arange.start", "arange.start_step"),
    *("linspace", "randperm", "scalar_tensor"),
)


class BasaltTensor(Tensor):
    """A tensor on the chip. A view of it holds a view of what it holds."""

    held: Tensor

    @staticmethod
    def __new__(cls: type["BasaltTensor"], held: Tensor) -> "BasaltTensor":
        size, strides, offset = held.shape, held.stride(), held.storage_offset()
        # A view, made in inference mode, of what was made before it must not look made in it.
        with torch.inference_mode(False):
            made: BasaltTensor = Tensor._make_wrapper_subclass(  # noqa: SLF001
                cls, size, strides, offset, dtype=held.dtype, device=torch.device(NAME, 0)
            )
        made.held = held
        CHIP.live[id(made)] = made
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        # A composite call that names a device in many ways; decomposed it names it in one.
        if func.overloadpacket is _aten.to:
            return func.decompose(*args, **(kwargs or {}))
        return _Call(func).run(args, kwargs or {})

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"basalt {self.held!r}"

    def tolist(self) -> Any:
        return self.held.tolist()


class Chip:
    """What ``torch.basalt`` is: the chip of this process. ``live``: its tensors, not owned."""

    def __init__(self) -> None:
        self.live: WeakValueDictionary[int, BasaltTensor] = WeakValueDictionary()

    def memory_allocated(self, device: Any = None) -> int:
        """Bytes of all tensors on the chip; those that share memory count once."""
        parts = [tensor.held.untyped_storage() for tensor in list(self.live.values())]
        return sum({part.data_ptr(): part.nbytes() for part in parts}.values())

    def is_available(self) -> bool:
        return True

    is_initialized = is_available

    def _is_in_bad_fork(self) -> bool:
        return False

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def manual_seed_all(self, seed: int) -> None:
        """The chip draws from the host's generator."""


CHIP = Chip()


class _Call:
    """One call of torch's, computed on what its tensors hold."""

    def __init__(self, func: Any) -> None:
        self._func = func
        # What is held -> who holds it: a call in place must give back what it was given.
        self._holders: dict[int, BasaltTensor] = {}
        self._of_host: dict[int, Tensor] = {}
        self._leaves = False

    def run(self, args: Any, kwargs: Any) -> Any:
        args, kwargs = pytree.tree_map(self._lower, (args, kwargs))
        mixes = self._holders and any(tensor.ndim for tensor in self._of_host.values())
        if mixes and self._func.overloadpacket not in _CROSSING:
            raise RuntimeError(f"{self._func}: tensors must be on one device, not {NAME} and cpu")
        return pytree.tree_map(self._lift, self._func(*args, **kwargs))

    def _lower(self, value: Any) -> Any:
        if isinstance(value, BasaltTensor):
            self._holders[id(value.held)] = value
            return value.held
        if isinstance(value, Tensor):
            self._of_host[id(value)] = value
        elif isinstance(value, torch.device):
            self._leaves = value.type != NAME
            return _HOST
        return value

    def _lift(self, value: Any) -> Any:
        if not isinstance(value, Tensor) or self._leaves or id(value) in self._of_host:
            return value
        holder = self._holders.get(id(value))
        return BasaltTensor(value) if holder is None else holder


@cache
def register() -> torch.library.Library:
    """Make the device known to torch, once in a process; UnsupportedError if it has another."""
    taken = torch._C._get_privateuse1_backend_name()  # noqa: SLF001 (nothing public tells)
    if taken != "privateuseone":
        raise UnsupportedError(
            f"this process has the torch device {taken}, and torch has room for one such device; "
            "run the platforms in processes of their own"
        )
    _setup_privateuseone_for_python_backend(NAME, backend_module=CHIP)
    library = torch.library.Library("aten", "IMPL")
    for name in _FACTORIES:
        func = attrgetter(name if "." in name else f"{name}.default")(_aten)
        library.impl(name, partial(_made, func), "PrivateUse1")
    library.impl("_copy_from", _copied, "PrivateUse1")
    return library


def _made(func: Callable[..., Tensor], *args: Any, **options: Any) -> BasaltTensor:
    return BasaltTensor(func(*args, **{**options, "device": _HOST}))


def _copied(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    """A copy where torch makes a tensor from numbers, and asks no subclass."""
    held_by(target).copy_(source)
    return target


def held_by(tensor: Tensor) -> Tensor:
    """The memory of a tensor on the chip."""
    assert isinstance(tensor, BasaltTensor), f"{tensor.device} is not {NAME}"
    return tensor.held
