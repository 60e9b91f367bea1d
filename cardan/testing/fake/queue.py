"""One ordered queue of device work, run by a thread of its own."""

import queue
import threading
import time
from collections.abc import Callable

import torch

from cardan.core.interfaces.device import Event, Stream
from cardan.testing.fake.counters import DeviceCounters
from cardan.testing.fake.step_faults import StepFaults

Task = Callable[[], object]

# Tasks handed to the thread at once: two threads that take turns at each task hold each other up.
_BATCH = 32


class DeviceQueue:
    """Runs tasks in order. The thread starts with the first one.

    Tasks are run when some have gathered or a mark follows; whoever waits sets a mark. After a
    task has failed no further one is run, only marks are passed: the failure is the device's until
    it is closed.
    """

    def __init__(self, name: str, clock: "StepClock | None" = None) -> None:
        """``clock`` is told when a task begins."""
        self._name = name
        self._clock = clock
        self._batches: queue.SimpleQueue[list[tuple[Task, bool]] | None] = queue.SimpleQueue()
        self._gathered: list[tuple[Task, bool]] = []
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closed = False
        self.error: BaseException | None = None

    def submit(self, task: Task) -> None:
        """Queue work."""
        self._put((task, False))

    def mark(self, task: Task) -> None:
        """Queue a task that runs even if work before it failed, or was dropped by ``close``.

        Raises:
            RuntimeError: the queue is closed.
        """
        self._put((task, True))

    @property
    def is_empty(self) -> bool:
        """Whether no task waits behind the batch that is being run."""
        return self._batches.empty() and not self._gathered

    def drain(self) -> None:
        """Wait for all that was queued. Raises what work raised."""
        with self._lock:
            if self._thread is None:
                return
        passed = threading.Event()
        self.mark(passed.set)
        passed.wait()
        if self.error is not None:
            raise self.error

    def close(self) -> None:
        """Drop queued work, pass marks and end the thread. Idempotent."""
        with self._lock:
            self._closed = True
            self._gathered.clear()
            thread, self._thread = self._thread, None
        if thread is not None:
            self._batches.put(None)
            thread.join()

    def _put(self, item: tuple[Task, bool]) -> None:
        with self._lock:
            if self._closed:
                raise RuntimeError(f"{self._name} is closed")
            if self._thread is None:
                # An engine that was told to stop need not wait for it.
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
            self._gathered.append(item)
            if item[1] or len(self._gathered) == _BATCH:
                batch, self._gathered = self._gathered, []
                self._batches.put(batch)

    @torch.inference_mode()
    def _run(self) -> None:
        while (batch := self._batches.get()) is not None:
            batch.reverse()
            while batch:
                # Nothing keeps what a task holds longer than the task takes.
                self._perform(*batch.pop())

    def _perform(self, task: Task, is_mark: bool) -> None:
        if not is_mark and (self.error is not None or self._closed):
            return
        if self._clock is not None and not is_mark:
            self._clock.begin()
        try:
            task()
        except BaseException as error:
            self.error = self.error or error


class StepClock:
    """Gives steps their length and their faults; used on the main queue's thread.

    A step begins with the first task after the end of the one before and ends with an event. Most
    of what it is to last beyond its own work is waited before that work, so that results come late.
    """

    def __init__(
        self, counters: DeviceCounters, faults: StepFaults, step_seconds: float, hold_seconds: float
    ) -> None:
        """``hold_seconds``: least time before a step's work, even if it then lasts too long."""
        self._counters = counters
        self._faults = faults
        self._step_seconds = step_seconds
        self._hold_seconds = hold_seconds
        self._began: float | None = None
        self._work_began = 0.0
        self._work_seconds = 0.0
        self._idle_since: float | None = None

    def begin(self) -> None:
        """A task begins."""
        if self._began is not None:
            return
        self._began = time.monotonic()
        if self._idle_since is not None:
            self._counters.idle_gaps.append(self._began - self._idle_since)
            self._idle_since = None
        # The work of this step will take about as long as that of the last one.
        time.sleep(max(self._hold_seconds, self._step_seconds - self._work_seconds, 0.0))
        self._work_began = time.monotonic()

    def reset(self) -> None:
        """What ran since the last step belongs to none (the host waited for it)."""
        self._began = self._idle_since = None

    def end(self, tasks: DeviceQueue) -> None:
        """End a step of ``tasks``, not before it has lasted as long as a step does.

        Raises:
            Exception: the step's fault.
        """
        self.begin()
        index, began = self._counters.steps, self._began or 0.0
        self._counters.steps += 1
        self._began = None
        self._work_seconds = time.monotonic() - self._work_began
        self._faults.before_step(index)
        time.sleep(max(0.0, began + self._step_seconds - time.monotonic()))
        ended = time.monotonic()
        self._counters.busy_seconds += ended - began
        self._idle_since = ended if tasks.is_empty else None


class QueueEvent(Event):
    """A point of a queue. ``is_lost``: it claims to have been reached when it has not."""

    def __init__(self, is_lost: bool = False) -> None:
        self._is_lost = is_lost
        self._passed = threading.Event()
        self._error: BaseException | None = None

    def query(self) -> bool:
        passed = self._is_lost or self._passed.is_set()
        self._raise()
        return passed

    def synchronize(self) -> None:
        if not self._is_lost:
            self._passed.wait()
        self._raise()

    def wait_on_device(self) -> None:
        """Hold up the queue that this runs on; what failed on the other one is not its affair."""
        self._passed.wait()

    def pass_by(self, error: BaseException | None) -> None:
        """The queue has come to this point, with ``error`` or without."""
        self._error = error
        self._passed.set()

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error


class QueueStream(Stream):
    """A queue as the contract's stream; ``enter`` and ``leave`` make it current and undo that."""

    def __init__(
        self,
        tasks: DeviceQueue,
        enter: Callable[[DeviceQueue], None],
        leave: Callable[[], None],
        is_lost: bool,
    ) -> None:
        self._tasks = tasks
        self._enter = enter
        self._leave = leave
        self._is_lost = is_lost

    def __enter__(self) -> "QueueStream":
        self._enter(self._tasks)
        return self

    def __exit__(self, *exc: object) -> None:
        self._leave()

    def wait(self, event: Event) -> None:
        if not isinstance(event, QueueEvent):
            raise TypeError(f"a fake stream waits for fake events, not {type(event).__name__}")
        self._tasks.submit(event.wait_on_device)

    def record(self) -> QueueEvent:
        event = QueueEvent(self._is_lost)
        tasks = self._tasks
        tasks.mark(lambda: event.pass_by(tasks.error))
        return event
