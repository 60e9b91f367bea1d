"""Launches that begin while the kernel before them still runs, and why that is right.

A kernel that is launched as *dependent* may begin as soon as each program of the kernel before it
in the stream has said so (``begin``) or has ended, so that its start, and loads of what no kernel
changes, hide behind that one. Where a device can do this, kernels take OVERLAPS, and are launched
with what ``dependent`` returns. These are the rules, for each of them:

- **Every program waits** (``wait``), also one that has nothing to do, before it touches what a
  kernel of the same work writes *or still reads*: an allocator that follows the order of launches
  gives a kernel memory for its results that earlier ones read. So neither loads of other kernels'
  results nor stores of any kind come before the wait.
- **Waiting is transitive.** The wait lasts until all programs of the kernel before have ended and
  what they stored can be seen. As these waited in turn, whatever was queued before them has ended,
  too, though several dependent kernels may have begun. Kernels launched plainly, copies and fills
  begin after the full end of the one before, so they order all that is around them.
- **The end of a kernel is not what lets the next one begin.** Events, other streams, copies to the
  host and the ends of graphs wait for the full end of the last kernel, and so, by its wait, of all
  before. Nothing outside of the stream has to know of dependent launches.
- **Constants may be loaded before the wait**, but only in recorded work, which the kernels learn
  from ``are_fixed``: weights, and a step's inputs (positions, slots, lengths, block tables) are
  written before a graph is replayed, and a replay begins after the full end of what came before.
  In work that is queued directly the kernel before may just be writing a weight, so that all loads
  wait. (A graph that made such tensors itself would have to do so before a kernel that is launched
  plainly.)
- A kernel lets the next one begin first of all: programs of that one come only once all of its own
  have begun, so that they take no room from these. Kernels that keep the memory busy for long do so
  late, as the loads of others would slow theirs down. One that does so after its own wait has all
  before it ended for the next kernel, which may then load before its wait what those left.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor
from triton.runtime import driver

# Devices of this backend of Triton can do it, from this architecture.
_BACKEND = "cuda"
_OLDEST = 90
# Rows of a step up to which kernels overlap: with more, programs that wait take more than they
# save.
MOST_ROWS = 128


def dependent(x: Tensor, num_rows: int) -> dict[str, Any]:
    """Named arguments for the launch of a kernel that takes OVERLAPS, on the device of ``x``."""
    if num_rows > MOST_ROWS or not can_overlap(x.device):
        return {"OVERLAPS": False}
    return {"OVERLAPS": True, "launch_pdl": True}


def are_fixed(x: Tensor) -> int:
    """1 where the launch is recorded into a graph on the device of ``x``, else 0."""
    if x.is_cpu or not can_overlap(x.device):
        return 0
    return int(torch.get_device_module(x.device).is_current_stream_capturing())


@cache
def can_overlap(device: torch.device) -> bool:
    """Never in the interpreter, whose tensors are the host's."""
    if device.type == "cpu":
        return False
    target = driver.active.get_current_target()
    return bool(target.backend == _BACKEND and int(target.arch) >= _OLDEST)
