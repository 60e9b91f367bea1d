"""The platform for AMD's GPUs on a machine without one: the kernel's files are made up."""

import subprocess
import sys
from dataclasses import replace

import pytest

from cardan.core.config.engine import EngineConfig
from cardan.core.config.model import ModelConfig
from cardan.core.constraint_solver import owned_constraints, solve
from cardan.core.interfaces.capabilities import DeviceInfo
from cardan.core.interfaces.errors import UnsupportedError
from cardan.core.interfaces.version import contract_refusal
from cardan.core.types.model import ModelSummary
from cardan.platforms.cuda import platform as cuda_platform
from cardan.platforms.cuda.nvml import DriverFacts, GpuFacts
from cardan.platforms.rocm.architectures import architecture, known_architectures
from cardan.platforms.rocm.platform import RocmPlatform
from cardan.platforms.rocm.topology import Places, driver_facts, visible_gpus
from cardan.platforms.rocm.torch_build import TorchBuild, build_in
from cardan.platforms.shared.triton.targets import target_named

GIB = 1 << 30
HIP = TorchBuild("hip", "2.9.1+rocm6.4")
MI300X = {"version": 90402, "device": 0x74A1, "memory": 192 * GIB}
MI250X = {"version": 90010, "device": 0x740C, "memory": 64 * GIB}
RX_7900 = {"version": 110000, "device": 0x744C, "memory": 24 * GIB, "revision": 0xC8}
IN_CPU = {"version": 100306, "device": 0x164E, "memory": GIB // 2, "revision": 0xC9}


class Host:
    """Files as Linux's driver shows them; node 0 is the processor."""

    def __init__(self, root):
        self.root, self.count = root, 0
        self.closed = set()

    @property
    def places(self):
        return Places(
            self.root / "sys",
            self.root / "dev",
            (self.root / "amdgpu.ids",),
            lambda path: path.name not in self.closed,
        )

    def write(self, path, text):
        path = self.root / path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def load_driver(self):
        node = "sys/class/kfd/kfd/topology/nodes/0"
        self.write(f"{node}/properties", "cpu_cores_count 64\nsimd_count 0\nvendor_id 0\n")
        self.write("sys/module/amdgpu/version", "6.12.12\n")

    def add(self, version, device, memory, revision=0):
        self.count += 1
        number, render = self.count, 127 + self.count
        node = f"sys/class/kfd/kfd/topology/nodes/{number}"
        is_wide = version < 100000
        self.write(
            f"{node}/properties",
            f"cpu_cores_count 0\nsimd_count {1216 if is_wide else 192}\nmem_banks_count 1\n"
            f"lds_size_in_kb 64\nwave_front_size {64 if is_wide else 32}\n"
            f"simd_per_cu {4 if is_wide else 2}\ngfx_target_version {version}\nvendor_id 4098\n"
            f"device_id {device}\nlocation_id {number << 8}\ndomain 0\n"
            f"drm_render_minor {render}\nunique_id {0xABC0 + number}\n",
        )
        bank = f"heap_type 1\nsize_in_bytes {memory}\nflags 0\nwidth 8192\nmem_clk_max 1300\n"
        self.write(f"{node}/mem_banks/0/properties", bank)
        self.write(f"sys/class/drm/renderD{render}/device/revision", f"0x{revision:02x}\n")

    def plug(self, vendor="0x1002", kind="0x030000"):
        self.write("sys/bus/pci/devices/0000:03:00.0/vendor", f"{vendor}\n")
        self.write("sys/bus/pci/devices/0000:03:00.0/class", f"{kind}\n")


@pytest.fixture
def host(tmp_path):
    made = Host(tmp_path)
    made.load_driver()
    return made


def platform(host, environment=None, build=HIP):
    return RocmPlatform(host.places, environment or {}, lambda: build)


def test_identity():
    assert RocmPlatform.name == "rocm"
    assert contract_refusal(RocmPlatform.contract) is None


def test_importing_and_probing_load_no_torch():
    code = (
        "import sys; from cardan.platforms.rocm.platform import RocmPlatform as P; "
        "p = P(); p.probe(); p.devices(); [p.kernels(d) for d in p.known_devices()]; "
        "names = ('torch', 'triton', 'numpy', 'aiter'); "
        "print([m for m in sys.modules if m.split('.')[0] in names])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_present_with_all_facts(host):
    host.add(**MI300X)
    host.add(**RX_7900)
    found = platform(host)
    probe = found.probe()
    assert (probe.state, probe.score) == ("present", 100)
    assert probe.reason == "AMD Instinct MI300X (gfx942), AMD Radeon RX 7900 XTX (gfx1100)"
    first, second = found.devices()
    assert (first.arch, first.memory_bytes, first.index) == ("gfx942", 192 * GIB, 0)
    assert first.details == {
        "bus": "0000:01:00.0",
        "id": "GPU-000000000000abc1",
        "ordinal": "0",
        "render": "renderD128",
        "units": "304",
        "lanes": "64",
        "driver": "6.12.12",
    }
    assert (second.arch, second.details["units"]) == ("gfx1100", "96")
    assert found.doctor(first)["torch"] == "2.9.1+rocm6.4 (hip)"


def test_names(host):
    host.add(**{**RX_7900, "revision": 0xCC})
    host.add(**{**RX_7900, "device": 0x7777})
    host.add(**{**RX_7900, "device": 0x8888})
    host.write("amdgpu.ids", "# table\n1.0.0\n744C,\tCC,\tAMD Radeon RX 7900 XT\n")
    host.write("sys/class/drm/renderD129/device/product_name", "Engineering board\n")
    names = [gpu.name for gpu in driver_facts(host.places, {}).gpus]
    assert names == ["AMD Radeon RX 7900 XT", "Engineering board", "gfx1100"]


def test_memory_is_the_sum_of_the_banks_of_its_own(host):
    host.add(**MI300X)
    bank = "sys/class/kfd/kfd/topology/nodes/1/mem_banks/{}/properties"
    host.write(bank.format(1), f"heap_type 2\nsize_in_bytes {GIB}\n")
    host.write(bank.format(2), f"heap_type 0\nsize_in_bytes {7 * GIB}\n")
    assert driver_facts(host.places, {}).gpus[0].memory_bytes == 193 * GIB
    (host.root / bank.format(0)).write_text("heap_type 0\nsize_in_bytes 5\n")
    (host.root / bank.format(1)).unlink()
    assert driver_facts(host.places, {}).gpus[0].memory_bytes is None


def test_nodes_that_cannot_be_read_are_not_there(host):
    """A container without a GPU's files may not read its node; the runtime counts without it."""
    host.add(**MI300X)
    host.add(**MI250X)
    node = host.root / "sys/class/kfd/kfd/topology/nodes/1/properties"
    node.unlink()
    node.mkdir()
    assert [gpu.arch for gpu in driver_facts(host.places, {}).gpus] == ["gfx90a"]


def test_what_the_runtime_is_told_to_believe(host):
    host.add(**{**RX_7900, "version": 110001})
    assert platform(host, {"HSA_OVERRIDE_GFX_VERSION": "11.0.0"}).devices()[0].arch == "gfx1100"
    assert platform(host, {"HSA_OVERRIDE_GFX_VERSION": "eleven"}).devices()[0].arch == "gfx1101"


@pytest.mark.parametrize(
    ("environment", "indices"),
    [
        ({}, [0, 1, 2]),
        ({"ROCR_VISIBLE_DEVICES": ""}, []),
        ({"ROCR_VISIBLE_DEVICES": "2,0"}, [2, 0]),
        ({"ROCR_VISIBLE_DEVICES": "GPU-000000000000ABC2"}, [1]),
        ({"ROCR_VISIBLE_DEVICES": "0,7,1"}, [0]),
        ({"HIP_VISIBLE_DEVICES": "1,1"}, [1]),
        ({"HIP_VISIBLE_DEVICES": "-1"}, []),
        ({"CUDA_VISIBLE_DEVICES": "1"}, [1]),
        ({"HIP_VISIBLE_DEVICES": "2", "CUDA_VISIBLE_DEVICES": "1"}, [2]),
        ({"ROCR_VISIBLE_DEVICES": "2,1", "HIP_VISIBLE_DEVICES": "1"}, [1]),
    ],
)
def test_visible_devices(host, environment, indices):
    for _ in range(3):
        host.add(**MI300X)
    gpus = driver_facts(host.places, {}).gpus
    assert [gpu.index for gpu in visible_gpus(gpus, environment)] == indices


def test_devices_keep_their_place_among_those_that_hip_counts(host):
    for gpu in (IN_CPU, MI300X):
        host.add(**gpu)
    (device,) = platform(host).devices()
    assert (device.index, device.details["ordinal"]) == (0, "1")


def test_absent_says_why(host, tmp_path):
    assert "lists no GPU" in platform(host).probe().reason
    host.add(**IN_CPU)
    probe = platform(host).probe()
    assert probe.state == "absent"
    assert "no GPU is one of gfx90a, gfx942" in probe.reason
    assert "is gfx1036" in probe.reason
    host.add(**MI300X)
    probe = platform(host, {"HIP_VISIBLE_DEVICES": ""}).probe()
    assert (probe.state, probe.reason) == (
        "absent",
        "HIP_VISIBLE_DEVICES='' hides all of the 2 GPUs",
    )
    bare = Host(tmp_path / "bare")
    assert platform(bare).probe().reason == "there is no AMD GPU"
    bare.plug(vendor="0x10de")
    assert platform(bare).probe().reason == "there is no AMD GPU"


def test_a_driver_that_is_not_loaded_is_a_fault_for_those_who_want_it(tmp_path):
    bare = Host(tmp_path)
    bare.plug(kind="0x120000")
    probe = platform(bare).probe()
    assert (probe.state, "modprobe amdgpu" in probe.fix) == ("broken", True)
    assert "/sys/class/kfd is missing" in probe.reason
    assert platform(bare, build=TorchBuild("host", "2.13")).probe().state == "absent"


def test_files_that_may_not_be_opened(host):
    host.add(**MI300X)
    for name in ("kfd", "renderD128"):
        host.closed = {name}
        probe = platform(host).probe()
        assert probe.state == "broken"
        assert name in probe.reason
        assert "groups render and video" in probe.fix


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (TorchBuild("none"), "not installed"),
        (TorchBuild("host", "2.13.0+cpu"), "torch 2.13.0+cpu is a build for the host alone"),
        (TorchBuild("cuda", "2.13.0"), "a build for CUDA"),
        (replace(HIP, archs=frozenset({"gfx90a", "gfx1100"})), "none for AMD Instinct MI300X"),
    ],
)
def test_a_torch_that_cannot_use_the_gpu(host, build, words):
    host.add(**MI300X)
    probe = platform(host, build=build).probe()
    assert probe.state == "broken"
    assert words in probe.reason
    assert "torch for ROCm" in probe.fix or "ROCR_VISIBLE_DEVICES" in probe.fix


