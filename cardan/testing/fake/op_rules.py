"""How an operation can be queued: what it writes, and what its results will look like."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor

# Composite operations that are queued whole, since taking them apart only costs time.
_WHOLE = frozenset({torch.ops.aten.linear.default, torch.ops.aten.matmul.default})
# Results are memory with no meaning yet.
_UNFILLED = frozenset(
    {
        torch.ops.aten.empty.memory_format,
        torch.ops.aten.empty_strided.default,
        torch.ops.aten.empty_like.default,
        torch.ops.aten.new_empty.default,
        torch.ops.aten.new_empty_strided.default,
    }
)
# Change what a tensor's storage is, which the host must know at once.
_STORAGE = frozenset({"aten::resize_", "aten::set_", "aten::resize_as_"})
_COMPOSITE = "CompositeImplicitAutograd"


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """What a tensor looks like."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> "TensorSpec":
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype)

    @property
    def num_bytes(self) -> int:
        """Bytes from the first to the last element."""
        if 0 in self.shape:
            return 0
        steps = zip(self.shape, self.stride, strict=True)
        return (1 + sum((size - 1) * stride for size, stride in steps)) * self.dtype.itemsize


class OpKind(Enum):
    """How the recorder treats an operation."""

    COMPOSITE = "taken apart into other operations"
    VIEW = "metadata only: run at once"
    UNFILLED = "allocation only"
    IN_PLACE = "writes to its arguments and returns them: queued"
    FUNCTIONAL = "new results: allocated now, computed later"
    HOST = "the host needs its values, or nothing can be said ahead: waited for"


def classify(func: Any) -> OpKind:
    """The kind of an ``OpOverload``, from its schema and tags."""
    schema = func._schema  # noqa: SLF001 (the only way to it)
    if func not in _WHOLE and _is_composite(func):
        return OpKind.COMPOSITE
    if func in _UNFILLED:
        return OpKind.UNFILLED
    if torch.Tag.data_dependent_output in func.tags or schema.name in _STORAGE:
        return OpKind.HOST
    if torch.Tag.inplace_view in func.tags:
        return OpKind.VIEW
    if schema.is_mutable:
        aliases = [item.alias_info for item in schema.returns]
        sound = all(alias is not None and alias.is_write for alias in aliases)
        return OpKind.IN_PLACE if sound else OpKind.HOST
    if any(item.alias_info is not None for item in schema.returns):
        return OpKind.VIEW
    if all(str(item.type) in ("Tensor", "List[Tensor]") for item in schema.returns):
        return OpKind.FUNCTIONAL
    return OpKind.HOST


def written_arguments(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """What an in-place or ``out=`` operation returns: the arguments that it writes to."""
    schema = func._schema  # noqa: SLF001
    written = []
    for place, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            written.append(args[place] if place < len(args) else kwargs[argument.name])
    if not schema.returns:
        return None
    return written[0] if len(schema.returns) == 1 else tuple(written)


def takes_out(func: Any) -> bool:
    """Whether results go to ``out=`` arguments, which the operation may resize."""
    return torch.Tag.out in func.tags


def cache_key(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """Equal for calls whose results have equal metadata."""
    parts: list[Any] = [id(func)]  # operations live as long as torch does
    for value in args:
        parts.append(_key(value))
    for name, value in kwargs.items():
        parts.append((name, _key(value)))
    return tuple(parts)


def result_specs(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The results with a ``TensorSpec`` for each tensor, from running ``func`` on meta tensors.

    Raises:
        RuntimeError: nothing can be said without the values, or the call is wrong.
    """
    meta_args = [_as_meta(value) for value in args]
    meta_kwargs = {name: _as_meta(value) for name, value in kwargs.items()}
    if any(argument.name == "device" for argument in func._schema.arguments):  # noqa: SLF001
        meta_kwargs["device"] = torch.device("meta")
    return map_leaves(Tensor, TensorSpec.of, func(*meta_args, **meta_kwargs))


def map_leaves(kind: type[Any], change: Callable[[Any], Any], value: Any) -> Any:
    """``value`` with everything of ``kind``, also inside lists and tuples, replaced."""
    if isinstance(value, kind):
        return change(value)
    if isinstance(value, list | tuple):
        return type(value)([map_leaves(kind, change, item) for item in value])
    return value


def _is_composite(func: Any) -> bool:
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key  # noqa: SLF001 (no public way)
    return bool(has_kernel(func.name(), _COMPOSITE))


def _as_meta(value: Any) -> Any:
    if isinstance(value, torch.Generator):
        return None
    return map_leaves(Tensor, _meta_tensor, value)


def _meta_tensor(x: Tensor) -> Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")


def _key(value: Any) -> Any:
    if isinstance(value, Tensor):
        return tuple(value.shape), value.stride(), value.dtype
    if isinstance(value, list | tuple):
        return tuple([_key(item) for item in value])
    if isinstance(value, torch.Generator):
        return None
    # Numbers that are equal but of another type give other dtypes.
    return type(value), value
