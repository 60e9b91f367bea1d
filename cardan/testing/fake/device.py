"""Host memory that behaves as a device's: whatever is computed there is computed later."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from cardan.core.interfaces.capabilities import Capabilities, DeviceInfo
from cardan.core.interfaces.communication import Communicator, GroupSpec
from cardan.core.interfaces.errors import UnsupportedError
from cardan.core.interfaces.graphs import Graph
from cardan.core.interfaces.memory import MemoryInfo
from cardan.core.interfaces.torch_communicator import TorchCommunicator
from cardan.core.interfaces.torch_device import TorchDevice
from cardan.testing.fake.communicator import QueuedCommunicator
from cardan.testing.fake.counters import DeviceCounters
from cardan.testing.fake.graph import Arena, FakeGraph, Tape
from cardan.testing.fake.memory import FakeMemory
from cardan.testing.fake.op_rules import TensorSpec
from cardan.testing.fake.queue import DeviceQueue, QueueEvent, QueueStream, StepClock, Task
from cardan.testing.fake.recorder import HostReads, OpRecorder, poisoned
from cardan.testing.fake.settings import FakeSettings
from cardan.testing.fake.step_faults import StepFaults

# Seconds that a device which does not wait keeps its results back, so that it is found out.
_LOST_SYNC_HOLD = 0.05


class FakeDevice(TorchDevice):
    """Tensors on the host whose operations, inside ``inference()``, run on a queue.

    Until the host has waited for an event or for ``synchronize``, results hold garbage. Outside
    ``inference()`` the host sees and changes memory as it is. An event on the main stream ends a
    step: see ``FakeSettings`` for how long steps take and how they fail. Work that fails makes the
    device fail: every later wait raises its error. One thread uses the device.

    Attributes:
        counters: what it did.
    """

    memory: FakeMemory

    def __init__(
        self, info: DeviceInfo, capabilities: Capabilities, settings: FakeSettings
    ) -> None:
        super().__init__(info, capabilities, "cpu", self.memory_info)
        self.counters = DeviceCounters()
        self._standing = settings.faults
        self._faults = StepFaults(settings)
        self._clock = StepClock(
            self.counters,
            self._faults,
            settings.step_ms / 1000,
            _LOST_SYNC_HOLD if "lost_sync" in settings.faults else 0.0,
        )
        self._main = DeviceQueue(f"{info.name} main", self._clock)
        self._queues = [self._main]
        self._current = [self._main]
        self.memory = FakeMemory(
            settings.memory_mb << 20, self.inference, self._drain, settings.faults, settings.peak
        )
        sink = _QueueSink(self._launch, self._sync, self.memory)
        self._recorder = OpRecorder(sink, settings.float64)
        self._reads = HostReads(self._recorder)
        self._is_recording = False

    def memory_info(self) -> MemoryInfo:
        return self.memory.info()

    def synchronize(self) -> None:
        """Also ends what was no step: the next one begins with the next operation."""
        if "lost_sync" in self._standing:
            return
        self._drain()
        self._clock.reset()

    @contextmanager
    def inference(self) -> Iterator[None]:
        """Autograd off; operations are queued. May be nested."""
        with torch.inference_mode():
            if self._is_recording:
                yield
                return
            self._is_recording = True
            try:
                with self._recorder, self._reads:
                    yield
            finally:
                self._is_recording = False

    def stream(self, priority: int = 0) -> QueueStream:
        """A queue of its own; ``priority`` has no effect."""
        tasks = DeviceQueue(f"{self.info.name} stream {len(self._queues)}")
        self._queues.append(tasks)
        return QueueStream(tasks, self._current.append, self._leave_stream, self._loses_sync)

    def event(self) -> QueueEvent:
        """A point on the current stream. On the main one it ends a step."""
        if self._is_capturing:
            raise UnsupportedError("events cannot be captured")
        event = QueueEvent(self._loses_sync)
        tasks = self._current[-1]
        if tasks is self._main:
            tasks.mark(lambda: self._end_step(event))
        else:
            tasks.mark(lambda: event.pass_by(tasks.error))
        return event

    def capture(self, launch: Callable[[], None], pool: Graph | None = None) -> FakeGraph:
        if self.capabilities.graphs == "none":
            raise UnsupportedError("this device does not capture graphs")
        if self._is_capturing:
            raise UnsupportedError("captures cannot be nested")
        if pool is not None and not isinstance(pool, FakeGraph):
            raise UnsupportedError("the pool is a graph of another device")
        arena = Arena(self.memory.allocate_bytes) if pool is None else pool.arena
        before = arena.num_bytes
        arena.start()
        tape = Tape(arena)
        usual, self._recorder.sink = self._recorder.sink, tape
        try:
            with self.inference():
                launch()
        finally:
            self._recorder.sink = usual
        self.counters.captures += 1
        is_stale = "stale_graph" in self._standing
        return FakeGraph(tape.tasks, arena, arena.num_bytes - before, self._replay, is_stale)

    def communicator(self, group: GroupSpec) -> Communicator:
        inner = TorchCommunicator(group, torch.device("cpu"))
        queued = QueuedCommunicator(inner, lambda: self._recorder.sink, self._standing)
        self._communicators.append(queued)
        return queued

    def close(self) -> None:
        self._faults.release()
        for tasks in self._queues:
            tasks.close()
        super().close()

    @property
    def _is_capturing(self) -> bool:
        return isinstance(self._recorder.sink, Tape)

    @property
    def _loses_sync(self) -> bool:
        return "lost_sync" in self._standing

    def _launch(self, task: Task) -> None:
        self.counters.launches += 1
        self._current[-1].submit(task)

    def _replay(self, task: Task) -> None:
        self.counters.replays += 1
        self._launch(task)

    def _sync(self) -> None:
        self.counters.syncs += 1
        self._drain()

    def _drain(self) -> None:
        for tasks in self._queues:
            tasks.drain()

    def _leave_stream(self) -> None:
        self._current.pop()

    def _end_step(self, event: QueueEvent) -> None:
        """On the main queue's thread."""
        try:
            if self._main.error is None:
                self._clock.end(self._main)
        except Exception as error:
            self._main.error = error
        event.pass_by(self._main.error)


class _QueueSink:
    """Work for the device's current stream."""

    def __init__(
        self, put: Callable[[Task], None], sync: Callable[[], None], memory: FakeMemory
    ) -> None:
        self.put = put
        self._sync = sync
        self._memory = memory

    def wait_for(self, what: str) -> None:
        self._sync()

    def allocate(self, spec: TensorSpec) -> Tensor:
        tensor = poisoned(spec)
        self._memory.allocated(tensor)
        return tensor
