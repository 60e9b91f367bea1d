"""The platform of docs/writing-a-platform.md, installed and used as the page says."""

import json
import os
import re
import subprocess
import sys
import textwrap
from dataclasses import fields
from pathlib import Path

import pytest

from cardan.testing.fake.settings import STANDING_FAULTS, STEP_FAULTS, FakeSettings

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "writing-a-platform.md").read_text()
IN_CLASS = "# in the class TinychipPlatform\n"
QUESTION = "What is the capital of France?"


def code_blocks() -> list[str]:
    """All python and toml blocks of the page, in order."""
    return re.findall(r"```(?:python|toml)\n(.*?)```", PAGE, re.DOTALL)


def write_package(folder: Path) -> None:
    """The page's files; methods "in the class" are put at its end."""
    files: dict[str, str] = {"cardan_tinychip/__init__.py": ""}
    for block in code_blocks():
        if block.startswith(IN_CLASS):
            method = textwrap.indent(block.removeprefix(IN_CLASS), "    ")
            files["cardan_tinychip/platform.py"] += f"\n{method}"
        else:
            name, _, text = block.partition("\n")
            files[name.removeprefix("# ")] = text
    (folder / "cardan_tinychip").mkdir(parents=True)
    for name, text in files.items():
        (folder / name).write_text(text)


@pytest.fixture(scope="module")
def environment(tmp_path_factory) -> dict[str, str]:
    """An environment in which the page's package is installed."""
    source = tmp_path_factory.mktemp("cardan-tinychip") / "cardan-tinychip"
    site = tmp_path_factory.mktemp("site")
    write_package(source)
    install = ("pip", "install", "--no-deps", "--no-build-isolation", "--no-index", "--quiet")
    run([sys.executable, "-m", *install, "--target", str(site), str(source)], dict(os.environ))
    return {**os.environ, "PYTHONPATH": str(site)}


def run(command: list[str], environment: dict[str, str], patience: float = 280) -> str:
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=patience, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def cardan(environment: dict[str, str], *arguments: str) -> str:
    return run([sys.executable, "-m", "cardan", *arguments], environment)


def test_it_is_a_page() -> None:
    platform = next(block for block in code_blocks() if "class TinychipPlatform" in block)
    assert len(platform.splitlines()) < 40
    assert sum(len(block.splitlines()) for block in code_blocks()) < 150
    assert all(len(line) <= 100 for block in code_blocks() for line in block.splitlines())


def test_it_is_found(environment) -> None:
    found = {item["name"]: item for item in json.loads(cardan(environment, "platforms", "--json"))}
    assert found["tinychip"]["state"] == "present"
    assert found["tinychip"]["distribution"] == "cardan-tinychip"
    assert [device["name"] for device in found["tinychip"]["devices"]] == ["Tinychip T1"]


@pytest.mark.model
@pytest.mark.slow
def test_it_answers_as_the_cpu_does(environment) -> None:
    # Kernels for stored blocks round activations, definitions do not.
    exact = ("--dtype", "float32", "--quantization", "none")
    options = ("--temperature", "0", *exact, "--max-tokens", "12", "-p", QUESTION)
    answer = cardan(environment, "run", "demo", "--platform", "tinychip", *options)
    assert "Paris" in answer
    assert answer == cardan(environment, "run", "demo", "--platform", "cpu", *options)


@pytest.mark.slow
def test_the_doctor_knows_its_parts(environment) -> None:
    report = cardan(environment, "doctor", "--platform", "tinychip")
    assert "tinychip.rms_norm" in report


# Of the levels that take long only what is the page's own, and one model through the engine.
SHORT = "test_l0 or test_l1 or tinychip or (gemma3 and batched)"
# Seconds: minutes of one core, and as much again for those that share it.
WHOLE_KIT = 1500


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "reached", "num_passed"),
    [
        (("--level", "L0,L1,L2,L3,L5", "-k", SHORT), None, 30),
        pytest.param((), "L5", 390, marks=[pytest.mark.scheduled, pytest.mark.timeout(WHOLE_KIT)]),
    ],
    ids=["short", "whole"],
)
def test_it_passes_the_kit(options, reached, num_passed, environment, tmp_path) -> None:
    results = tmp_path / "results.json"
    command = (sys.executable, "-m", "cardan", "conformance", "tinychip", *options)
    run([*command, "--json", str(results)], environment, 280 if options else WHOLE_KIT)
    report = json.loads(results.read_text())
    outcomes = [test["outcome"] for test in report["tests"]]
    assert "failed" not in outcomes
    assert outcomes.count("passed") >= num_passed
    assert report["reached"] == reached


def test_every_setting_of_the_fake_device_is_explained() -> None:
    page = (DOCS / "testing.md").read_text()
    names = {item.name for item in fields(FakeSettings)} - {"faults", "step_faults"}
    for name in (*names, *STANDING_FAULTS, *STEP_FAULTS):
        assert f"`{name}`" in page, name


@pytest.mark.model
@pytest.mark.slow
def test_the_example_of_the_fake_device() -> None:
    page = (DOCS / "testing.md").read_text()
    commands = re.findall(r"```sh\n(.*?)```", page, re.DOTALL)
    [command] = [command for command in commands if "--platform fake" in command]
    assert "Paris" in run(
        ["sh", "-c", command.replace("cardan run", f"{sys.executable} -m cardan run")],
        dict(os.environ),
    )