def test_on_hosts_with_both_vendors_torch_decides(host, tmp_path, monkeypatch):
    """Neither platform is in the other's way."""
    host.add(**MI300X)
    host.write("dev/nvidiactl", "")
    assert platform(host, build=TorchBuild("cuda", "2.13.0")).probe().state == "absent"
    assert platform(host).probe().state == "present"
    folder = tmp_path / "torch"
    (folder / "lib").mkdir(parents=True)
    (folder / "lib" / "libtorch_hip.so").touch()
    gpus = DriverFacts("580.1", (13, 0), (GpuFacts(0, "H200", "GPU-1", 1, (9, 0)),))
    other = cuda_platform.CudaPlatform(lambda: gpus, {}, lambda: folder)
    monkeypatch.setattr(cuda_platform, "_OTHER_DRIVER", tmp_path / "no")
    assert other.probe().state == "broken"
    monkeypatch.setattr(cuda_platform, "_OTHER_DRIVER", tmp_path)
    assert other.probe().state == "absent"


def test_builds_of_torch_by_their_files(tmp_path):
    libraries = tmp_path / "lib"
    libraries.mkdir()
    assert build_in(tmp_path, "2.9") == TorchBuild("host", "2.9")
    (libraries / "libtorch_cuda.so").touch()
    assert build_in(tmp_path, "2.9").kind == "cuda"
    (libraries / "libtorch_hip.so").touch()
    assert build_in(tmp_path, "2.9") == TorchBuild("hip", "2.9")
    for place, archs in (("rocblas", ("942", "90a", "1100")), ("hipblaslt", ("942", "90a"))):
        folder = libraries / place / "library"
        folder.mkdir(parents=True)
        for arch in archs:
            (folder / f"Kernels.so-000-gfx{arch}-xnack-.hsaco").touch()
    assert build_in(tmp_path, "2.9").archs == {"gfx942", "gfx90a"}


