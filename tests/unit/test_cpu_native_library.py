"""Compiling, keeping and loading the CPU's kernels, and the pool of threads inside."""

import ctypes
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from cardan.core.interfaces.errors import OutOfMemoryError
from cardan.platforms.cpu.native import build, library
from cardan.platforms.cpu.native.isa import IsaLevel, choose_level, usable_levels
from cardan.platforms.cpu.native.library import NativeUnavailable, check, open_library

HAS_COMPILER = any(shutil.which(name) for name in ("cc", "gcc", "clang"))
needs_compiler = pytest.mark.skipif(not HAS_COMPILER, reason="no C compiler")
POOL = Path(library.__file__).parent
AVX2 = ("sse4_2", "avx2", "fma", "f16c")
AVX512 = (*AVX2, "avx512f", "avx512bw", "avx512dq", "avx512vl")

# Each index is counted by its task; a forked child, and tasks that start loops, count too.
COUNT_C = """
#include "pool.h"
#include <sys/wait.h>
#include <unistd.h>

static void count(void *context, int64_t begin, int64_t end, int worker) {
    int *counts = context;
    for (int64_t i = begin; i < end; i++) counts[i] += worker >= 0 && worker < 256;
}

struct count_call { int64_t threads, size, grain; int *counts; };

CARDAN_EXPORT int count_up(const struct count_call *call) {
    cardan_parallel_for((int)call->threads, call->size, call->grain, count, call->counts);
    return 0;
}

CARDAN_EXPORT int count_guided(const struct count_call *call) {
    cardan_parallel_guided((int)call->threads, call->size, call->grain, count, call->counts);
    return 0;
}

static int count_rows_of(const void *job, int64_t begin, int64_t end, int threads) {
    const struct count_call *call = job;
    count(call->counts, begin, end, 0);
    const int64_t wrong = threads == 1 && call->threads > 1 && begin % call->grain;
    return wrong ? 9 : begin <= call->size / 2 && call->size / 2 < end ? 7 : 0;
}

// 7, the status of the one part that has the row in the middle.
CARDAN_EXPORT int count_rows(const struct count_call *call) {
    return cardan_parallel_rows((int)call->threads, call->size, call->grain, count_rows_of, call);
}

static void nested(void *context, int64_t begin, int64_t end, int worker) {
    const struct count_call *call = context;
    for (int64_t i = begin; i < end; i++) {
        struct count_call inner = {call->threads, call->size, 3, call->counts + i * call->size};
        count_up(&inner);
    }
    (void)worker;
}

CARDAN_EXPORT int count_nested(const struct count_call *call) {
    cardan_parallel_for((int)call->threads, call->size, 1, nested, (void *)call);
    return 0;
}

CARDAN_EXPORT int count_in_child(const struct count_call *call) {
    const pid_t child = fork();
    if (!child) {
        count_up(call);
        for (int64_t i = 0; i < call->size; i++) if (call->counts[i] != 1) _exit(1);
        _exit(0);
    }
    int status = -1;
    waitpid(child, &status, 0);
    return status;
}

struct scratch_call { int64_t bytes; };

CARDAN_EXPORT int scratch_is_kept(const struct scratch_call *call) {
    const int64_t bytes = call->bytes;
    char *first = cardan_scratch(CARDAN_SCRATCH_CALL, bytes);
    char *other = cardan_scratch(CARDAN_SCRATCH_TASK, bytes);
    if (!first || !other || (uintptr_t)first % 64 || (uintptr_t)other % 64) return 0;
    for (int64_t i = 0; i < bytes; i++) first[i] = 1, other[i] = 2;
    return first[bytes - 1] == 1 && cardan_scratch(CARDAN_SCRATCH_CALL, bytes / 2) == first;
}
"""

# The caller's chunk waits for a worker to take the other one.
FAULT_C = """
#include "pool.h"
#include <unistd.h>

static void fault(void *context, int64_t begin, int64_t end, int worker) {
    if (worker) *(volatile int *)context = 1;
    sleep(60);
    (void)begin, (void)end;
}

struct fault_call { int *nowhere; };

CARDAN_EXPORT int fault_in_worker(const struct fault_call *call) {
    cardan_parallel_for(2, 2, 1, fault, call->nowhere);
    return 0;
}
"""

COUNT = (library.Size, library.Size, library.Size, library.Pointer)


def small_source(folder, text="int answer(void);\nint answer(void) { return 42; }\n"):
    folder.mkdir(exist_ok=True)
    text = text.replace("int answer(void);", '__attribute__((visibility("default"))) int answer();')
    (folder / "answer.c").write_text(text)
    return folder


