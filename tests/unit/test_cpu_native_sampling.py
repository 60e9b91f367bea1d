"""Native sampling kernels against NumPy in float64: ties, masks, cuts, odd sizes, and errors."""

import os
import subprocess
import sys
from functools import cache

import numpy as np
import pytest
import torch

from cardan.core.ops.catalogue import CATALOGUE
from cardan.core.ops.compare import compare_case
from cardan.core.ops.registry import KernelRegistry
from cardan.platforms.cpu.native.library import open_library
from cardan.platforms.cpu.native.sampling import SamplingKernels
from cardan.platforms.cpu.native.sampling_providers import SAMPLING_PROVIDERS

OPS = {op.name: op for op in CATALOGUE}
NAMES = [provider.op for provider in SAMPLING_PROVIDERS]
ISAS = ("best", "scalar")
# Below one group, whole groups, and every kind of remainder.
VOCABULARIES = (1, 2, 7, 63, 64, 65, 200, 1029, 5003)
INF = np.float32(np.inf)


@cache
def kernels(isa):
    wanted = {} if isa == "best" else {"CARDAN_CPU_ISA": isa}
    return SamplingKernels(open_library({**os.environ, **wanted}))


@pytest.fixture(autouse=True)
def _threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def tensor(values, dtype):
    return None if values is None else torch.tensor(np.asarray(values), dtype=dtype)


def choose(isa, x, uniform=None, index=None, temperature=None, top_k=None, top_p=None, min_p=None):
    wide, whole, single = torch.float64, torch.int64, torch.float32
    return kernels(isa).choose_tokens(
        x if isinstance(x, torch.Tensor) else torch.from_numpy(x),
        tensor(index, whole),
        tensor(uniform, wide),
        tensor(temperature, single),
        tensor(top_k, whole),
        None if top_k is None else tensor([top_p, min_p], wide),
    )


