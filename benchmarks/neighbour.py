"""Another process that takes half of one CPU, while something is measured."""

import contextlib
import subprocess
import sys
from collections.abc import Iterator

# Works for ten milliseconds and sleeps for ten.
_LOAD = """
import time
while True:
    until = time.monotonic() + 0.01
    while time.monotonic() < until:
        pass
    time.sleep(0.01)
"""


@contextlib.contextmanager
def neighbour() -> Iterator[None]:
    process = subprocess.Popen([sys.executable, "-c", _LOAD])
    try:
        yield
    finally:
        process.kill()
        process.wait()
