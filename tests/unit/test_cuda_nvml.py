"""What NVML says, from made-up libraries and processes."""

import ctypes
import subprocess
from types import SimpleNamespace

import pytest

from cardan.platforms.cuda import nvml
from cardan.platforms.cuda.nvml import DriverError, DriverFacts, GpuFacts, visible_gpus

GIB = 1 << 30


class ErrorString:
    """``nvmlErrorString``, whose result's type is set by its caller."""

    restype = None

    def __call__(self, code):
        return {9: b"Driver Not Loaded", 15: b"GPU is lost"}.get(code, b"Unknown Error")


class FakeNvml:
    """NVML with one GPU; functions named in ``refusing`` return their codes."""

    def __init__(self, **refusing):
        self.refusing = refusing
        self.sessions = 0
        self.nvmlErrorString = ErrorString()

    def nvmlInit_v2(self):
        self.sessions += 1
        return self.refusing.get("nvmlInit_v2", 0)

    def nvmlShutdown(self):
        self.sessions -= 1
        return 0

    def nvmlDeviceGetCount_v2(self, count):
        count._obj.value = 1
        return 0

    def nvmlSystemGetCudaDriverVersion_v2(self, version):
        version._obj.value = 13020
        return 0

    def nvmlSystemGetDriverVersion(self, text, size):
        text.value = b"580.159.04"
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index, handle):
        return self.refusing.get("nvmlDeviceGetHandleByIndex_v2", 0)

    def nvmlDeviceGetName(self, handle, text, size):
        text.value = b"NVIDIA H200"
        return 0

    def nvmlDeviceGetUUID(self, handle, text, size):
        text.value = b"GPU-1234"
        return 0

    def nvmlDeviceGetMigMode(self, handle, mode, pending):
        return 3

    def nvmlDeviceGetMemoryInfo(self, handle, memory):
        memory._obj.total = 150754820096
        return 0

    def nvmlDeviceGetCudaComputeCapability(self, handle, major, minor):
        major._obj.value, minor._obj.value = 9, 0
        return 0


def test_nvml_is_asked_and_left():
    library = FakeNvml()
    found = nvml.ask_driver(lambda: library)
    assert found == DriverFacts(
        "580.159.04",
        (13, 2),
        (GpuFacts(0, "NVIDIA H200", "GPU-1234", 150754820096, (9, 0)),),
    )
    assert library.sessions == 0


def test_refusals_of_nvml_are_explained():
    library = FakeNvml(nvmlDeviceGetHandleByIndex_v2=15)
    with pytest.raises(DriverError, match="cannot read device 0: GPU is lost"):
        nvml.ask_driver(lambda: library)
    assert library.sessions == 0
    with pytest.raises(DriverError) as caught:
        nvml.ask_driver(lambda: FakeNvml(nvmlInit_v2=9))
    assert caught.value.is_absent


def answering(monkeypatch, text="", code=0, errors=""):
    """Let the process that asks NVML answer so."""
    monkeypatch.setattr(nvml, "load_library", lambda: ctypes.CDLL(None))

    def run(command, **options):
        assert command[-1] == nvml.__file__
        return subprocess.CompletedProcess(command, code, text.encode(), errors.encode())

    monkeypatch.setattr(subprocess, "run", run)


def test_answers_travel_between_processes(monkeypatch):
    answering(monkeypatch, nvml.answer(FakeNvml))
    assert nvml.driver_facts() == nvml.ask_driver(FakeNvml)
    answering(monkeypatch, nvml.answer(lambda: FakeNvml(nvmlInit_v2=9)))
    with pytest.raises(DriverError, match="Driver Not Loaded") as caught:
        nvml.driver_facts()
    assert caught.value.is_absent


def test_a_process_that_dies_or_hangs_is_a_refusal(monkeypatch):
    answering(monkeypatch, code=-11, errors="boom\nSegmentation fault\n")
    with pytest.raises(DriverError, match="ends with -11 and says Segmentation fault"):
        nvml.driver_facts()

    def hang(command, **options):
        raise subprocess.TimeoutExpired(command, options["timeout"])

    monkeypatch.setattr(subprocess, "run", hang)
    with pytest.raises(DriverError, match="does not answer"):
        nvml.driver_facts()


def test_no_library_is_no_driver(monkeypatch):
    def load():
        raise OSError("libnvidia-ml.so.1: cannot open shared object file")

    monkeypatch.setattr(nvml, "load_library", load)
    with pytest.raises(OSError, match="cannot open"):
        nvml.driver_facts()


@pytest.mark.parametrize("text", ["", "null", "{}", "Segmentation fault", '{"gpus": [{}]}'])
def test_what_is_no_answer_is_a_refusal(monkeypatch, text):
    answering(monkeypatch, text)
    with pytest.raises(DriverError, match="asking NVML gives"):
        nvml.driver_facts()


