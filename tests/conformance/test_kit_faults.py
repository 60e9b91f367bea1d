"""Each standing fault of the fake platform is found by the level that should find it, and only
from there on; the sound one passes everything."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import pytest

from cardan.testing.conformance.run import KitRun, command
from cardan.testing.fake.settings import VARIABLE, StandingFault

pytestmark = pytest.mark.slow

# What of the slower levels is enough to show that a fault of a level above does not disturb them.
SOME_HYGIENE = "test_l0_facts"
SOME_MEMORY = "test_l1_memory"
SOME_OPS = "test_l2 and (rms_norm or linear or sample_tokens) and float32"
SOME_ATTENTION = "test_l3 and fake and (mixed or float32 or window or steps or placement)"
SOME_ENGINES = "test_batched and llama]"
IMPORT_EFFECTS = "cardan.testing.fake.faulty_import:ImportEffectsPlatform"


@dataclass(frozen=True)
class Planted:
    """The level that finds a fault, a test that fails, the levels to run and which of their tests
    (all, if empty), and what else the fake platform is to be, or which class."""

    level: str
    test: str
    levels: str
    expression: str = ""
    fake: str = ""
    spec: str = "fake"


def attention(test):
    return Planted("L3", test, "L2,L3", f"({SOME_OPS}) or ({SOME_ATTENTION})")


FAULTS = {
    "import_effects": Planted("L0", "leaves_alone[signal", "L0", spec=IMPORT_EFFECTS),
    "env_write": Planted("L0", "leaves_alone[environment", "L0"),
    "device_at_probe": Planted("L0", "leaves_alone[threads", "L0"),
    "lost_copy": Planted("L1", "test_l1_memory", "L0,L1", f"test_l1_memory or {SOME_HYGIENE}"),
    "lost_sync": Planted("L1", "test_l1_order", "L0,L1", f"test_l1_order or {SOME_HYGIENE}"),
    "leak": Planted("L1", "test_l1_lifecycle", "L0,L1", f"test_l1_lifecycle or {SOME_HYGIENE}"),
    "stale_graph": Planted(
        "L1", "replay_computes_anew", "L0,L1", f"test_l1_graphs or {SOME_HYGIENE}", "graphs=full"
    ),
    "wrong_op": Planted("L2", "rms_norm", "L1,L2", f"{SOME_MEMORY} or ({SOME_OPS})"),
    "unstable_sum": Planted("L2", "equal_bits", "L1,L2", f"{SOME_MEMORY} or ({SOME_OPS})"),
    "wrong_mask": attention("test_l3_attention"),
    "window_off_by_one": attention("window"),
    "stale_block": attention("test_steps"),
    "lost_write": attention("test_l3"),
    "unstable_reduce": Planted("L4", "repeats", "L3,L4", f"(test_l4 and 2]) or ({SOME_ATTENTION})"),
    "lost_rank": Planted("L4", "all_reduce", "L3,L4", f"(test_l4 and 2]) or ({SOME_ATTENTION})"),
    "lost_edit": Planted(
        "L5",
        "test_batched",
        "L0,L5",
        f"{SOME_HYGIENE} or ({SOME_ENGINES})",
        "tier=executor depth=0",
    ),
}
# Name -> what the fake platform is without a fault, levels, expression, least number that pass.
SOUND = {
    "sound_collectives": ("1", "L4", "2]", 20),
    "sound_engines": ("1", "L5", "llama] or depth or samples or aborted or offline", 10),
    "sound_graphs": ("static=1 graphs=decode", "L5", "llama] and (batched or preempted)", 2),
    "sound_without_float64": ("float64=0", "L5", "(llama] and batched) or samples or offline", 3),
    "sound_executor": (
        *("tier=executor depth=0", "L5", "llama] or depth or samples or aborted or offline"),
        10,
    ),
}


def outcome_of(file):
    failed, passed = {}, {}
    for test in json.loads(file.read_text())["tests"]:
        if test["outcome"] == "failed":
            failed.setdefault(test["level"], []).append((test["id"], test["reason"]))
        elif test["outcome"] == "passed":
            passed[test["level"]] = passed.get(test["level"], 0) + 1
    return failed, passed


def run_kit(tmp_path, fake, levels, expression="", plugin=""):
    """(exit code, {level: ids of failed tests}, number of passed tests by level)."""
    file = tmp_path / "report.json"
    run = KitRun(spec="fake", levels=levels, json_file=str(file), expression=expression or None)
    line = command(run) + (["-p", plugin] if plugin else [])
    result = subprocess.run(
        line, env=environment(fake, tmp_path), capture_output=True, text=True, timeout=280
    )
    assert file.exists(), result.stdout + result.stderr
    return result.returncode, *outcome_of(file)


def environment(fake, path):
    return {
        **os.environ,
        VARIABLE: fake,
        "PYTHONPATH": str(path),
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    }


def run_of(name, folder):
    """[command line for pytest, environment] of a run, which writes NAME.json."""
    if name in SOUND:
        fake, levels, expression, _ = SOUND[name]
        spec = "fake"
    else:
        planted = FAULTS[name]
        spec, levels, expression = planted.spec, planted.levels, planted.expression
        standing = f"fault={name}" if name in get_args(StandingFault) else ""
        fake = f"{standing} {planted.fake}".strip() or "1"
    run = KitRun(
        spec=spec,
        levels=levels,
        json_file=str(folder / f"{name}.json"),
        expression=expression or None,
    )
    return command(run)[3:], {VARIABLE: fake}


def run_all(names, folder):
    """One after the other in one process, each with a report in ``folder``."""
    plan = folder / f"{names[0]}.plan.json"
    plan.write_text(json.dumps([run_of(name, folder) for name in names]))
    script = Path(__file__).parent / "several_runs.py"
    with (folder / f"{names[0]}.txt").open("w") as log:
        subprocess.run(
            [sys.executable, script, plan],
            env=environment("1", folder),
            stdout=log,
            stderr=subprocess.STDOUT,
            timeout=280,
        )


@pytest.fixture(scope="module")
def faulty_reports(tmp_path_factory):
    """Folder with a report of each fault. Those of L0 have processes of their own: what is
    examined there is what an import does to a process."""
    folder = tmp_path_factory.mktemp("faults")
    for name, planted in FAULTS.items():
        if planted.level == "L0":
            run_all([name], folder)
    run_all([name for name, planted in FAULTS.items() if planted.level != "L0"], folder)
    return folder


@pytest.fixture(scope="module")
def sound_reports(tmp_path_factory):
    """Folder with a report of each sound platform."""
    folder = tmp_path_factory.mktemp("sound")
    run_all(list(SOUND), folder)
    return folder


def test_every_standing_fault_is_here():
    assert set(FAULTS) - {"import_effects"} == set(get_args(StandingFault))


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_is_found(fault, faulty_reports):
    planted = FAULTS[fault]
    failed, passed = outcome_of(faulty_reports / f"{fault}.json")
    assert set(failed) == {planted.level}, failed
    assert any(planted.test in name for name, _ in failed[planted.level]), failed
    assert set(planted.levels.split(",")) - {planted.level} <= set(passed)


@pytest.mark.parametrize(("fake", "levels"), [("1", "L0,L1,L2,L3"), ("float64=0", "L2,L3")])
def test_sound_platform_passes(fake, levels, tmp_path):
    code, failed, passed = run_kit(tmp_path, fake, levels)
    assert (code, failed) == (0, {})
    assert set(passed) == set(levels.split(","))


BOASTFUL = """
from dataclasses import replace

