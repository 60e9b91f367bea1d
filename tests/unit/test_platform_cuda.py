"""The platform for NVIDIA's GPUs on a machine without one: drivers are made up."""

import subprocess
import sys

import pytest

from cardan.core.config.engine import EngineConfig
from cardan.core.config.model import ModelConfig
from cardan.core.constraint_solver import owned_constraints, solve
from cardan.core.interfaces.capabilities import DeviceInfo
from cardan.core.interfaces.version import contract_refusal
from cardan.core.types.model import ModelSummary
from cardan.platforms.cuda.nvml import DriverError, DriverFacts, GpuFacts, visible_gpus
from cardan.platforms.cuda.platform import CudaPlatform

GIB = 1 << 30


def gpu(index, name="H200", memory=140 * GIB, capability=(9, 0)):
    return GpuFacts(index, name, f"GPU-{index}{index}-abc", memory, capability)


def facts(*gpus):
    return DriverFacts("580.1", (13, 0), gpus)


@pytest.fixture
def torch_folder(tmp_path):
    """A build of torch with CUDA, as far as its files go."""
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libtorch_cuda.so").touch()
    return tmp_path


@pytest.fixture
def platform(torch_folder):
    def make(answer, environment=None, folder=torch_folder):
        def ask():
            if isinstance(answer, Exception):
                raise answer
            return answer

        return CudaPlatform(ask, environment or {}, lambda: folder)

    return make


def test_identity():
    assert CudaPlatform.name == "cuda"
    assert contract_refusal(CudaPlatform.contract) is None


