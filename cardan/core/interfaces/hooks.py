"""Hooks of the group ``cardan.plugins``: for what several plugins contribute to or observe.

Implementations take any subset of a hook's arguments by name, so that arguments can be added. A
misspelt hook or argument fails when the plugin is loaded. No hook is called for each layer; the
per-step ones see plain data only. A plugin object states ``contract`` as platforms do.

All hooks run in the process of the engine, where a plugin has one object for the engine's life; the
server, mostly another process, gets what they return as plain data. With several ranks the other
ranks' processes call ``cardan_ops`` and ``cardan_kernels`` only. A hook that raises is reported
once, with the plugin's name, and hurts no request; ``cardan_request_admit`` alone then refuses.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import pluggy

from cardan.core.interfaces.constraints import Constraint
from cardan.core.interfaces.executor import LoadReport
from cardan.core.interfaces.kernels import OpSpec, Provider, Resolution
from cardan.core.interfaces.platform import ConfigView
from cardan.core.interfaces.scheduling import RequestView
from cardan.core.types.outputs import EngineStats, Finish

PROJECT = "cardan"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


class HookSpecs:
    """All hooks, with what they return."""

    @hookspec
    def cardan_constrain(self, config: ConfigView) -> Sequence[Constraint]:  # type: ignore[empty-body]
        """Demands on the configuration."""

    @hookspec
    def cardan_ops(self) -> Sequence[OpSpec]:  # type: ignore[empty-body]
        """Operations that this plugin adds to the catalogue."""

    @hookspec
    def cardan_kernels(self) -> Sequence[Provider]:  # type: ignore[empty-body]
        """Kernel providers for any platform; their needs decide where they fit."""

    @hookspec
    def cardan_cli_options(self) -> Mapping[str, str]:  # type: ignore[empty-body]
        """Settings (``name -> help``) that ``--plugin-option name=value`` accepts."""

    @hookspec
    def cardan_engine_starting(self, config: ConfigView, options: Mapping[str, str]) -> None:
        """The configuration is resolved; nothing is loaded yet."""

    @hookspec
    def cardan_model_loaded(self, report: LoadReport) -> None:
        """The weights are on the device."""

    @hookspec
    def cardan_kernel_plan_ready(self, plan: Sequence[Resolution]) -> None:
        """Every operation of the model is bound: who serves which, for each use. At load, after
        ``cardan_model_loaded``. Platforms that run whole steps have no plan; it is not called."""

    @hookspec
    def cardan_engine_started(self) -> None:
        """The engine accepts requests."""

    @hookspec
    def cardan_engine_stopped(self, reason: str) -> None:
        """The engine has stopped; its last hook."""

    @hookspec(firstresult=True)
    def cardan_request_admit(self, request: RequestView) -> str | None:
        """A reason to refuse the request (400), or None. The first reason counts."""

    @hookspec
    def cardan_request_finished(self, request: RequestView, finish: Finish) -> None:
        """A sequence of an admitted request has ended, and its client was told. On the engine's
        thread: return within microseconds. Stop strings are found in the front, which then ends the
        sequence: ``finish`` has the reason ``abort``, as when a client leaves."""

    @hookspec
    def cardan_step_completed(self, stats: EngineStats) -> None:
        """A step is done. On the engine's thread: return within microseconds."""

    @hookspec
    def cardan_health(self) -> str | None:
        """A reason why the engine is unhealthy, or None. Asked every second, on a thread for that.
        While there is one, ``/health`` answers 503 with the plugin's name and the reason, and
        requests are served all the same."""

    @hookspec
    def cardan_metrics(self) -> Mapping[str, Any]:  # type: ignore[empty-body]
        """Gauges (``name -> number``) to export; asked as ``cardan_health`` is.

        ``/metrics`` shows them as ``cardan:plugin_NAME`` with the label ``plugin``. Names are
        letters, digits and underscores, at most 100, no digit first; 256 for each plugin."""
