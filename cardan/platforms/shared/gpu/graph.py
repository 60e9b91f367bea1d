"""Captured work: graphs of the runtime that share a memory pool."""

import contextlib
from collections.abc import Callable
from typing import Any

import torch

from cardan.core.interfaces.errors import OutOfMemoryError, UnsupportedError
from cardan.core.interfaces.graphs import Graph


class GpuGraph(Graph):
    """One graph. Its results and scratch lie in ``pool``, which lives as long as any of its
    graphs."""

    def __init__(
        self, graph: torch.cuda.CUDAGraph, pool: Any, num_bytes: int, device: torch.device
    ) -> None:
        self._graph: torch.cuda.CUDAGraph | None = graph
        self._num_bytes = num_bytes
        self._device = device
        self.pool = pool

    def replay(self) -> None:
        if self._graph is None:
            raise UnsupportedError("this graph was released")
        self._graph.replay()

    def release(self) -> None:
        graph, self._graph, self._num_bytes = self._graph, None, 0
        if graph is None:
            return
        try:
            torch.cuda.synchronize(self._device)
        finally:
            graph.reset()

    @property
    def num_bytes(self) -> int:
        """What the pool grew by when this graph was captured, and the graph itself."""
        return self._num_bytes


def capture_graph(
    launch: Callable[[], None], stream: torch.cuda.Stream, shared: Graph | None
) -> GpuGraph:
    """Record what ``launch`` queues on ``stream``, the current one meanwhile.

    An exception of ``launch`` reaches the caller, and the device can be used on.

    Raises:
        OutOfMemoryError: the results and scratch do not fit.
        UnsupportedError: ``launch`` does what cannot be captured, such as waiting for the device.
    """
    pool = shared.pool if isinstance(shared, GpuGraph) else torch.cuda.graph_pool_handle()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        stream.synchronize()
        if not isinstance(shared, GpuGraph):
            # Graphs cannot use what torch keeps of freed tensors.
            torch.cuda.empty_cache()
        before = torch.cuda.mem_get_info()[0]
        try:
            _record(graph, launch, pool, stream.device.index)
        except torch.OutOfMemoryError as error:
            raise OutOfMemoryError(
                f"a captured step needs more than the {before / 2**20:.0f} MiB that are free; "
                "lower cache.memory_utilization, scheduler.max_num_seqs or "
                "scheduler.max_num_batched_tokens, or set device.enforce_eager"
            ) from error
        except RuntimeError as error:
            if not _is_refusal(error):
                raise
            raise UnsupportedError(f"this work cannot be captured: {_first_line(error)}") from error
        grown = before - torch.cuda.mem_get_info()[0]
    return GpuGraph(graph, pool, max(0, grown), stream.device)


def _record(
    graph: torch.cuda.CUDAGraph, launch: Callable[[], None], pool: Any, device_index: int
) -> None:
    # Other threads may go on using the device.
    graph.capture_begin(pool=pool, capture_error_mode="thread_local")
    try:
        launch()
    except BaseException:
        # The capture may be void already, which is no news beside the first error.
        with contextlib.suppress(RuntimeError):
            _end(graph, pool, device_index)
        raise
    _end(graph, pool, device_index)


def _end(graph: torch.cuda.CUDAGraph, pool: Any, device_index: int) -> None:
    try:
        graph.capture_end()
    except RuntimeError:
        # Where the runtime declares the capture void torch goes on directing allocations to the
        # pool, and never gives it up. Where it did end that, it refuses here.
        with contextlib.suppress(RuntimeError):
            torch._C._cuda_endAllocateToPool(device_index, pool)  # noqa: SLF001
            torch._C._cuda_releasePool(device_index, pool)  # noqa: SLF001
        raise


def _is_refusal(error: RuntimeError) -> bool:
    """Whether the runtime, torch or a launcher of kernels says that this cannot be captured."""
    return isinstance(error, torch.AcceleratorError) or "captur" in str(error).lower()


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
