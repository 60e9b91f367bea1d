"""Random numbers by seed and position."""

import numpy as np
import pytest

from cardan.core.interfaces.random_stream import random_streams, uniforms


def drawn(seeds, positions):
    return uniforms(random_streams(seeds), positions)


MASK = 2**64 - 1


def splitmix(state):
    """The published generator, one output after another, in plain integers."""
    while True:
        state = (state + 0x9E3779B97F4A7C15) & MASK
        z = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
        yield z ^ (z >> 31)


def chi_square_z(counts, expected):
    """Deviation of chi-square from its mean in standard deviations."""
    freedom = counts.size - 1
    chi = ((counts - expected) ** 2 / expected).sum()
    return abs(chi - freedom) / np.sqrt(2 * freedom)


def test_the_plain_generator_gives_the_published_numbers():
    stream = splitmix(1234567)
    assert [next(stream) for _ in range(3)] == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
    ]


@pytest.mark.parametrize("seed", [0, 1, -1, 42, 2**63 - 1, -(2**63)])
def test_equal_to_the_plain_generator(seed):
    stream = splitmix(next(splitmix(seed & MASK)))
    truth = [(next(stream) >> 11) / 2**53 for _ in range(50)]
    assert drawn(np.full(50, seed, np.int64), np.arange(50)).tolist() == truth
    assert drawn(np.array([seed]), np.array([17])).tolist() == [truth[17]]


def test_uniform_along_positions_and_along_seeds():
    n = 200_000
    for seeds, positions in (
        (np.zeros(n, np.int64), np.arange(n)),
        (np.arange(n), np.zeros(n, np.int64)),
        (np.arange(n) << 32, np.full(n, 5, np.int64)),
    ):
        u = drawn(seeds, positions)
        assert ((u >= 0) & (u < 1)).all()
        assert chi_square_z(np.bincount((u * 256).astype(int), minlength=256), n / 256) < 4
        assert chi_square_z(np.bincount((u * 2**24).astype(int) % 64, minlength=64), n / 64) < 4
        assert len(np.unique(u)) == n


def test_neighbours_are_independent():
    n = 100_000
    base = np.arange(n)
    zero = np.zeros(n, np.int64)
    pairs = (
        (drawn(zero, base), drawn(zero, base + 1)),
        (drawn(base, zero), drawn(base + 1, zero)),
        (drawn(zero, base), drawn(zero + 1, base)),
        (drawn(base, base), drawn(base, base + 1)),
        (drawn(base, zero), drawn(zero, base)),
    )
    for a, b in pairs:
        assert abs(np.corrcoef(a, b)[0, 1]) < 4 / np.sqrt(n)
        cells = (a * 16).astype(int) * 16 + (b * 16).astype(int)
        assert chi_square_z(np.bincount(cells, minlength=256), n / 256) < 4


def test_empty():
    assert drawn(np.empty(0, np.int64), np.empty(0, np.int64)).shape == (0,)
