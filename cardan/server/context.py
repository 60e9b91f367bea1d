"""What the routes of one server share."""

import hashlib
import time
from dataclasses import dataclass, field
from importlib.metadata import version

from cardan.core.config.server import ServerConfig
from cardan.core.engine.serving import ServingEngine
from cardan.core.types.engine_info import EngineInfo
from cardan.core.types.errors import NotFoundError
from cardan.server.errors import clip
from cardan.server.metrics import ServerMetrics
from cardan.server.tool_format import ToolFormat
from cardan.server.tracker import RequestTracker

VERSION = version("cardan")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerContext:
    """Fixed for the life of a server; the parts it points to have a state of their own."""

    engine: ServingEngine
    config: ServerConfig
    metrics: ServerMetrics
    tracker: RequestTracker
    tool_format: ToolFormat | None = None
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def model_names(self) -> tuple[str, ...]:
        return served_names(self.config, self.engine.info)

    @property
    def system_fingerprint(self) -> str:
        """Changes with whatever may change the tokens of a seeded request."""
        info = self.engine.info
        facts = (info.model, info.architecture, info.platform, info.device, info.dtype)
        digest = hashlib.sha256("\0".join(facts).encode()).hexdigest()
        return f"cardan-{VERSION}-{digest[:8]}"

    def check_model(self, name: str | None) -> None:
        """
        Raises:
            NotFoundError: ``name`` is not served here.
        """
        if name is not None and name not in self.model_names:
            known = ", ".join(self.model_names)
            raise NotFoundError(
                f"the model {clip(name, 100)!r} does not exist; this server has {known}", "model"
            )


def served_names(config: ServerConfig, info: EngineInfo) -> tuple[str, ...]:
    """Names that a request may give as its model; replies use the first."""
    return config.served_model_names or (info.model,)
