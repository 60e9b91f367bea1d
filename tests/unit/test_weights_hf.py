"""Hugging Face directories, dummy weights, and what of the package must work without torch."""

import json
import subprocess
import sys
import textwrap

import pytest
import torch
from safetensors.torch import save_file

from cardan.core.interfaces.errors import WeightsError
from cardan.core.weights.checkpoint import Checkpoint
from cardan.core.weights.dummy_checkpoint import DummyCheckpoint
from cardan.core.weights.hf_checkpoint import HFCheckpoint
from cardan.core.weights.hf_config import load_hf_config

INDEX = "model.safetensors.index.json"
A = torch.arange(6, dtype=torch.bfloat16).reshape(2, 3)
B = torch.arange(4, dtype=torch.float32)


@pytest.fixture
def directory(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    return tmp_path


def write_shards(directory, weight_map=None):
    save_file({"a": A}, directory / "m-1.safetensors")
    save_file({"b": B}, directory / "m-2.safetensors")
    weight_map = weight_map or {"a": "m-1.safetensors", "b": "m-2.safetensors"}
    (directory / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def test_single_file(directory):
    save_file({"a": A, "b": B, "s": torch.tensor(3.0)}, directory / "model.safetensors")
    save_file({"x": B}, directory / "consolidated.safetensors")
    checkpoint: Checkpoint = HFCheckpoint(directory)
    assert checkpoint.config == {"model_type": "llama"}
    assert checkpoint.names() == {"a", "b", "s"}
    assert (checkpoint.shape("a"), checkpoint.shape("s")) == ((2, 3), ())
    assert torch.equal(checkpoint.tensor("a"), A)
    assert checkpoint.tensor("a", torch.float32).dtype == torch.float32
    # The same mapped bytes each time, no copies.
    assert checkpoint.tensor("b").data_ptr() == checkpoint.tensor("b").data_ptr()
    assert checkpoint.describe("b") == "model.safetensors"
    kept = checkpoint.tensor("b")
    checkpoint.close()
    checkpoint.close()
    assert torch.equal(kept, B)
    with pytest.raises(WeightsError, match="no safetensors file has a tensor 'nope'"):
        checkpoint.tensor("nope")


def test_shards_are_opened_when_needed(directory):
    write_shards(directory)
    (directory / "m-2.safetensors").write_bytes(b"not looked at yet")
    checkpoint = HFCheckpoint(directory)
    assert checkpoint.names() == {"a", "b"}
    assert torch.equal(checkpoint.tensor("a"), A)
    assert checkpoint.describe("b") == "m-2.safetensors"
    with pytest.raises(WeightsError, match=r"m-2\.safetensors: is not a whole safetensors file"):
        checkpoint.tensor("b")


def test_a_lone_file_of_another_name(directory):
    save_file({"a": A}, directory / "weights.safetensors")
    assert HFCheckpoint(directory).names() == {"a"}


def test_missing_shard(directory):
    write_shards(directory)
    (directory / "m-2.safetensors").unlink()
    with pytest.raises(WeightsError, match=r"1 of 2 shards are missing \(m-2\.safetensors\)"):
        HFCheckpoint(directory)


def test_index_names_a_tensor_that_is_not_there(directory):
    write_shards(directory, {"a": "m-1.safetensors", "ghost": "m-2.safetensors"})
    checkpoint = HFCheckpoint(directory)
    for read in (checkpoint.tensor, checkpoint.shape):
        with pytest.raises(WeightsError, match=r"m-2\.safetensors: has no tensor 'ghost', though"):
            read("ghost")
    with pytest.raises(WeightsError, match="no safetensors file has a tensor 'b'"):
        checkpoint.tensor("b")


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ("{", "is not valid JSON"),
        ("[]", "must hold a JSON object, holds a list"),
        ("{}", "'weight_map' must be an object"),
        ('{"weight_map": {"a": "../m.safetensors"}}', "tensor 'a': .* is not a plain file name"),
        ('{"weight_map": {"a": "/etc/passwd"}}', "is not a plain file name"),
        ('{"weight_map": {"a": 1}}', "tensor 'a': 1 is not a plain file name"),
    ],
)
def test_bad_index(directory, index, message):
    (directory / INDEX).write_text(index)
    with pytest.raises(WeightsError, match=message):
        HFCheckpoint(directory)


def test_truncated_or_damaged_file(directory):
    path = directory / "model.safetensors"
    save_file({"a": A, "b": B}, path)
    whole = path.read_bytes()
    for data in (whole[:-1], whole[:20], whole[:4], b"", b"\xff" * 100, whole + b"x"):
        path.write_bytes(data)
        with pytest.raises(WeightsError, match=r"model\.safetensors: is not a whole safetensors"):
            HFCheckpoint(directory)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.pth", "model.ckpt"])
