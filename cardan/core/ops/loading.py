"""Importing a provider's functions."""

import inspect
from importlib import import_module

from cardan.core.interfaces.errors import UnsupportedError
from cardan.core.interfaces.kernels import Kernel, OpSpec, Provider
from cardan.core.ops.self_check import LoadedKernel


def load_provider(op: OpSpec, provider: Provider) -> LoadedKernel | str:
    """The provider's functions, or why they cannot be had.

    Raises:
        UnsupportedError: a module says that this machine lacks what it needs.
    """
    run = _function(provider.load)
    if isinstance(run, str):
        return run
    # A composite body takes its parts first; providers do not.
    wanted = _positional(op.body)[1 if op.parts else 0 :]
    try:
        found = _positional(run)
    except (TypeError, ValueError) as error:
        return f"signature of {provider.load} is unknown: {error}"
    if found != wanted:
        return f"signature ({', '.join(found)}) of {provider.load} is not ({', '.join(wanted)})"
    if not provider.prepare:
        return LoadedKernel(run)
    if op.prepares is None:
        return f"has {provider.prepare}, but {op.name} has no argument to prepare"
    prepare = _function(provider.prepare)
    return prepare if isinstance(prepare, str) else LoadedKernel(run, prepare)


def _function(target: str) -> Kernel | str:
    """The function ``module:function``, or why it cannot be had."""
    module_name, _, function_name = target.partition(":")
    try:
        module = import_module(module_name)
    except UnsupportedError:
        raise
    except Exception as error:
        return f"import of {module_name} failed: {type(error).__name__}: {error}"
    function: Kernel | None = getattr(module, function_name, None) if function_name else None
    return function if callable(function) else f"{target} is not a function"


def _positional(kernel: Kernel) -> list[str]:
    """Names of parameters that a positional call fills, and markers of what does not fit one."""
    names = []
    for parameter in inspect.signature(kernel).parameters.values():
        if parameter.kind is parameter.VAR_POSITIONAL:
            names.append(f"*{parameter.name}")
        elif parameter.kind is parameter.KEYWORD_ONLY:
            if parameter.default is parameter.empty:
                names.append(f"*, {parameter.name}")
        elif parameter.kind is not parameter.VAR_KEYWORD:
            names.append(parameter.name)
    return names
