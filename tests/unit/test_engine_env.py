"""What is asked of another interpreter before an engine starts on it."""

import json
import sys
from importlib.metadata import version

import pytest

from cardan.bootstrap.engine_env import engine_env, engine_env_elsewhere, main
from cardan.core.interfaces.errors import ConfigError, PluginError


@pytest.fixture
def python(tmp_path):
    """Make an interpreter that says something and exits."""

    def make(says, code=0):
        path = tmp_path / "python"
        path.write_text(f"#!/bin/sh\necho '{says}'\nexit {code}\n")
        path.chmod(0o755)
        return str(path)

    return make


def test_this_interpreter_answers_itself():
    assert engine_env_elsewhere(sys.executable, "cpu") == engine_env("cpu")


def test_its_platform_decides_the_environment(python):
    answer = {"version": version("cardan"), "env": {"XLA_FLAGS": "--deterministic"}}
    elsewhere = engine_env_elsewhere(python("a banner\n" + json.dumps(answer)), "acme")
    assert elsewhere == {"XLA_FLAGS": "--deterministic"}


def test_an_unknown_platform_is_said_with_the_interpreter():
    with pytest.raises(PluginError, match=r"^engine_python \S+: .*nosuch"):
        engine_env_elsewhere(sys.executable, "nosuch")


@pytest.mark.parametrize("says", ["", "no json", "[1]", "{}"])
def test_an_interpreter_without_cardan(python, says):
    with pytest.raises(ConfigError, match=r"no usable cardan .*-m pip install cardan=="):
        engine_env_elsewhere(python(says), "acme")
    with pytest.raises(ConfigError, match=r"no usable cardan"):
        engine_env_elsewhere(python(json.dumps({"version": version("cardan")}), 1), "acme")


def test_another_version(python):
    with pytest.raises(ConfigError, match=r"has cardan 0\.0\.7, this is cardan .*install the same"):
        engine_env_elsewhere(python(json.dumps({"version": "0.0.7", "env": {}})), "acme")


@pytest.mark.parametrize("name", ["missing", "text"])
def test_no_interpreter(tmp_path, name):
    (tmp_path / "text").write_text("words")
    with pytest.raises(ConfigError, match=r"cannot be run: .*name the interpreter of a virtual"):
        engine_env_elsewhere(str(tmp_path / name), None)


def test_its_main_states_errors_as_data(capsys):
    assert main(["nosuch"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["version"] == version("cardan")
    assert "nosuch" in answer["error"]
