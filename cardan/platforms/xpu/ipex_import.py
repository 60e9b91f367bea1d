"""Loading intel-extension-for-pytorch."""

import re
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType

import torch

from cardan.core.interfaces.errors import UnsupportedError

_PACKAGE = "intel-extension-for-pytorch"
_MINOR = re.compile(r"\d+\.\d+")


def ipex_functions() -> ModuleType:
    """Its module ``llm.functional``; its operators are in ``torch.ops.torch_ipex`` then.

    The package ends the process that imports it beside another torch than its own, so versions
    are compared first, as it does itself.

    Raises:
        UnsupportedError: it is not made for this torch, or does not load.
    """
    try:
        installed = version(_PACKAGE)
    except PackageNotFoundError as error:
        raise UnsupportedError(f"{_PACKAGE} does not say which torch it is for") from error
    if _MINOR.findall(installed)[:1] != _MINOR.findall(torch.__version__)[:1]:
        raise UnsupportedError(f"{_PACKAGE} {installed} is not for torch {torch.__version__}")
    try:
        import_module("intel_extension_for_pytorch")
        return import_module("intel_extension_for_pytorch.llm.functional")
    except (ImportError, OSError, RuntimeError, AttributeError, SystemExit) as error:
        raise UnsupportedError(
            f"{_PACKAGE} {installed} does not load beside torch {torch.__version__}: {error}"
        ) from error
