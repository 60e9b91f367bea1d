"""The platform for TPUs on a machine without one, and without jax. Files are made up."""

import importlib.machinery
import subprocess
import sys

import pytest

from cardan.core.config.engine import EngineConfig
from cardan.core.config.model import ModelConfig
from cardan.core.constraint_solver import owned_constraints, solve
from cardan.core.interfaces.errors import ConfigError
from cardan.core.interfaces.version import contract_refusal
from cardan.core.types.model import ModelSummary
from cardan.platforms.tpu import platform as tpu_platform
from cardan.platforms.tpu.platform import HOST_VARIABLE, TpuPlatform

GIB = 1 << 30
MODULES = ("jax", "torchax", "torch", "libtpu")


class Host:
    """A machine's files."""

    def __init__(self, root):
        self.root = root

    def write(self, path, text=""):
        path = self.root / path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def plug(self, slot, device, vendor="0x1ae0"):
        self.write(f"sys/bus/pci/devices/0000:{slot:02x}:04.0/vendor", f"{vendor}\n")
        self.write(f"sys/bus/pci/devices/0000:{slot:02x}:04.0/device", f"{device}\n")

    def platform(self, **environment):
        return TpuPlatform(self.root, environment)


@pytest.fixture
def host(tmp_path):
    return Host(tmp_path)


@pytest.fixture
def installed(monkeypatch):
    """Which modules there are; a test may take some away."""
    names = set(MODULES)

    def found(name):
        return importlib.machinery.ModuleSpec(name, None) if name in names else None

    monkeypatch.setattr(tpu_platform, "find_spec", found)
    return names


def test_is_absent_without_a_tpu(host, installed):
    host.plug(1, "0x2330", vendor="0x10de")
    host.plug(2, "0x1f")  # Google makes other things, too
    probe = host.platform().probe()
    assert probe.state == "absent"
    assert "no TPU" in probe.reason
    assert host.platform().devices() == ()


def test_finds_chips(host, installed):
    for slot in range(4):
        host.plug(slot, "0x006f")
        host.write(f"dev/vfio/{slot}")
    platform = host.platform()
    probe = platform.probe()
    assert (probe.state, probe.reason) == ("present", "4 x TPU v6e")
    devices = platform.devices()
    assert [device.index for device in devices] == [0, 1, 2, 3]
    assert {(device.arch, device.memory_bytes) for device in devices} == {("v6e", 32 * GIB)}
    assert platform.capabilities(devices[0]).dtypes[0] == "bfloat16"


def test_a_tpu7x_is_two_devices(host, installed):
    host.plug(0, "0x0076")
    assert [device.memory_bytes for device in host.platform().devices()] == [96 * GIB, 96 * GIB]


@pytest.mark.parametrize("missing", MODULES)
def test_is_broken_without_its_packages(host, installed, missing):
    host.plug(0, "0x0063")
    host.write("dev/accel0")
    installed.discard(missing)
    probe = host.platform().probe()
    assert probe.state == "broken"
    assert missing in probe.reason
    assert "cardan[tpu]" in probe.fix


def test_is_broken_without_a_node(host, installed):
    host.plug(0, "0x0063")
    host.write("dev/vfio/vfio")  # the module's own, which leads to no device
    probe = host.platform().probe()
    assert probe.state == "broken"
    assert "/dev/accel" in probe.fix


def test_a_host_poses_as_one_where_it_is_asked_to(host, installed):
    installed.discard("libtpu")
    platform = host.platform(**{HOST_VARIABLE: "1"})
    assert (platform.probe().state, platform.probe().score) == ("present", 0)
    (device,) = platform.devices()
    assert platform.child_env("engine", [device]) == {"JAX_PLATFORMS": "cpu"}
    assert platform.roofline(device) is None
    assert host.platform(**{HOST_VARIABLE: "0"}).probe().state == "absent"
    assert host.platform().child_env("engine", [device]) == {}


def test_import_and_probe_load_no_runtime(host):
    code = (
        "import sys; from cardan.platforms.tpu.platform import TpuPlatform\n"
        "p = TpuPlatform(); p.probe(); p.devices()\n"
        "assert not {'jax', 'torchax', 'torch', 'libtpu'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_contract_and_claims():
    assert contract_refusal(TpuPlatform.contract) is None
    assert "torch.privateuse1" in TpuPlatform.claims


@pytest.fixture
def device(host, installed):
    host.plug(0, "0x006f")
    return host.platform().devices()[0]


def solved(device, **changes):
    config = EngineConfig(model=ModelConfig(model="demo"))
    for path, value in changes.items():
        config = config.with_value(path.replace("__", "."), value)
    platform = TpuPlatform()
    return solve(config, owned_constraints(platform.constrain(config, device), "tpu"))


def test_settings(device):
    config = solved(device).config
    assert (config.cache.block_size, config.scheduler.max_num_seqs) == (32, 128)
    assert config.scheduler.max_num_batched_tokens == 1024
    assert config.cache.memory_utilization == 0.9


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("model__quantization", "int8"),
        ("cache__kv_cache_dtype", "int8"),
        ("cache__block_size", 12),
    ],
)
def test_refuses_what_programs_cannot_do(device, path, value):
    with pytest.raises(ConfigError, match=path.replace("__", ".").split(".")[1]):
        solved(device, **{path: value})


def test_shapes_hold_the_longest_sequence(device):
    model = ModelSummary(
        architecture="LlamaForCausalLM",
        vocab_size=64,
        hidden_size=64,
        num_layers=1,
        max_model_len=5000,
        dtype="bfloat16",
    )
    shapes = TpuPlatform().shapes(model, device)
    assert shapes.strict
    assert shapes.kv_len_buckets == (256, 1024, 4096, 5000)


def test_rooflines_of_known_devices():
    platform = TpuPlatform()
    peaks = {device.arch: platform.roofline(device) for device in platform.known_devices()}
    assert set(peaks) == {"v4", "v5e", "v5p", "v6e", "tpu7x"}
    assert peaks["v6e"].flop_per_s["bfloat16"] == 918e12
    assert peaks["v5e"].bytes_per_s == 819e9
