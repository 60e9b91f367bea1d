"""Kernels that say at import that this machine lacks what they need."""

from cardan.core.interfaces.errors import UnsupportedError

raise UnsupportedError("there is no compiler")