from cardan.testing.fake.platform import FakePlatform

capabilities = FakePlatform.capabilities
FakePlatform.capabilities = lambda self, info: replace(capabilities(self, info), float64=True)
"""


def test_a_device_that_does_not_say_that_it_lacks_float64_is_found(tmp_path):
    (tmp_path / "boastful.py").write_text(BOASTFUL)
    code, failed, passed = run_kit(tmp_path, "float64=0", "L2", SOME_OPS, "boastful")
    assert code == 1
    assert all("sample_tokens" in name for name, _ in failed["L2"])
    assert "float64" in failed["L2"][0][1]
    assert passed["L2"] >= 4


@pytest.mark.parametrize("name", SOUND)
def test_sound_platform_passes_collectives_and_engines(name, sound_reports):
    _, levels, _, least = SOUND[name]
    failed, passed = outcome_of(sound_reports / f"{name}.json")
    assert failed == {}
    assert passed[levels] >= least


LEAKY = """
from cardan.core.kvcache.manager import KVCacheManager

free = KVCacheManager.free


def leaky(self, sequence, forget=False):
    for blocks in sequence.blocks:
        del blocks[-1:]
    free(self, sequence, forget)


KVCacheManager.free = leaky
"""


def test_block_lost_by_the_engine_is_found(tmp_path):
    (tmp_path / "leaky.py").write_text(LEAKY)
    code, failed, _ = run_kit(tmp_path, "1", "L5", "test_batched and llama]", "leaky")
    assert code == 1
    assert "KV blocks in use" in failed["L5"][0][1]


EXCLUSIVE = """
from cardan.testing.fake.device import FakeDevice
from cardan.testing.fake.platform import FakePlatform

held = []
open_device, close_device = FakePlatform.open, FakeDevice.close


def open_alone(self, info):
    if held:
        raise RuntimeError("the device is in use")
    held.append(open_device(self, info))
    return held[0]


def close(self):
    if self in held:
        held.remove(self)
    close_device(self)


FakePlatform.open, FakeDevice.close = open_alone, close
"""


def test_a_device_that_cannot_be_opened_twice_at_a_time_passes(tmp_path):
    (tmp_path / "exclusive.py").write_text(EXCLUSIVE)
    engines = "llama] and (batched or chunked) or samples or offline"
    wanted = f"test_l1_lifecycle or (test_l2 and rms_norm) or {engines}"
    code, failed, passed = run_kit(tmp_path, "1", "L1,L2,L5", wanted, "exclusive")
    assert (code, failed) == (0, {})
    assert set(passed) == {"L1", "L2", "L5"}
