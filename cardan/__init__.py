"""cardan: one LLM engine for any silicon. Public names are loaded when first used."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cardan.core.types.errors import CardanError, ConfigError, EngineDeadError, InputError
    from cardan.core.types.outputs import CompletionOutput, Logprob, RequestOutput
    from cardan.core.types.prompt import ChatPrompt, TextPrompt, TokenPrompt
    from cardan.core.types.sampling_params import OutputKind, SamplingParams
    from cardan.llm import LLM

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "CardanError",
    "ChatPrompt",
    "CompletionOutput",
    "ConfigError",
    "EngineDeadError",
    "InputError",
    "Logprob",
    "OutputKind",
    "RequestOutput",
    "SamplingParams",
    "TextPrompt",
    "TokenPrompt",
    "__version__",
]

_HOMES = {
    "LLM": "cardan.llm",
    "CardanError": "cardan.core.types.errors",
    "ChatPrompt": "cardan.core.types.prompt",
    "CompletionOutput": "cardan.core.types.outputs",
    "ConfigError": "cardan.core.types.errors",
    "EngineDeadError": "cardan.core.types.errors",
    "InputError": "cardan.core.types.errors",
    "Logprob": "cardan.core.types.outputs",
    "OutputKind": "cardan.core.types.sampling_params",
    "RequestOutput": "cardan.core.types.outputs",
    "SamplingParams": "cardan.core.types.sampling_params",
    "TextPrompt": "cardan.core.types.prompt",
    "TokenPrompt": "cardan.core.types.prompt",
}


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'cardan' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(home), name)


def __dir__() -> list[str]:
    return sorted(__all__)