def vector_source(folder):
    """One whose file reads the vectors' header."""
    folder.mkdir()
    (folder / "simd.h").write_text("#pragma once\n")
    return small_source(
        folder, '#include "simd.h"\nint answer(void);\nint answer(void) { return 42; }\n'
    )


def environment(tmp_path, **changes):
    return {"PATH": os.environ["PATH"], "HOME": str(tmp_path / "home"), **changes}


@pytest.fixture(scope="module")
def pool(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pool")
    for name in ("pool.c", "pool.h"):
        shutil.copy(POOL / name, folder)
    (folder / "count.c").write_text(COUNT_C)
    return open_library(environment(folder), folder=folder)


def test_levels_follow_features_and_the_variable():
    assert choose_level("x86_64", (), {}).name == "scalar"
    assert choose_level("x86_64", AVX2, {}).name == "avx2"
    assert choose_level("x86_64", (*AVX2, "avx_vnni"), {}).name == "avx2_vnni"
    # Foundation alone, of the first such machines, is not enough.
    assert choose_level("x86_64", (*AVX2, "avx512f"), {}).name == "avx2"
    assert choose_level("x86_64", AVX512, {}).name == "avx512"
    best = choose_level("x86_64", (*AVX512, "avx512_vnni", "avx512_bf16", "avx_vnni"), {})
    assert best.name == "avx512_bf16"
    assert {"-mavx512bf16", "-mavx512vnni"} <= set(best.flags)
    for name in ("scalar", "avx2", "avx512"):
        assert choose_level("AMD64", AVX512, {"CARDAN_CPU_ISA": name}).name == name
    # The variable lowers only.
    assert choose_level("x86_64", AVX2, {"CARDAN_CPU_ISA": "avx512"}).name == "avx2"
    names = [level.name for level in usable_levels("x86_64", AVX512, {})]
    assert names == ["avx512", "avx2", "scalar"]
    with pytest.raises(NativeUnavailable, match="'mmx' is not known on x86_64; known: scalar, avx"):
        choose_level("x86_64", AVX2, {"CARDAN_CPU_ISA": "mmx"})


def test_levels_of_other_architectures():
    arm = ("neon", "asimdhp", "asimddp")
    assert choose_level("aarch64", ("neon",), {}).flags == ()
    assert choose_level("aarch64", arm, {}).name == "dotprod"
    assert choose_level("arm64", (*arm, "i8mm", "bf16"), {}).name == "i8mm"
    sve = choose_level("aarch64", (*arm, "i8mm", "bf16", "sve"), {})
    assert sve.flags == ("-march=armv8.2-a+fp16+dotprod+i8mm+bf16+sve",)
    # The lowest has this name everywhere.
    assert choose_level("aarch64", arm, {"CARDAN_CPU_ISA": "scalar"}).name == "neon"
    assert choose_level("riscv64", (), {}).name == "scalar"


def test_the_cache_folder_follows_the_environment():
    assert build.cache_root({"XDG_CACHE_HOME": "/c"}) == Path("/c/cardan/native")
    assert build.cache_root({"HOME": "/h"}) == Path("/h/.cache/cardan/native")
    # Relative paths are ignored.
    assert build.cache_root({"XDG_CACHE_HOME": "c", "HOME": "/h"}) == Path(
        "/h/.cache/cardan/native"
    )


@needs_compiler
def test_compiles_once_and_again_for_other_sources(tmp_path):
    folder = small_source(tmp_path / "c")
    where = environment(tmp_path)
    first = open_library(where, folder=folder)
    assert first.origin.startswith("compiled in ")
    assert first.function("answer")() == 42
    assert open_library(where, folder=folder).origin.startswith("cached in ")
    small_source(folder, "int answer(void);\nint answer(void) { return 43; }\n")
    other = open_library(where, folder=folder)
    assert other.origin.startswith("compiled in ")
    assert other.function("answer")() == 43
    with pytest.raises(AttributeError):
        other.function("question")


@needs_compiler
@pytest.mark.parametrize("name", ["kernels.so", "kernels.sha256"])
@pytest.mark.parametrize("damage", ["truncated", "missing"])
def test_a_damaged_cache_is_built_again(tmp_path, name, damage):
    folder = small_source(tmp_path / "c")
    where = environment(tmp_path)
    open_library(where, folder=folder)
    (file,) = build.cache_root(where).glob(f"*/{name}")
    # In a new file, since the old one is in use by this process.
    content = file.read_bytes()[:20]
    file.unlink()
    if damage == "truncated":
        file.write_bytes(content)
    found = open_library(where, folder=folder)
    assert found.origin.startswith("compiled in ")
    assert found.function("answer")() == 42
    assert open_library(where, folder=folder).origin.startswith("cached in ")
    assert sorted(path.name for path in file.parent.iterdir()) == ["kernels.sha256", "kernels.so"]


@needs_compiler
def test_without_a_writable_cache_it_is_compiled_for_the_process(tmp_path, caplog):
    folder = small_source(tmp_path / "c")
    (tmp_path / "file").write_text("not a folder")
    where = environment(tmp_path, XDG_CACHE_HOME=str(tmp_path / "file"))
    with caplog.at_level(logging.INFO):
        found = open_library(where, folder=folder)
    assert found.origin.startswith("compiled for this process (")
    assert found.function("answer")() == 42
    assert "cannot keep them" in caplog.text


def test_without_a_compiler_the_reason_is_told(tmp_path):
    with pytest.raises(NativeUnavailable, match="none of cc, gcc, clang is on PATH; install gcc"):
        open_library({"PATH": str(tmp_path)})
    with pytest.raises(NativeUnavailable, match="CC=nonesuch is not on PATH"):
        open_library(environment(tmp_path, CC="nonesuch -O1"))


@needs_compiler
def test_a_failed_build_shows_what_the_compiler_said(tmp_path):
    folder = small_source(tmp_path / "c", "int answer(void) { return nothing; }\n")
    with pytest.raises(NativeUnavailable, match=r"(?s)failed with status 1: .*nothing"):
        open_library(environment(tmp_path), folder=folder)
    assert not list(build.cache_root(environment(tmp_path)).glob("*/*"))


@needs_compiler
def test_a_compiler_too_old_for_a_level_gets_the_one_below(tmp_path, monkeypatch, caplog):
    folder = small_source(tmp_path / "c")
    levels = (IsaLevel("future", frozenset(), ("-mfuture",)), IsaLevel("now", frozenset(), ()))
    monkeypatch.setattr(library, "usable_levels", lambda *_: levels)
    with caplog.at_level(logging.INFO):
        found = open_library(environment(tmp_path), folder=folder)
    assert found.isa == "now"
    assert found.function("answer")() == 42
    assert "no flags for future: -mfuture" in caplog.text
    monkeypatch.setattr(library, "usable_levels", lambda *_: levels[:1])
    with pytest.raises(NativeUnavailable, match="knows none of"):
        open_library(environment(tmp_path), folder=folder)


@needs_compiler
def test_without_a_precompiled_header_it_is_compiled_all_the_same(tmp_path):
    folder = vector_source(tmp_path / "c")
    (folder / "other.c").write_text("int other = 1;\n")
    wrapper = tmp_path / "cc"
    wrapper.write_text(
        '#!/bin/sh\ncase "$*" in *c-header*) exit 1;; esac\nexec cc "$@"\n', encoding="ascii"
    )
    wrapper.chmod(0o755)
    found = open_library(environment(tmp_path, CC=str(wrapper)), folder=folder)
    assert found.function("answer")() == 42


@needs_compiler
def test_a_compiler_that_needs_all_of_its_header_reads_it(tmp_path):
    folder = vector_source(tmp_path / "c")
    (folder / "other.c").write_text("int other = 1;\n")
    wrapper, log = tmp_path / "cc", tmp_path / "log"
    wrapper.write_text(
        "#!/bin/sh\nfor last; do :; done\n"
        'case "$*" in *c-header*) grep -q AVX512FP16 "$last" && exit 1;; esac\n'
        f'echo "$*" >> {log}\nexec cc "$@"\n',
        encoding="ascii",
    )
    wrapper.chmod(0o755)
    found = open_library(environment(tmp_path, CC=str(wrapper)), folder=folder)
    assert found.function("answer")() == 42
    compiled = [line for line in log.read_text().splitlines() if " -c " in line]
    # Files without vectors do not wait for the header.
    assert {line.split("/")[-1]: "-include" in line for line in compiled} == {
        "answer.c": True,
        "other.c": False,
    }


def test_a_library_that_is_being_found_is_waited_for(monkeypatch):
    begun, may_end = threading.Event(), threading.Event()
    calls = []

    def open_slowly(_):
        calls.append(threading.current_thread().name)
        begun.set()
        assert may_end.wait(60)
        return library.NativeLibrary(ctypes.CDLL(None), "avx2", "cached in /c")

    monkeypatch.setattr(library, "open_library", open_slowly)
    library._find_out.cache_clear()
    try:
        library.start_building()
        assert begun.wait(60)
        threading.Timer(0.05, may_end.set).start()
        assert library.library().origin == "cached in /c"
        library.start_building()
        assert library.library().origin == "cached in /c"
        assert calls == ["native-library"]
    finally:
        library._find_out.cache_clear()


@needs_compiler
def test_starts_at_the_same_time_all_get_the_library(tmp_path):
    folder = small_source(tmp_path / "c")
    code = (
        "import os, sys; from pathlib import Path\n"
        "from cardan.platforms.cpu.native.library import open_library\n"
        "found = open_library(os.environ, folder=Path(sys.argv[1]))\n"
        "assert 'torch' not in sys.modules\n"
        "sys.exit(found.function('answer')() - 42)\n"
    )
    where = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    command = [sys.executable, "-c", code, str(folder)]
    processes = [subprocess.Popen(command, env=where) for _ in range(3)]
    assert [process.wait() for process in processes] == [0, 0, 0]
    assert len(list(build.cache_root(where).iterdir())) == 1


def test_the_status_says_what_there_is(monkeypatch):
    monkeypatch.setattr(library, "_outcome", lambda: "no C compiler: none")
    monkeypatch.setattr(library, "substitute", lambda: "torch serves")
    assert library.native_status() == "unavailable: no C compiler: none; torch serves"
    assert library.unavailable_reason() == "no C compiler: none"
    with pytest.raises(NativeUnavailable, match="no C compiler: none"):
        library.library()
    found = library.NativeLibrary(ctypes.CDLL(None), "avx2", "cached in /c")
    monkeypatch.setattr(library, "_outcome", lambda: found)
    assert library.native_status() == "avx2, cached in /c"
    assert library.unavailable_reason() is None
    assert library.library() is found


def test_a_kernel_without_memory_raises():
    check(0)
    with pytest.raises(OutOfMemoryError, match="max_num_batched_tokens"):
        check(1)


@needs_compiler
@pytest.mark.parametrize("threads", [0, 1, 2, 5, 40])
@pytest.mark.parametrize("name", ["count_up", "count_guided"])
def test_every_index_is_done_once(pool, name, threads):
    count = pool.function(name, *COUNT)
    for size, grain in ((0, 1), (1, 1), (7, 0), (100, 1), (1000, 7), (100000, 64), (10, 20)):
        counts = (ctypes.c_int * max(size, 1))()
        count(threads, size, grain, ctypes.addressof(counts))
        assert sum(counts) == size
        assert set(counts[:size]) <= {1}


@needs_compiler
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_rows_are_computed_once_by_one_thread_or_together(pool, threads):
    count = pool.function("count_rows", *COUNT)
    for size, unit in ((1, 6), (100, 6), (255, 32), (256, 6), (1000, 32), (5001, 6)):
        counts = (ctypes.c_int * size)()
        assert count(threads, size, unit, ctypes.addressof(counts)) == 7
        assert set(counts) == {1}


@needs_compiler
def test_loops_inside_tasks_and_forked_children(pool):
    counts = (ctypes.c_int * 400)()
    pool.function("count_nested", *COUNT)(2, 20, 0, ctypes.addressof(counts))
    assert set(counts) == {1}
    child = pool.function("count_in_child", *COUNT)
    for _ in range(3):
        counts = (ctypes.c_int * 400)()
        assert child(2, 400, 1, ctypes.addressof(counts)) == 0
        assert set(counts) == {0}


@needs_compiler
def test_scratch_is_aligned_and_kept(pool):
    kept = pool.function("scratch_is_kept", library.Size)
    assert [kept(size) for size in (1, 100, 5000, 1 << 20, 64)] == [1] * 5


@needs_compiler
def test_a_fault_in_a_worker_is_reported(tmp_path):
    """Workers leave signals to the threads of the host program, but not their own faults."""
    for name in ("pool.c", "pool.h"):
        shutil.copy(POOL / name, tmp_path)
    (tmp_path / "fault.c").write_text(FAULT_C)
    code = (
        "import faulthandler, os, sys; from pathlib import Path\n"
        "from cardan.platforms.cpu.native.library import Pointer, open_library\n"
        "faulthandler.enable()\n"
        "found = open_library(os.environ, folder=Path(sys.argv[1]))\n"
        "found.function('fault_in_worker', Pointer)(0)\n"
    )
    where = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    command = [sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(command, env=where, capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGSEGV
    assert "Fatal Python error: Segmentation fault" in done.stderr
