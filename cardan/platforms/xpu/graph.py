"""Captured work: torch's XPU graphs that share a memory pool."""

import contextlib
from collections.abc import Callable
from typing import Any

import torch

from cardan.core.interfaces.errors import OutOfMemoryError, UnsupportedError
from cardan.core.interfaces.graphs import Graph


class XpuGraph(Graph):
    """One graph. Its results and scratch lie in ``pool``, which lives as long as any of its
    graphs."""

    def __init__(self, graph: Any, pool: Any, num_bytes: int, device: torch.device) -> None:
        self._graph: Any = graph
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
            torch.xpu.synchronize(self._device)
        finally:
            graph.reset()

    @property
    def num_bytes(self) -> int:
        """What torch took more of the device when this graph was captured: an estimate."""
        return self._num_bytes


def capture_graph(
    launch: Callable[[], None], stream: torch.xpu.Stream, shared: Graph | None
) -> XpuGraph:
    """Record what ``launch`` queues on ``stream``, the current one meanwhile.

    An exception of ``launch`` reaches the caller.

    Raises:
        OutOfMemoryError: the results and scratch do not fit.
        UnsupportedError: the driver records no graphs, or ``launch`` does what cannot be captured.
    """
    device = stream.device
    pool = shared.pool if isinstance(shared, XpuGraph) else torch.xpu.graph_pool_handle()
    graph = torch.xpu.XPUGraph()
    with torch.xpu.stream(stream):
        stream.synchronize()
        if not isinstance(shared, XpuGraph):
            # Graphs cannot use what torch keeps of freed tensors.
            torch.xpu.empty_cache()
        before = torch.xpu.memory_reserved(device)
        try:
            _record(graph, launch, pool)
        except torch.OutOfMemoryError as error:
            raise OutOfMemoryError(
                "a captured step needs more memory than is free; lower cache.memory_utilization, "
                "scheduler.max_num_seqs or scheduler.max_num_batched_tokens, or set "
                "device.enforce_eager"
            ) from error
        except RuntimeError as error:
            if not _is_refusal(error):
                raise
            first_line = str(error).partition("\n")[0]
            raise UnsupportedError(f"this work cannot be captured: {first_line}") from error
        grown = torch.xpu.memory_reserved(device) - before
    return XpuGraph(graph, pool, max(0, grown), device)


def _record(graph: Any, launch: Callable[[], None], pool: Any) -> None:
    graph.capture_begin(pool=pool)
    try:
        launch()
    except BaseException:
        # The capture may be void already, which is no news beside the first error.
        with contextlib.suppress(RuntimeError):
            graph.capture_end()
        raise
    graph.capture_end()


def _is_refusal(error: RuntimeError) -> bool:
    """Whether torch, SYCL or a launcher of kernels says that it cannot do this in a capture."""
    text = str(error).lower()
    return isinstance(error, torch.AcceleratorError) or "captur" in text or "graph" in text