@pytest.mark.parametrize(
    ("arch", "words", "kv_dtypes", "peers"),
    [
        ("gfx90a", ("mfma", "wave64"), ("int8",), True),
        ("gfx942", ("mfma", "wave64", "float8_fnuz"), ("int8", "float8_e4m3"), True),
        ("gfx950", ("mfma", "wave64", "float8_ocp"), ("int8", "float8_e4m3"), True),
        ("gfx1100", ("wmma", "wave32"), ("int8",), False),
        ("gfx1201", ("wmma", "wave32", "float8_ocp"), ("int8", "float8_e4m3"), False),
    ],
)
def test_capabilities_follow_the_architecture(host, arch, words, kv_dtypes, peers):
    info = DeviceInfo(platform="rocm", index=0, name="x", arch=arch)
    found = platform(host).capabilities(info)
    assert found.instruction_sets == (arch, *words)
    assert found.kv_dtypes == kv_dtypes
    assert (found.graphs, found.peer_copies, found.sleep_levels) == ("full", peers, (1, 2))


def test_kernels_know_what_the_platform_knows():
    for name in known_architectures():
        known, target = architecture(name), target_named(name)
        assert (known.products, known.lds_bytes) == (target.products, target.shared_bytes)


def test_an_architecture_that_is_not_known(host):
    info = DeviceInfo(platform="rocm", index=0, name="x", arch="gfx803")
    with pytest.raises(UnsupportedError, match="knows no gfx803; it knows gfx90a"):
        platform(host).capabilities(info)


