"""Where numba is looked for, what is said of it, and where its kernels are kept."""

import os
import subprocess
import sys

import pytest

from cardan.platforms.cpu import platform as cpu_platform
from cardan.platforms.cpu.numba import availability
from cardan.platforms.cpu.platform import CpuPlatform

needs_numba = pytest.mark.skipif(
    availability.missing_reason() is not None, reason=str(availability.missing_reason())
)

COMPILE = """
import sys
from cardan.platforms.cpu.numba.compiler import kernel
@kernel("int64(int64)")
def twice(x):
    return 2 * x
sys.exit(twice(21) - 42)
"""


@pytest.fixture
def no_numba(monkeypatch):
    monkeypatch.setitem(sys.modules, "numba", None)
    availability.missing_reason.cache_clear()
    yield
    availability.missing_reason.cache_clear()


@pytest.mark.usefixtures("no_numba")
def test_without_numba_torch_serves():
    assert not availability.is_installed()
    assert availability.substitute() == (
        "torch's operations serve, several times slower: numba is not installed "
        "(pip install 'cardan[numba]')"
    )


def test_a_numba_that_cannot_be_imported_is_named(tmp_path):
    """One for another NumPy, say."""
    tmp_path.joinpath("numba.py").write_text("raise ImportError('needs another NumPy')")
    code = "from cardan.platforms.cpu.numba.availability import substitute; print(substitute())"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True)
    assert b"slower: numba cannot be imported: ImportError: needs another NumPy" in done.stdout


@needs_numba
def test_a_numba_that_compiles_nothing_does_not_serve(monkeypatch):
    monkeypatch.setattr("numba.config.DISABLE_JIT", 1)
    monkeypatch.setattr(availability, "missing_reason", availability.missing_reason.__wrapped__)
    assert availability.substitute().endswith("several times slower: NUMBA_DISABLE_JIT is set")


@needs_numba
def test_with_numba_its_kernels_serve():
    assert "kernels compiled by numba" in availability.substitute()


def test_the_platform_offers_numba_after_the_native_kernels_and_before_torch(monkeypatch):
    platform = CpuPlatform()
    device = platform.devices()[0]

    def named(found):
        return [item.name for item in found if "numba" in item.name]

    monkeypatch.setattr(cpu_platform, "numba_is_installed", lambda: False)
    assert not named(platform.kernels(device))
    assert not named(platform.attention(device))
    monkeypatch.setattr(cpu_platform, "numba_is_installed", lambda: True)
    assert "cpu.numba_block_linear" in named(platform.kernels(device))
    names = [backend.name for backend in platform.attention(device)]
    assert names == ["cpu.native", "cpu.numba", "cpu"]
    by_op = {}
    for item in platform.kernels(device):
        by_op.setdefault(item.op, {})[item.name.split("_")[0]] = item.priority
    for op in ("block_linear", "rms_norm", "rotary_embedding"):
        found = by_op[op]
        assert found["cpu.native"] > found["cpu.numba"] > found.get("cpu.rms", 0)


@needs_numba
def test_kernels_are_kept_or_not(tmp_path):
    """Again from the folder; and where none can be written, all the same."""
    script = tmp_path / "twice.py"
    script.write_text(COMPILE)

    def run(cache):
        environment = {**os.environ, "XDG_CACHE_HOME": cache, "HOME": cache}
        environment.pop("NUMBA_CACHE_DIR", None)
        done = subprocess.run(
            [sys.executable, str(script)], env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        return done.stderr

    cache = tmp_path / "cache"
    assert "numba compiles kernels for this CPU" in run(str(cache))
    assert list((cache / "cardan" / "numba").rglob("*.nbi"))
    assert run(str(cache)) == ""
    assert "numba compiles kernels" in run("/proc/nothing")
