"""Operations on quantised weights: their definitions, and weights that providers prepare."""

import gguf
import numpy as np
import pytest
import stored_kernels
import torch

from cardan.core.interfaces.errors import ConfigError
from cardan.core.interfaces.kernels import Needs, check_needs
from cardan.core.interfaces.quantization import StoredBlocks
from cardan.core.ops.catalogue import CATALOGUE
from cardan.core.ops.compare import compare_case
from cardan.core.ops.reference.block_inputs import random_blocks
from cardan.core.ops.reference.blocks import block_embedding, block_linear, int8_linear
from cardan.core.types.ggml import BLOCK_TYPES, block_format

OPS = {op.name: op for op in CATALOGUE}
CPU = torch.device("cpu")


def decoded(weight, format):
    """What the ``gguf`` package makes of stored rows."""
    kind = gguf.GGMLQuantizationType(int(BLOCK_TYPES[format]))
    return gguf.quants.dequantize(weight.numpy(), kind).astype(np.float32)


def drawn(format, rows, columns, seed=0, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    return random_blocks(format, rows, columns, scale, generator)


@pytest.mark.parametrize("format", BLOCK_TYPES)
def test_random_blocks_have_the_scale_that_was_asked_for(format):
    values = decoded(drawn(format, 40, 512, scale=0.25), format)
    assert np.isfinite(values).all()
    assert 0.24 < np.sqrt(np.square(values).mean()) < 0.26
    assert abs(values.mean()) < 0.05


@pytest.mark.parametrize("format", BLOCK_TYPES)
@pytest.mark.parametrize("shape", [(), (0,), (1,), (7,), (2, 3)])
def test_products_with_stored_rows(format, shape):
    columns = 2 * block_format(format).elements
    weight = drawn(format, 5, columns)
    x = torch.randn(*shape, columns, generator=torch.Generator().manual_seed(1))
    bias = torch.randn(5)
    expected = x.double().numpy() @ decoded(weight, format).T.astype(np.float64) + bias.numpy()
    got = block_linear(x, weight, bias, format)
    assert got.dtype == torch.float32
    assert got.shape == (*shape, 5)
    np.testing.assert_allclose(got.numpy(), expected, rtol=1e-4, atol=1e-4)
    wide = block_linear(x.double(), weight, None, format)
    np.testing.assert_allclose(wide.numpy(), expected - bias.numpy(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_short_activations_are_rounded_once(dtype):
    weight = drawn("q4_1", 9, 64, scale=0.1)
    x = torch.randn(3, 64).to(dtype)
    expected = x.float() @ torch.from_numpy(decoded(weight, "q4_1")).T
    got = block_linear(x, weight, None, "q4_1")
    assert got.dtype == dtype
    torch.testing.assert_close(got, expected.to(dtype), rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("format", BLOCK_TYPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_of_a_stored_table(format, dtype):
    weight = drawn(format, 11, 256)
    ids = torch.tensor([10, 0, 0, 7])
    expected = torch.from_numpy(decoded(weight, format))[ids].to(dtype)
    got = block_embedding(ids, weight, format, dtype)
    assert torch.equal(got, expected)
    assert block_embedding(ids[:0], weight, format, dtype).shape == (0, 256)


@pytest.mark.parametrize("columns", [1, 50, 4096])
def test_products_of_eight_bit_numbers(columns):
    rng = np.random.default_rng(columns)
    x = rng.standard_normal((4, columns)).astype(np.float32)
    x[2] = 0.0
    weight = rng.integers(-127, 128, (6, columns)).astype(np.int8)
    scales = rng.random(6).astype(np.float32) / columns**0.5
    bias = rng.standard_normal(6).astype(np.float32)
    steps = np.abs(x).max(axis=1, keepdims=True) / np.float32(127)
    numbers = np.rint(x / np.where(steps == 0, 1, steps)).astype(np.int64)
    assert np.abs(numbers).max() == 127
    expected = (numbers @ weight.astype(np.int64).T) * steps.astype(np.float64) * scales + bias
    tensors = [torch.from_numpy(array) for array in (x, weight, scales, bias)]
    got = int8_linear(*tensors)
    assert got.dtype == torch.float32
    np.testing.assert_allclose(got.numpy(), expected, rtol=1e-6, atol=1e-6)


def test_views_of_stored_matrices():
    data = torch.arange(4 * 36, dtype=torch.uint8).view(4, 36)
    blocks = StoredBlocks("q4_0", 64, data)
    assert blocks.num_rows == 4
    part = blocks.rows(1, 3)
    assert part.data.data_ptr() == data[1].data_ptr()
    assert (part.num_rows, part.in_features) == (2, 64)
    right = part.columns(32, 64)
    assert right.in_features == 32
    assert torch.equal(right.data, data[1:3, 18:])
    assert part.columns(16, 64) is None
    assert part.columns(0, 48) is None


@pytest.mark.parametrize("name", ["block_linear", "block_embedding", "int8_linear"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_inputs_name_their_sizes(name, dtype):
    op = OPS[name]
    cases = op.make_inputs(getattr(torch, dtype), CPU, 3)
    if name != "int8_linear":
        assert {case.attributes["format"] for case in cases} == set(BLOCK_TYPES)
    for case in cases:
        assert case.attributes["dtype"] == dtype
        found = compare_case(op, op.body, case, OPS, op.tolerances[dtype])
        assert found.ok, found
        if "out_features" in case.attributes:
            x, weight = case.args[:2]
            assert x.shape[-1] == case.attributes["in_features"]
            assert weight.shape[0] == case.attributes["out_features"]


def test_eight_bit_activations_are_within_the_tolerance():
    op = OPS["block_linear"]
    for seed in range(3):
        for case in op.make_inputs(torch.float32, CPU, seed):
            found = compare_case(
                op,
                stored_kernels.rounding_block_linear,
                case,
                OPS,
                op.tolerances["float32"],
            )
            assert found.ok, found


def test_a_provider_prepares_the_weight_once():
    ops = stored_kernels.stored_ops()
    weight = drawn("q4_1", 6, 64)
    use = {"dtype": "float32", "format": "q4_1", "in_features": 64, "out_features": 6}
    resolution = ops.resolve("block_linear", **use)
    assert resolution.provider == "test.stored"
    assert resolution.self_check.startswith("passed: ")
    before = weight.clone()
    prepared = ops.prepare("block_linear", weight, **use)
    assert prepared.attributes == use
    assert torch.equal(weight, before)
    x = torch.randn(2, 64)
    got = ops.bind("block_linear", **use)(x, prepared, None, "q4_1")
    torch.testing.assert_close(got, block_linear(x, weight, None, "q4_1"))
    assert ops.explain() == [resolution]


def test_the_definition_takes_weights_as_they_are():
    ops = stored_kernels.stored_ops()
    use = {"dtype": "float32", "format": "q2_k", "in_features": 256, "out_features": 6}
    resolution = ops.resolve("block_linear", **use)
    assert resolution.provider == "reference"
    reason = "format=q2_k is not among q4_0, q4_1, q4_k, q5_1, q6_k, q8_0"
    assert resolution.rejected[0].reasons == (reason,)
    weight = drawn("q2_k", 6, 256)
    assert ops.prepare("block_linear", weight, **use) is weight
    dense = torch.ones(3, 4)
    sizes = {"dtype": "float32", "in_features": 4, "out_features": 3}
    assert ops.prepare("linear", dense, **sizes) is dense
    with pytest.raises(KeyError, match="did you mean block_linear"):
        ops.resolve("block_liner", **use)
    with pytest.raises(ConfigError, match="needs dtype"):
        ops.prepare("block_linear", weight, format="q2_k")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (
            {"prepare": "stored_kernels:nothing"},
            "stored_kernels:nothing is not a function",
        ),
        ({"prepare": "no_such_module:f"}, "import of no_such_module failed"),
        ({"prepare": "stored_kernels:failing_prepare"}, "failed: ValueError: no room"),
        ({"prepare": ""}, "failed: "),
    ],
)
def test_a_provider_that_cannot_prepare_is_not_used(changes, reason, caplog):
    ops = stored_kernels.stored_ops(stored_kernels.provider(**changes))
    use = {"dtype": "float32", "format": "q4_1", "in_features": 64, "out_features": 6}
    resolution = ops.resolve("block_linear", **use)
    assert resolution.provider == "reference"
    assert reason in resolution.rejected[0].reasons[0]
    assert reason in caplog.text


def test_only_operations_that_say_so_can_be_prepared_for(caplog):
    spare = stored_kernels.provider("block_embedding", prepare="stored_kernels:prepare")
    ops = stored_kernels.stored_ops(spare)
    resolution = ops.resolve("block_embedding", dtype="float32", format="q4_0", hidden=64)
    assert resolution.provider == "reference"
    assert "block_embedding has no argument to prepare" in caplog.text


def test_needs_of_several_values():
    needs = Needs(one_of={"format": frozenset({"q8_0", "q4_0"})})
    assert check_needs(needs, (), {"dtype": "float32", "format": "q4_0"})
    refused = check_needs(needs, (), {"dtype": "float32", "format": "q6_k"})
    assert refused.reasons == ("format=q6_k is not among q4_0, q8_0",)
    assert check_needs(needs, (), {}).reasons == ("format=None is not among q4_0, q8_0",)