@pytest.mark.parametrize(("gpu", "num_seqs"), [(RX_7900, 256), (MI300X, 512)])
def test_preferences_leave_the_user_alone(host, gpu, num_seqs):
    host.add(**gpu)
    found = platform(host)
    config = EngineConfig(model=ModelConfig(model="demo"))
    wishes = owned_constraints(found.constrain(config, found.devices()[0]), "platform rocm")
    assert solve(config, wishes).config.scheduler.max_num_seqs == num_seqs
    assert solve(config.with_value("cache.block_size", 32), wishes).config.cache.block_size == 32
    assert {wish.severity for wish in wishes} == {"prefer"}


def test_shapes_and_peaks(host):
    found = platform(host)
    model = ModelSummary(
        architecture="LlamaForCausalLM",
        vocab_size=100,
        hidden_size=64,
        num_layers=2,
        max_model_len=256,
        dtype="bfloat16",
    )
    assert 512 in found.shapes(model, found.known_devices()[0]).token_buckets
    known = {info.name: info for info in found.known_devices()}
    peaks = found.roofline(known["AMD Instinct MI300X"])
    assert (peaks.bytes_per_s, peaks.flop_per_s["bfloat16"]) == (5.3e12, 1307.4e12)
    assert peaks.efficiency is None
    assert "data sheet" in peaks.source
    assert found.roofline(replace(known["AMD Instinct MI300X"], name="AMD Odd")) is None
    assert all(architecture(info.arch) for info in known.values())
