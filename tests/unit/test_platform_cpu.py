"""The CPU platform on made-up machines: identity, threads, limits, capabilities, constraints."""

import os
import subprocess
import sys

import pytest

from cardan.core.config.engine import EngineConfig
from cardan.core.config.model import ModelConfig
from cardan.core.constraint_solver import solve
from cardan.core.interfaces.errors import ConfigError
from cardan.core.interfaces.version import contract_refusal
from cardan.platforms.cpu import platform as cpu_platform
from cardan.platforms.cpu.cgroup import cpu_quota, memory_left, memory_limit
from cardan.platforms.cpu.platform import CpuPlatform
from cardan.platforms.cpu.threads import usable_threads

GIB = 1 << 30
EPYC = "processor : 0\nmodel name\t: Fancy CPU 9000\nflags\t\t: sse4_2 avx2 fma avx512f {}\n"
ARM = "processor : 0\nFeatures\t: fp asimd asimddp i8mm sve {}\n"


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Writes a file system of ``path=text`` pairs; four CPUs are allowed."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3}, raising=False)

    def write(files):
        for path, text in files.items():
            file = tmp_path / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        return tmp_path

    return write


def siblings(*groups):
    return {
        f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list": ",".join(map(str, group))
        for group in groups
        for cpu in group
    }


V2 = {"proc/self/cgroup": "0::/app/worker\n"}
V1 = {"proc/self/cgroup": "5:memory:/app\n3:cpu,cpuacct:/app\n1:name=systemd:/app\n"}


