"""What commands need of the engine. Imported for type checking only: its imports are heavy."""

from collections.abc import Awaitable, Callable
from typing import Protocol

from cardan.core.config.engine import EngineConfig
from cardan.core.config.engine_process import EngineProcessConfig
from cardan.core.engine.serving import ServingEngine
from cardan.core.types.sampling_params import SamplingParams


class Engine(ServingEngine, Protocol):
    """An engine that its user opened and has to close."""

    def default_sampling_params(self) -> SamplingParams:
        """What the model's authors recommend, or the general defaults."""

    async def close(self) -> None: ...


class OpenEngine(Protocol):
    """``cardan.bootstrap.open_async_engine``."""

    def __call__(
        self,
        config: EngineConfig,
        *,
        in_process: bool,
        process: EngineProcessConfig = ...,
        meanwhile: Callable[[], object] | None = ...,
    ) -> Awaitable[Engine]: ...