def truth(x, uniform, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """Token of one float32 row, and how far it is from turning on a rounding."""
    tempered = ((x - x.max()) / np.float32(temperature)).astype(np.float64)
    order = np.lexsort((np.arange(len(x)), -tempered))
    weights = np.exp(tempered)
    if 0 < top_k < len(x):
        weights[tempered < tempered[order[top_k - 1]]] = 0.0
    margin = 1.0
    if top_p < 1:
        shares = np.cumsum(weights[order]) / weights.sum()
        number = int(np.searchsorted(shares, top_p)) + 1
        margin = float(np.abs(shares - top_p).min())
        weights[order[number:]] = 0.0
    with np.errstate(divide="ignore"):
        weights[tempered < np.float32(np.log(min_p))] = 0.0
    edges = np.cumsum(weights) / weights.sum()
    token = int(np.searchsorted(edges, uniform, side="right"))
    return token, min(margin, float(np.abs(edges[:-1] - uniform).min(initial=1.0)))


def rows_of(kind, rng, num_rows, vocab_size):
    x = rng.standard_normal((num_rows, vocab_size)) * 3
    if kind == "ties":
        x = np.round(x)
    if kind == "flat":
        x = x * 0.01
    if kind == "equal":
        x = np.full_like(x, 1.5)
    if kind == "masked":
        x[:, rng.random(vocab_size) < 0.7] = -np.inf
        x[:, vocab_size // 2] = 0.5
    return x.astype(np.float32)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", NAMES)
def test_agrees_with_definition(name, isa):
    kernel, op = getattr(kernels(isa), name), OPS[name]
    for seed in range(3):
        for case in op.make_inputs(torch.float32, torch.device("cpu"), seed):
            found = compare_case(op, kernel, case, OPS, op.tolerances["float32"])
            assert found.ok, f"{name}: {found}"


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", ["normal", "ties", "flat", "equal", "masked"])
def test_draws_equal_the_truth(kind, isa):
    rng = np.random.default_rng(3)
    close = total = 0
    for vocab_size in VOCABULARIES:
        sizes = (0, 1, 2, 40, 700, vocab_size - 1, vocab_size, vocab_size + 1)
        settings = [(k, p, m) for k in sizes for p in (1.0, 0.9, 0.2, 1e-7) for m in (0.0, 0.07)]
        x = rows_of(kind, rng, len(settings), vocab_size)
        uniform = rng.random(len(settings))
        temperature = rng.choice(np.float32([0.4, 1.0, 1.7]), len(settings))
        top_k, top_p, min_p = zip(*settings, strict=True)
        got, failed = choose(isa, x, uniform, None, temperature, top_k, top_p, min_p)
        assert not failed.any()
        for i, setting in enumerate(settings):
            token, margin = truth(x[i], uniform[i], temperature[i], *setting)
            if margin < 1e-6:
                # Equal weights put cuts on round numbers.
                close += 1
            else:
                assert int(got[i]) == token, (vocab_size, setting, temperature[i])
            total += 1
    assert close < total / (5 if kind in ("equal", "ties") else 100)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", ["normal", "flat", "ties"])
def test_large_vocabulary(kind, isa):
    rng = np.random.default_rng(8)
    x = rows_of(kind, rng, 8, 49157)
    uniform = rng.random(8)
    settings = [(0, 1.0, 0.0), (0, 0.95, 0.0), (50, 0.9, 0.0), (2000, 0.99, 0.0)]
    for top_k, top_p, min_p in [*settings, (0, 1.0, 0.05), (0, 0.3, 0.01), (30000, 1.0, 0.0)]:
        parts = [np.full(8, value) for value in (0.8, top_k, top_p, min_p)]
        got, _ = choose(isa, x, uniform, None, *parts)
        for i in range(8):
            token, margin = truth(x[i], uniform[i], 0.8, top_k, top_p, min_p)
            assert int(got[i]) == token or margin < 1e-6


@pytest.mark.parametrize("isa", ISAS)
def test_ties_at_the_last_place(isa):
    """Top-k keeps all that tie for its last place; top-p no more than it needs, lowest ids."""
    x = np.zeros((3000, 300), np.float32)
    x[:, 70:] = -1.0
    uniform = (np.arange(3000) + 0.5) / 3000
    n = np.ones(3000)
    reached = {}
    for name, cuts in {"k": (n * 5, n), "p": (n * 0, n * 0.3), "kp": (n * 5, n * 0.5)}.items():
        tokens, _ = choose(isa, x, uniform, None, None, *cuts, n * 0)
        reached[name] = sorted(set(tokens.tolist()))
    mass = 70 + 230 * np.exp(-1.0)
    assert reached["k"] == list(range(70))
    assert reached["p"] == list(range(int(np.ceil(0.3 * mass))))
    assert reached["kp"] == list(range(35))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("vocab_size", VOCABULARIES)
def test_greedy_ties_and_faulty_rows(vocab_size, isa):
    rng = np.random.default_rng(vocab_size)
    x = rng.integers(-3, 4, (12, vocab_size)).astype(np.float32)
    x[1] = -INF
    x[2], x[2, -1] = -INF, -3e38
    x[3, rng.integers(vocab_size)] = INF
    x[4, rng.integers(vocab_size)] = np.nan
    x[5] = np.nan
    x[6] = np.where(rng.random(vocab_size) < 0.5, -0.0, 0.0)
    faulty = [1, 3, 4, 5]
    want = x.argmax(-1)
    want[faulty] = 0
    tokens, failed = choose(isa, x)
    assert tokens.tolist() == want.tolist()
    assert np.flatnonzero(failed.numpy()).tolist() == faulty
    # Drawn rows fail alike, and the others do not notice.
    uniform = rng.random(12)
    settings = [np.full(12, value) for value in (1.5, 5, 0.9, 0.01)]
    drawn, failed = choose(isa, x, uniform, None, *settings)
    assert np.flatnonzero(failed.numpy()).tolist() == faulty
    assert not drawn[faulty].any()
    for i in set(range(12)) - set(faulty):
        one = slice(i, i + 1)
        alone, _ = choose(isa, x[one], uniform[one], None, *[value[one] for value in settings])
        assert alone[0] == drawn[i]


@pytest.mark.parametrize("isa", ISAS)
def test_some_rows_are_drawn(isa):
    rng = np.random.default_rng(4)
    x, uniform = rows_of("normal", rng, 6, 500), rng.random(3)
    tokens, _ = choose(isa, x, uniform, [5, 0, 2])
    want = x.argmax(-1)
    for u, row in zip(uniform, (5, 0, 2), strict=True):
        want[row], margin = truth(x[row], u)
        assert margin > 1e-6
    assert tokens.tolist() == want.tolist()
    assert choose(isa, x, [], [])[0].tolist() == x.argmax(-1).tolist()
    assert choose(isa, x[:0])[0].shape == choose(isa, x[:0], [])[1].shape == (0,)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("uniform", [0.0, 1 - 2**-53, 1.0])
def test_no_impossible_token(uniform, isa):
    for vocab_size in (3, 257, 49152):
        x = np.full((5, vocab_size), -INF)
        x[0, 1] = -500.0
        x[1, vocab_size - 2] = 3e38
        x[2, 1], x[2, vocab_size - 2] = 0.0, -60.0
        x[3, [0, 1, 2]] = 3e38, -3e38, 1.0
        x[4] = 0.0
        tokens, failed = choose(isa, x, [uniform] * 5, None, [1, 1, 1, 2e-5, 0.5])
        assert not failed.any()
        assert tokens[[0, 1, 3]].tolist() == [1, vocab_size - 2, 0]
        assert tokens[2] in (1, vocab_size - 2)
        assert tokens[4] == (0 if uniform == 0 else vocab_size - 1)


def test_a_huge_vocabulary_keeps_its_accuracy():
    uniform = np.random.default_rng(0).random(24)
    tokens, _ = choose("best", np.zeros((24, 262144), np.float32), uniform)
    assert tokens.tolist() == (uniform * 262144).astype(int).tolist()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(
    "settings", [(1.0, 0, 1.0, 0.0), (0.6, 0, 0.97, 0.0), (1.0, 6, 1.0, 0.0), (1.3, 0, 1.0, 0.08)]
)
def test_frequencies_follow_the_distribution(settings, isa):
    draws, vocab_size = 20_000, 100
    x = rows_of("normal", np.random.default_rng(9), 1, vocab_size) * np.float32(0.3)
    uniform = np.random.default_rng(10).random(draws)
    parts = [np.full(draws, value) for value in settings]
    tokens, _ = choose(isa, torch.from_numpy(x).expand(draws, -1), uniform, None, *parts)
    counts = np.bincount(tokens.numpy(), minlength=vocab_size)
    # Differences of the distribution function on a fine grid, which the truth inverts.
    grid = (np.arange(4000) + 0.5) / 4000
    expected = np.bincount([truth(x[0], u, *settings)[0] for u in grid], minlength=vocab_size)
    expected = expected * (draws / 4000)
    seen = expected > 20
    chi = ((counts - expected)[seen] ** 2 / expected[seen]).sum()
    freedom = seen.sum() - 1
    assert counts[expected == 0].sum() <= 3
    assert chi < freedom + 5 * np.sqrt(2 * freedom)


def test_views_threads_and_neighbours_change_nothing():
    rng = np.random.default_rng(2)
    wide = torch.from_numpy(rows_of("ties", rng, 40, 3011))
    uniform = rng.random(40)
    settings = [rng.choice(values, 40) for values in ((0.5, 1.0), (0, 50), (0.9, 1.0), (0, 0.02))]
    views = {
        "part of a row": (wide[:, 7:3001], wide[:, 7:3001].clone()),
        "every second row": (wide[::2], wide[::2].clone()),
        "columns": (wide.T[:40], wide.T[:40].clone()),
    }
    for name, (view, dense) in views.items():
        n = len(view)
        args = (uniform[:n], None, *[value[:n] for value in settings])
        got = choose("best", view, *args)[0]
        assert torch.equal(got, choose("best", dense, *args)[0]), name
        table = kernels("best").token_logprobs(view, got, 4)
        torch.set_num_threads(1)
        assert torch.equal(got, choose("best", view, *args)[0]), name
        for i in (0, n // 2, n - 1):
            one = slice(i, i + 1)
            alone = choose("best", view[one], uniform[one], None, *[v[one] for v in settings])
            assert alone[0] == got[i]
            row = kernels("best").token_logprobs(dense[one], got[one], 4)
            assert all(torch.equal(a[0], b[i]) for a, b in zip(row, table, strict=True))
        torch.set_num_threads(2)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", ["normal", "ties", "masked", "equal"])
def test_logprobs_equal_the_truth(kind, isa):
    rng = np.random.default_rng(6)
    for vocab_size in (*VOCABULARIES, 49157):
        x = rows_of(kind, rng, 3, vocab_size)
        x[x == 0] = rng.choice(np.float32([0.0, -0.0]), int((x == 0).sum()))
        tokens = rng.integers(vocab_size, size=3)
        wide = x.astype(np.float64)
        top = wide.max(-1, keepdims=True)
        want = wide - top - np.log(np.exp(wide - top).sum(-1, keepdims=True))
        for k in {0, 1, min(5, vocab_size), min(150, vocab_size), vocab_size}:
            ids, values, logprobs, ranks = (
                part.numpy()
                for part in kernels(isa).token_logprobs(
                    torch.from_numpy(x), torch.from_numpy(tokens), k
                )
            )
            for i in range(3):
                order = np.lexsort((np.arange(vocab_size), -wide[i]))[:k]
                assert ids[i].tolist() == order.tolist()
                np.testing.assert_allclose(values[i], want[i, order], atol=1e-5, rtol=1e-6)
                chosen = want[i, tokens[i]]
                np.testing.assert_allclose(logprobs[i], chosen, atol=1e-5, rtol=1e-6)
                assert ranks[i] == 1 + (wide[i] > wide[i, tokens[i]]).sum()


def test_logprobs_of_rows_without_a_distribution():
    x = torch.zeros(4, 130)
    x[0], x[1, 5], x[2, 7] = -torch.inf, torch.nan, torch.inf
    got = kernels("best").token_logprobs(x, torch.zeros(4, dtype=torch.int64), 3)
    want = OPS["token_logprobs"].body(x, torch.zeros(4, dtype=torch.int64), 3)
    torch.testing.assert_close(got[2], want[2], equal_nan=True)
    assert ((got[0] >= 0) & (got[0] < 130)).all()
    assert got[0][3].tolist() == [0, 1, 2]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, 64, 1000])
def test_edits(vocab_size, isa):
    """Rows and tables that are views are edited in place, and nothing beside them."""
    rng = np.random.default_rng(vocab_size)
    wide = torch.from_numpy(rows_of("masked", rng, 5, vocab_size + 3))
    prompt = torch.from_numpy(rng.random((4, vocab_size)) < 0.1)
    counts = torch.from_numpy(rng.integers(-8, 4, (4, vocab_size)).clip(0).astype(np.int32))
    factors = torch.tensor([[1.3, 0.7], [0.5, -1.0], [0.25, 1.5]])
    for index in (torch.tensor([3, 1]), None):
        before = wide.clone()
        view = wide[:, 2:-1] if index is not None else wide[3:, 2:-1]
        want = view.double()
        args = (index, torch.tensor([2, 0]), prompt, counts, factors)
        OPS["apply_penalties"].body(want, *args)
        kernels(isa).apply_penalties(view, *args)
        torch.testing.assert_close(view.double(), want, atol=1e-5, rtol=1e-6)
        assert torch.equal(wide[:, :2], before[:, :2])
        assert torch.equal(wide[:, -1], before[:, -1])
        assert torch.equal(wide[[0, 2], 2:-1], before[[0, 2], 2:-1])
    bits = rng.integers(-(2**31), 2**31, (5, -(-vocab_size // 32))).astype(np.int32)
    out = kernels(isa).apply_token_mask(wide[:, 2:-1], torch.from_numpy(bits))
    allowed = np.unpackbits(bits.view(np.uint8), axis=1, bitorder="little")[:, :vocab_size] == 1
    assert np.array_equal(out.numpy(), np.where(allowed, wide[:, 2:-1].numpy(), -INF))


def test_bad_input_is_named():
    ops, x = kernels("best"), torch.zeros(2, 40)
    ids = torch.zeros(2, dtype=torch.int64)
    with pytest.raises(ValueError, match="logits must be float32"):
        choose("best", x.half())
    with pytest.raises(ValueError, match="uniform has 1 entries for 2 rows"):
        choose("best", x, [0.5])
    with pytest.raises(ValueError, match=r"top_k must be \(2,\), got \(1,\)"):
        choose("best", x, [0.5, 0.5], None, None, [1], [1.0] * 2, [0.0] * 2)
    with pytest.raises(IndexError, match=r"index must lie in \[0, 2\)"):
        choose("best", x, [0.5], [2])
    with pytest.raises(ValueError, match=r"k must be in \[0, 40\]"):
        ops.token_logprobs(x, ids, 41)
    with pytest.raises(IndexError, match=r"token_ids must lie in \[0, 40\)"):
        ops.token_logprobs(x, ids - 1, 0)
    with pytest.raises(ValueError, match=r"bits must be \(2, 2\), got \(2, 1\)"):
        ops.apply_token_mask(x, torch.zeros(2, 1, dtype=torch.int32))
    prompt, counts = torch.zeros(1, 40, dtype=torch.bool), torch.zeros(1, 40, dtype=torch.int32)
    ones = torch.ones(3, 2)
    with pytest.raises(IndexError, match=r"slots in \[0, 1\)"):
        ops.apply_penalties(x, None, ids + 1, prompt, counts, ones)
    with pytest.raises(ValueError, match=r"output_counts must be torch\.int32"):
        ops.apply_penalties(x, None, ids, prompt, prompt, ones)
    with pytest.raises(ValueError, match="prompt_mask has 2 rows and output_counts 1"):
        ops.apply_penalties(x, None, ids, prompt.expand(2, -1), counts, ones)


def test_registry_resolves_to_the_providers():
    registry = KernelRegistry(
        CATALOGUE, SAMPLING_PROVIDERS, device=torch.device("cpu"), features=()
    )
    chosen = {resolution.op: resolution for resolution in registry.table("bfloat16")}
    for name in NAMES:
        assert chosen[name].provider == f"cpu.native_{name}"
        assert chosen[name].self_check.startswith("passed")


def test_providers_import_no_torch():
    code = (
        "import sys; import cardan.platforms.cpu.native.sampling_providers; "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
