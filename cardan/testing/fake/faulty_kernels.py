"""Kernel providers with a fault, for tests of what is to notice it."""

from collections.abc import Collection, Sequence

from cardan.core.interfaces.kernels import Provider
from cardan.testing.fake.settings import StandingFault

_MODULE = "cardan.testing.fake.faulty_ops"


def providers(faults: Collection[StandingFault]) -> Sequence[Provider]:
    """A provider for each of ``faults`` that is one of a kernel; none otherwise."""
    found = []
    if "wrong_op" in faults:
        found.append(Provider(op="rms_norm", name="fake.wrong_op", load=f"{_MODULE}:rms_norm"))
    if "unstable_sum" in faults:
        found.append(Provider(op="linear", name="fake.unstable_sum", load=f"{_MODULE}:linear"))
    return tuple(found)