def test_pickles_are_refused(directory, name):
    (directory / name).write_bytes(b"\x80\x04.")
    with pytest.raises(WeightsError, match=f"pickle only .{name}.*convert to safetensors"):
        HFCheckpoint(directory)
    save_file({"a": A}, directory / "model.safetensors")
    assert HFCheckpoint(directory).names() == {"a"}


def test_no_weights_and_no_index(directory):
    with pytest.raises(WeightsError, match="has no safetensors weights"):
        HFCheckpoint(directory)
    save_file({"a": A}, directory / "1.safetensors")
    save_file({"b": B}, directory / "2.safetensors")
    with pytest.raises(
        WeightsError, match=r"2 safetensors files .* but no model\.safetensors\.ind"
    ):
        HFCheckpoint(directory)


def test_config(tmp_path):
    with pytest.raises(WeightsError, match=r"config\.json: is missing"):
        load_hf_config(tmp_path)
    path = tmp_path / "config.json"
    for text, message in (
        ("{", "is not valid JSON"),
        ("3", "must hold a JSON object, holds a int"),
        ("[" * 100_000, "is not valid JSON"),
    ):
        path.write_text(text)
        with pytest.raises(WeightsError, match=message):
            load_hf_config(tmp_path)
    path.write_bytes(b'{"a": "\xff"}')
    with pytest.raises(WeightsError, match="is not valid JSON"):
        load_hf_config(tmp_path)
    path.write_text('{"text_config": {"hidden_size": 8}}')
    assert load_hf_config(tmp_path) == {"text_config": {"hidden_size": 8}}
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
    assert load_hf_config(tmp_path)["generation_config"] == {"eos_token_id": [1, 2]}
    (tmp_path / "generation_config.json").write_text("null")
    with pytest.raises(WeightsError, match=r"generation_config\.json: must hold a JSON object"):
        load_hf_config(tmp_path)


SHAPES = {"w": (600, 700), "v": (600, 700), "model.norm.weight": (512,), "s": (), "e": (0, 3)}


def test_dummy_weights():
    checkpoint: Checkpoint = DummyCheckpoint({"model_type": "llama"}, SHAPES, seed=1)
    assert checkpoint.names() == set(SHAPES)
    for name, shape in SHAPES.items():
        assert checkpoint.shape(name) == tuple(checkpoint.tensor(name).shape) == shape
    w = checkpoint.tensor("w")
    assert w.dtype == torch.float32
    assert w.std().item() == pytest.approx(0.02, rel=0.02)
    assert abs(w.mean().item()) < 1e-3
    assert torch.linalg.matrix_rank(w) == 600
    assert len(torch.unique(w, dim=0)) == 600
    norm = checkpoint.tensor("model.norm.weight")
    assert norm.mean().item() == pytest.approx(1.0, abs=0.01)
    assert checkpoint.describe("w") == "dummy weights (seed 1)"
    for read in (checkpoint.tensor, checkpoint.shape, checkpoint.describe):
        with pytest.raises(WeightsError, match="no tensor 'nope'"):
            read("nope")


def test_dummy_weights_depend_on_seed_and_name_only():
    one = DummyCheckpoint({}, SHAPES, seed=1)
    w = one.tensor("w")
    assert not torch.equal(w, one.tensor("v"))
    again = DummyCheckpoint({}, dict(reversed(SHAPES.items())), seed=1)
    assert torch.equal(w, again.tensor("w"))
    assert torch.equal(w.bfloat16(), again.tensor("w", torch.bfloat16))
    assert not torch.equal(w, DummyCheckpoint({}, SHAPES, seed=2).tensor("w"))
    # Gemma's norms scale by 1 + weight.
    gemma = DummyCheckpoint({"model_type": "gemma3_text"}, SHAPES, seed=1)
    assert abs(gemma.tensor("model.norm.weight").mean().item()) < 0.01


def test_dummy_weights_are_made_where_they_are_needed():
    checkpoint = DummyCheckpoint({}, SHAPES, 1, torch.device("meta"))
    for name, shape in SHAPES.items():
        tensor = checkpoint.tensor(name)
        assert (tensor.device.type, tuple(tensor.shape)) == ("meta", shape)


def test_readers_import_without_torch():
    program = """
        import sys
        sys.modules["torch"] = None
        import cardan.core.weights
        import cardan.core.weights.checkpoint
        import cardan.core.weights.gguf_config
        import cardan.core.weights.gguf_file
        import cardan.core.weights.gguf_names
        import cardan.core.weights.hf_config
        import cardan.core.weights.resolve
        assert "huggingface_hub" not in sys.modules
        assert "gguf" not in sys.modules
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=True)
