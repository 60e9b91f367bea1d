"""The conformance kit as it is run: exit codes, reports on file, and what L0 catches."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest

CLEAN = """
from cardan.core.interfaces.capabilities import Capabilities, DeviceInfo
from cardan.core.interfaces.platform import Platform, Probe

class Clean(Platform):
    name = "clean"
    contract = (1, 0)

    def probe(self):
        return Probe.present(1, "always here")

    def devices(self):
        return (DeviceInfo(platform="clean", index=0, name="a device", arch="none"),)

    def open(self, device):
        raise NotImplementedError
"""


def conformance(folder, *arguments):
    """Run the command where ``folder``'s modules can be imported."""
    return subprocess.run(
        [sys.executable, "-m", "cardan", "conformance", *arguments],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )


def examine(folder, source, *arguments, name="subject"):
    """Write a module, run L0 over its class, and return the process and its JSON."""
    (folder / f"{name}.py").write_text(textwrap.dedent(source), encoding="utf-8")
    options = ("--level", "L0", "--json", str(folder / "found.json"), *arguments)
    done = conformance(folder, f"{name}:Clean", *options)
    return done, json.loads((folder / "found.json").read_text(encoding="utf-8"))


def failures(document):
    return {
        test["id"].partition("::")[2]: test["reason"]
        for test in document["tests"]
        if test["outcome"] == "failed"
    }


def test_usage_errors(tmp_path):
    for arguments, told in (
        (("nope",), "no platform named 'nope'"),
        (("cpu", "--level", "L7"), "L7 is no level, there are L0, L1, L2, L3, L4, L5"),
    ):
        done = conformance(tmp_path, *arguments)
        assert done.returncode == 2, done
        assert told in done.stdout + done.stderr


def test_without_a_platform(tmp_path):
    plugin, package = "cardan.testing.conformance.plugin", "cardan.testing.conformance"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-pno:cacheprovider", f"-p{plugin}", "--pyargs", package],
        cwd=tmp_path,
        env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == pytest.ExitCode.USAGE_ERROR, done
    assert "name a platform with --cardan-platform" in done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr


def test_loaded_as_entry_point_and_by_name(tmp_path, monkeypatch):
    """Whichever comes first, the other one adds nothing and is no error."""
    info = tmp_path / "other-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[pytest11]\ncardan-conformance = cardan.testing.conformance.plugin\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    module = "cardan.testing.conformance.plugin"
    for names in ([module, "cardan-conformance"], ["cardan-conformance", module]):
        manager = pytest.PytestPluginManager()
        for name in names:
            if name == module:
                manager.import_plugin(name)
            else:
                manager.load_setuptools_entrypoints("pytest11", name=name)
        assert manager.get_name(sys.modules[module]) == names[0]


def test_other_runs_are_left_alone(tmp_path):
    (tmp_path / "test_l0_own.py").write_text("LEVEL = 'L0'\ndef test_own():\n    pass\n")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-pcardan.testing.conformance.plugin"],
        cwd=tmp_path,
        env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed" in done.stdout
    assert "conformance" not in done.stdout


