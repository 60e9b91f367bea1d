"""A virtual environment with Intel's Triton and Intel's OpenCL device for CPUs, made once.

It lies in the user's cache (XDG_CACHE_HOME) or where CARDAN_SPIRV_VENV says. Its packages come
before those of this environment on the path of the programs that are run with it, so that torch is
this environment's and Triton is Intel's.
"""

import os
import subprocess
import sys
import venv
from pathlib import Path

PACKAGES = (
    "triton-xpu==3.3.0b1",
    "pyopencl>=2026.1",
    "intel-opencl-rt>=2026.2",
    "intel-cmplr-lib-rt>=2026.2",
)
_LIBRARY = "libintelocl.so"


def folder():
    chosen = os.environ.get("CARDAN_SPIRV_VENV")
    if chosen:
        return Path(chosen)
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "cardan" / "spirv-venv"


def made():
    """The environment, with a file that tells OpenCL of the device."""
    place = folder()
    done = place / "complete"
    if not done.exists():
        venv.create(place, with_pip=True)
        pip = [str(place / "bin" / "python"), "-m", "pip", "install", "--quiet", *PACKAGES]
        subprocess.run(pip, check=True)
        (place / "icd").mkdir(exist_ok=True)
        (place / "icd" / "intel.icd").write_text(f"{place / 'lib' / _LIBRARY}\n")
        done.touch()
    return place


def run(script, *words):
    """A script of this folder with the environment's packages; what it printed."""
    place = made()
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    here = Path(__file__).parent
    path = [place / "lib" / version / "site-packages", here, here.parent / "unit"]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, path)),
        "OCL_ICD_VENDORS": str(place / "icd"),
        "LD_LIBRARY_PATH": str(place / "lib"),
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, str(here / script), *words],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout
