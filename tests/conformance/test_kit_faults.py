"""Each standing fault of the fake platform is found by the level that should find it, and only
from there on; the sound one passes everything."""

import json
import os
import subprocess
from typing import get_args

import pytest

from cardan.testing.conformance.run import KitRun, command
from cardan.testing.fake.settings import VARIABLE, StandingFault

pytestmark = pytest.mark.slow

# What of the slower levels is enough to show that a fault of a level above does not disturb them.
SOME_HYGIENE = "test_l0_facts"
SOME_MEMORY = "test_l1_memory"
SOME_OPS = "test_l2 and (rms_norm or linear or sample_tokens)"
SOME_ATTENTION = "test_l3 and fake and (mixed or float32 or window or steps or placement)"
# Fault -> the level that finds it, the levels to run, and which of their tests (all, if empty).
FAULTS = {
    "env_write": ("L0", "L0", ""),
    "device_at_probe": ("L0", "L0", ""),
    "lost_copy": ("L1", "L0,L1", f"test_l1_memory or {SOME_HYGIENE}"),
    "lost_sync": ("L1", "L0,L1", f"test_l1_order or {SOME_HYGIENE}"),
    "leak": ("L1", "L0,L1", f"test_l1_lifecycle or {SOME_HYGIENE}"),
    "wrong_op": ("L2", "L1,L2", f"{SOME_MEMORY} or ({SOME_OPS})"),
    "unstable_sum": ("L2", "L1,L2", f"{SOME_MEMORY} or ({SOME_OPS})"),
    "wrong_mask": ("L3", "L2,L3", f"({SOME_OPS}) or ({SOME_ATTENTION})"),
    "window_off_by_one": ("L3", "L2,L3", f"({SOME_OPS}) or ({SOME_ATTENTION})"),
    "stale_block": ("L3", "L2,L3", f"({SOME_OPS}) or ({SOME_ATTENTION})"),
    "lost_write": ("L3", "L2,L3", f"({SOME_OPS}) or ({SOME_ATTENTION})"),
    "unstable_reduce": ("L4", "L3,L4", f"test_l4 or ({SOME_ATTENTION})"),
    "lost_rank": ("L4", "L3,L4", f"test_l4 or ({SOME_ATTENTION})"),
}


def run_kit(tmp_path, fake, levels, expression="", plugin=""):
    """(exit code, {level: ids of failed tests}, number of passed tests by level)."""
    file = tmp_path / "report.json"
    run = KitRun(spec="fake", levels=levels, json_file=str(file), expression=expression or None)
    line = command(run) + (["-p", plugin] if plugin else [])
    environment = {
        **os.environ,
        VARIABLE: fake,
        "PYTHONPATH": str(tmp_path),
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    }
    result = subprocess.run(
        line, env=environment, capture_output=True, text=True, timeout=280, check=False
    )
    assert file.exists(), result.stdout + result.stderr
    tests = json.loads(file.read_text())["tests"]
    failed, passed = {}, {}
    for test in tests:
        if test["outcome"] == "failed":
            failed.setdefault(test["level"], []).append((test["id"], test["reason"]))
        elif test["outcome"] == "passed":
            passed[test["level"]] = passed.get(test["level"], 0) + 1
    return result.returncode, failed, passed


def test_every_standing_fault_is_here():
    assert set(FAULTS) == set(get_args(StandingFault))


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_is_found(fault, tmp_path):
    level, levels, expression = FAULTS[fault]
    code, failed, passed = run_kit(tmp_path, f"fault={fault}", levels, expression)
    assert code == 1
    assert set(failed) == {level}, failed
    assert set(levels.split(",")) - {level} <= set(passed)


def test_sound_platform_passes(tmp_path):
    code, failed, passed = run_kit(tmp_path, "1", "L0,L1,L2,L3,L4")
    assert (code, failed) == (0, {})
    assert set(passed) == {"L0", "L1", "L2", "L3", "L4"}


@pytest.mark.parametrize(
    ("fake", "expression"),
    [
        ("1", "llama] or depth or samples or aborted or offline"),
        ("static=1 graphs=decode", "llama] and (batched or preempted)"),
        ("tier=executor depth=0", "llama] or depth or samples or aborted or offline"),
    ],
)
def test_sound_platform_passes_whole_engines(fake, expression, tmp_path):
    code, failed, passed = run_kit(tmp_path, fake, "L5", expression)
    assert (code, failed) == (0, {})
    assert passed["L5"] >= (10 if "or samples" in expression else 2)


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
    code, failed, _ = run_kit(tmp_path, "1", "L5", "test_alone and llama]", "leaky")
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
    wanted = "test_l1_lifecycle or (test_l2 and rms_norm) or llama] or samples or offline"
    code, failed, passed = run_kit(tmp_path, "1", "L1,L2,L5", wanted, "exclusive")
    assert (code, failed) == (0, {})
    assert set(passed) == {"L1", "L2", "L5"}
