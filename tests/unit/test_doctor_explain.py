"""``cardan doctor --explain``: whose every setting and kernel is."""

import json

import pytest

from cardan.cli.main import main
from cardan.testing.tiny_models import make_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    make_tiny_model("llama", path)
    # Nothing but the shapes is looked at.
    (path / "model.safetensors").unlink()
    return str(path)


def explained(capsys, *arguments):
    assert main(["doctor", "--explain", "--json", *arguments]) == 0
    found = json.loads(capsys.readouterr().out)
    return found, {row["path"]: row for row in found["settings"]}


def test_owners_of_settings(model, capsys, tmp_path):
    config = tmp_path / "cardan.toml"
    config.write_text("max-num-batched-tokens = 64\n")
    found, settings = explained(
        capsys, model, "--platform", "cpu", "--config", str(config), "--max-num-seqs", "4"
    )
    assert found["platform"]["owner"] == "user: flag"
    assert settings["scheduler.max_num_seqs"] == {
        "path": "scheduler.max_num_seqs",
        "value": 4,
        "owner": "user: flag",
        "reason": "",
    }
    assert settings["scheduler.max_num_batched_tokens"]["owner"] == "user: file"
    assert settings["cache.block_size"]["owner"] == "platform cpu"
    assert settings["cache.block_size"]["reason"]
    assert settings["cache.enable_prefix_caching"]["owner"] == "default"
    assert settings["model.max_model_len"]["value"] == 128
    assert settings["model.quantization"]["value"] == "none"
    assert {"package": "cardan 0.1.0", "group": "cardan.policies", "names": "fcfs, priority"} in [
        {**row, "package": "cardan 0.1.0"} for row in found["installed"]
    ]


def test_kernels_and_attention_of_a_model(model, capsys, monkeypatch):
    monkeypatch.setenv("CARDAN_FAKE", "fault=wrong_op")
    found, _ = explained(capsys, model, "--platform", "fake")
    kernels = {row["op"]: row for row in found["kernels"]}
    assert kernels["rms_norm"]["provider"] == "reference"
    assert "fake.wrong_op: failed: error" in kernels["rms_norm"]["rejected"][0]
    (attention,) = found["attention"]
    assert attention["backend"] == "fake"
    assert attention["layers"] == "3 from layer 0"
    # Keys and values of two heads of 16 float32 in three layers.
    assert attention["bytes_per_token"] == 3 * 2 * 2 * 16 * 4
    assert found["graphs"] == "none: the device captures none"


def test_without_a_model_and_for_whole_steps(capsys, monkeypatch):
    monkeypatch.setenv("CARDAN_FAKE", "tier=executor")
    found, settings = explained(capsys, "--platform", "fake")
    assert "whole steps itself" in found["note"]
    assert "model.model" not in settings


def test_for_people(model, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    assert main(["doctor", model, "--platform", "cpu"]) == 0
    out = capsys.readouterr().out
    for text in ("Settings on", "Kernels", "Attention", "Installed (contract", "platform cpu"):
        assert text in out


def test_a_run_that_cannot_be_is_not_explained(model, capsys):
    assert main(["doctor", model, "--explain", "--platform", "cpu", "--dtype", "int3"]) == 1
    assert "model.dtype int3 is not available" in capsys.readouterr().err
