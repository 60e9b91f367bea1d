"""Why there are no native kernels."""

from cardan.core.interfaces.errors import UnsupportedError


class NativeUnavailable(UnsupportedError):
    """The kernel library cannot be had on this machine; the reason is the only argument."""
