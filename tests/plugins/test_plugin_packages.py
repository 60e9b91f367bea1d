"""The packages of ``plugins/``, built into wheels and installed beside cardan as strangers are."""

import json
import os
import re
import shutil
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import httpx
import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from cardan.testing.conformance.source_imports import package_sources
from cardan.testing.tiny_models import VOCAB_SIZE, make_tokenizer

PLUGINS = Path(__file__).parents[2] / "plugins"
PACKAGES = {"cardan-basalt": "cardan_basalt", "cardan-extras": "cardan_extras"}
CONTRACT = ("cardan.core.interfaces", "cardan.core.types", "cardan.core.observability")
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet")
OFFLINE = ("--no-deps", "--no-index")


@pytest.fixture(scope="module")
def wheels(tmp_path_factory) -> dict[str, Path]:
    """Each package's wheel, built from a copy: building leaves files beside the sources."""
    sources, built = tmp_path_factory.mktemp("sources"), tmp_path_factory.mktemp("wheels")
    for name in PACKAGES:
        ignored = shutil.ignore_patterns("build", "*.egg-info", "__pycache__", ".*")
        shutil.copytree(PLUGINS / name, sources / name, ignore=ignored)
    folders = [str(sources / name) for name in PACKAGES]
    options = (*OFFLINE, "--no-build-isolation", "--wheel-dir", str(built))
    run([*PIP, "wheel", *options, *folders], dict(os.environ))
    return {name: next(built.glob(f"{module}-*.whl")) for name, module in PACKAGES.items()}


@pytest.fixture(scope="module")
def site(wheels, tmp_path_factory) -> Path:
    """The folder that both are installed in."""
    folder = tmp_path_factory.mktemp("site")
    run([*PIP, "install", *OFFLINE, "--target", str(folder), *map(str, wheels.values())])
    return folder


@pytest.fixture(scope="module")
def environment(site) -> dict[str, str]:
    """That of a process that finds them."""
    return {**os.environ, "PYTHONPATH": str(site)}


def run(
    command: list[str], environment: dict[str, str] | None = None, patience: float = 280
) -> str:
    done = subprocess.run(
        command,
        env=environment,
        capture_output=True,
        text=True,
        timeout=patience,
        check=False,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-8000:]
    return done.stdout


def cardan(environment: dict[str, str], *arguments: str, patience: float = 280) -> str:
    return run([sys.executable, "-m", "cardan", *arguments], environment, patience)


def test_wheels_hold_the_package_alone(wheels):
    for name, module in PACKAGES.items():
        with zipfile.ZipFile(wheels[name]) as wheel:
            tops = {entry.split("/")[0] for entry in wheel.namelist()}
        assert tops == {module, f"{module}-0.1.0.dist-info"}


def test_they_import_the_contract_alone(site, monkeypatch):
    monkeypatch.syspath_prepend(site)
    for module in PACKAGES.values():
        sources = package_sources(module)
        assert sources is not None
        assert sources.folder == site / module
        for found in sources.imports():
            of_cardan = found.module == "cardan" or found.module.startswith("cardan.")
            assert not of_cardan or found.module.startswith(CONTRACT), found


def test_a_platform_is_small(site):
    lines = [len(file.read_text().splitlines()) for file in (site / "cardan_basalt").glob("*.py")]
    assert sum(lines) < 300


def test_discovery_lists_all(environment):
    code = (
        "from cardan.core.discovery import GROUPS, Discovery\n"
        "found = Discovery()\n"
        "for group in GROUPS:\n"
        "    for entry in found.entries(group):\n"
        "        if entry.distribution in ('cardan-basalt', 'cardan-extras'):\n"
        "            found.load(group, entry.name)\n"
        "            print(group, entry.name)\n"
    )
    assert run([sys.executable, "-c", code], environment).splitlines() == [
        "cardan.platforms basalt",
        "cardan.models GraniteForCausalLM",
        "cardan.quantization nf4",
        "cardan.quantization pack-quantized",
        "cardan.gguf granite",
        "cardan.parsers mistral",
        "cardan.policies aged_shortest",
        "cardan.logits_processors no_repeat_ngram",
        "cardan.plugins statsd",
    ]


