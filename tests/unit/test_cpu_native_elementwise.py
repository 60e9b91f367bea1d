"""Native elementwise kernels against the float64 definitions: sizes, strides, bits, and errors."""

import os
import subprocess
import sys
from functools import cache

import numpy as np
import pytest
import torch

from cardan.core.interfaces.kernels import Case
from cardan.core.ops.catalogue import CATALOGUE
from cardan.core.ops.compare import compare_case
from cardan.core.ops.registry import KernelRegistry
from cardan.platforms.cpu.native.elementwise import ElementwiseKernels
from cardan.platforms.cpu.native.elementwise_providers import ELEMENTWISE_PROVIDERS
from cardan.platforms.cpu.native.library import open_library

OPS = {op.name: op for op in CATALOGUE}
NAMES = [provider.op for provider in ELEMENTWISE_PROVIDERS]
DTYPES = ("float32", "bfloat16", "float16")


@cache
def kernels(isa):
    wanted = {} if isa == "best" else {"CARDAN_CPU_ISA": isa}
    return ElementwiseKernels(open_library({**os.environ, **wanted}))


@pytest.fixture(autouse=True)
def _threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def check(name, dtype, *args, isa="best"):
    op = OPS[name]
    kernel = getattr(kernels(isa), name)
    with torch.inference_mode():
        found = compare_case(op, kernel, Case(args, {}), OPS, op.tolerances[dtype])
    assert found.ok, f"{name} {dtype}: {found}"


@pytest.mark.parametrize("isa", ["best", "scalar"])
@pytest.mark.parametrize("name", NAMES)
def test_agrees_with_definition(name, isa):
    for dtype in OPS[name].tolerances:
        for seed in range(5):
            for case in OPS[name].make_inputs(getattr(torch, dtype), torch.device("cpu"), seed):
                check(name, dtype, *case.args, isa=isa)


