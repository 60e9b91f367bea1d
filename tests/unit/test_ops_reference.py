"""The definitions against NumPy and against transformers' own modules."""

import numpy as np
import pytest
import torch

from cardan.core.interfaces.kernels import Tolerance
from cardan.core.ops.catalogue import CATALOGUE
from cardan.core.ops.compare import compare_tensors, reference_kernel

OPS = {op.name: op for op in CATALOGUE}
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
LOOSE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def run(name, *args):
    return reference_kernel(OPS[name], OPS)(*args)


def draw(*shape, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))).to(dtype)


def close(actual, want, dtype):
    assert actual.dtype == dtype
    np.testing.assert_allclose(
        actual.double().numpy(), np.asarray(want), rtol=LOOSE[dtype], atol=LOOSE[dtype]
    )


def as_numpy(tensor):
    return tensor.double().numpy()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weight_dtype", [None, torch.float32])
def test_rms_norm(dtype, weight_dtype):
    x, weight = draw(4, 3, 24, dtype=dtype), draw(24, dtype=weight_dtype or dtype)
    a, w = as_numpy(x), as_numpy(weight)
    want = a / np.sqrt((a**2).mean(-1, keepdims=True) + 1e-5) * w
    close(run("rms_norm", x, weight, 1e-5), want, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_fused_add_rms_norm(dtype):
    x, residual, weight = draw(4, 24, dtype=dtype), draw(4, 24, dtype=dtype), draw(24, dtype=dtype)
    kept = residual.clone()
    normed, total = run("fused_add_rms_norm", x, residual, weight, 1e-5)
    assert torch.equal(residual, kept)
    a = as_numpy(total)
    close(total, as_numpy(x) + as_numpy(residual), dtype)
    close(normed, a / np.sqrt((a**2).mean(-1, keepdims=True) + 1e-5) * as_numpy(weight), dtype)


def rotate_pairs(x, cos_sin, positions):
    """Each pair (i, i + R/2) as a complex number times exp(i * angle)."""
    table, x = as_numpy(cos_sin)[positions.numpy()], as_numpy(x).copy()
    half = table.shape[1] // 2
    turn = table[:, :half] + 1j * table[:, half:]
    turned = (x[..., :half] + 1j * x[..., half : 2 * half]) * turn[:, None, :]
    x[..., :half], x[..., half : 2 * half] = turned.real, turned.imag
    return x


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rotary", [16, 8, 4])
def test_rotary_embedding(dtype, rotary):
    q, k = draw(5, 4, 16, dtype=dtype), draw(5, 2, 16, dtype=dtype)
    angles = torch.arange(9)[:, None] * 100.0 ** (-torch.arange(rotary // 2) / rotary)
    cos_sin = torch.cat((angles.cos(), angles.sin()), -1)
    positions = torch.tensor([0, 8, 3, 3, 1])
    rotated_q, rotated_k = run("rotary_embedding", q, k, cos_sin, positions)
    close(rotated_q, rotate_pairs(q, cos_sin, positions), dtype)
    close(rotated_k, rotate_pairs(k, cos_sin, positions), dtype)
    assert torch.equal(rotated_q[0], q[0])


def test_rotary_embedding_equals_transformers():
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    q, k, angles = draw(6, 4, 16), draw(6, 2, 16), torch.rand(6, 8) * 6
    cos_sin = torch.cat((angles.cos(), angles.sin()), -1)
    cos, sin = (torch.cat((x, x), -1)[None] for x in (angles.cos(), angles.sin()))
    want_q, want_k = apply_rotary_pos_emb(
        q.transpose(0, 1)[None], k.transpose(0, 1)[None], cos, sin
    )
    got_q, got_k = run("rotary_embedding", q, k, cos_sin, torch.arange(6))
    torch.testing.assert_close(got_q, want_q[0].transpose(0, 1))
    torch.testing.assert_close(got_k, want_k[0].transpose(0, 1))


def test_qk_norm_rope_is_its_parts():
    q, k, wq, wk = draw(5, 4, 16), draw(5, 2, 16), draw(16), draw(16) + 1
    angles = torch.rand(9, 8) * 6
    cos_sin = torch.cat((angles.cos(), angles.sin()), -1)
    positions = torch.tensor([2, 8, 3, 3, 1])
    got_q, got_k = run("qk_norm_rope", q, k, wq, wk, 1e-6, cos_sin, positions)
    for got, x, weight in ((got_q, q, wq), (got_k, k, wk)):
        normed = x / (x**2).mean(-1, keepdim=True).add(1e-6).sqrt() * weight
        close(got, rotate_pairs(normed, cos_sin, positions), torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gated_activations(dtype):
    x = draw(4, 20, dtype=dtype) * 4
    kept = x.clone()
    a = as_numpy(x)
    gate, up = a[:, :10], a[:, 10:]
    close(run("silu_and_mul", x), gate / (1 + np.exp(-gate)) * up, dtype)
    inner = np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)
    close(run("gelu_tanh_and_mul", x), 0.5 * gate * (1 + np.tanh(inner)) * up, dtype)
    assert torch.equal(x, kept)


@pytest.mark.parametrize("dtype", DTYPES)
def test_soft_cap(dtype):
    x = draw(4, 20, dtype=dtype) * 50
    kept = x.clone()
    close(run("soft_cap", x, 30.0), 30 * np.tanh(as_numpy(x) / 30), dtype)
    assert torch.equal(x, kept)


def test_embedding_and_linear():
    weight, ids = draw(7, 12), torch.tensor([6, 0, 6])
    np.testing.assert_array_equal(run("embedding", ids, weight), weight.numpy()[[6, 0, 6]])
    x, bias = draw(2, 3, 12), draw(7)
    want = as_numpy(x) @ as_numpy(weight).T
    close(run("linear", x, weight, None), want, torch.float32)
    close(run("linear", x, weight, bias), want + as_numpy(bias), torch.float32)


def test_comparison_finds_the_worst_element():
    truth = torch.arange(6.0, dtype=torch.float64).view(2, 3)
    got = truth.float()
    tolerance = Tolerance(atol=0.01, rtol=0.0)
    assert compare_tensors(got, torch.float32, truth, tolerance, "out").ok
    got[1, 2] += 0.5
    found = compare_tensors(got, torch.float32, truth, tolerance, "out")
    assert not found.ok
    assert found.max_error == 0.5
    assert "out[1, 2]: 5.5 instead of 5" in str(found)


def test_comparison_of_what_is_not_finite():
    tolerance = Tolerance(atol=0.0, rtol=0.0)
    special = torch.tensor([torch.inf, -torch.inf, torch.nan, 1.0], dtype=torch.float64)
    assert compare_tensors(special.float(), torch.float32, special, tolerance, "x").ok
    for index in range(4):
        other = special.float()
        other[index] = 2.0
        assert not compare_tensors(other, torch.float32, special, tolerance, "x").ok
    big = Tolerance(atol=1.0, rtol=1.0)
    finite = torch.tensor([3.0])
    infinite = torch.tensor([torch.inf], dtype=torch.float64)
    assert not compare_tensors(finite, torch.float32, infinite, big, "x").ok
    assert not compare_tensors(torch.tensor([torch.nan]), torch.float32, finite, big, "x").ok


def test_comparison_of_shape_dtype_and_integers():
    tolerance = Tolerance(atol=1.0, rtol=1.0)
    x = torch.zeros(3)
    assert "instead of (3,)" in str(compare_tensors(x[:2], x.dtype, x, tolerance, "x"))
    assert "float64" in str(compare_tensors(x.double(), x.dtype, x, tolerance, "x"))
    ids = torch.tensor([4, 5])
    assert compare_tensors(ids, torch.int64, ids, tolerance, "x").ok
    assert not compare_tensors(ids + 1, torch.int64, ids, tolerance, "x").ok
