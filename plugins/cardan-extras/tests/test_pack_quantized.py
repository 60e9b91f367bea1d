"""Checkpoints of 4-bit words through an engine, against transformers on the numbers they hold."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cardan_extras.pack_quantized import PackedMatrix, PackQuantizedScheme
from safetensors.torch import load_file, save_file
from test_extras import GRANITE, SETTINGS, greedy, ids_of, make_model, params

from cardan.core.interfaces.errors import CardanError, ConfigError
from cardan.llm import LLM

GROUP = 32
WEIGHTS = {
    "num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP,
}  # fmt: skip
Change = Callable[[dict[str, torch.Tensor]], object]


def stated(ignore: tuple[str, ...] = ("lm_head",), **changes: Any) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": {**WEIGHTS, **changes}}},
        "ignore": list(ignore),
    }


def packed(weight: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Words, scales and the matrix that they stand for, number by number."""
    rows, columns = weight.shape
    scales = np.abs(weight.reshape(rows, -1, GROUP)).max(-1) / 7.5
    numbers = np.rint(weight / np.repeat(scales, GROUP, 1)).clip(-8, 7).astype(np.int64)
    words = np.zeros((rows, columns // 8), np.uint64)
    for column in range(columns):
        shifted = (numbers[:, column] + 8).astype(np.uint64) << np.uint64(column % 8 * 4)
        words[:, column // 8] |= shifted
    return words.astype(np.uint32).view(np.int32), scales, numbers * np.repeat(scales, GROUP, 1)


def make_packed(
    folder: Path,
    kind: str,
    ignored: tuple[str, ...] = (),
    change: Change | None = None,
    **sizes: Any,
) -> list[int]:
    """A checkpoint of packed projections; what transformers answers with the same numbers."""
    model = make_model(folder, kind, **sizes)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    parameters = dict(model.named_parameters())
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        if name.removesuffix(".weight") in ignored:
            continue
        weight = tensors.pop(name)
        words, scales, exact = packed(weight.numpy().astype(np.float64))
        tensors[f"{name}_packed"] = torch.from_numpy(words)
        tensors[f"{name}_scale"] = torch.from_numpy(scales).float()
        tensors[f"{name}_shape"] = torch.tensor(weight.shape)
        with torch.no_grad():
            parameters[name].copy_(torch.from_numpy(exact))
    if change is not None:
        change(tensors)
    save_file(tensors, path)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = stated(("lm_head", *ignored))
    (folder / "config.json").write_text(json.dumps(config))
    return greedy(model)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("kind", "sizes"), [("llama", {}), ("granite", GRANITE)])
def test_a_packed_checkpoint_is_what_it_stands_for(
    tmp_path: Path, kind: str, sizes: dict[str, Any], tied: bool
) -> None:
    expected = make_packed(tmp_path, kind, tie_word_embeddings=tied, **sizes)
    assert len(set(expected)) > 3
    with LLM(str(tmp_path), kv_cache_dtype="float32", **SETTINGS) as llm:
        assert ids_of(llm, params()) == expected


def test_a_fused_layer_of_which_a_part_is_not_packed(tmp_path: Path) -> None:
    """The others are decoded."""
    ignored = ("model.layers.0.self_attn.k_proj", "model.layers.1.mlp.down_proj")
    expected = make_packed(tmp_path, "llama", ignored)
    with LLM(str(tmp_path), kv_cache_dtype="float32", **SETTINGS) as llm:
        assert ids_of(llm, params()) == expected


def test_two_ranks_share_a_packed_checkpoint(tmp_path: Path) -> None:
    expected = make_packed(tmp_path, "llama")
    with LLM(str(tmp_path), tensor_parallel_size=2, kv_cache_dtype="float32", **SETTINGS) as llm:
        assert ids_of(llm, params()) == expected


NAME = "model.layers.0.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda tensors: tensors.pop(f"{NAME}_scale"),
            rf"1 missing tensors: {NAME}_scale \[128, 2\]",
        ),
        (
            lambda tensors: tensors.update({f"{NAME}_scale": torch.ones(128, 4)}),
            rf"{NAME}_scale in .* is \[128, 4\], the model needs \[128, 2\]",
        ),
        (
            lambda tensors: tensors.update({f"{NAME}_g_idx": torch.ones(64)}),
            rf"1 tensors that the model has no place for: .{NAME}_g_idx",
        ),
        (
            lambda tensors: tensors.update({f"{NAME}_shape": torch.tensor([64, 128])}),
            rf"{NAME} is \[64, 128\]",
        ),
        (lambda tensors: tensors.update({NAME: torch.ones(128, 64)}), "no place for"),
    ],
    ids=["missing", "scales", "unknown", "shape", "twice"],
)  # fmt: skip
def test_checkpoints_that_do_not_fit(tmp_path: Path, change: Change, message: str) -> None:
    make_packed(tmp_path, "llama", change=change)
    with pytest.raises(CardanError, match=message):
        LLM(str(tmp_path), **SETTINGS)


@pytest.mark.parametrize("changes", [{"num_bits": 8}, {"symmetric": False}, {"group_size": 12}])
def test_other_kinds_are_refused(changes: dict[str, Any]) -> None:
    config = {"quantization_config": stated(**changes)}
    assert PackQuantizedScheme.detect(config)
    with pytest.raises(ConfigError, match="is read, not"):
        PackQuantizedScheme.for_checkpoint(config)
    entry = {"weights": WEIGHTS, "input_activations": {"num_bits": 8}}
    with pytest.raises(ConfigError, match="no input_activations"):
        PackQuantizedScheme.for_checkpoint(
            {"quantization_config": {**stated(), "config_groups": {"group_0": entry}}}
        )
    with pytest.raises(ConfigError, match="does not say"):
        PackQuantizedScheme.for_checkpoint({})


def test_parts_of_a_matrix() -> None:
    weight = np.random.default_rng(3).standard_normal((6, 4 * GROUP))
    words, scales, exact = packed(weight)
    whole = PackedMatrix("x", 4 * GROUP, torch.from_numpy(words), torch.from_numpy(scales))
    part = whole.rows(1, 4).columns(GROUP, 3 * GROUP)
    assert part is not None
    np.testing.assert_allclose(part.decoded().numpy(), exact[1:4, GROUP : 3 * GROUP], rtol=1e-6)
    assert whole.columns(GROUP // 2, GROUP) is None