def test_importing_and_probing_load_no_torch():
    code = (
        "import sys; from cardan.platforms.cuda.platform import CudaPlatform as P; "
        "p = P(); p.probe(); p.devices(); p.kernels(None); "
        "print([m for m in sys.modules if m.split('.')[0] in ('torch', 'triton', 'numpy')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_present_with_all_facts(platform):
    found = platform(facts(gpu(0), gpu(1, "A100", 80 * GIB, (8, 0))))
    assert found.probe().state == "present"
    assert found.probe().reason == "H200 (9.0), A100 (8.0)"
    first, second = found.devices()
    assert (first.name, first.index, first.arch, first.memory_bytes) == (
        "H200",
        0,
        "sm_90",
        140 * GIB,
    )
    assert (second.index, second.arch) == (1, "sm_80")
    assert first.details == {"uuid": "GPU-00-abc", "driver": "580.1", "cuda": "13.0"}


@pytest.mark.parametrize(
    ("answer", "environment", "state", "words"),
    [
        (OSError("no such file"), {}, "absent", "libnvidia-ml.so.1 is missing"),
        (DriverError("NVML cannot start", 9), {}, "absent", "not loaded"),
        (DriverError("NVML cannot start: mismatch", 18), {}, "broken", "mismatch"),
        (facts(), {}, "absent", "lists no GPU"),
        (facts(gpu(0)), {"CUDA_VISIBLE_DEVICES": ""}, "absent", "CUDA_VISIBLE_DEVICES=''"),
        (facts(gpu(0, "T4", capability=(7, 5))), {}, "absent", "8.0 or more (T4 has 7.5)"),
    ],
)
def test_absent_and_broken_say_why(platform, answer, environment, state, words):
    found = platform(answer, environment)
    assert found.probe().state == state
    assert words in found.probe().reason
    assert not found.devices()
    if state == "broken":
        assert found.probe().fix


def test_torch_must_be_there_and_know_cuda(platform, tmp_path):
    missing = platform(facts(gpu(0)), folder=None).probe()
    assert (missing.state, missing.fix) == ("broken", "pip install 'cardan[cuda]'")
    (tmp_path / "cpu_build").mkdir()
    plain = platform(facts(gpu(0)), folder=tmp_path / "cpu_build").probe()
    assert plain.state == "broken"
    assert "a build without CUDA" in plain.reason


@pytest.mark.parametrize(
    ("listed", "indices"),
    [
        (None, [0, 1, 2]),
        ("", []),
        ("2,0", [2, 0]),
        (" 1 , 2", [1, 2]),
        ("0,7,1", [0]),
        ("1,1", [1]),
        ("GPU-22", [2]),
        ("GPU-", []),
        ("-1", []),
        ("MIG-5", []),
    ],
)
def test_visible_devices(listed, indices):
    """As CUDA reads them: what follows an entry that names no device is ignored."""
    environment = {} if listed is None else {"CUDA_VISIBLE_DEVICES": listed}
    gpus = [gpu(0), gpu(1), gpu(2)]
    assert [item.index for item in visible_gpus(gpus, environment)] == indices


def test_devices_are_numbered_as_visible(platform):
    old = gpu(1, "P100", capability=(6, 0))
    found = platform(facts(gpu(0), old, gpu(2)), {"CUDA_VISIBLE_DEVICES": "2,1,0"})
    assert [(item.index, item.details["uuid"]) for item in found.devices()] == [
        (0, "GPU-22-abc"),
        (1, "GPU-00-abc"),
    ]


def test_capabilities_follow_the_architecture(platform):
    found = platform(facts(gpu(0), gpu(1, capability=(8, 9)), gpu(2, capability=(12, 0))))
    sets = [found.capabilities(info).instruction_sets for info in found.devices()]
    assert sets == [("sm_90", "tile_copies"), ("sm_89",), ("sm_120", "tile_copies")]
    assert found.capabilities(found.devices()[0]).dtypes[0] == "bfloat16"


def test_constraints_are_solvable_and_leave_the_user_alone(platform):
    found = platform(facts(gpu(0)))
    config = EngineConfig(model=ModelConfig(model="demo"))
    wishes = owned_constraints(found.constrain(config, found.devices()[0]), "platform cuda")
    assert solve(config, wishes).config.cache.block_size == 16
    assert solve(config.with_value("cache.block_size", 32), wishes).config.cache.block_size == 32
    assert {wish.severity for wish in wishes} == {"prefer"}


@pytest.mark.parametrize(("memory", "num_seqs"), [(24 * GIB, 256), (80 * GIB, 512)])
def test_preferences_hold_where_the_user_says_nothing(platform, memory, num_seqs):
    found = platform(facts(gpu(0, memory=memory)))
    config = EngineConfig(model=ModelConfig(model="demo"))
    wishes = owned_constraints(found.constrain(config, found.devices()[0]), "platform cuda")
    solved = solve(config, wishes).config
    assert solved.scheduler.max_num_seqs == num_seqs
    assert solved.scheduler.max_num_batched_tokens == 8192
    assert solved.cache.memory_utilization == 0.9
    config = config.with_value("scheduler.max_num_seqs", 128)
    assert solve(config, wishes).config.scheduler.max_num_seqs == 128


def test_shapes_cover_decode_steps_without_padding_tokens(platform):
    found = platform(facts(gpu(0)))
    model = ModelSummary(
        architecture="LlamaForCausalLM",
        vocab_size=100,
        hidden_size=64,
        num_layers=2,
        max_model_len=256,
        dtype="bfloat16",
    )
    shapes = found.shapes(model, found.devices()[0])
    assert set(shapes.sequence_buckets) <= set(shapes.token_buckets)


def test_child_environment(platform):
    found = platform(facts(gpu(0)))
    assert found.child_env("engine", found.devices()) == {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    assert found.child_env("server", found.devices()) == {}
    chosen = platform(facts(gpu(0)), {"CUDA_DEVICE_ORDER": "FASTEST_FIRST"})
    assert chosen.child_env("engine", chosen.devices()) == {}


def test_the_driver_is_asked_once(torch_folder):
    asked = []

    def ask():
        asked.append(1)
        return facts(gpu(0))

    found = CudaPlatform(ask, {}, lambda: torch_folder)
    found.probe()
    found.devices()
    assert len(asked) == 1


def test_opening_a_gpu_that_torch_does_not_see():
    from cardan.core.interfaces.capabilities import Capabilities
    from cardan.core.interfaces.errors import PluginError
    from cardan.platforms.cuda.device import open_device

    info = DeviceInfo(
        platform="cuda", index=0, name="H200", arch="sm_90", details={"uuid": "GPU-no"}
    )
    with pytest.raises(PluginError, match="does not see H200"):
        open_device(info, Capabilities())
