"""All collectives, between threads and between processes, against what one process computes."""

import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from cardan.core.interfaces.communication import GroupSpec
from cardan.core.interfaces.errors import CardanError, ConfigError
from cardan.core.interfaces.thread_communicator import ThreadCommunicator
from cardan.core.interfaces.torch_communicator import TorchCommunicator


def of_rank(rank, shape=(4, 6), dtype=torch.float32):
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(shape, generator=generator).to(dtype)


def exercise(group):
    """Every rank calls this; what other ranks hold is known from their seeds."""
    rank, size = group.rank, group.world_size
    shape = (2 * size, 3 * size)
    everyone = [of_rank(r, shape) for r in range(size)]
    total = torch.stack(everyone).sum(0)
    torch.testing.assert_close(group.all_reduce(of_rank(rank, shape)), total)
    highest = torch.stack(everyone).amax(0)
    assert torch.equal(group.all_reduce(of_rank(rank, shape), "max"), highest)
    short = group.all_reduce(torch.full((3,), float(rank + 1), dtype=torch.bfloat16))
    assert short.dtype == torch.bfloat16
    assert short.tolist() == [size * (size + 1) / 2] * 3
    for dim in (0, 1, -1):
        gathered = group.all_gather(of_rank(rank, shape), dim)
        assert torch.equal(gathered, torch.cat(everyone, dim))
        mine = of_rank(rank, shape)
        share = group.reduce_scatter(mine, dim)
        torch.testing.assert_close(share, total.chunk(size, dim)[rank])
        assert share.is_contiguous()
        assert torch.equal(mine, of_rank(rank, shape))
    for root in range(size):
        assert torch.equal(group.broadcast(of_rank(rank, shape), root), everyone[root])
    exercise_all_to_all(group)
    exercise_neighbours(group)
    exercise_split(group)


def exercise_all_to_all(group):
    """Rank s sends (s + r) % 3 rows to rank r, some of them none."""
    rank, size = group.rank, group.world_size
    send = [(rank + r) % 3 for r in range(size)]
    receive = [(s + rank) % 3 for s in range(size)]
    rows = torch.cat([torch.full((n, 2), rank * 10.0 + r) for r, n in enumerate(send)])
    want = torch.cat([torch.full((n, 2), s * 10.0 + rank) for s, n in enumerate(receive)])
    assert torch.equal(group.all_to_all(rows, send, receive), want)


def exercise_neighbours(group):
    rank, size = group.rank, group.world_size
    out = torch.empty(5, dtype=torch.int64)
    if rank % 2 == 0 and rank + 1 < size:
        group.send(torch.arange(5) + rank, rank + 1)
        group.recv(out, rank + 1)
        assert out.tolist() == [rank + 1] * 5
    elif rank % 2:
        group.recv(out, rank - 1)
        assert out.tolist() == [n + rank - 1 for n in range(5)]
        group.send(torch.full((5,), rank), rank - 1)


def exercise_split(group):
    rank, size = group.rank, group.world_size
    last_first = list(range(size))[::-1]
    turned = group.split(last_first)
    assert (turned.rank, turned.world_size) == (size - 1 - rank, size)
    gathered = turned.all_gather(torch.tensor([rank]))
    assert gathered.tolist() == last_first
    turned.close()
    part = group.split([1])
    assert (part is None) == (rank != 1)
    if part is not None:
        assert part.all_reduce(torch.ones(2)).tolist() == [1.0, 1.0]
        part.close()
    # Two parts at once, each rank naming its own.
    halves = [[r for r in range(size) if r % 2 == parity] for parity in (0, 1)]
    half = group.split(halves[rank % 2])
    assert half.all_gather(torch.tensor([rank])).tolist() == halves[rank % 2]


def in_threads(groups, work):
    """Run ``work(group)`` on a thread for each rank; the first failure is raised here."""
    failures = []

    def guarded(group):
        try:
            work(group)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=guarded, args=(group,)) for group in groups]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


@pytest.mark.parametrize("size", [2, 3, 4])
def test_threads(size):
    in_threads(ThreadCommunicator.group(size, timeout=20), exercise)


def test_thread_sums_have_the_same_bits_on_every_rank():
    results = [None] * 4

    def work(group):
        results[group.rank] = group.all_reduce(of_rank(group.rank) * 10.0 ** (3 * group.rank))

    in_threads(ThreadCommunicator.group(4), work)
    want = of_rank(0)
    for rank in range(1, 4):
        want = want + of_rank(rank) * 10.0 ** (3 * rank)
    assert all(torch.equal(result, want) for result in results)


def test_thread_group_of_one():
    (group,) = ThreadCommunicator.group(1)
    assert group.all_reduce(torch.ones(2)).tolist() == [1.0, 1.0]
    assert group.all_gather(torch.ones(2, 1), dim=1).shape == (2, 1)
    with pytest.raises(ConfigError, match="at least one"):
        ThreadCommunicator.group(0)


def test_a_missing_rank_is_an_error_not_a_hang():
    groups = ThreadCommunicator.group(2, timeout=0.05)
    with pytest.raises(CardanError, match="not all 2 ranks"):
        groups[0].all_reduce(torch.ones(1))
    with pytest.raises(CardanError, match="rank 0 sent nothing to rank 1"):
        groups[1].recv(torch.empty(1), 0)


def test_closed_and_uneven():
    groups = ThreadCommunicator.group(2)
    with pytest.raises(ConfigError, match="no multiple"):
        groups[0].reduce_scatter(torch.ones(3))
    groups[0].close()
    groups[0].close()
    with pytest.raises(ConfigError, match="closed"):
        groups[0].all_reduce(torch.ones(1))


@pytest.mark.parametrize("where", ["udp://a:1", "tcp://host", "file://", "", "127.0.0.1:80"])
def test_unusable_rendezvous(where):
    with pytest.raises(ConfigError, match="neither tcp://host:port nor file:///path"):
        TorchCommunicator(GroupSpec(0, 1, where), torch.device("cpu"))
    with pytest.raises(ConfigError, match="rank 2 is not below"):
        TorchCommunicator(GroupSpec(2, 2, where), torch.device("cpu"))


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["tcp", "file"])
def test_two_gloo_processes(scheme, tmp_path):
    where = f"file://{tmp_path}/meet"
    if scheme == "tcp":
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            where = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
    script = Path(__file__).with_name("gloo_rank.py")
    path = os.pathsep.join([str(script.parent), *sys.path])
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), str(rank), "2", where],
            env={**os.environ, "PYTHONPATH": path},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    errors = [rank.communicate(timeout=120)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], errors
