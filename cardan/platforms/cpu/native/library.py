"""The kernel library of this process. Imports no torch.

A module of kernels binds its functions once::

    _FUNCTION = library().function("cardan_scale", Pointer, Pointer, Size, Real, Size)

    def scale(x: Tensor, factor: float) -> Tensor:
        out = torch.empty_like(x)
        check(_FUNCTION(out.data_ptr(), x.data_ptr(), x.numel(), factor, torch.get_num_threads()))
        return out

Pointers are passed as integers (``data_ptr()``, or 0); the caller keeps the memory alive during
the call. The lock of the interpreter is released meanwhile. Kernels take the number of threads as
an argument (the pool in ``pool.h`` grows as asked), so that torch's setting is theirs.
"""

import ctypes
import logging
import os
import platform
import shlex
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

from cardan.core.interfaces.errors import CardanError, OutOfMemoryError
from cardan.platforms.cpu.cpu_info import instruction_sets
from cardan.platforms.cpu.native.amx import amx_refusal
from cardan.platforms.cpu.native.build import (
    BASE_FLAGS,
    Compiler,
    accepts,
    cache_key,
    cache_root,
    cached_library,
    compile_into,
    find_compiler,
    sources,
)
from cardan.platforms.cpu.native.errors import NativeUnavailable
from cardan.platforms.cpu.native.function import (
    NativeFunction,
    Pointer,
    Reads,
    Real,
    Recorder,
    Size,
)
from cardan.platforms.cpu.native.isa import AMX, IsaLevel, usable_levels
from cardan.platforms.cpu.numba.availability import substitute

__all__ = [
    "NativeFunction",
    "NativeLibrary",
    "NativeUnavailable",
    "Pointer",
    "Real",
    "Size",
    "check",
    "library",
    "native_status",
    "open_library",
    "start_building",
    "unavailable_reason",
]

_LOG = logging.getLogger(__name__)
_FOLDER = Path(__file__).parent
# The environment variable with further flags for the compiler.
FLAGS_VARIABLE = "CARDAN_CPU_CFLAGS"
# Held by the thread that loads the library for all.
_FINDING_OUT = threading.Lock()
# A status of ``pool.h``.
_NO_MEMORY = 1
# Statuses of ``communicator.c``: what another rank did.
PEER_FAILURES = {
    16: "has left the group, because it failed or was closed",
    17: "has died",
    18: "did not come to a collective in time: it is stopped, stuck or swamped",
}


@dataclass(frozen=True, slots=True)
class NativeLibrary:
    """A loaded library. ``origin`` says where it came from, for people."""

    handle: ctypes.CDLL
    isa: str
    origin: str
    recorder: Recorder = field(default_factory=Recorder)

    def function(self, name: str, *fields: str, reads: Reads | None = None) -> NativeFunction:
        """The exported C function ``name``, whose call has the ``fields``: Pointer, Size, Real.

        ``reads``: of functions that read weights; see `Call`.

        Raises:
            AttributeError: the library has no such function.
        """
        return NativeFunction(self.handle[name], fields, self.recorder, reads)


def check(status: int, what: str = "a kernel") -> None:
    """Raise what a kernel's status (``pool.h``) stands for; ``what`` names the kernel.

    Raises:
        OutOfMemoryError: the kernel found no memory for its scratch.
        CardanError: a rank that it waited for is lost.
        RuntimeError: it refused its input, of which the caller has nothing better to say.
    """
    if status == _NO_MEMORY:
        raise OutOfMemoryError(
            f"{what} of the CPU found no memory for its scratch; free memory, or use smaller "
            "steps (scheduler.max_num_batched_tokens)"
        )
    if status in PEER_FAILURES:
        raise CardanError(f"another rank {PEER_FAILURES[status]}")
    if status:
        raise RuntimeError(f"{what} of the CPU refused its input (status {status})")


def start_building() -> None:
    """Have a thread find or compile the library of this process, and return at once.

    For a process that is sure to need it, before what takes long and one CPU, such as the import of
    torch. ``library()`` waits for the thread, and so does the end of the process, so that the next
    one finds what was begun.
    """
    threading.Thread(target=_outcome, name="native-library").start()


