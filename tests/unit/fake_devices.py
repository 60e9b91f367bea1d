"""Opens fake devices for tests of the kernel tier."""

from cardan.testing.fake.device import FakeDevice
from cardan.testing.fake.platform import FakePlatform
from cardan.testing.fake.settings import FakeSettings


def open_fake(text: str = "") -> FakeDevice:
    """A device of these settings; the caller closes it."""
    platform = FakePlatform(FakeSettings.parse(text))
    return platform.open(platform.devices()[0])
