"""Whether numba is there. Importing this imports neither numba nor torch."""

from functools import cache
from importlib import import_module
from importlib.util import find_spec

from cardan.core.interfaces.errors import UnsupportedError

# Where numba can be had from.
INSTALL = "pip install 'cardan[numba]'"


class NumbaUnavailable(UnsupportedError):
    """Kernels cannot be compiled by numba; the reason is the only argument."""


def is_installed() -> bool:
    """Whether numba can be found; it is not imported."""
    try:
        return find_spec("numba") is not None
    except (ImportError, ValueError):
        return False


@cache
def missing_reason() -> str | None:
    """Why numba cannot be used, or None; imports it at the first call."""
    if not is_installed():
        return f"numba is not installed ({INSTALL})"
    try:
        numba = import_module("numba")
    except Exception as error:
        return f"numba cannot be imported: {type(error).__name__}: {error}"
    return "NUMBA_DISABLE_JIT is set" if numba.config.DISABLE_JIT else None


def substitute() -> str:
    """In words, what computes where the native kernels are missing."""
    reason = missing_reason()
    if reason is None:
        return f"kernels compiled by numba {import_module('numba').__version__} serve, slower"
    return f"torch's operations serve, several times slower: {reason}"
