"""Compiling the kernels into one shared object, kept in the user's cache. Imports no torch."""

import hashlib
import os
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from cardan.platforms.cpu.native.errors import NativeUnavailable

# Not -ffast-math: NaN, infinities and the order of sums are part of what the kernels promise.
# What is left out of the C standard's rules cannot change a value: errno and traps of floating
# point; contraction is the fused multiply-add.
BASE_FLAGS: tuple[str, ...] = (
    "-std=gnu11",
    # The vectors are written out, so -O3 makes nothing faster, only this take half as long again.
    "-O2",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-ffp-contract=fast",
    "-fopenmp-simd",
    "-fvisibility=hidden",
    # Nobody reads warnings here, and to find them takes a tenth of the time.
    "-w",
    "-fPIC",
    "-pthread",
    # Empty, as a file that defines it itself does.
    "-D_GNU_SOURCE=",
)
_LINK_FLAGS = ("-shared",)
_LIBRARY_NAME = "kernels.so"
_DIGEST_NAME = "kernels.sha256"
# Headers that most files read; the first includes what takes the compiler longest to read.
_SHARED_NAMES = ("simd.h", "vmath.h")
_COMMON_NAME = "common.h"
_COMMON = """#if defined(__x86_64__) || defined(__i386__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif
"""
# Parts of GCC's immintrin.h, by the macros that say that they have been read. It reads those of all
# instruction sets whatever it compiles for, and three quarters of it are these.
_NEVER_USED = ("__AVX512FP16", "__AVX512FP16VL")
_OF_AVX512 = (
    *("_AVX512F", "_AVX512VL", "_AVX512BW", "_AVX512VLBW", "_AVX512DQ", "_AVX512VLDQ"),
    *("_AVX512CD", "_AVX512ER", "_AVX512PF", "_AVX512IFMA", "_AVX512IFMAVL", "_AVX512VBMI"),
    *("_AVX512VBMIVL", "__AVX512VBMI2", "_AVX512VBMI2VL", "__AVX512VNNI", "_AVX512VNNIVL"),
    *("_AVX512VPOPCNTDQ", "_AVX512VPOPCNTDQVL", "_AVX512BITALG", "_AVX512VP2INTERSECT"),
    *("_AVX512VP2INTERSECTVL", "_AVX5124FMAPS", "_AVX5124VNNIW", "_AVX512BF16", "_AVX512BF16VL"),
    *("_GFNI", "__VAES", "_VAES", "__VPCLMULQDQ", "_VPCLMULQDQ"),
)
_INCLUDE = re.compile(r'^#include "(.+)"', re.MULTILINE)
_TIMEOUT_S = 300
_MOST_OUTPUT = 2000


@dataclass(frozen=True, slots=True)
class Compiler:
    """A C compiler: its command, the text by which its versions differ, and flags that the user
    adds."""

    command: tuple[str, ...]
    version: str
    extra: tuple[str, ...] = ()


def sources(folder: Path) -> tuple[Path, ...]:
    """C files and headers of ``folder``, sorted."""
    return tuple(sorted([*folder.glob("*.c"), *folder.glob("*.h")]))


def find_compiler(environment: Mapping[str, str]) -> Compiler:
    """The compiler that ``CC`` names, or the first of cc, gcc, clang on ``PATH``.

    Raises:
        NativeUnavailable: there is none, or it does not say its version.
    """
    named = shlex.split(environment.get("CC", ""))
    path = environment.get("PATH")
    for command in [named] if named else [["cc"], ["gcc"], ["clang"]]:
        program = shutil.which(command[0], path=path)
        if program is not None:
            found = (program, *command[1:])
            return Compiler(found, _run([*found, "--version"]))
    wanted = f"CC={named[0]} is not on PATH" if named else "none of cc, gcc, clang is on PATH"
    raise NativeUnavailable(f"no C compiler: {wanted}; install gcc or clang, or set CC")


def cache_root(environment: Mapping[str, str]) -> Path:
    """The user's folder of built libraries; it may not exist."""
    base = environment.get("XDG_CACHE_HOME", "")
    # The specification of the variable has relative paths ignored.
    folder = Path(base) if base.startswith("/") else Path(environment.get("HOME", "~"), ".cache")
    return folder.expanduser() / "cardan" / "native"


def cache_key(files: Sequence[Path], compiler: Compiler, flags: Sequence[str]) -> str:
    """A name that differs whenever the compiled library may."""
    digest = hashlib.sha256()
    parts = [*compiler.command, compiler.version, *flags, *_LINK_FLAGS]
    for part in [part.encode() for part in parts] + [file.read_bytes() for file in files]:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()[:32]


def cached_library(folder: Path) -> Path | None:
    """The library in ``folder``, or None if it is missing or not as it was written."""
    library = folder / _LIBRARY_NAME
    try:
        written = (folder / _DIGEST_NAME).read_text(encoding="ascii").strip()
        found = hashlib.sha256(library.read_bytes()).hexdigest()
    except (OSError, ValueError):
        return None
    return library if found == written else None


