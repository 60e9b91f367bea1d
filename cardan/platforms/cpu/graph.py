"""Captured work on the CPU: native calls that C makes again, and torch operations in between."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from cardan.core.interfaces.errors import UnsupportedError
from cardan.core.interfaces.graphs import Graph
from cardan.platforms.cpu.graph_memory import GraphMemory
from cardan.platforms.cpu.native.library import NativeLibrary
from cardan.platforms.cpu.native.program import Program

_ALLOCATIONS = frozenset(
    {
        torch.ops.aten.empty.memory_format,
        torch.ops.aten.empty_like.default,
        torch.ops.aten.empty_strided.default,
        torch.ops.aten.new_empty.default,
    }
)


@dataclass(frozen=True, slots=True)
class TorchCall:
    """A torch operation and the tensors that hold its results; none if it works in place."""

    function: Callable[..., Any]
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    results: Sequence[Tensor]

    def run(self) -> None:
        again, _ = tree_flatten(self.function(*self.args, **self.kwargs))
        if self.results:
            for old, new in zip(self.results, again, strict=True):
                old.copy_(new)


class CpuGraph(Graph):
    """Calls in order. Owns them, and the memory they compute in together with other graphs."""

    def __init__(self, parts: Sequence[Program | TorchCall], memory: GraphMemory) -> None:
        self._parts = tuple(parts)
        self.memory = memory

    @property
    def num_torch_calls(self) -> int:
        """Operations that no native kernel serves."""
        return sum(isinstance(part, TorchCall) for part in self._parts)

    def replay(self) -> None:
        for part in self._parts:
            part.run()

    def release(self) -> None:
        self._parts = ()

    @property
    def num_bytes(self) -> int:
        """Of the calls; the memory they compute in belongs to all graphs that share it."""
        return sum(part.num_bytes for part in self._parts if isinstance(part, Program))


def capture_graph(
    native: NativeLibrary, launch: Callable[[], None], memory: GraphMemory
) -> CpuGraph:
    """Run ``launch`` and take down what it does.

    Raises:
        UnsupportedError: it does what cannot be done again, such as reading a tensor's values.
    """
    recording = _Recording(native, memory)
    with native.recorder.record(), recording:
        launch()
        recording.close_program()
    return CpuGraph(recording.parts, memory)


class _Recording(TorchDispatchMode):
    """Sees every torch operation of a launch. Tensors that operations allocate for native kernels
    to write come from the graph's memory; whatever torch computes is taken down, and its results
    are kept."""

    def __init__(self, native: NativeLibrary, memory: GraphMemory) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.parts: list[Program | TorchCall] = []
        self._native = native
        self._memory = memory

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Torch's default imports its compiler at the first capture, over a second's work, to keep
        it away from this class, which nothing here compiles."""
        return False

    def close_program(self) -> None:
        """Make a part of the native calls since the last one."""
        calls = self._native.recorder.take()
        if calls:
            self.parts.append(Program(self._native, calls))

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func in _ALLOCATIONS:
            return self._memory.like(result)
        results, _ = tree_flatten(result)
        inputs, _ = tree_flatten((args, kwargs))
        storages = {_storage(item) for item in inputs if isinstance(item, Tensor)}
        is_mutable = func._schema.is_mutable  # noqa: SLF001 (torch documents no other way)
        if not all(isinstance(item, Tensor) for item in results):
            raise UnsupportedError(f"{func} reads what the device computed, which a graph cannot")
        if not is_mutable and all(_storage(item) in storages for item in results):
            return result  # views of what is there anyway
        self.close_program()
        self.parts.append(TorchCall(func, args, kwargs, () if is_mutable else results))
        return result


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
