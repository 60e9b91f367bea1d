"""An engine that comes back: a new process replaces one that died or hangs."""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace

from cardan.core.engine.client import OutputSink
from cardan.core.engine.engine_child import EngineChild
from cardan.core.engine.messages import SleepMode
from cardan.core.engine.process_client import ProcessClient
from cardan.core.types.engine_info import EngineHealth
from cardan.core.types.errors import CardanError, EngineDeadError
from cardan.core.types.outputs import StepOutputs
from cardan.core.types.request import EngineRequest

logger = logging.getLogger("cardan.engine")

_WATCH_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """At most ``max_restarts`` within ``window`` seconds; the n-th in a row waits
    ``backoff * 2**(n - 2)`` seconds, the first none. An engine that finishes no step for
    ``hang_timeout`` seconds is ended: more than any step may take, of a large model on a slow
    device, too."""

    max_restarts: int = 3
    hang_timeout: float = 300.0
    window: float = 600.0
    backoff: float = 1.0


class SupervisedClient:
    """Owner of one engine process at a time.

    What was unfinished in a process that ends is lost, and the sink is told so (``on_death``);
    until the next process is ready, requests are refused with the reason.
    """

    def __init__(
        self,
        spawn: Callable[[], EngineChild],
        step_timeout: float = 60.0,
        policy: RestartPolicy | None = None,
    ) -> None:
        """Start the first process and wait for it; if that fails there is no second try."""
        self._spawn = spawn
        self._step_timeout = step_timeout
        self._policy = policy or RestartPolicy()
        self._sink: OutputSink | None = None
        self._reason = ""
        self._num_restarts = 0
        self._restarted_at: deque[float] = deque()
        self._closing = threading.Event()
        # Guards the three below; nothing slow happens under it.
        self._lock = threading.Lock()
        self._child: EngineChild | None = None
        self._restarting: threading.Thread | None = None
        self._client: ProcessClient | None = ProcessClient(spawn(), step_timeout)
        self.info = self._client.info
        self._watcher = threading.Thread(
            target=self._watch, name="cardan-engine-watcher", daemon=True
        )
        self._watcher.start()

    def connect(self, sink: OutputSink) -> None:
        self._sink = sink
        self._live().connect(self)

    def submit(self, request: EngineRequest) -> None:
        self._live().submit(request)

    def abort(self, keys: Sequence[int]) -> None:
        if client := self._client:
            client.abort(keys)

    def reset_prefix_cache(self) -> None:
        self._live().reset_prefix_cache()

    @property
    def sleep_level(self) -> int:
        """Of the process at hand; a new one is awake."""
        client = self._client
        return client.sleep_level if client is not None else 0

    def sleep(self, level: int, mode: SleepMode) -> "Future[None]":
        return self._live().sleep(level, mode)

    def wake_up(self, tags: Sequence[str] | None) -> "Future[None]":
        return self._live().wake_up(tags)

    def health(self) -> EngineHealth:
        with self._lock:
            client, is_restarting = self._client, self._restarting is not None
        if client is not None:
            health = client.health()
        elif is_restarting:
            health = EngineHealth("starting", f"it is restarted, because {self._reason}")
        else:
            health = EngineHealth("dead", self._reason)
        return replace(health, num_restarts=self._num_restarts)

    def close(self) -> None:
        self._closing.set()
        with self._lock:
            client, child, restarting = self._client, self._child, self._restarting
        if child is not None:
            child.kill()
        if restarting is not None:
            restarting.join()
            client = self._client
        if client is not None:
            client.close()
        self._watcher.join()

    # -- the sink of the process at hand, called on its reader's thread -------------------------

    def on_outputs(self, outputs: StepOutputs) -> None:
        if self._sink is not None:
            self._sink.on_outputs(outputs)

    def on_death(self, reason: str) -> None:
        with self._lock:
            self._reason = reason
            if not self._closing.is_set():
                self._client = None
                if self._may_restart():
                    self._restarting = threading.Thread(
                        target=self._restart, name="cardan-engine-restart", daemon=True
                    )
                    self._restarting.start()
        if self._sink is not None:
            self._sink.on_death(reason)

    # -- restarts -------------------------------------------------------------------------------

    def _live(self) -> ProcessClient:
        client = self._client
        if client is None:
            health = self.health()
            raise EngineDeadError(f"the engine is {health.state}: {health.reason}")
        return client

    def _may_restart(self) -> bool:
        """Whether the policy allows another start now; counts it if so."""
        now = time.monotonic()
        while self._restarted_at and now - self._restarted_at[0] > self._policy.window:
            self._restarted_at.popleft()
        if len(self._restarted_at) < self._policy.max_restarts:
            self._restarted_at.append(now)
            self._num_restarts += 1
            return True
        if self._policy.max_restarts:
            self._reason += (
                f"; not started again after {self._policy.max_restarts} restarts within "
                f"{self._policy.window:.0f} s"
            )
        return False

    def _restart(self) -> None:
        while not self._closing.is_set():
            before = len(self._restarted_at) - 1
            delay = self._policy.backoff * 2 ** (before - 1) if before else 0.0
            if self._closing.wait(delay):
                break
            logger.warning("starting the engine again, because %s", self._reason)
            if self._start():
                return
            with self._lock:
                if not self._may_restart():
                    break
        with self._lock:
            self._restarting = None

    def _start(self) -> bool:
        try:
            client = ProcessClient(self._spawn_child(), self._step_timeout)
        except Exception as error:
            # Also what nobody expects: without this thread there is no engine any more.
            is_expected = isinstance(error, CardanError | OSError)
            self._reason = str(error) if is_expected else f"{type(error).__name__}: {error}"
            logger.error(
                "the engine did not start again: %s", self._reason, exc_info=not is_expected
            )
            return False
        finally:
            with self._lock:
                self._child = None
        self.info = client.info
        with self._lock:
            self._client = client
            self._restarting = None
        client.connect(self)
        return True

    def _spawn_child(self) -> EngineChild:
        """A new process, which ``close`` can end while it starts."""
        child = self._spawn()
        with self._lock:
            self._child = child
        if self._closing.is_set():
            child.kill()
        return child

    def _watch(self) -> None:
        """End a process whose steps do not finish: it will not come back by itself."""
        suspect: ProcessClient | None = None
        while not self._closing.wait(_WATCH_SECONDS):
            client = self._client
            health = client.health() if client is not None else None
            if client is None or health is None or not self._is_hung(health):
                suspect = None
            elif client is not suspect:
                # After this process itself stood still there are beats that nobody has read yet.
                suspect = client
            else:
                # Its end starts the next one.
                client.kill(
                    f"the engine hung: {health.reason}; where steps may take so long, raise the "
                    f"limit, hang_timeout ({self._policy.hang_timeout:g} s)"
                )

    def _is_hung(self, health: EngineHealth) -> bool:
        return health.state == "stuck" and health.last_step_age > self._policy.hang_timeout
