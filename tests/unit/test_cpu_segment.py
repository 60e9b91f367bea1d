"""Collectives over shared memory, between processes, against sums in float64."""

import json
import os
import secrets
import subprocess
import sys
from pathlib import Path

import pytest

from cardan.core.types.errors import ConfigError
from cardan.platforms.cpu.native.library import library, open_library, unavailable_reason
from cardan.platforms.cpu.segment import (
    Segment,
    create_segment,
    open_segment,
    segment_bytes,
)

pytestmark = pytest.mark.skipif(
    not hasattr(os, "memfd_create") or unavailable_reason() is not None,
    reason="needs Linux and native kernels",
)

RANK = Path(__file__).parent / "segment_rank.py"


def run_ranks(size, act, *, slot_bytes=1024, patience=20.0, threads=1, environment=None):
    """Exit codes, and what the ranks that came to an end print."""
    descriptor = os.memfd_create("test")
    os.ftruncate(descriptor, segment_bytes(size, slot_bytes))
    seed = secrets.randbits(32)
    processes = []
    try:
        for rank in range(size):
            order = {
                "rank": rank,
                "size": size,
                "act": act,
                "seed": seed,
                "descriptor": descriptor,
                "slot_bytes": slot_bytes,
                "patience": patience,
                "threads": threads,
                "environment": environment or {},
            }
            processes.append(
                subprocess.Popen(
                    [sys.executable, str(RANK), json.dumps(order)],
                    pass_fds=[descriptor],
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )
        outputs = [process.communicate(timeout=120)[0] for process in processes]
    finally:
        os.close(descriptor)
        for process in processes:
            process.kill()
            process.wait()
    codes = [process.returncode for process in processes]
    return codes, [json.loads(output) if output else None for output in outputs]


@pytest.mark.parametrize(
    ("size", "slot_bytes", "threads"), [(2, 1024, 1), (3, 64 * 1024, 1), (4, 512 * 1024, 2)]
)
def test_collectives(size, slot_bytes, threads):
    """In pieces and whole, summed by each rank or by shares; with equal bits on every rank."""
    codes, outputs = run_ranks(size, "sums", slot_bytes=slot_bytes, threads=threads)
    assert codes == [0] * size
    assert len({output["digest"] for output in outputs}) == 1


def test_collectives_without_vectors():
    environment = {"CARDAN_CPU_ISA": "scalar"}
    open_library({**os.environ, **environment})  # compiled once, not by each rank
    codes, _ = run_ranks(2, "sums", environment=environment)
    assert codes == [0, 0]


def test_a_rank_that_dies_ends_the_collectives_of_all():
    codes, outputs = run_ranks(3, "die")
    assert codes == [0, -9, 0]
    # Whoever hears of it first leaves the group, too.
    told = {text for output in (outputs[0], outputs[2]) for text in output["told"]}
    assert "rank 1 has died" in told
    assert told <= {
        "rank 1 has died",
        "rank 0 has left the group, because it failed or was closed",
        "rank 2 has left the group, because it failed or was closed",
    }


def test_a_rank_that_leaves_ends_the_collectives_of_all():
    codes, outputs = run_ranks(2, "leave")
    assert codes == [0, 0]
    assert outputs[0]["told"] == ["rank 1 has left the group, because it failed or was closed"] * 2


def test_a_rank_that_is_late_ends_the_collectives_of_all():
    codes, outputs = run_ranks(2, "stop", patience=0.5)
    assert codes == [0, 0]
    late = "rank 1 did not come to a collective in time: it is stopped, stuck or swamped"
    assert outputs[0]["told"] == [late] * 2


def test_a_closed_segment_is_refused():
    descriptor, _ = create_segment(1)
    segment = Segment(library(), descriptor, 0, 1)
    segment.barrier()
    segment.close()
    segment.close()
    with pytest.raises(ConfigError, match="is closed"):
        segment.barrier()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


def test_a_file_that_cannot_be_mapped():
    read_end, write_end = os.pipe()
    with pytest.raises(OSError, match="cannot be mapped or locked"):
        Segment(library(), read_end, 0, 2)
    os.close(write_end)


def test_only_the_segment_that_was_created_is_opened(tmp_path):
    descriptor, nonce = create_segment(2)
    try:
        other = open_segment(os.getpid(), descriptor, nonce, 2)
        assert os.fstat(other).st_ino == os.fstat(descriptor).st_ino
        os.close(other)
        for number, size in ((nonce ^ 1, 2), (nonce, 3)):
            with pytest.raises(OSError, match="different hosts or in different containers"):
                open_segment(os.getpid(), descriptor, number, size)
        with pytest.raises(FileNotFoundError):
            open_segment(os.getpid(), 999_999, nonce, 2)
    finally:
        os.close(descriptor)


@pytest.mark.parametrize("lacking", [0, 1])
def test_ranks_decide_alike_where_one_cannot_share(lacking, tmp_path):
    """A rank without the library makes all of them exchange through sockets."""
    script = str(RANK.parent / "shared_rank.py")
    processes = []
    for rank in range(2):
        without = {"CC": "/no/such/compiler", "XDG_CACHE_HOME": str(tmp_path)}
        processes.append(
            subprocess.Popen(
                [sys.executable, script, str(rank), f"file://{tmp_path}/meet"],
                env={**os.environ, **(without if rank == lacking else {})},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    try:
        told = [process.communicate(timeout=120) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    for rank, (output, errors) in enumerate(told):
        assert output == "TorchCommunicator [3.0, 3.0, 3.0]\n"
        assert f"rank {rank} exchanges through sockets, not shared memory" in errors
    assert "no C compiler" in told[lacking][1]
    assert "another rank cannot" in told[1 - lacking][1]
