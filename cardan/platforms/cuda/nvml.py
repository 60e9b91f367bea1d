"""What the driver says of its devices, through NVML, which makes no CUDA context.

NVML leaves a thread behind in the process that asks, so a short-lived one of its own asks: this
file, run as a script, which therefore imports the standard library alone. A forked child may ask
again.
"""

import ctypes
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

LIBRARY = "libnvidia-ml.so.1"
_TEXT_BYTES = 96
_NOT_SUPPORTED = 3
_NO_PERMISSION = 4
_NOT_FOUND = 6
_DRIVER_NOT_LOADED = 9
_ANSWER_WITHIN_S = 30.0


class DriverError(Exception):
    """NVML refused; ``code`` is its return code and ``is_absent`` says that no driver is loaded."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code

    @property
    def is_absent(self) -> bool:
        return self.code == _DRIVER_NOT_LOADED


@dataclass(frozen=True, slots=True)
class GpuFacts:
    """One GPU, or one instance of a divided one (MIG), whose ``whole`` is the GPU's UUID.

    ``index`` counts, in order of PCI addresses, the GPUs that this process may use, as CUDA does;
    instances have that of their GPU. ``memory_bytes`` is None where the host's memory is the GPU's.
    """

    index: int
    name: str
    uuid: str
    memory_bytes: int | None
    compute_capability: tuple[int, int]
    whole: str = ""


@dataclass(frozen=True, slots=True)
class DriverFacts:
    """All GPUs of the host; ``cuda_version`` is the newest that the driver runs."""

    version: str
    cuda_version: tuple[int, int]
    gpus: tuple[GpuFacts, ...]


class _Memory(ctypes.Structure):
    _fields_ = (
        ("total", ctypes.c_ulonglong),
        ("free", ctypes.c_ulonglong),
        ("used", ctypes.c_ulonglong),
    )


def load_library() -> Any:
    """NVML as a ctypes library.

    Raises:
        OSError: it is not installed; there is no driver.
    """
    return ctypes.CDLL(LIBRARY)


def driver_facts() -> DriverFacts:
    """Ask NVML, in a process of its own.

    Raises:
        OSError: there is no NVML.
        DriverError: NVML refuses, or does not answer.
    """
    load_library()
    command = [sys.executable, "-I", "-S", __file__]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_ANSWER_WITHIN_S
        )
    except subprocess.TimeoutExpired as error:
        raise DriverError(f"NVML does not answer within {_ANSWER_WITHIN_S:.0f} s", -1) from error
    except OSError as error:
        raise DriverError(f"no process can be started that asks NVML: {error}", -1) from error
    if done.returncode != 0:
        said = done.stderr.decode(errors="replace").strip().splitlines() or ["nothing"]
        raise DriverError(f"asking NVML ends with {done.returncode} and says {said[-1]}", -1)
    try:
        return _from_answer(json.loads(done.stdout))
    except (ValueError, KeyError, TypeError) as error:
        raise DriverError(f"asking NVML gives {done.stdout[:80]!r}", -1) from error


def ask_driver(load: Callable[[], Any] = load_library) -> DriverFacts:
    """Ask NVML, in this process.

    Raises:
        OSError: there is no NVML.
        DriverError: NVML refuses.
    """
    library = load()
    with _session(library):
        count = ctypes.c_uint()
        _check(library, library.nvmlDeviceGetCount_v2(ctypes.byref(count)), "count devices")
        version = ctypes.c_int()
        _check(
            library,
            library.nvmlSystemGetCudaDriverVersion_v2(ctypes.byref(version)),
            "read the CUDA version",
        )
        text = ctypes.create_string_buffer(_TEXT_BYTES)
        _check(
            library,
            library.nvmlSystemGetDriverVersion(text, ctypes.c_uint(_TEXT_BYTES)),
            "read the driver's version",
        )
        gpus = tuple(_gpus(library, count.value))
        number = version.value
        return DriverFacts(text.value.decode(), (number // 1000, number % 1000 // 10), gpus)


def visible_gpus(gpus: Sequence[GpuFacts], environment: Mapping[str, str]) -> tuple[GpuFacts, ...]:
    """The GPUs that ``CUDA_VISIBLE_DEVICES`` leaves, in its order. As CUDA does, what follows an
    entry that names no GPU is ignored, and of instances of divided GPUs only the first one is
    seen, alone."""
    chosen: list[GpuFacts] = []
    listed = environment.get("CUDA_VISIBLE_DEVICES")
    if listed is None:
        chosen = list(gpus)
    for entry in (part.strip() for part in (listed or "").split(",")):
        found = [gpu for gpu in gpus if _is_named(gpu, entry)]
        if len({gpu.whole or gpu.uuid for gpu in found}) != 1 or found[0] in chosen:
            break
        chosen.append(found[0])
    instances = [gpu for gpu in chosen if gpu.whole]
    return tuple(instances[:1] or chosen)


def _from_answer(answer: Any) -> DriverFacts:
    if "refusal" in answer:
        raise DriverError(answer["refusal"], answer["code"])
    gpus = tuple(
        GpuFacts(**{**gpu, "compute_capability": tuple(gpu["compute_capability"])})
        for gpu in answer["gpus"]
    )
    return DriverFacts(answer["version"], tuple(answer["cuda_version"]), gpus)


def answer(load: Callable[[], Any] = load_library) -> str:
    """What ``driver_facts`` reads, in JSON."""
    try:
        return json.dumps(asdict(ask_driver(load)))
    except DriverError as error:
        return json.dumps({"refusal": str(error), "code": error.code})


def _is_named(gpu: GpuFacts, entry: str) -> bool:
    if entry.isdigit():
        return gpu.index == int(entry)
    if entry.startswith("MIG-"):
        return gpu.uuid.startswith(entry)
    return entry.startswith("GPU-") and (gpu.whole or gpu.uuid).startswith(entry)


@contextmanager
def _session(library: Any) -> Iterator[None]:
    _check(library, library.nvmlInit_v2(), "start")
    try:
        yield
    finally:
        library.nvmlShutdown()


def _gpus(library: Any, count: int) -> Iterator[GpuFacts]:
    """What CUDA can see of ``count`` GPUs. NVML counts those, too, that a container withholds."""
    index = 0
    for place in range(count):
        handle = ctypes.c_void_p()
        code = library.nvmlDeviceGetHandleByIndex_v2(place, ctypes.byref(handle))
        if code == _NO_PERMISSION:
            continue
        _check(library, code, f"read device {place}")
        gpu = _gpu(library, handle, index)
        if _is_divided(library, handle):
            yield from _instances(library, handle, gpu)
        else:
            yield gpu
        index += 1


def _gpu(library: Any, handle: Any, index: int) -> GpuFacts:
    doing = f"read device {index}"
    major, minor = ctypes.c_int(), ctypes.c_int()
    _check(
        library,
        library.nvmlDeviceGetCudaComputeCapability(
            handle, ctypes.byref(major), ctypes.byref(minor)
        ),
        doing,
    )
    return GpuFacts(
        index,
        _text(library, library.nvmlDeviceGetName, handle, doing),
        _text(library, library.nvmlDeviceGetUUID, handle, doing),
        _memory_bytes(library, handle, doing),
        (major.value, minor.value),
    )


def _is_divided(library: Any, handle: Any) -> bool:
    mode, pending = ctypes.c_uint(), ctypes.c_uint()
    code = library.nvmlDeviceGetMigMode(handle, ctypes.byref(mode), ctypes.byref(pending))
    return code == 0 and mode.value == 1


def _instances(library: Any, handle: Any, gpu: GpuFacts) -> Iterator[GpuFacts]:
    doing = f"read the instances of device {gpu.index}"
    count = ctypes.c_uint()
    _check(library, library.nvmlDeviceGetMaxMigDeviceCount(handle, ctypes.byref(count)), doing)
    for place in range(count.value):
        part = ctypes.c_void_p()
        code = library.nvmlDeviceGetMigDeviceHandleByIndex(handle, place, ctypes.byref(part))
        if code in (_NOT_FOUND, _NO_PERMISSION):
            continue
        _check(library, code, doing)
        yield replace(
            gpu,
            name=_text(library, library.nvmlDeviceGetName, part, doing),
            uuid=_text(library, library.nvmlDeviceGetUUID, part, doing),
            memory_bytes=_memory_bytes(library, part, doing),
            whole=gpu.uuid,
        )


def _text(library: Any, ask: Any, handle: Any, doing: str) -> str:
    text = ctypes.create_string_buffer(_TEXT_BYTES)
    _check(library, ask(handle, text, ctypes.c_uint(_TEXT_BYTES)), doing)
    return text.value.decode()


def _memory_bytes(library: Any, handle: Any, doing: str) -> int | None:
    memory = _Memory()
    code = library.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory))
    if code == _NOT_SUPPORTED:
        return None
    _check(library, code, doing)
    return int(memory.total)


def _check(library: Any, code: int, doing: str) -> None:
    if code == 0:
        return
    explain = library.nvmlErrorString
    explain.restype = ctypes.c_char_p
    text = explain(code)
    said = text.decode() if isinstance(text, bytes) else f"code {code}"
    raise DriverError(f"NVML cannot {doing}: {said}", code)


if __name__ == "__main__":
    print(answer())
