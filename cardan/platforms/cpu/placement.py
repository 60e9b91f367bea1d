"""Where an opened device computes and keeps its pages: its rank's CPUs and memory nodes."""

import contextlib
import logging
import os
from dataclasses import dataclass
from pathlib import Path

from cardan.core.interfaces.capabilities import DeviceInfo
from cardan.core.interfaces.errors import ConfigError
from cardan.core.interfaces.memory import MemoryInfo
from cardan.platforms.cpu.cpu_info import memory_info
from cardan.platforms.cpu.memory_policy import (
    MemoryPolicy,
    current_policy,
    policy_for,
    refusal,
    set_policy,
)
from cardan.platforms.cpu.numa import (
    allowed_cpus,
    list_text,
    parse_list,
    plan_shares,
    usable_nodes,
)

_LOG = logging.getLogger("cardan.engine")


@dataclass(frozen=True, slots=True)
class Placement:
    """What one of ``num_ranks`` ranks gets; None: as the process has it already."""

    rank: int
    num_ranks: int
    num_threads: int
    cpus: frozenset[int] | None = None
    policy: MemoryPolicy | None = None

    def bind(self) -> "Binding":
        """Apply it to the calling thread and those that it makes later."""
        return Binding(self)


class Binding:
    """A placement in force, until it is released. What the system refuses is left out."""

    def __init__(self, placement: Placement) -> None:
        self._cpus = placement.cpus
        self._cpus_before: set[int] | None = None
        self._policy_before: MemoryPolicy | None = None
        if placement.cpus is not None:
            with contextlib.suppress(OSError):
                before = os.sched_getaffinity(0)
                os.sched_setaffinity(0, placement.cpus)
                self._cpus_before = before
        if placement.policy is not None:
            try:
                before_policy = current_policy()
                set_policy(placement.policy)
                self._policy_before = before_policy
            except OSError as error:
                _LOG.info("pages are placed by first touch: %s", error)

    def release(self) -> None:
        """Undo it: for threads that are still bound, and for pages of the calling thread."""
        before, self._cpus_before = self._cpus_before, None
        if before is not None and self._cpus is not None:
            for thread in _threads():
                # Threads end and others were bound by somebody else.
                with contextlib.suppress(OSError):
                    if os.sched_getaffinity(thread) == self._cpus:
                        os.sched_setaffinity(thread, before)
        policy, self._policy_before = self._policy_before, None
        if policy is not None:
            with contextlib.suppress(OSError):
                set_policy(policy)


def rank_of(device: DeviceInfo) -> tuple[int, int]:
    """Rank and number of ranks that ``device`` is opened for, from its details."""
    return int(device.details.get("rank", "0")), int(device.details.get("num_ranks", "1"))


def plan_placement(root: Path, device: DeviceInfo, num_threads: int) -> Placement:
    """What the rank that ``device`` is for gets, if all ranks have ``num_threads`` threads.

    A single rank on several nodes stays where it is and has its pages spread over the nodes,
    since its threads are on all of them.

    Raises:
        ConfigError: there are more ranks than threads.
    """
    rank, num_ranks = rank_of(device)
    # Those that were usable when the device was found: rank 0 is bound before others start, and
    # they inherit that.
    cpus = parse_list(device.details.get("cpus", "")) or frozenset(allowed_cpus())
    if num_ranks == 1:
        nodes = usable_nodes(root, cpus)
        policy = policy_for(nodes) if len(nodes) > 1 else None
        return Placement(0, 1, num_threads, policy=policy)
    if num_ranks > num_threads:
        raise ConfigError(too_many_ranks(num_ranks, num_threads))
    nodes = usable_nodes(root, cpus)
    if rank == 0 and len(nodes) < 2:
        _LOG.warning(
            "%d processes share the CPUs of one memory node; threads of one process exchange less "
            "and are usually faster: leave out --tensor-parallel-size",
            num_ranks,
        )
    share = plan_shares(root, cpus, num_ranks)[rank]
    threads = min(share.num_cores, num_threads // num_ranks)
    return Placement(
        rank,
        num_ranks,
        max(1, threads),
        share.cpus if share.is_exclusive and hasattr(os, "sched_setaffinity") else None,
        policy_for(share.nodes) if len(nodes) > 1 else None,
    )


def rank_details() -> dict[str, str]:
    """What ``plan_placement`` needs among the details of a device."""
    return {"ranks": "share", "cpus": list_text(allowed_cpus())}


def rank_memory(root: Path, num_ranks: int) -> MemoryInfo:
    """An equal share of the host's memory, since all ranks take theirs from it."""
    host = memory_info(root)
    return MemoryInfo(host.total // num_ranks, host.free // num_ranks, exact=host.exact)


def too_many_ranks(num_ranks: int, num_threads: int) -> str:
    """A message for more ranks than threads."""
    return (
        f"parallel.tensor_parallel_size is {num_ranks}, but each rank needs a thread of its own "
        f"and there are {num_threads}; use at most {num_threads}, or raise --threads to share CPUs"
    )


def placement_facts(root: Path) -> dict[str, str]:
    """Lines for ``doctor`` on a machine of several memory nodes; none elsewhere."""
    cpus = allowed_cpus()
    nodes = usable_nodes(root, cpus)
    if len(nodes) < 2:
        return {}
    reason = refusal()
    pages = "placed by node" if reason is None else f"placed by first touch: {reason}"
    return {
        "memory nodes": (
            f"{len(nodes)}; --tensor-parallel-size {len(nodes)} computes on each node what lies "
            "there, if the model's heads can be shared out"
        ),
        "pages": pages,
    }


def _threads() -> list[int]:
    """Threads of this process."""
    try:
        return [int(name) for name in os.listdir("/proc/self/task")]
    except (OSError, ValueError):
        return [0]
