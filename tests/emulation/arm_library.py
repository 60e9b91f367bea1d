"""The kernels as compiled for Arm, running under QEMU on this process's memory."""

import atexit
import ctypes
import subprocess
import threading
from functools import cache
from pathlib import Path

from cardan.platforms.cpu import native
from cardan.platforms.cpu.native.build import (
    BASE_FLAGS,
    Compiler,
    cache_key,
    cache_root,
    cached_library,
    compile_into,
    sources,
)
from cardan.platforms.cpu.native.isa import usable_levels
from cardan.platforms.cpu.native.library import NativeLibrary

COMPILER = "aarch64-linux-gnu-gcc"
EMULATOR = "qemu-aarch64"
# What a processor of each level has at least, so that a library which needs more fails.
PROCESSORS = {
    "neon": "cortex-a53",
    "dotprod": "neoverse-n1",
    "i8mm": "max,sve=off",
    # Bytes of a vector.
    "sve": "max,sve-default-vector-length=32",
}
FEATURES = ("neon", "asimdhp", "asimddp", "i8mm", "bf16", "sve")
_SERVER = Path(__file__).with_name("call_server.c")
_LIBRARIES = "/usr/aarch64-linux-gnu"


class EmulatedFunctions:
    """Functions of a library by name, as ``ctypes.CDLL`` has them."""

    def __init__(self, server: Path, library: Path, processor: str) -> None:
        self._memory = open("/proc/self/mem", "r+b", buffering=0)  # noqa: SIM115
        command = [EMULATOR, "-L", _LIBRARIES, "-cpu", processor, str(server), str(library)]
        self._process = subprocess.Popen(
            [*command, str(self._memory.fileno())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=[self._memory.fileno()],
            text=True,
            bufsize=1,
        )
        self._one_call = threading.Lock()
        self._made = {}
        atexit.register(self._close)

    def __getitem__(self, name):
        """A C function of this process that has the emulated one called."""
        if name not in self._made:
            if self._ask(name, 0) == "?":
                raise AttributeError(name)

            def call(address):
                return int(self._ask(name, address))

            self._made[name] = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(call)
        return self._made[name]

    def _close(self):
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()
        self._memory.close()

    def _ask(self, name, address):
        with self._one_call:
            print(name, address, file=self._process.stdin)
            answer = self._process.stdout.readline().strip()
        if not answer:
            raise RuntimeError(f"{EMULATOR} ended with status {self._process.wait()} in {name}")
        return answer


def open_library(environment):
    """As ``cardan.platforms.cpu.native.library.open_library``, for the level that
    ``CARDAN_CPU_ISA`` names."""
    level = usable_levels("aarch64", FEATURES, environment)[0]
    files = sources(Path(native.__file__).parent)
    # As they are shipped, since from -O2 on the compiler chooses vectors of its own.
    flags = (*BASE_FLAGS, *level.flags)
    compiler = Compiler((COMPILER,), "")
    kept = cache_root(environment) / cache_key([*files, _SERVER], compiler, flags)
    library = cached_library(kept) or compile_into(kept, files, compiler, flags)
    server = kept / "call_server"
    if not server.exists():
        flags = ("-O1", "-fno-builtin", "-fno-tree-loop-distribute-patterns", "-rdynamic")
        subprocess.run([COMPILER, *flags, "-o", str(server), str(_SERVER)], check=True)
    functions = _functions(server, library, PROCESSORS[level.name])
    return NativeLibrary(functions, level.name, f"emulated by {EMULATOR}")


@cache
def _functions(server, library, processor):
    return EmulatedFunctions(server, library, processor)
