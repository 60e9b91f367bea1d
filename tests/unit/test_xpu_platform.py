"""The platform for Intel's GPUs on a machine without one: sysfs and the software are made up."""

import os
import subprocess
import sys
from itertools import pairwise

import pytest

from cardan.core.config.engine import EngineConfig
from cardan.core.config.model import ModelConfig
from cardan.core.constraint_solver import owned_constraints, solve
from cardan.core.interfaces.version import contract_refusal
from cardan.platforms.xpu.families import FAMILIES, family_of, num_tiles
from cardan.platforms.xpu.platform import XpuPlatform
from cardan.platforms.xpu.sysfs import finder, intel_cards

GIB = 1 << 30
B580, A770, MAX_1550, LUNAR_LAKE, OLD_UHD = 0xE20B, 0x56A0, 0x0BD5, 0x64A0, 0x9A49


class Machine:
    """Files as the kernel and the distribution lay them."""

    def __init__(self, root):
        self.root = root
        self.environment = {}
        self.torch = root / "torch"
        self.libraries = {"libze_loader.so.1", "libze_intel_gpu.so.1"}
        self.num_cards = 0
        (root / "proc").mkdir()
        (root / "proc" / "meminfo").write_text(
            "MemTotal:   33554432 kB\nMemFree:    1048576 kB\nMemAvailable:   16777216 kB\n"
        )
        (root / "dev" / "dri").mkdir(parents=True)
        self.set_torch("libtorch_xpu.so")

    def set_torch(self, library):
        (self.torch / "lib").mkdir(parents=True, exist_ok=True)
        (self.torch / "xpu").mkdir(exist_ok=True)
        for old in (self.torch / "lib").iterdir():
            old.unlink()
        (self.torch / "lib" / library).touch()
        (self.torch / "xpu" / "graphs.py").touch()

    def add(self, device_id, vendor=0x8086, has_node=True, kind=0x030000):
        number = self.num_cards
        self.num_cards += 1
        address = f"0000:{number + 3:02x}:00.0"
        device = self.root / "sys" / "devices" / "pci0000:00" / address
        (device / "drm" / f"card{number}").mkdir(parents=True)
        (device / "drm" / f"renderD{128 + number}").mkdir()
        (device / "vendor").write_text(f"{vendor:#06x}\n")
        (device / "device").write_text(f"{device_id:#06x}\n")
        (device / "class").write_text(f"{kind:#08x}\n")
        driver = self.root / "sys" / "bus" / "pci" / "drivers" / "xe"
        driver.mkdir(parents=True, exist_ok=True)
        (device / "driver").symlink_to(driver)
        entry = self.root / "sys" / "class" / "drm" / f"card{number}"
        entry.mkdir(parents=True)
        (entry / "device").symlink_to(device)
        (entry.parent / f"card{number}-HDMI-A-1").mkdir()
        if has_node:
            (self.root / "dev" / "dri" / f"renderD{128 + number}").touch()

    def platform(self):
        return XpuPlatform(
            self.root, self.environment, lambda: self.torch, lambda name: name in self.libraries
        )


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path)


def test_identity():
    assert XpuPlatform.name == "xpu"
    assert contract_refusal(XpuPlatform.contract) is None