@pytest.mark.parametrize(
    ("files", "threads"),
    [
        ({}, 4),
        (siblings([0, 1], [2, 3]), 2),
        (siblings([0], [1], [2], [3]), 4),
        (siblings([0, 4], [1, 5], [2, 6], [3, 7]), 4),
        (V2 | {"sys/fs/cgroup/app/worker/cpu.max": "max 100000\n"}, 4),
        (V2 | {"sys/fs/cgroup/app/worker/cpu.max": "150000 100000\n"}, 2),
        (V2 | {"sys/fs/cgroup/app/cpu.max": "250000 100000\n"}, 3),
        (V2 | {"sys/fs/cgroup/cpu.max": "20000 100000\n"}, 1),
        (V2 | {"sys/fs/cgroup/cpu.max": "900000 100000\n"}, 4),
        (V2 | {"sys/fs/cgroup/cpu.max": "300000 100000"} | siblings([0, 1], [2, 3]), 2),
        (
            V1
            | {
                "sys/fs/cgroup/cpu,cpuacct/app/cpu.cfs_quota_us": "120000\n",
                "sys/fs/cgroup/cpu,cpuacct/app/cpu.cfs_period_us": "100000\n",
            },
            2,
        ),
        (
            V1
            | {
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            4,
        ),
    ],
)
def test_usable_threads(machine, files, threads):
    assert usable_threads(machine(files)) == threads


def test_quota_is_the_tightest_of_all_levels(machine):
    root = machine(
        V2
        | {
            "sys/fs/cgroup/app/worker/cpu.max": "300000 100000",
            "sys/fs/cgroup/app/cpu.max": "50000 100000",
        }
    )
    assert cpu_quota(root) == 0.5


@pytest.mark.parametrize(
    ("files", "limit", "left"),
    [
        ({}, None, None),
        (V2 | {"sys/fs/cgroup/memory.max": "max"}, None, None),
        (
            V2
            | {
                "sys/fs/cgroup/app/memory.max": str(4 * GIB),
                "sys/fs/cgroup/app/memory.current": str(3 * GIB),
                "sys/fs/cgroup/app/memory.stat": f"anon 5\ninactive_file {GIB}\n",
            },
            4 * GIB,
            2 * GIB,
        ),
        (
            V1
            | {
                "sys/fs/cgroup/memory/app/memory.limit_in_bytes": str(2 * GIB),
                "sys/fs/cgroup/memory/app/memory.usage_in_bytes": str(GIB),
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712",
            },
            2 * GIB,
            GIB,
        ),
    ],
)
def test_memory_limits(machine, files, limit, left):
    root = machine(files)
    assert (memory_limit(root), memory_left(root)) == (limit, left)


MEMORY = {"proc/meminfo": f"MemTotal: {16 * GIB >> 10} kB\nMemAvailable: {9 * GIB >> 10} kB\n"}


def test_device_states_what_was_found(machine):
    root = machine(
        MEMORY
        | {"proc/cpuinfo": EPYC.format("avx512_bf16"), "sys/devices/system/node/node0/x": ""}
        | {"sys/devices/system/node/node1/x": ""}
    )
    (device,) = CpuPlatform(root).devices()
    assert (device.platform, device.index, device.name) == ("cpu", 0, "Fancy CPU 9000")
    assert device.memory_bytes == 16 * GIB
    assert device.details["num_threads"] == "4"
    assert device.details["numa_nodes"] == "2"
    assert device.details["instruction_sets"] == "sse4_2 avx2 fma avx512f avx512_bf16"
    assert device.details["torch"][0].isdigit()


def test_memory_is_what_the_group_allows(machine):
    root = machine(MEMORY | V2 | {"sys/fs/cgroup/memory.max": str(4 * GIB)})
    platform = CpuPlatform(root)
    (device,) = platform.devices()
    assert device.memory_bytes == 4 * GIB
    info = platform.open(device).memory_info()
    assert (info.total, info.free, info.exact) == (4 * GIB, 4 * GIB, False)


def test_a_machine_without_files_still_has_a_device(machine):
    (device,) = CpuPlatform(machine({})).devices()
    assert device.name
    assert device.memory_bytes > 0


@pytest.mark.parametrize(
    ("cpuinfo", "first"),
    [
        (EPYC.format(""), "float32"),
        (EPYC.format("avx512_vnni"), "float32"),
        (EPYC.format("avx512_bf16"), "bfloat16"),
        (EPYC.format("amx_bf16 amx_int8"), "bfloat16"),
        (ARM.format(""), "float32"),
        (ARM.format("bf16"), "bfloat16"),
    ],
)
def test_bfloat16_comes_first_only_where_it_is_native(machine, cpuinfo, first):
    platform = CpuPlatform(machine({"proc/cpuinfo": cpuinfo}))
    capabilities = platform.capabilities(platform.devices()[0])
    assert capabilities.dtypes[0] == first
    assert set(capabilities.dtypes) == {"float32", "bfloat16", "float16"}
    assert capabilities.async_depth == 0


def test_arm_instruction_sets(machine):
    platform = CpuPlatform(machine({"proc/cpuinfo": ARM.format("bf16")}))
    found = platform.capabilities(platform.devices()[0]).instruction_sets
    assert found == ("neon", "asimddp", "i8mm", "sve", "bf16")


def test_constraints_name_real_settings(machine):
    platform = CpuPlatform(machine({"proc/cpuinfo": EPYC.format("")}))
    config = EngineConfig(model=ModelConfig(model="m"))
    constraints = {c.path: c for c in platform.constrain(config, platform.devices()[0])}
    for path, constraint in constraints.items():
        config.get(path)
        assert constraint.reason
    assert constraints["scheduler.async_depth"].severity == "require"
    assert not constraints["scheduler.async_depth"].allows(1)
    assert constraints["parallel.tensor_parallel_size"].severity == "require"
    # A rank for each CPU at most, or for each thread that is asked for.
    assert constraints["parallel.tensor_parallel_size"].allows(4)
    assert not constraints["parallel.tensor_parallel_size"].allows(5)
    more = platform.constrain(config.with_value("device.num_threads", 6), platform.devices()[0])
    assert next(c for c in more if c.path == "parallel.tensor_parallel_size").value == 6
    assert constraints["cache.block_size"].value == 16
    assert constraints["model.dtype"].value == "float32"
    solved = solve(config, tuple(constraints.values())).config
    assert (solved.scheduler.max_num_seqs, solved.scheduler.max_num_batched_tokens) == (128, 2048)
    assert solved.cache.memory_utilization == 0.4
    assert solved.cache.kv_cache_memory_bytes == constraints["cache.kv_cache_memory_bytes"].value


def test_a_share_of_the_memory_that_the_user_asks_for_is_not_overruled(machine):
    platform = CpuPlatform(machine({"proc/cpuinfo": EPYC.format("")}))
    config = EngineConfig(model=ModelConfig(model="m")).with_value("cache.memory_utilization", 0.1)
    solved = solve(config, tuple(platform.constrain(config, platform.devices()[0]))).config
    assert solved.cache.memory_utilization == 0.1
    assert solved.cache.kv_cache_memory_bytes is None


def test_child_environment_leaves_the_users_alone(machine, monkeypatch):
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    platform = CpuPlatform(machine({}))
    devices = platform.devices()
    assert platform.child_env("engine", devices)["OMP_NUM_THREADS"] == "4"
    monkeypatch.setenv("OMP_NUM_THREADS", "9")
    assert "OMP_NUM_THREADS" not in platform.child_env("worker", devices)
    assert platform.child_env("worker", devices)["MKL_NUM_THREADS"] == "4"
    assert platform.child_env("server", devices) == {}
    assert platform.doctor(devices[0])["OMP_NUM_THREADS"] == "9"


def test_missing_torch_is_broken_with_a_fix(monkeypatch):
    monkeypatch.setattr(cpu_platform, "find_spec", lambda name: None)
    probe = CpuPlatform().probe()
    assert probe.state == "broken"
    assert "torch" in probe.reason
    assert "pip install 'cardan[cpu]'" in probe.fix
    monkeypatch.undo()
    probe = CpuPlatform().probe()
    assert (probe.state, probe.score) == ("present", 1)


def test_unusable_thread_number(machine):
    from dataclasses import replace

    platform = CpuPlatform(machine({}))
    device = replace(platform.devices()[0], details={"num_threads": "many"})
    with pytest.raises(ConfigError, match=r"device\.num_threads"):
        platform.open(device)


def test_opening_begins_to_build_the_kernels_before_torch_is_imported():
    code = (
        "import sys; from cardan.platforms.cpu import platform; seen = [];"
        "platform.start_building = lambda: seen.append('torch' in sys.modules);"
        "p = platform.CpuPlatform(); p.open(p.devices()[0]).close();"
        "sys.exit(seen != [False] or 'torch' not in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_importing_and_probing_load_no_torch():
    code = (
        "import sys; from cardan.platforms.cpu.platform import CpuPlatform; p = CpuPlatform();"
        "d = p.devices()[0]; p.probe(); p.capabilities(d); p.kernels(d);"
        "p.child_env('engine', [d]);"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    assert contract_refusal(CpuPlatform.contract) is None
