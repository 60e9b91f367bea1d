"""torchax, which runs torch's operations on jax's arrays while jax traces."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch


def torchax_environment() -> Any:
    """torchax's own environment, entered with ``with``: what torch calls then, jax does."""
    # Once it is imported nothing is patched, for other threads may be importing or tracing.
    with nullcontext() if "torchax" in sys.modules else _missing_overloads():
        import torchax

        return torchax.default_env()


@contextmanager
def _missing_overloads() -> Iterator[None]:
    """While torchax is imported: names for overloads of operators that this torch has no more.

    torchax 0.0.13 registers functions for the overloads with named dimensions, which torch dropped
    in 2.13; nobody can call those.
    """
    packet: Any = type(torch.ops.aten.add)
    lookup = packet.__getattr__

    def found(self: Any, name: str) -> Any:
        try:
            return lookup(self, name)
        except AttributeError:
            if "name" not in name.lower() or name.startswith("__"):
                raise
            return (str(self), name)

    packet.__getattr__ = found
    try:
        yield
    finally:
        packet.__getattr__ = lookup
