"""Captured forward passes: capture, lookup, pool and release."""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from cardan.core.interfaces.device import Device
from cardan.core.interfaces.errors import OutOfMemoryError, UnsupportedError
from cardan.core.interfaces.executor import WarmupReport
from cardan.core.interfaces.graphs import Graph
from cardan.core.runner.step_shapes import StepShape

logger = logging.getLogger("cardan.engine")

# Shapes that are captured to see what all of them will take.
_TRIALS = 3


@dataclass(frozen=True, slots=True)
class ForwardResult:
    """What a forward pass leaves on the device.

    Attributes:
        hidden: the hidden states.
        corrupt: [R] bool, rows whose last token's hidden state is not finite, where these states
            are of last tokens alone; else None.
    """

    hidden: torch.Tensor
    corrupt: torch.Tensor | None


# Runs the model over the step buffers.
Forward = Callable[[], ForwardResult]


@dataclass(slots=True)
class GraphCounters:
    """Forward passes since the engine started: replayed ones, and those that ran eagerly."""

    replayed: int = 0
    eager: int = 0


@dataclass(frozen=True, slots=True)
class _Captured:
    """A graph, what it writes, and what holds the tensors that it reads."""

    graph: Graph
    result: ForwardResult
    forward: Forward


class GraphManager:
    """Owner of the captured forward passes of one model on one device, by shape.

    All graphs share one pool: the results of a replay last until the next replay. What a
    graph reads lies at fixed addresses: the step buffers, the weights, the caches, and the plans
    of the attention backends, which said that they can be captured (``AttentionNeed.captured``)
    and therefore write the plan of a shape to where the last plan of that shape was.
    """

    def __init__(self, device: Device, lazy: bool = False) -> None:
        """``lazy``: decode shapes are captured when ``run`` first sees them."""
        self._device = device
        self._lazy = lazy
        self._captured: dict[StepShape, _Captured] = {}
        self.counters = GraphCounters()

    @property
    def num_graphs(self) -> int:
        return len(self._captured)

    @property
    def num_bytes(self) -> int:
        """Device memory held by the graphs, bytes."""
        return sum(entry.graph.num_bytes for entry in self._captured.values())

    def capture(
        self, shapes: Sequence[StepShape], prepare: Callable[[StepShape], Forward]
    ) -> WarmupReport:
        """Capture a forward pass for each shape; call it once.

        A shape that does not fit into memory is left out, and none is captured where the device
        cannot capture what the model does: such steps run eagerly, and one warning says so.

        Args:
            shapes: largest first, so that smaller graphs find room in the pool.
            prepare: fills the step buffers with harmless contents of a shape.
        """
        began = time.monotonic()
        pool: Graph | None = None
        reason = ""
        with self._device.memory.region("graphs"):
            for shape in shapes:
                try:
                    entry = self._capture_one(prepare(shape), pool)
                except OutOfMemoryError as error:
                    reason = str(error)
                    continue
                except UnsupportedError as error:
                    reason = str(error)
                    break
                self._captured[shape] = entry
                pool = pool or entry.graph
        if reason:
            logger.warning(
                "%d of %d step shapes are captured, other steps run eagerly: %s",
                self.num_graphs,
                len(shapes),
                reason,
            )
        return WarmupReport(self.num_graphs, self.num_bytes, time.monotonic() - began)

    def estimate(self, shapes: Sequence[StepShape], prepare: Callable[[StepShape], Forward]) -> int:
        """About what ``capture`` of the same will hold, bytes.

        The first shapes are captured, and released again. All but the very first find what they
        need in the pool, as all later ones will, so each of these is taken for as large as the
        largest of those.
        """
        trial: list[_Captured] = []
        try:
            for shape in shapes[:_TRIALS]:
                pool = trial[0].graph if trial else None
                trial.append(self._capture_one(prepare(shape), pool))
        except (OutOfMemoryError, UnsupportedError):
            pass  # ``capture`` will meet the same and say so
        sizes = [entry.graph.num_bytes for entry in trial]
        for entry in trial:
            entry.graph.release()
        if len(sizes) < _TRIALS:
            return sum(sizes)
        return sum(sizes) + max(sizes[1:]) * (len(shapes) - _TRIALS)

    def run(self, shape: StepShape, forward: Forward) -> ForwardResult:
        """The step whose inputs and plans are in the buffers: a replay if ``shape`` was captured,
        else ``forward``."""
        entry = self._captured.get(shape)
        if entry is None and self._lazy and shape.is_decode:
            entry = self._capture_lazily(shape, forward)
        if entry is None:
            self.counters.eager += 1
            return forward()
        self.counters.replayed += 1
        entry.graph.replay()
        return entry.result

    def close(self) -> None:
        """Release the graphs. Idempotent."""
        for entry in self._captured.values():
            entry.graph.release()
        self._captured.clear()

    def _capture_lazily(self, shape: StepShape, forward: Forward) -> _Captured | None:
        pool = next((entry.graph for entry in self._captured.values()), None)
        try:
            with self._device.memory.region("graphs"):
                entry = self._capture_one(forward, pool, warm=False)
        except (OutOfMemoryError, UnsupportedError) as error:
            self._lazy = False
            logger.warning(
                "%d step shapes are captured, other steps run eagerly: %s", self.num_graphs, error
            )
            return None
        self._captured[shape] = entry
        return entry

    def _capture_one(self, forward: Forward, pool: Graph | None, warm: bool = True) -> _Captured:
        if warm:
            # Once for real: whatever kernels set up when they first run cannot be captured.
            forward()
            self._device.synchronize()
        results: list[ForwardResult] = []
        graph = self._device.capture(lambda: results.append(forward()), pool)
        return _Captured(graph, results[0], forward)
