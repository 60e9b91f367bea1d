"""Fixtures that several modules of the kit share."""

from typing import TYPE_CHECKING

import pytest

from cardan.testing.conformance.results import not_supported

if TYPE_CHECKING:
    from cardan.core.interfaces.attention import AttentionBackend
    from cardan.core.interfaces.device import Device
    from cardan.core.interfaces.platform import Platform
    from cardan.testing.conformance.attention_bench import AttentionBench


@pytest.fixture
def bench(
    backend: "type[AttentionBackend]", cardan_platform: "Platform", cardan_device: "Device"
) -> "AttentionBench":
    """The attention backend under test (a parameter of the test) on the opened device."""
    # Brings torch, which the levels below do without.
    from cardan.testing.conformance.attention_bench import AttentionBench

    if cardan_device.torch_device is None:
        not_supported("the platform runs whole steps itself and has no torch device")
    return AttentionBench(backend, cardan_platform, cardan_device, cardan_device.torch_device)
