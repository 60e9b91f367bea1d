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
from dataclasses import asdict, dataclass
from typing import Any

LIBRARY = "libnvidia-ml.so.1"
_TEXT_BYTES = 96
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
    """One GPU. ``index`` counts as NVML does, in order of PCI addresses."""

    index: int
    name: str
    uuid: str
    memory_bytes: int
    compute_capability: tuple[int, int]


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
        OSError: there is no NVML, or no process can be started.
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
    if done.returncode != 0:
        said = done.stderr.decode(errors="replace").strip().splitlines() or ["nothing"]
        raise DriverError(f"asking NVML ends with {done.returncode} and says {said[-1]}", -1)
    return _from_answer(json.loads(done.stdout))


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
        gpus = tuple(_gpu(library, index) for index in range(count.value))
        number = version.value
        return DriverFacts(text.value.decode(), (number // 1000, number % 1000 // 10), gpus)


def visible_gpus(gpus: Sequence[GpuFacts], environment: Mapping[str, str]) -> tuple[GpuFacts, ...]:
    """The GPUs that ``CUDA_VISIBLE_DEVICES`` leaves, in its order. As CUDA does, what follows an
    entry that names no GPU is ignored."""
    listed = environment.get("CUDA_VISIBLE_DEVICES")
    if listed is None:
        return tuple(gpus)
    chosen: list[GpuFacts] = []
    for entry in (part.strip() for part in listed.split(",")):
        found = [gpu for gpu in gpus if _is_named(gpu, entry)]
        if len(found) != 1 or found[0] in chosen:
            break
        chosen.append(found[0])
    return tuple(chosen)


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
    return entry.startswith("GPU-") and gpu.uuid.startswith(entry)


@contextmanager
def _session(library: Any) -> Iterator[None]:
    _check(library, library.nvmlInit_v2(), "start")
    try:
        yield
    finally:
        library.nvmlShutdown()


def _gpu(library: Any, index: int) -> GpuFacts:
    handle = ctypes.c_void_p()
    doing = f"read device {index}"
    _check(library, library.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle)), doing)
    name = ctypes.create_string_buffer(_TEXT_BYTES)
    _check(library, library.nvmlDeviceGetName(handle, name, ctypes.c_uint(_TEXT_BYTES)), doing)
    uuid = ctypes.create_string_buffer(_TEXT_BYTES)
    _check(library, library.nvmlDeviceGetUUID(handle, uuid, ctypes.c_uint(_TEXT_BYTES)), doing)
    memory = _Memory()
    _check(library, library.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)), doing)
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
        name.value.decode(),
        uuid.value.decode(),
        int(memory.total),
        (major.value, minor.value),
    )


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