def test_clean_platform_reaches_l0(tmp_path):
    """A platform in a page passes, whatever the project's own configuration of pytest says."""
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = --no-such-option\n")
    (tmp_path / "conftest.py").write_text("raise SystemExit('of the user')\n")
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "conftest.py").write_text("raise SystemExit('of the user')\n")
    done, found = examine(tmp_path, CLEAN, "--seed", "11", "--markdown", str(tmp_path / "m.md"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "level reached: L0." in done.stdout
    assert found["reached"] == "L0"
    assert (found["schema"], found["seed"], found["interrupted"]) == (1, 11, False)
    assert found["target"] == "subject:Clean"
    assert found["device"]["name"] == "a device"
    assert found["capabilities"]["dtypes"] == ["float32"]
    (level,) = found["levels"]
    counts = (level["passed"], level["failed"], level["not_supported"])
    assert sum(counts) == len(found["tests"])
    assert counts[1] == 0
    for test in found["tests"]:
        assert set(test) == {"level", "id", "title", "outcome", "reason", "seconds", "facts"}
        assert test["level"] == "L0"
        assert test["title"]
        assert bool(test["reason"]) == (test["outcome"] != "passed")
    quick = [test for test in found["tests"] if "quick" in test["id"]]
    assert quick[0]["facts"]["import_seconds"] >= 0
    assert (tmp_path / "m.md").read_text().startswith("## subject:Clean")


def test_dirty_import_is_caught(tmp_path):
    source = f"""
    import os, random, signal, sys, threading, time, warnings

    os.environ["DIRTY"] = "1"
    os.umask(0o027)
    random.seed(0)
    warnings.simplefilter("ignore", BytesWarning)
    sys.path.append("/nowhere")
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    threading.Thread(target=time.sleep, args=(30,), name="busy", daemon=True).start()
    held = open("/dev/ptmx")

    def late():
        from cardan.core.engine import loop
        from cardan.core import scheduler
        import cardan.llm
    {textwrap.indent(CLEAN, "    ")}
    """
    done, found = examine(tmp_path, source)
    assert done.returncode == 1
    caught = failures(found)
    for kind, told in (
        ("environment", "import: DIRTY is new: 1"),
        ("directory, umask and locale", "import: umask was"),
        ("random state", "import: random was"),
        ("warning filters", "BytesWarning"),
        ("import path and hooks", "sys.path was"),
        ("signal handlers", "SIGUSR1"),
        ("threads", "thread busy is new"),
        ("device files", "/dev/ptmx is new"),
    ):
        assert told in caught.pop(f"test_leaves_alone[{kind}]")
    internal = caught.pop("test_imports_the_contract_alone")
    assert "imports cardan.core.engine.loop" in internal
    assert "imports cardan.core.scheduler" in internal
    assert "imports cardan.llm" in internal
    assert not caught


def test_raising_probe_is_caught(tmp_path):
    source = CLEAN.replace('return Probe.present(1, "always here")', 'raise OSError("no driver")')
    done, found = examine(tmp_path, source)
    assert done.returncode == 1
    caught = failures(found)
    assert caught["test_nothing_raises"] == "probe raised OSError: no driver"
    assert "no driver" in caught["test_probe_repeats"]
    assert "no level reached." in done.stdout


def test_wrong_facts_are_caught(tmp_path):
    source = (
        CLEAN.replace('name="a device"', 'name=""')
        .replace("contract = (1, 0)", "contract = (9, 0)")
        .replace('name = "clean"', 'name = "cle:an"')
        + """
    def capabilities(self, device):
        return Capabilities(dtypes=("float33",), async_depth=-1)

    def constrain(self, config, device):
        from cardan.core.interfaces.constraints import Constraint
        return (Constraint("cache.blocksize", "==", 16, "it is so"),)

    def child_env(self, role, devices):
        return {"THREADS": 4}

    def shapes(self, model, device):
        from cardan.core.interfaces.graphs import ShapePolicy
        return ShapePolicy(token_buckets=(8, 4))

    def kernel(self, device):
        return ()
"""
    )
    done, found = examine(tmp_path, source)
    assert done.returncode == 1
    caught = failures(found)
    assert "cache.blocksize, which is no setting" in caught["test_constraints_are_solvable"]
    assert "float33" in caught["test_capabilities_are_well_formed"]
    assert "not ascending" in caught["test_shapes_are_well_formed"]
    assert "THREADS must be a string" in caught["test_child_environment_is_plain[worker]"]
    assert "needs contract 9.0" in caught["test_contract_version_is_accepted"]
    assert "syntax" in caught["test_name_and_claims"]
    assert "did you mean kernels?" in caught["test_members_belong_to_the_contract"]
    assert "test_devices_are_well_formed" in caught


def test_module_that_cannot_be_imported(tmp_path):
    done, found = examine(tmp_path, "import no_such_vendor_library\n" + CLEAN)
    assert done.returncode == 1
    assert found["device"] is None
    assert "no_such_vendor_library" in failures(found)["test_nothing_raises"]


def test_absent_platform_can_run_l0_alone(tmp_path):
    source = CLEAN.replace('Probe.present(1, "always here")', 'Probe.absent("no such card")')
    done, found = examine(tmp_path, source)
    assert done.returncode == 0, done.stdout
    reasons = {test["reason"] for test in found["tests"] if test["outcome"] == "not supported"}
    assert "facts need a device, the platform is absent: no such card" in reasons
    higher = conformance(tmp_path, "subject:Clean")
    assert higher.returncode == 2
    assert "absent here: no such card" in higher.stdout + higher.stderr
    assert "only --cardan-level L0" in higher.stdout + higher.stderr


def test_interrupt_keeps_partial_results(tmp_path):
    marker = tmp_path / "reached"
    source = f"""
    import pathlib, time
    {textwrap.indent(CLEAN, "    ")}
        def doctor(self, device):
            pathlib.Path({str(marker)!r}).touch()
            time.sleep(60)
    """
    (tmp_path / "slow.py").write_text(textwrap.dedent(source), encoding="utf-8")
    words = ["conformance", "slow:Clean", "--level", "L0", "--json", str(tmp_path / "found.json")]
    process = subprocess.Popen(
        [sys.executable, "-m", "cardan", *words],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        end = time.monotonic() + 120
        while not marker.exists() and process.poll() is None and time.monotonic() < end:
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130, output
    assert "interrupted: these results are incomplete." in output
    found = json.loads((tmp_path / "found.json").read_text(encoding="utf-8"))
    assert found["interrupted"] is True
    assert found["levels"][0]["passed"] > 3
