"""Results of steps on their way to the host."""

import numpy as np
import pytest
import torch

from cardan.core.interfaces.errors import OutOfMemoryError, UnsupportedError
from cardan.core.runner.host_results import HostResults
from cardan.core.runner.step_handle import DeviceStepHandle, StepResults
from cardan.core.sampling.sampler import BAD_LOGITS, SampleResult

ROWS = 6


class Pool:
    def __init__(self, num_bytes):
        self.bytes = bytearray(b"\xff" * num_bytes)
        self.is_open = True

    def buffer(self):
        return memoryview(self.bytes)

    def close(self):
        self.is_open = False


class Device:
    """A device whose memory has page-locked pools, or none."""

    def __init__(self, has_pools=True):
        self.memory = self
        self.pools = []
        self._has_pools = has_pools

    def host_pool(self, num_bytes):
        if not self._has_pools:
            raise UnsupportedError("this device offers no host pool")
        self.pools.append(Pool(num_bytes))
        return self.pools[-1]


def handle(rooms, tokens, failed=(), corrupt=None, num_rows=ROWS):
    """The handle of a step, and its tensors, which the next step overwrites."""
    flags = torch.zeros(len(tokens), dtype=torch.bool)
    flags[list(failed)] = True
    sampled = SampleResult(torch.tensor(tokens), flags) if tokens else None
    results = StepResults(num_rows=num_rows, sampled=sampled, corrupt=corrupt)
    room = rooms.lend()
    if room is not None:
        results.copy_to(room)
    return DeviceStepHandle(results, None, room, rooms)


@pytest.mark.parametrize("has_pools", [True, False])
def test_a_step_reads_what_it_made(has_pools):
    rooms = HostResults(Device(has_pools), ROWS)
    corrupt = torch.tensor([False, True, False, True])
    result = handle(rooms, [7, 0, 2**31 - 1], [1], corrupt, num_rows=3).result()
    assert result.token_ids.tolist() == [[7], [0], [2**31 - 1]]
    assert result.token_ids.dtype == np.int32
    assert result.failed.tolist() == [False, True, False]
    assert result.failures == {1: BAD_LOGITS}
    assert result.corrupt.tolist() == [False, True, False]
    # A flag of padding alone is no news, nor is none.
    sound = handle(rooms, [3], corrupt=corrupt[2:], num_rows=1).result()
    assert sound.corrupt is None
    without = handle(rooms, []).result()
    assert without.token_ids.shape == (0, 1)
    assert without.failed.shape == (0,)
    assert without.corrupt is None


def test_steps_that_nobody_read_keep_rooms_of_their_own():
    device = Device()
    rooms = HostResults(device, ROWS)
    waiting = [handle(rooms, [step, step + 1]) for step in range(3)]
    first = waiting[0].result()
    later = [handle(rooms, [50 + step]) for step in range(2)]
    assert [item.result().token_ids[0, 0] for item in (*waiting[1:], *later)] == [1, 2, 50, 51]
    assert first.token_ids.tolist() == [[0], [1]]  # though its room was used again
    assert len(device.pools) == 4
    for step in range(20):
        assert handle(rooms, [step]).result().token_ids.tolist() == [[step]]
    assert len(device.pools) == 4
    late = handle(rooms, [1])
    rooms.close()
    rooms.close()
    del late
    assert not any(pool.is_open for pool in device.pools)
    assert rooms.lend() is None


def test_results_that_nobody_reads_take_one_room():
    """Ranks that do not answer drop their handles."""
    device = Device()
    rooms = HostResults(device, ROWS)
    for step in range(20):
        handle(rooms, [step])
    assert len(device.pools) == 1
    assert handle(rooms, [7]).result().token_ids.tolist() == [[7]]


def test_a_host_that_can_lock_no_more_memory(monkeypatch):
    device = Device()
    rooms = HostResults(device, ROWS)
    first = handle(rooms, [1])

    def refuse(num_bytes):
        raise OutOfMemoryError("a host pool does not fit")

    monkeypatch.setattr(device, "host_pool", refuse)
    second = handle(rooms, [2])
    assert [item.result().token_ids.tolist() for item in (first, second)] == [[[1]], [[2]]]
    assert rooms.lend() is not None  # the first one's