def test_a_process_that_cannot_be_started_is_a_refusal(monkeypatch):
    answering(monkeypatch)

    def run(command, **options):
        raise OSError("no more processes")

    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(DriverError, match="no more processes"):
        nvml.driver_facts()


class Machine(FakeNvml):
    """GPUs by number: None is one that a container withholds, a list are instances of one."""

    def __init__(self, *gpus, memory=0):
        super().__init__()
        self.gpus = gpus
        self.memory = memory

    def nvmlDeviceGetCount_v2(self, count):
        count._obj.value = len(self.gpus)
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index, handle):
        handle._obj.value = 100 * (index + 1)
        return 4 if self.gpus[index] is None else 0

    def nvmlDeviceGetUUID(self, handle, text, size):
        number, part = divmod(handle.value, 100)
        text.value = (f"MIG-{number}{part}" if part else f"GPU-{number}").encode()
        return 0

    def nvmlDeviceGetMemoryInfo(self, handle, memory):
        memory._obj.total = GIB * (1 + handle.value % 100)
        return self.memory

    def nvmlDeviceGetMigMode(self, handle, mode, pending):
        mode._obj.value = int(isinstance(self.gpus[handle.value // 100 - 1], list))
        return 0

    def nvmlDeviceGetMaxMigDeviceCount(self, handle, count):
        count._obj.value = 7
        return 0

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle, place, part):
        part._obj.value = handle.value + place
        return 0 if place in self.gpus[handle.value // 100 - 1] else 6


def found(*gpus, **options):
    machine = Machine(*gpus, **options)
    return nvml.ask_driver(lambda: machine).gpus


def test_gpus_that_a_container_withholds_do_not_count():
    """CUDA does not see them either, so that its numbers are those of the others."""
    assert [(gpu.index, gpu.uuid) for gpu in found(None, "whole", None, "whole")] == [
        (0, "GPU-2"),
        (1, "GPU-4"),
    ]


def test_memory_that_is_the_host_s_is_not_known():
    assert found("whole", memory=3)[0].memory_bytes is None
    with pytest.raises(DriverError, match="GPU is lost"):
        found("whole", memory=15)


def test_instances_of_a_divided_gpu():
    gpus = found("whole", [2, 5], "whole")
    assert [(gpu.index, gpu.uuid, gpu.whole, gpu.memory_bytes // GIB) for gpu in gpus] == [
        (0, "GPU-1", "", 1),
        (1, "MIG-22", "GPU-2", 3),
        (1, "MIG-25", "GPU-2", 6),
        (2, "GPU-3", "", 1),
    ]


@pytest.mark.parametrize(
    ("listed", "uuids"),
    [
        (None, ["MIG-22"]),  # an instance that CUDA sees is alone
        ("0,2", ["GPU-1", "GPU-3"]),
        ("1", ["MIG-22"]),
        ("GPU-2", ["MIG-22"]),
        ("MIG-25", ["MIG-25"]),
        ("0,MIG-25", ["MIG-25"]),
        ("MIG-9", []),
    ],
)
def test_visible_instances(listed, uuids):
    environment = {} if listed is None else {"CUDA_VISIBLE_DEVICES": listed}
    gpus = found("whole", [2, 5], "whole")
    assert [gpu.uuid for gpu in visible_gpus(gpus, environment)] == uuids


def test_instances_travel_between_processes(monkeypatch):
    answering(monkeypatch, nvml.answer(lambda: Machine([1], "whole")))
    assert nvml.driver_facts().gpus == found([1], "whole")


# -- opening -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("uuid", "seen", "index"),
    [
        ("GPU-b", ["a", "b"], 1),
        ("MIG-b", ["b"], 0),
        ("MIG-b", ["a"], 0),  # the whole GPU's
        ("MIG-b", ["a", "c"], None),
        ("GPU-b", ["a"], None),
    ],
)
def test_which_device_of_torch_is_opened(monkeypatch, uuid, seen, index):

    from cardan.core.interfaces.capabilities import Capabilities, DeviceInfo
    from cardan.core.interfaces.errors import PluginError
    from cardan.platforms.cuda import device

    monkeypatch.setattr("torch.cuda.device_count", lambda: len(seen))
    monkeypatch.setattr(
        "torch.cuda.get_device_properties", lambda place: SimpleNamespace(uuid=seen[place])
    )
    monkeypatch.setattr(device, "GpuDevice", lambda info, capabilities, place: place)
    info = DeviceInfo(platform="cuda", index=0, name="H200", arch="sm_90", details={"uuid": uuid})
    if index is None:
        with pytest.raises(PluginError, match="CUDA_DEVICE_ORDER=PCI_BUS_ID"):
            device.open_device(info, Capabilities())
    else:
        assert device.open_device(info, Capabilities()) == index
