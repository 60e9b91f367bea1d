"""The fake platform in a module that, as it is imported, changes what the process shares: the fault
``import_effects``, for tests of what is to notice it."""

import random
import signal
import sys

from cardan.testing.fake.platform import FakePlatform

random.seed(0)
signal.signal(signal.SIGUSR2, signal.SIG_IGN)
sys.path.append("/opt/fake/lib")


class ImportEffectsPlatform(FakePlatform):
    """As sound as its base, once it is there."""
