"""Compiling kernels by numba, once for a user and version. Importing this imports numba.

Kernels take whole numbers and reals only. Memory is passed by address, as to the C kernels: torch
has types that numba does not know, and describing an array to numba costs more than a small kernel
does. The caller keeps the memory alive; the lock of the interpreter is released meanwhile.
"""

import hashlib
import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from cardan.platforms.cpu.native.build import cache_root
from cardan.platforms.cpu.numba.availability import NumbaUnavailable, missing_reason

if missing_reason() is not None:
    raise NumbaUnavailable(missing_reason())

import numba
from numba import carray, types
from numba.extending import intrinsic

_LOG = logging.getLogger(__name__)
_FOLDER = Path(__file__).parent
# A multiply-add may be one instruction and sums may be reordered; NaN and infinities stay.
_OPTIONS: dict[str, Any] = {
    "nogil": True,
    "fastmath": {"contract", "reassoc"},
    "error_model": "numpy",
}
# numba's simplest pool of threads takes one launch at a time, and ends the process otherwise.
_LAUNCHING = threading.Lock()


def part_of_kernel(function: Callable[..., Any]) -> Any:
    """A function that kernels call; compiled with them, for the types that they call it with."""
    return numba.njit(**_OPTIONS)(function)


def kernel(signature: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Compile a function of whole numbers and reals (``signature`` in numba's words) for the
    thread that calls it."""
    return lambda function: _compiled(function, signature, parallel=False)


def parallel_kernel(signature: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """As ``kernel``, for a function with a ``prange`` whose first argument is the number of
    threads: as many as torch uses."""

    def compile_parallel(function: Callable[..., Any]) -> Callable[..., Any]:
        run = _compiled(function, signature, parallel=True)
        pool = _Pool()
        most = numba.config.NUMBA_NUM_THREADS

        def launch(threads: int, *fields: float) -> Any:
            with _LAUNCHING:
                if pool.threads != threads:
                    numba.set_num_threads(min(threads, most))
                    pool.threads = threads
                return run(threads, *fields)

        return launch

    return compile_parallel


class _Pool(threading.local):
    """How many threads numba was told to use by the thread that looks, which costs less to
    remember than to ask for."""

    threads = 0


@intrinsic  # type: ignore[untyped-decorator]
def _pointer(_context: Any, _address: Any) -> Any:
    def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], context.get_value_type(types.voidptr))

    return types.voidptr(types.int64), generate


@part_of_kernel
def array_at(address: int, size: int, dtype: Any) -> Any:
    """The ``size`` elements of ``dtype`` at ``address``."""
    return carray(_pointer(address), size, dtype)


def _compiled(function: Callable[..., Any], signature: str, parallel: bool) -> Any:
    options = {**_OPTIONS, "parallel": parallel}
    folder = _cache_folder()
    if not any(folder.rglob(f"*.{function.__qualname__}-*.nbi")):
        _announce(str(folder))
    try:
        with _keeping_in(folder):
            return numba.njit(signature, cache=True, **options)(function)
    except (OSError, RuntimeError) as error:
        _LOG.info("the kernel %s cannot be kept: %s", function.__name__, error)
        return numba.njit(signature, **options)(function)


@cache
def _announce(folder: str) -> None:
    _LOG.warning(
        "numba compiles kernels for this CPU, which takes some seconds, and keeps them in %s",
        folder,
    )


@cache
def _cache_folder() -> Path:
    """Of the kernels of these sources: numba itself looks only at the file of a kernel for
    changes, not at those whose functions it calls. ``NUMBA_CACHE_DIR`` goes first."""
    digest = hashlib.sha256()
    for file in sorted(_FOLDER.glob("*.py")):
        digest.update(file.read_bytes())
    named = os.environ.get("NUMBA_CACHE_DIR")
    root = Path(named) if named else cache_root(os.environ).parent / "numba"
    return root / digest.hexdigest()[:32]


@contextmanager
def _keeping_in(folder: Path) -> Iterator[None]:
    """numba asks its configuration for the folder when a function is decorated."""
    before = numba.config.CACHE_DIR
    numba.config.CACHE_DIR = str(folder)
    try:
        yield
    finally:
        numba.config.CACHE_DIR = before