@pytest.mark.parametrize("isa", ["best", "scalar"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_sizes(dtype, isa):
    """From one element over every remainder of a vector to sizes that threads share."""
    generator = torch.Generator().manual_seed(5)

    def draw(*shape):
        return torch.randn(shape, generator=generator).to(getattr(torch, dtype))

    for size in [*range(1, 34), 63, 576, 1537]:
        x, gate_up = draw(3, size), draw(3, 2 * size)
        check("rms_norm", dtype, x, draw(size), 1e-5, isa=isa)
        check("rms_norm", dtype, x, draw(size).float(), 1e-5, isa=isa)
        check("fused_add_rms_norm", dtype, x, draw(3, size), draw(size), 1e-5, isa=isa)
        check("silu_and_mul", dtype, gate_up, isa=isa)
        check("gelu_tanh_and_mul", dtype, gate_up, isa=isa)
        check("soft_cap", dtype, x * 40, 30.0, isa=isa)
        check("to_float32", dtype, x, isa=isa)
    for rows, size in ((300, 576), (0, 64)):
        check("rms_norm", dtype, draw(rows, size), draw(size), 1e-5, isa=isa)
        check("silu_and_mul", dtype, draw(rows, 2 * size), isa=isa)


@pytest.mark.parametrize("isa", ["best", "scalar"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rotation(dtype, isa):
    generator = torch.Generator().manual_seed(6)
    torch_dtype = getattr(torch, dtype)
    for tokens, dim, rotary in ((1, 64, 64), (7, 64, 32), (3, 10, 6), (2, 5, 0), (400, 64, 64)):
        heads = torch.randn(tokens, 15, dim, generator=generator).to(torch_dtype)
        q, k, _ = heads.split([9, 3, 3], dim=1)
        cos_sin = torch.rand(32, rotary, generator=generator) * 2 - 1
        positions = torch.randint(0, 32, (tokens,), generator=generator)
        weights = [torch.randn(dim, generator=generator) for _ in range(2)]
        weights[0] = weights[0].to(torch_dtype)
        check("rotary_embedding", dtype, q, k, cos_sin, positions, isa=isa)
        check("qk_norm_rope", dtype, q, k, *weights, 1e-6, cos_sin, positions, isa=isa)


@pytest.mark.parametrize("isa", ["best", "scalar"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_finite_rows(dtype, isa):
    """One bad element at each place of a row, and the largest numbers, which are finite."""
    torch_dtype = getattr(torch, dtype)
    for size in (1, 7, 33, 1500):
        x = torch.randn(size, size).to(torch_dtype)
        for value in (torch.inf, -torch.inf, torch.nan):
            bad = x.clone()
            bad.fill_diagonal_(value)
            bad[0] = torch.finfo(torch_dtype).max
            found = kernels(isa).finite_rows(bad)
            assert found.tolist() == [True] + [False] * (size - 1)
    x = torch.zeros(4, 6, dtype=torch_dtype)
    x[1, 2] = torch.nan
    assert kernels(isa).finite_rows(x[:, 3:]).all()
    assert kernels(isa).finite_rows(x[:0]).tolist() == []


def test_strided_inputs():
    """``compare_case`` copies inputs, so views are compared with their copies here."""
    ops = kernels("best")
    heads = torch.randn(6, 15, 64)
    q, k, _ = heads.split([9, 3, 3], dim=1)
    cos_sin, positions = torch.rand(16, 128)[:, ::2], torch.arange(12)[::2]
    for views in ((q, k), (q.flip(0).transpose(1, 2).contiguous().transpose(1, 2), k)):
        dense = [view.contiguous() for view in views]
        got = ops.rotary_embedding(*views, cos_sin, positions)
        want = ops.rotary_embedding(*dense, cos_sin.contiguous(), positions.contiguous())
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    weight = torch.randn(128)[::2]
    assert torch.equal(
        ops.rms_norm(q, weight, 1e-5), ops.rms_norm(q.contiguous(), weight.contiguous(), 1e-5)
    )
    assert torch.equal(ops.silu_and_mul(q), ops.silu_and_mul(q.contiguous()))
    logits = torch.randn(4, 999)
    assert torch.equal(ops.greedy_tokens(logits[:, 3:]), logits[:, 3:].argmax(-1))
    assert torch.equal(ops.greedy_tokens(logits.T), logits.T.argmax(-1))


@pytest.mark.parametrize("dtype", DTYPES)
def test_embeddings_are_rows_of_the_table(dtype):
    """Bit by bit, for no id, few, and so many that threads share them; views as their copies."""
    ops = kernels("best")
    table = torch.randn(50, 130).to(getattr(torch, dtype))
    table[7, 3] = torch.nan
    for ids in (torch.randint(0, 50, (count,)) for count in (0, 1, 3, 2000)):
        found = ops.embedding(ids, table)
        assert found.dtype is table.dtype
        assert torch.equal(found.view(torch.uint8), table[ids].view(torch.uint8))
    ids = torch.randint(0, 50, (4, 6))
    for chosen in (ids.int(), ids.T, ids[:, ::2]):
        found, wanted = ops.embedding(chosen, table[:, 5:69]), table[:, 5:69][chosen.long()]
        assert torch.equal(found.view(torch.uint8), wanted.contiguous().view(torch.uint8))


@pytest.mark.parametrize("isa", ["best", "scalar"])
@pytest.mark.parametrize("vocab_size", [1, 5, 33, 2048, 2049, 9001])
def test_greedy_ties_and_special_values(vocab_size, isa):
    """The lowest id wins a tie; NaN counts as largest."""
    rng = np.random.default_rng(vocab_size)
    logits = rng.integers(-3, 4, (40, vocab_size)).astype(np.float32)
    logits[1] = -np.inf
    logits[2] = -np.inf
    logits[2, -1] = -3e38
    logits[3, rng.integers(vocab_size)] = np.inf
    logits[4, rng.integers(vocab_size, size=2)] = np.nan
    logits[5] = np.nan
    logits[6] = np.where(rng.random(vocab_size) < 0.5, -0.0, 0.0)
    # NumPy too takes the first of equals, and the first NaN before all.
    want = logits.argmax(-1)
    assert kernels(isa).greedy_tokens(torch.from_numpy(logits)).tolist() == want.tolist()


@pytest.mark.parametrize("isa", ["best", "scalar"])
def test_extremes_of_activations(isa):
    """Far tails, infinities and NaN come out as the definition has them."""
    edges = [0.0, -0.0, 87.0, 88.5, 89.0, 1e4, 3e38, np.inf, np.nan, 1e-30, 0.3, 0.7, 10.0]
    gate = torch.tensor([*edges, *(-edge for edge in edges)])
    x = torch.cat((gate, torch.ones_like(gate)))[None]
    for name in ("silu_and_mul", "gelu_tanh_and_mul"):
        got, want = getattr(kernels(isa), name)(x), OPS[name].body(x.double())
        torch.testing.assert_close(got.double(), want, rtol=1e-6, atol=1e-30, equal_nan=True)
    got, want = kernels(isa).soft_cap(gate, 30.0), OPS["soft_cap"].body(gate.double(), 30.0)
    torch.testing.assert_close(got.double(), want, rtol=1e-6, atol=1e-30, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_do_not_depend_on_rows_or_threads(dtype):
    ops = kernels("best")
    x = torch.randn(400, 576).to(getattr(torch, dtype))
    weight = torch.randn(576)
    for kernel in (lambda x: ops.rms_norm(x, weight, 1e-5), ops.silu_and_mul):
        torch.set_num_threads(2)
        together = kernel(x)
        torch.set_num_threads(1)
        assert torch.equal(together, kernel(x))
        assert all(torch.equal(together[row : row + 1], kernel(x[row : row + 1])) for row in (0, 9))


def test_bad_input_is_named():
    ops = kernels("best")
    x, q, k = torch.randn(3, 8), torch.randn(3, 2, 8), torch.randn(3, 1, 8)
    cos_sin, positions = torch.rand(4, 8), torch.tensor([0, 1, 4])
    with pytest.raises(ValueError, match=r"weight must be \(8,\), got \(7,\)"):
        ops.rms_norm(x, torch.ones(7), 1e-5)
    with pytest.raises(
        ValueError, match=r"x must be float32, bfloat16 or float16, got torch\.float64"
    ):
        ops.rms_norm(x.double(), torch.ones(8), 1e-5)
    with pytest.raises(ValueError, match="residual must be as x"):
        ops.fused_add_rms_norm(x, x[:2], torch.ones(8), 1e-5)
    with pytest.raises(ValueError, match="so it is even; got 7"):
        ops.silu_and_mul(x[:, :7])
    with pytest.raises(IndexError, match=r"token_ids must lie in \[0, 8\), .* got -1 to 8"):
        ops.embedding(torch.tensor([3, 8, -1]), torch.randn(8, 2))
    with pytest.raises(IndexError, match=r"positions must lie in \[0, 4\), .* got 0 to 4"):
        ops.rotary_embedding(q, k, cos_sin, positions)
    with pytest.raises(IndexError, match="got -1 to -1"):
        ops.rotary_embedding(q, k, cos_sin, torch.full((3,), -1))
    with pytest.raises(ValueError, match="positions must be int64"):
        ops.rotary_embedding(q, k, cos_sin, positions.int())
    with pytest.raises(ValueError, match="must agree in tokens, dtype and head dim"):
        ops.rotary_embedding(q, k[:2], cos_sin, positions)
    with pytest.raises(ValueError, match="logits must be float32"):
        ops.greedy_tokens(x.half())


def test_registry_resolves_to_the_providers():
    registry = KernelRegistry(
        CATALOGUE, ELEMENTWISE_PROVIDERS, device=torch.device("cpu"), features=()
    )
    chosen = {resolution.op: resolution for resolution in registry.table("bfloat16")}
    for name in NAMES:
        assert chosen[name].provider == f"cpu.native_{name}"
        assert chosen[name].self_check.startswith("passed")


def test_providers_import_no_torch():
    code = (
        "import sys; import cardan.platforms.cpu.native.elementwise_providers; "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
