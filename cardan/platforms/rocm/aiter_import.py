"""Finding AITER's functions."""

from importlib import import_module

import torch

from cardan.core.interfaces.errors import UnsupportedError
from cardan.core.interfaces.kernels import Kernel


def aiter_function(name: str) -> Kernel:
    """The function of AITER's top module.

    Raises:
        UnsupportedError: AITER does not load, or what loads has no such function. Another package
            for asynchronous iterators has the same name.
    """
    try:
        module = import_module("aiter")
    except (ImportError, OSError, RuntimeError) as error:
        raise UnsupportedError(
            f"AITER does not load beside torch {torch.__version__}: {error}"
        ) from error
    found: Kernel | None = getattr(module, name, None)
    if not callable(found):
        raise UnsupportedError(
            f"the module aiter has no function {name}: it is another release of AITER, or another "
            "package of that name"
        )
    return found
