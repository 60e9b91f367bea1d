"""Weights that stay where the file is mapped, and pages that are given back."""

import mmap
from pathlib import Path

import pytest
import torch
from model_helpers import load_model, reference_ops
from safetensors.torch import save_file

from cardan.core.interfaces.kernels import Provider
from cardan.core.interfaces.torch_linear import DenseEmbedding, DenseLinear, may_keep
from cardan.core.ops.catalogue import CATALOGUE
from cardan.core.ops.registry import KernelRegistry
from cardan.core.weights.file_pages import release_mapping
from cardan.core.weights.hf_checkpoint import HFCheckpoint
from cardan.testing.tiny_models import make_tiny_model

CPU = torch.device("cpu")
needs_maps = pytest.mark.skipif(
    not Path("/proc/self/maps").exists() or not hasattr(mmap, "MADV_DONTNEED"),
    reason="the system does not say what is mapped",
)


def linear(rows, columns, ops=None):
    return DenseLinear(ops or reference_ops(), columns, rows, torch.float32, CPU)


def test_a_whole_tensor_of_the_right_dtype_is_kept():
    weight = torch.randn(6, 4)
    layer = linear(6, 4)
    layer.load(0, weight)
    layer.finish()
    assert layer.weight is weight
    x = torch.randn(3, 4)
    torch.testing.assert_close(layer.apply(x, None), x @ weight.T)


@pytest.mark.parametrize(
    "weight",
    [
        torch.randn(6, 4, dtype=torch.float64),
        torch.randn(4, 6).T,
        torch.randn(12, 4)[3:9],
        torch.randn(7, 4).view(-1)[1:25].view(6, 4),
        torch.randn(6, 4, dtype=torch.bfloat16),
    ],
    ids=["dtype", "strides", "slice", "alignment", "short"],
)
def test_other_tensors_are_copied(weight):
    assert not may_keep(weight, torch.float32, CPU)
    layer = linear(6, 4)
    layer.load(0, weight)
    assert layer.weight.data_ptr() != weight.data_ptr()
    assert torch.equal(layer.weight, weight.float())
    table = DenseEmbedding(reference_ops(), 4, torch.float32, CPU)
    table.load(weight)
    assert table.table.data_ptr() != weight.data_ptr()
    assert torch.equal(table.lookup(torch.tensor([5, 0])), weight.float()[[5, 0]])


def test_what_is_kept_is_never_written():
    first, second = torch.randn(6, 4), torch.randn(3, 4)
    layer = linear(6, 4)
    layer.load(0, first)
    before = first.clone()
    layer.load(0, second)
    layer.load(3, second)
    assert torch.equal(first, before)
    assert torch.equal(layer.weight, torch.cat([second, second]))


def transposed(weight, **attributes):
    return weight.T.contiguous(), attributes


def transposed_linear(x, weight, bias):
    values, attributes = weight
    assert x.shape[-1] == attributes["in_features"] == values.shape[0]
    out = x @ values
    return out if bias is None else out + bias


def test_providers_may_bring_dense_weights_into_a_form_of_their_own(tmp_path):
    provider = Provider(
        op="linear",
        name="test.transposed",
        load="test_weights_in_place:transposed_linear",
        prepare="test_weights_in_place:transposed",
    )
    ops = KernelRegistry(CATALOGUE, [provider], device=CPU, features=())
    layer = linear(6, 4, ops)
    layer.load(0, torch.ones(6, 4))
    layer.finish()
    assert isinstance(layer.weight, tuple)
    assert torch.equal(layer.apply(torch.ones(2, 4), torch.ones(6)), torch.full((2, 6), 5.0))
    # The tied head's form is its own, the embedding's table stays.
    make_tiny_model("qwen2", tmp_path)
    model = load_model(tmp_path, ops=ops)
    table = model.embed_tokens.method.table
    values, _ = model.lm_head.method.weight
    assert torch.equal(values, table.T)


@needs_maps
def test_weights_of_their_own_stay_in_the_mapped_file(tmp_path):
    make_tiny_model("llama", tmp_path)
    file = str(tmp_path / "model.safetensors")
    model = load_model(tmp_path)
    ranges = [
        [int(end, 16) for end in line.split()[0].split("-")]
        for line in Path("/proc/self/maps").read_text().splitlines()
        if file in line
    ]

    def is_mapped(tensor):
        return any(start <= tensor.data_ptr() < stop for start, stop in ranges)

    layer = model.layers[0]
    assert is_mapped(layer.self_attn.o_proj.method.weight)
    assert is_mapped(layer.mlp.down_proj.method.weight)
    assert is_mapped(model.embed_tokens.method.table)
    # Fused projections are put together in memory of their own.
    assert not is_mapped(layer.self_attn.qkv_proj.method.weight)
    assert not is_mapped(layer.mlp.gate_up_proj.method.weight)


@needs_maps
def test_pages_given_back_are_read_anew(tmp_path):
    weights = {"a": torch.randn(3000, 1000), "b": torch.randn(10)}
    save_file(weights, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    checkpoint = HFCheckpoint(tmp_path)
    checkpoint.release_pages()
    tensors = {name: checkpoint.tensor(name) for name in weights}
    assert torch.equal(tensors["a"], weights["a"])
    resident = rss_file()
    checkpoint.release_pages()
    assert resident - rss_file() > 10_000
    assert checkpoint.stored("a") is None
    checkpoint.close()
    assert all(torch.equal(tensors[name], weights[name]) for name in weights)


def rss_file():
    """KiB of mapped files in memory."""
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if "RssFile" in line)


@needs_maps
def test_memory_of_no_file_is_left_alone():
    values = torch.ones(1 << 20)
    assert not release_mapping(values.data_ptr())
    assert values.sum() == 1 << 20
    assert not release_mapping(0)
