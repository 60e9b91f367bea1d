"""A plugin that contributes, vetoes and observes."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from cardan.core.interfaces.constraints import Constraint
from cardan.core.interfaces.hooks import hookimpl
from cardan.core.interfaces.platform import ConfigView
from cardan.core.interfaces.scheduling import RequestView
from cardan.core.types.outputs import EngineStats


class WatchPlugin:
    contract: ClassVar[tuple[int, int]] = (1, 0)

    def __init__(self) -> None:
        self.steps = 0

    @hookimpl
    def cardan_constrain(self, config: ConfigView) -> Sequence[Constraint]:
        return [Constraint("scheduler.max_num_seqs", "<=", 64, "the watch has 64 hands")]

    @hookimpl
    def cardan_cli_options(self) -> Mapping[str, str]:
        return {"acme.color": "colour of the watch"}

    @hookimpl
    def cardan_request_admit(self, request: RequestView) -> str | None:
        return "too long for the watch" if request.num_prompt_tokens > 1000 else None

    @hookimpl
    def cardan_step_completed(self, stats: EngineStats) -> None:
        self.steps += 1

    @hookimpl
    def cardan_health(self) -> str | None:
        return None

    @hookimpl
    def cardan_metrics(self) -> Mapping[str, Any]:
        return {"acme_steps": self.steps}