def test_commands_show_them(environment):
    found = {item["name"]: item for item in json.loads(cardan(environment, "platforms", "--json"))}
    assert (found["basalt"]["state"], found["basalt"]["score"]) == ("present", 0)
    assert found["basalt"]["distribution"] == "cardan-basalt"
    report = json.loads(cardan(environment, "doctor", "--json", "--platform", "basalt"))
    [device] = report["devices"]
    kernels = {row["op"]: row["provider"] for row in device["kernels"]}
    served = {op for op, provider in kernels.items() if provider != "reference"}
    assert served == {"linear", "rms_norm"}
    assert device["problems"] == []
    states = {item["name"]: item["state"] for item in report["plugins"]}
    assert states["statsd"] == "loaded"


@pytest.mark.slow
@pytest.mark.parametrize("name", PACKAGES)
def test_their_own_tests(name, environment, tmp_path):
    tests = shutil.copytree(PLUGINS / name / "tests", tmp_path / "tests")
    run([sys.executable, "-m", "pytest", "-q", "-W", "error", str(tests)], environment)


@pytest.mark.slow
@pytest.mark.model
def test_the_demo_answers_as_on_the_cpu(environment):
    exact = ("--dtype", "float32", "--quantization", "none", "--temperature", "0")
    prompt = ("--max-tokens", "8", "-p", "What is the capital of France?")
    answer = cardan(environment, "run", "demo", "--platform", "basalt", *exact, *prompt)
    assert "Paris" in answer
    assert answer == cardan(environment, "run", "demo", "--platform", "cpu", *exact, *prompt)


@pytest.mark.slow
def test_the_server_serves_all_of_them(environment, tmp_path):
    make_granite(tmp_path / "model")
    command = [sys.executable, "-m", "cardan", "serve", str(tmp_path / "model"), "--port", "0"]
    options = ("--platform", "basalt", "--quantization", "nf4", "--dtype", "float32",
               "--scheduling-policy", "aged_shortest", "--plugin", "statsd")  # fmt: skip
    log = tmp_path / "log"
    with log.open("w") as out:
        process = subprocess.Popen([*command, *options], env=environment, stdout=out, stderr=out)
    try:
        url = _served_at(process, log)
        body = {"prompt": "w5 w17 w99", "max_tokens": 4, "min_tokens": 4, "temperature": 0,
                "extra_args": {"no_repeat_ngram_size": 2}}  # fmt: skip
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] == 4
        refused = httpx.post(
            f"{url}/v1/completions", json={**body, "extra_args": {"unheard_of": 1}}, timeout=60
        )
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "extra_args")
        # The engine's process says it within a second or two.
        deadline = time.monotonic() + 60
        while 'plugin="statsd"' not in (metrics := httpx.get(f"{url}/metrics").text):
            assert time.monotonic() < deadline, metrics
            time.sleep(0.2)
        assert re.search(
            r"^cardan:plugin_statsd_datagrams\{.*plugin=\"statsd\"", metrics, re.MULTILINE
        )
    finally:
        process.terminate()
        process.wait(30)


def make_granite(folder: Path) -> None:
    """A random Granite model and a tokenizer."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    config = AutoConfig.for_model(
        "granite", vocab_size=VOCAB_SIZE, num_attention_heads=4, num_key_value_heads=2, **sizes
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    make_tokenizer().save(str(folder / "tokenizer.json"))


def _served_at(process: subprocess.Popen, log: Path) -> str:
    """The address that the server says it is ready at."""
    deadline = time.monotonic() + 120
    while True:
        found = re.search(r"http://127\.0\.0\.1:\d+", log.read_text())
        if found and "ready" in log.read_text().lower():
            return found[0]
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.1)


# Seconds: three minutes of one core, and as much again for those that share it.
WHOLE_KIT = 1500
SHORT = "test_l0 or test_l1 or basalt or (gemma3 and batched)"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "reached", "num_passed"),
    [
        (("--level", "L0,L1,L2,L3,L5", "-k", SHORT), None, 120),
        pytest.param((), "L5", 480, marks=[pytest.mark.scheduled, pytest.mark.timeout(WHOLE_KIT)]),
    ],
    ids=["short", "whole"],
)
def test_it_passes_the_kit(options, reached, num_passed, environment, tmp_path):
    file = tmp_path / "report.json"
    patience = 280 if options else WHOLE_KIT
    command = ("conformance", "basalt", *options, "--json", str(file))
    cardan(environment, *command, patience=patience)
    report = json.loads(file.read_text())
    outcomes = [test["outcome"] for test in report["tests"]]
    assert "failed" not in outcomes
    assert outcomes.count("passed") >= num_passed
    assert report["reached"] == reached
