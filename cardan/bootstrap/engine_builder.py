"""Builds an engine, from a configuration to the parts that take requests. Importing this imports no
torch: a platform may begin what it needs, when its device is opened, while torch is imported."""

from typing import TYPE_CHECKING

from cardan.bootstrap.engine_choice import choose
from cardan.bootstrap.model_source import read_model
from cardan.core.config.engine import EngineConfig
from cardan.core.discovery import Discovery
from cardan.core.engine.client import EngineParts
from cardan.core.observability.timing import Phases
from cardan.core.plugin_manager import PluginManager
from cardan.core.runtime import Runtime

if TYPE_CHECKING:
    from cardan.core.runner.model_runner import PromptLogitsObserver


def build_engine(
    config: EngineConfig, prompt_logits: "PromptLogitsObserver | None" = None
) -> EngineParts:
    """Everything from a configuration to an engine that takes requests.

    ``prompt_logits`` is shown the logits of prompts whose log-probabilities are wanted.

    Raises:
        CardanError: with the cause and the remedy; opened devices are closed.
    """
    phases = Phases()
    with phases.phase("plugins"):
        discovery = Discovery()
        plugins = PluginManager(config.plugins, discovery)
        plugins.check_options(config.plugins.options)
    with phases.phase("read_config"):
        source = read_model(config.model)
        chosen = choose(config, discovery, plugins, source)
    runtime = Runtime()
    try:
        with phases.phase("open_device"):
            device = runtime.open(chosen.platform, chosen.info)
        with phases.phase("import"):
            from cardan.bootstrap.engine_parts import PartsBuilder
        builder = PartsBuilder(chosen, discovery, plugins, source, runtime, device, phases)
        return builder.build(prompt_logits)
    except BaseException:
        runtime.close()
        raise