def compile_into(
    folder: Path, files: Sequence[Path], compiler: Compiler, flags: Sequence[str]
) -> Path:
    """Compile the C files among ``files`` and put the library into ``folder``, made if missing.

    Files get their names when they are complete, so that processes may do this at the same time:
    they write the same.

    Raises:
        OSError: the folder cannot be written.
        NativeUnavailable: the compiler failed.
    """
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    library = folder / _LIBRARY_NAME
    with tempfile.TemporaryDirectory(dir=folder, prefix="build-") as name:
        built = Path(name, _LIBRARY_NAME)
        digest = Path(name, _DIGEST_NAME)
        objects = _compile_objects(Path(name), files, [*compiler.command, *flags])
        _run([*compiler.command, *flags, *_LINK_FLAGS, "-o", str(built), *objects, "-lm"])
        text = hashlib.sha256(built.read_bytes()).hexdigest()
        digest.write_text(f"{text}\n", encoding="ascii")
        os.replace(built, library)
        os.replace(digest, folder / _DIGEST_NAME)
    return library


def accepts(compiler: Compiler, flags: Sequence[str]) -> bool:
    """Whether the compiler knows the flags."""
    try:
        _run([*compiler.command, *flags, "-E", "-x", "c", os.devnull])
    except NativeUnavailable:
        return False
    return True


def _compile_objects(folder: Path, files: Sequence[Path], command: Sequence[str]) -> list[str]:
    """Compile the C files side by side; the names of their objects in ``folder``.

    Those that read no shared header do not wait for its compilation. Of the others those that read
    most come first, so that none of them is left over at the end.
    """

    def compile_one(file: Path, header: Future[tuple[str, ...]] | None) -> str:
        target = str(folder / f"{file.stem}.o")
        common = header.result() if header else ()
        _run([*command, *common, "-c", "-o", target, str(file)])
        return target

    read = _read_files(files)
    sizes = {file.name: file.stat().st_size for file in files}
    inputs = [file for file in files if file.suffix == ".c"]
    inputs.sort(key=lambda file: -sum(sizes[name] for name in read[file.name]))
    waiting = {file.name for file in inputs if _SHARED_NAMES[0] in read[file.name]}
    inputs.sort(key=lambda file: file.name in waiting)
    shared = [file for file in files if file.name in _SHARED_NAMES]
    with ThreadPoolExecutor(max_workers=_usable_cpus()) as threads:
        # The first task: whoever waits for it waits for one that runs.
        header = threads.submit(_precompile, folder, shared, command)
        objects = [
            threads.submit(compile_one, file, header if file.name in waiting else None)
            for file in inputs
        ]
        try:
            return [task.result() for task in objects]
        except NativeUnavailable:
            threads.shutdown(wait=False, cancel_futures=True)
            raise


def _read_files(files: Sequence[Path]) -> dict[str, set[str]]:
    """By the name of each file: itself and those among ``files`` that it includes."""
    included = {file.name: _INCLUDE.findall(file.read_text(encoding="utf-8")) for file in files}

    def reach(name: str, found: set[str]) -> set[str]:
        if name in included and name not in found:
            found.add(name)
            for other in included[name]:
                reach(other, found)
        return found

    return {name: reach(name, set()) for name in included}


def _usable_cpus() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _precompile(folder: Path, shared: Sequence[Path], command: Sequence[str]) -> tuple[str, ...]:
    """Flags that include ``_COMMON`` and the shared headers as compiled into ``folder``; none if
    that does not work."""
    header = folder / _COMMON_NAME
    includes = "".join(f'#include "{file.name}"\n' for file in shared)
    places = [part for file in shared[:1] for part in ("-iquote", str(file.parent))]
    # Other compilers may need what is skipped.
    for text in (_skip_parts() + _COMMON, _COMMON):
        header.write_text(text + includes, encoding="ascii")
        try:
            _run([*command, *places, "-x", "c-header", "-o", f"{header}.gch", str(header)])
        except NativeUnavailable:
            continue
        # With the places, since compilers read the text where they cannot use what is compiled.
        return (*places, "-include", str(header))
    return ()


def _skip_parts() -> str:
    """What tells GCC that it has read the parts of its header that no file uses."""

    def defined(parts: Sequence[str]) -> str:
        return "".join(f"#define {part}INTRIN_H_INCLUDED\n" for part in parts)

    return f"{defined(_NEVER_USED)}#ifndef __AVX512F__\n{defined(_OF_AVX512)}#endif\n"


def _run(command: Sequence[str]) -> str:
    """What the command prints."""
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NativeUnavailable(f"the C compiler {command[0]} cannot be run: {error}") from error
    output = done.stdout.decode(errors="replace").strip()
    if done.returncode:
        shown = output[:_MOST_OUTPUT]
        raise NativeUnavailable(
            f"the C compiler failed with status {done.returncode}: "
            f"{shlex.join(command)}: {shown or 'no output'}"
        )
    return output
