"""The process that an engine behind a server runs in."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineProcessConfig:
    """Settings of the engine's own process.

    Attributes:
        step_timeout: seconds without progress after which the engine counts as stuck (health).
        hang_timeout: seconds without progress after which a stuck engine is replaced.
        max_restarts: how often within ten minutes a dead or stuck engine is replaced.
        python: the interpreter that it runs on, in whose virtual environment the platform is; None:
            this process's.
    """

    step_timeout: float = 60.0
    hang_timeout: float = 300.0
    max_restarts: int = 3
    python: str | None = None
