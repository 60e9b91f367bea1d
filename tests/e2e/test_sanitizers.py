"""The C kernels under AddressSanitizer and UndefinedBehaviorSanitizer."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

FLAGS = "-fsanitize=address,undefined -fno-sanitize-recover=undefined -O1 -g"
SCRIPT = Path(__file__).with_name("sanitized_kernels.py")


def runtime() -> str | None:
    """The sanitizer's library, which has to be there before anything else is loaded."""
    try:
        done = subprocess.run(
            ["gcc", "-print-file-name=libasan.so"], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    path = done.stdout.strip()
    return path if os.path.isabs(path) else None


@pytest.mark.skipif(runtime() is None, reason="gcc has no AddressSanitizer here")
def test_kernels_touch_what_is_theirs(tmp_path: Path) -> None:
    environment = {**os.environ, "CARDAN_CPU_CFLAGS": FLAGS, "XDG_CACHE_HOME": str(tmp_path)}
    # Compiled without the runtime, which would slow the compiler down; it cannot be loaded yet.
    building = "from cardan.platforms.cpu.native.library import native_status; native_status()"
    subprocess.run([sys.executable, "-c", building], env=environment, capture_output=True)
    assert list(tmp_path.rglob("kernels.so"))
    sanitized = {
        **environment,
        "LD_PRELOAD": runtime(),
        # Python frees little at its end, and torch's allocator asks for more than there is.
        "ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1",
    }
    done = subprocess.run(
        [sys.executable, str(SCRIPT)], env=sanitized, capture_output=True, text=True, timeout=400
    )
    assert done.returncode == 0, done.stderr[-6000:]
    assert "uses of native kernels" in done.stderr