def library() -> NativeLibrary:
    """The library of this process, compiled and loaded at the first call.

    Raises:
        NativeUnavailable: it cannot be had; the same reason at every call, logged once.
    """
    found = _outcome()
    if isinstance(found, str):
        raise NativeUnavailable(found)
    return found


def unavailable_reason() -> str | None:
    """Why ``library()`` raises, or None if it does not; compiles at the first call."""
    found = _outcome()
    return found if isinstance(found, str) else None


def native_status() -> str:
    """One line for people: instruction sets and origin of the library, or why there is none."""
    found = _outcome()
    if isinstance(found, str):
        return f"unavailable: {found}; {substitute()}"
    return f"{found.isa}, {found.origin}"


def open_library(
    environment: Mapping[str, str], root: Path = Path("/"), folder: Path = _FOLDER
) -> NativeLibrary:
    """Load the library that ``environment`` (CC, CARDAN_CPU_CFLAGS, CARDAN_CPU_ISA, PATH,
    XDG_CACHE_HOME, HOME) asks for, from the cache or compiled now.

    ``root``: the file system that facts are read from. ``folder``: that of the C files.

    Raises:
        NativeUnavailable: it cannot be had.
    """
    compiler = find_compiler(environment)
    levels = usable_levels(platform.machine(), instruction_sets(root), environment)
    # After the kernels' own, so that they win: sanitizers, debugging.
    compiler = replace(compiler, extra=tuple(shlex.split(environment.get(FLAGS_VARIABLE, ""))))
    for level in levels:
        refusal = amx_refusal() if level.features & AMX else None
        if refusal is not None:
            _LOG.info("the instructions of %s cannot be used: %s", level.name, refusal)
            continue
        found = _open_level(level, compiler, sources(folder), cache_root(environment))
        if found is not None:
            return found
    raise NativeUnavailable(f"the C compiler {compiler.command[0]} knows none of {BASE_FLAGS}")


def _open_level(
    level: IsaLevel, compiler: Compiler, files: Sequence[Path], root: Path
) -> NativeLibrary | None:
    """The library for ``level``; None if the compiler is too old for it."""
    flags = (*BASE_FLAGS, *level.flags, *compiler.extra)
    kept = root / cache_key(files, compiler, flags)
    cached = cached_library(kept)
    if cached is not None:
        origin = f"cached in {kept}"
        return NativeLibrary(_load(cached), level.name, origin, _recorder_of(cached))
    started = time.perf_counter()
    try:
        built = compile_into(kept, files, compiler, flags)
    except NativeUnavailable:
        if accepts(compiler, flags):
            raise
        _LOG.info("the C compiler has no flags for %s: %s", level.name, " ".join(level.flags))
        return None
    except OSError as error:
        _LOG.info("kernels are compiled for this process alone: cannot keep them: %s", error)
        handle = _build_uncached(files, compiler, flags)
        return NativeLibrary(handle, level.name, f"compiled for this process ({error})")
    seconds = time.perf_counter() - started
    origin = f"compiled in {seconds:.1f} s into {kept}"
    return NativeLibrary(_load(built), level.name, origin, _recorder_of(built))


def _build_uncached(files: Sequence[Path], compiler: Compiler, flags: Sequence[str]) -> ctypes.CDLL:
    """Compile and load from a folder that is gone afterwards; a loaded library needs no file."""
    try:
        with tempfile.TemporaryDirectory(prefix="cardan-native-") as name:
            return _load(compile_into(Path(name), files, compiler, flags))
    except OSError as error:
        raise NativeUnavailable(f"no folder to compile the kernels in: {error}") from error


@cache
def _recorder_of(file: Path) -> Recorder:
    """One for a file however often it is opened, since its functions are then the same: what one
    caller of ``library()`` records, those who bound functions before are part of."""
    return Recorder()


def _load(file: Path) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(file))
    except OSError as error:
        raise NativeUnavailable(f"the compiled kernels cannot be loaded: {error}") from error


def _outcome() -> NativeLibrary | str:
    """The library or why there is none: found out once for each process."""
    with _FINDING_OUT:
        return _find_out()


@cache
def _find_out() -> NativeLibrary | str:
    try:
        return open_library(os.environ)
    except NativeUnavailable as error:
        _LOG.warning("the CPU runs without native kernels (%s); %s", error, substitute())
        return str(error)
