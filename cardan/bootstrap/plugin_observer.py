"""Between an engine and the plugins that watch it."""

import threading

from cardan.core.interfaces.scheduling import RequestView
from cardan.core.plugin_manager import PluginManager
from cardan.core.types.engine_info import PluginReport
from cardan.core.types.outputs import EngineStats, Finish

REPORT_SECONDS = 1.0


class PluginObserver:
    """Tells plugins of steps and ended sequences, and asks them how the engine is.

    The questions are asked on a thread of their own: a plugin that hangs there holds up neither
    steps nor the engine's signs of life, and its last answers stand. Where no plugin implements a
    hook nothing happens for it.
    """

    def __init__(self, plugins: PluginManager, interval: float = REPORT_SECONDS) -> None:
        """``interval``: seconds between two questions."""
        self._plugins = plugins
        self._interval = interval
        self._wants_steps = plugins.implements("cardan_step_completed")
        self._wants_ends = plugins.implements("cardan_request_finished")
        # Sequences that ended in the step at hand.
        self._ended: list[tuple[RequestView, Finish]] = []
        self._report = PluginReport()
        self._closed = threading.Event()
        self._asker: threading.Thread | None = None
        if plugins.implements("cardan_health") or plugins.implements("cardan_metrics"):
            self._asker = threading.Thread(target=self._ask, name="cardan-plugins", daemon=True)

    def start(self) -> None:
        """Begin to ask; once."""
        if self._asker is not None:
            self._asker.start()

    def note_end(self, request: RequestView, finish: Finish) -> None:
        """Keep for ``flush``: the client is told first."""
        if self._wants_ends:
            self._ended.append((request, finish))

    def step_completed(self, stats: EngineStats) -> None:
        if self._wants_steps:
            self._plugins.notify("cardan_step_completed", stats=stats)

    def flush(self) -> None:
        """The clients know of everything that was noted."""
        if self._ended:
            ended, self._ended = self._ended, []
            for request, finish in ended:
                self._plugins.notify("cardan_request_finished", request=request, finish=finish)

    def report(self) -> PluginReport:
        """What plugins last said; from any thread, and at once."""
        return self._report

    def close(self) -> None:
        """Ask no more; a plugin that hangs is not waited for."""
        self._closed.set()
        if self._asker is not None and self._asker.is_alive():
            self._asker.join(REPORT_SECONDS)

    def _ask(self) -> None:
        while True:
            self._report = PluginReport(self._plugins.metrics(), self._plugins.health())
            if self._closed.wait(self._interval):
                return
