"""Turns torch operations on host memory into queued work."""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from cardan.testing.fake.op_rules import (
    OpKind,
    TensorSpec,
    cache_key,
    classify,
    map_leaves,
    result_specs,
    takes_out,
    written_arguments,
)

# Reads that go past the dispatcher, straight to memory.
_READS = frozenset({Tensor.cpu, Tensor.numpy, Tensor.tolist, Tensor.__array__})
_GARBAGE = 0x25
_FROM_ARRAY = torch.ops.aten.lift_fresh.default
_CONVERSION = torch.ops.aten._to_copy.default  # noqa: SLF001 (the only way to it)


class Sink(Protocol):
    """Where recorded work goes: a queue, or a graph in the making."""

    def put(self, task: Callable[[], object]) -> None:
        """Take a task that comes after all tasks taken before."""

    def wait_for(self, what: str) -> None:
        """Let everything be computed because ``what`` needs it.

        Raises:
            UnsupportedError: nothing can be computed now.
        """

    def allocate(self, spec: TensorSpec) -> Tensor:
        """Memory for a result."""


class OpRecorder(TorchDispatchMode):
    """While entered, operations are put into ``sink`` instead of being run.

    Views are made at once, for they read no memory. Results are allocated at once, with the
    metadata that the operation has on meta tensors, and computed later. What needs values on the
    host waits for the sink. Without ``float64`` operations on such tensors raise TypeError, as on
    devices that lack the dtype.
    """

    def __init__(self, sink: Sink, float64: bool = True) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.sink = sink
        self._float64 = float64
        self._kinds: dict[Any, OpKind] = {}
        self._specs: dict[tuple[Any, ...], Any] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No: torch would import its compiler only to keep it away from this class."""
        return False

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        result = self._record(func, args, kwargs)
        if not self._float64 and self._kinds[func] is not OpKind.COMPOSITE:
            _refuse_float64(func, args, kwargs, result)
        return result

    def _record(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        kind = self._kinds.get(func)
        if kind is None:
            kind = self._kinds[func] = classify(func)
        if kind is OpKind.COMPOSITE:
            with self:
                return func.decompose(*args, **kwargs)
        if kind is OpKind.VIEW:
            return func(*args, **kwargs)
        if kind is OpKind.IN_PLACE and not self._resizes(func, args, kwargs):
            self.sink.put(lambda: func(*args, **kwargs))
            return written_arguments(func, args, kwargs)
        if kind in (OpKind.FUNCTIONAL, OpKind.UNFILLED):
            specs = self._result_specs(func, args, kwargs)
            if specs is not None:
                return self._launch(func, args, kwargs, specs, kind is OpKind.FUNCTIONAL)
        self.sink.wait_for(str(func))
        return func(*args, **kwargs)

    def _launch(
        self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], specs: Any, computes: bool
    ) -> Any:
        results = map_leaves(TensorSpec, self.sink.allocate, specs)
        if computes:
            self.sink.put(lambda: _fill(func, results, func(*args, **kwargs)))
        return results

    def _result_specs(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Specs of the results; None where they depend on values."""
        key = cache_key(func, args, kwargs)
        if key not in self._specs:
            try:
                self._specs[key] = result_specs(func, args, kwargs)
            except (RuntimeError, IndexError, ValueError, TypeError):
                # A wrong call fails again, with its own message, when it is run at once.
                self._specs[key] = None
        return self._specs[key]

    def _resizes(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        if not takes_out(func):
            return False
        specs = self._result_specs(func, args, kwargs)
        outs = written_arguments(func, args, kwargs)
        return bool(specs != map_leaves(Tensor, TensorSpec.of, outs))


class HostReads(TorchFunctionMode):
    """While entered, reads of tensors by the host wait for ``recorder``'s sink, as on a device."""

    def __init__(self, recorder: OpRecorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func in _READS:
            self._recorder.sink.wait_for(f"Tensor.{func.__name__}")
        return func(*args, **(kwargs or {}))


def poisoned(spec: TensorSpec) -> Tensor:
    """Memory that nobody can take for a result."""
    tensor = torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype)
    garbage = _garbage(spec.dtype)
    return tensor if garbage is None else tensor.fill_(garbage)


@cache
def _garbage(dtype: torch.dtype) -> float | bool | None:
    """What no result is; None: left as memory is."""
    if dtype is torch.bool:
        return True
    if dtype.is_floating_point or dtype.is_complex:
        return torch.nan if dtype.itemsize > 1 else None
    # Outside any table, if somebody takes it for an index.
    return torch.iinfo(dtype).max - _GARBAGE


def _refuse_float64(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
    """Arrays of the host may become tensors, and be converted on their way to the device."""
    if func is _FROM_ARRAY:
        return
    seen: list[Tensor] = []
    inputs = () if func is _CONVERSION else (list(args), *kwargs.values())
    map_leaves(Tensor, seen.append, (*inputs, result))
    if any(tensor.dtype == torch.float64 for tensor in seen):
        raise TypeError(f"{func} on float64, which the fake device does not know")


def _fill(func: Any, results: Any, values: Any) -> None:
    if isinstance(results, Tensor):
        if results.shape != values.shape:
            raise RuntimeError(
                f"{func} gave shape {tuple(values.shape)} where {tuple(results.shape)} was expected"
            )
        results.copy_(values)
    elif isinstance(results, list | tuple):
        for result, value in zip(results, values, strict=True):
            _fill(func, result, value)