def test_importing_and_probing_load_no_torch():
    code = (
        "import sys; from cardan.platforms.xpu.platform import XpuPlatform as P; "
        "p = P(); p.probe(); p.devices(); [p.kernels(d) for d in p.known_devices()]; "
        "names = ('torch', 'triton', 'numpy', 'vllm_xpu_kernels', 'intel_extension_for_pytorch'); "
        "print([m for m in sys.modules if m.split('.')[0] in names])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_present_with_all_facts(machine):
    machine.add(B580)
    platform = machine.platform()
    probe = platform.probe()
    assert (probe.state, probe.reason) == ("present", "Arc B580 (xe2_hpg)")
    (device,) = platform.devices()
    assert (device.name, device.index, device.memory_bytes) == ("Arc B580", 0, 12 * GIB)
    assert device.details == {
        "address": "0000:03:00.0",
        "device_id": "0xe20b",
        "family": "Battlemage",
        "driver": "xe",
        "node": "/dev/dri/renderD128",
    }


def test_absent_where_there_is_none(machine):
    assert machine.platform().probe().reason == "there is no Intel GPU under /sys/class/drm"
    machine.add(0x2330, vendor=0x10DE)
    machine.add(B580, kind=0x040300)
    assert machine.platform().probe().state == "absent"
    assert not machine.platform().devices()


def test_absent_where_torch_serves_none(machine):
    machine.add(OLD_UHD)
    probe = machine.platform().probe()
    assert probe.state == "absent"
    assert "serve none of the Intel GPUs here (PCI device 0x9a49)" in probe.reason


def test_absent_where_the_mask_hides_all(machine):
    machine.add(B580)
    machine.environment["ZE_AFFINITY_MASK"] = "7"
    probe = machine.platform().probe()
    assert probe.state == "absent"
    assert probe.reason == "ZE_AFFINITY_MASK='7' hides all of the 1 Intel GPUs"


def test_absent_in_a_container_that_is_not_given_the_device(machine):
    machine.add(B580, has_node=False)
    probe = machine.platform().probe()
    assert probe.state == "absent"
    assert "this process is not given /dev/dri/renderD128" in probe.reason
    assert not machine.platform().devices()


def test_broken_without_permission(machine, monkeypatch):
    machine.add(B580)
    monkeypatch.setattr("cardan.platforms.xpu.platform.may_open", lambda path: False)
    probe = machine.platform().probe()
    assert probe.state == "broken"
    assert "this user may not open /dev/dri/renderD128" in probe.reason
    assert "usermod -aG render" in probe.fix


def test_broken_without_torch_or_with_another_build(machine):
    machine.add(B580)
    platform = XpuPlatform(machine.root, {}, lambda: None, lambda name: True)
    assert platform.probe().reason == "torch is not installed"
    machine.set_torch("libtorch_cpu.so")
    probe = machine.platform().probe()
    assert probe.state == "broken"
    assert "is a build without XPU" in probe.reason
    assert "docs/xpu.md" in probe.fix


@pytest.mark.parametrize(
    ("library", "package"),
    [("libze_loader.so.1", "libze1"), ("libze_intel_gpu.so.1", "libze-intel-gpu1")],
)
def test_broken_without_level_zero(machine, library, package):
    machine.add(A770)
    machine.libraries.remove(library)
    probe = machine.platform().probe()
    assert probe.state == "broken"
    assert library in probe.reason
    assert package in probe.fix


def test_an_integrated_gpu_that_nobody_set_up_stops_nothing(machine):
    machine.add(LUNAR_LAKE)
    assert 0 < machine.platform().probe().score < 90
    machine.set_torch("libtorch_cpu.so")
    probe = machine.platform().probe()
    assert probe.state == "absent"
    assert "is not set up: torch" in probe.reason


def test_the_probe_is_the_same_in_a_forked_child(machine):
    machine.add(B580)
    expected = machine.platform().probe()
    child = os.fork()
    if child == 0:
        os._exit(0 if machine.platform().probe() == expected else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_cards_hide_integrated_gpus_as_for_torch(machine):
    machine.add(LUNAR_LAKE)
    machine.add(B580)
    assert [item.name for item in machine.platform().devices()] == ["Arc B580"]
    machine.environment["ZE_AFFINITY_MASK"] = "0"
    (device,) = machine.platform().devices()
    assert device.details["family"] == "Lunar Lake"


def test_integrated_gpus_share_the_hosts_memory(machine):
    machine.add(LUNAR_LAKE)
    platform = machine.platform()
    (device,) = platform.devices()
    assert device.memory_bytes == 32 * GIB
    assert device.details["memory"] == "shared with the host"
    assert platform.capabilities(device).unified_memory
    assert "may refuse" in platform.doctor(device)["free memory"]


@pytest.mark.parametrize(
    ("mask", "hierarchy", "found"),
    [
        (None, "", ["0", "1", "0", "1"]),
        ("1,2", "FLAT", ["1", "0"]),
        ("2, 0", "", ["0", "0"]),
        ("0.1", "", []),
        (None, "COMPOSITE", [None, None]),
        ("1.0", "COMPOSITE", [None]),
        ("x", "COMPOSITE", []),
    ],
)
def test_tiles_and_the_mask(machine, mask, hierarchy, found):
    """Tiles are devices unless joined; the mask filters and keeps the order of the bus."""
    machine.add(MAX_1550)
    machine.add(MAX_1550)
    machine.environment["ZE_FLAT_DEVICE_HIERARCHY"] = hierarchy
    if mask is not None:
        machine.environment["ZE_AFFINITY_MASK"] = mask
    devices = machine.platform().devices()
    assert [item.details.get("tile") for item in devices] == found
    memory = 128 if hierarchy == "COMPOSITE" else 64
    assert {item.memory_bytes for item in devices} <= {memory * GIB}


def test_capabilities_follow_the_family(machine):
    machine.add(B580)
    machine.add(A770)
    platform = machine.platform()
    battlemage, alchemist = map(platform.capabilities, platform.devices())
    assert battlemage.instruction_sets == ("xe2_hpg", "xmx", "block_io", "fp64")
    assert alchemist.instruction_sets == ("xe_hpg", "xmx")
    assert battlemage.graphs == "full"
    assert battlemage.kv_dtypes == ("int8",)
    (machine.torch / "xpu" / "graphs.py").unlink()
    assert machine.platform().capabilities(platform.devices()[0]).graphs == "none"
    assert "XPUGraph" in machine.platform().doctor(platform.devices()[0])["graphs"]


def test_kernels_that_count_in_float64_are_for_devices_that_have_it(machine):
    machine.add(B580)
    machine.add(A770)
    platform = machine.platform()

    def needs(device):
        kernels = {item.name: item.needs for item in platform.kernels(device)}
        return kernels["triton.choose_tokens"].features

    battlemage, alchemist = platform.devices()
    assert not needs(battlemage)
    assert needs(alchemist) == {"fp64"}
    machine.environment |= platform.child_env("engine", platform.devices())
    assert not needs(alchemist)


def test_child_environment(machine):
    machine.add(B580)
    platform = machine.platform()
    wanted = {"ZE_ENABLE_PCI_ID_DEVICE_ORDER": "1", "ZES_ENABLE_SYSMAN": "1"}
    assert platform.child_env("engine", platform.devices()) == wanted
    assert platform.child_env("server", platform.devices()) == {}
    machine.environment["ZES_ENABLE_SYSMAN"] = "0"
    assert "ZES_ENABLE_SYSMAN" not in platform.child_env("worker", platform.devices())
    machine.add(A770)
    assert platform.child_env("engine", platform.devices())["IGC_EnableDPEmulation"] == "1"


def test_constraints_are_solvable_and_leave_the_user_alone(machine):
    machine.add(LUNAR_LAKE)
    platform = machine.platform()
    config = EngineConfig(model=ModelConfig(model="demo"))
    wishes = owned_constraints(platform.constrain(config, platform.devices()[0]), "platform xpu")
    assert solve(config, wishes).config.cache.memory_utilization == 0.5
    assert solve(config.with_value("cache.block_size", 32), wishes).config.cache.block_size == 32
    assert {wish.severity for wish in wishes} == {"prefer"}


def test_planning_knows_data_sheets():
    platform = XpuPlatform()
    known = {item.name: item for item in platform.known_devices()}
    found = platform.roofline(known["Arc B580"])
    assert found.bytes_per_s == 456e9
    assert "data sheet" in found.source
    for device in known.values():
        peaks = platform.roofline(device).flop_per_s
        assert peaks["bfloat16"] > peaks["float32"]
        assert device.arch in {family.arch for family in FAMILIES}


def test_families_do_not_overlap():
    ranges = sorted(span for family in FAMILIES for span in family.ids)
    assert all(first <= last for first, last in ranges)
    assert all(a[1] < b[0] for a, b in pairwise(ranges))
    assert family_of(0x56C0).title == "Alchemist"
    assert family_of(0x7D51).arch == "xe_lpg_plus"
    assert (num_tiles(MAX_1550), num_tiles(0x0BDA)) == (2, 1)


def test_libraries_are_found_in_folders_and_in_the_loaders_cache(tmp_path):
    is_there = finder(tmp_path, [str(tmp_path / "own")])
    assert not is_there("libze_loader.so.1")
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "libze_loader.so.1").touch()
    assert is_there("libze_loader.so.1")
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc" / "ld.so.cache").write_bytes(b"\0libze_intel_gpu.so.1\0/usr/lib/x\0")
    assert is_there("libze_intel_gpu.so.1")


def test_unreadable_entries_are_passed_over(machine):
    machine.add(B580)
    (machine.root / "sys" / "class" / "drm" / "card9").mkdir()
    broken = machine.root / "sys" / "devices" / "pci0000:00" / "0000:03:00.0" / "device"
    assert len(intel_cards(machine.root)) == 1
    broken.write_text("no number")
    assert not intel_cards(machine.root)
