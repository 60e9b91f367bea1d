"""The ranks of an engine: their devices, their processes, and how they come together. Imports no
torch."""

import shutil
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING

from cardan.core.interfaces.capabilities import DeviceInfo
from cardan.core.interfaces.communication import Communicator, GroupSpec
from cardan.core.interfaces.errors import ConfigError
from cardan.core.runner.rank_messages import RankOrder
from cardan.core.runner.rank_processes import RankProcesses

if TYPE_CHECKING:
    from cardan.bootstrap.executor_builder import ExecutorBuilder

_COMMAND = (sys.executable, "-m", "cardan.bootstrap.rank_main")


def rank_devices(
    platform: str, devices: Sequence[DeviceInfo], num_ranks: int
) -> tuple[DeviceInfo, ...]:
    """A device for each rank, which its details ``rank`` and ``num_ranks`` name.

    Where there are fewer devices than ranks, all share the first one if its detail ``ranks`` is
    ``share``: then its platform bounds their number by a constraint.

    Raises:
        ConfigError: there are too few devices.
    """
    if num_ranks == 1:
        return tuple(devices[:1])
    chosen = list(devices[:num_ranks])
    if len(chosen) < num_ranks:
        if devices[0].details.get("ranks") != "share":
            raise ConfigError(
                f"parallel.tensor_parallel_size is {num_ranks}, but platform {platform} has "
                f"{len(devices)} device(s), one for each rank; use at most {len(devices)}"
            )
        chosen = [devices[0]] * num_ranks
    return tuple(
        replace(info, details={**info.details, "rank": str(rank), "num_ranks": str(num_ranks)})
        for rank, info in enumerate(chosen)
    )


def start_ranks(
    builder: "ExecutorBuilder", devices: Sequence[DeviceInfo]
) -> tuple[RankProcesses, Communicator]:
    """Start the ranks above 0 and meet them; rank 0 is the device of ``builder``.

    Raises:
        CardanError: a rank could not start; none is left.
    """
    folder = tempfile.mkdtemp(prefix="cardan-ranks-")
    rendezvous = f"file://{folder}/meet"
    ranks = RankProcesses(_COMMAND)
    with ExitStack() as on_error:
        on_error.callback(ranks.close)
        try:
            for rank, info in enumerate(devices[1:], start=1):
                order = RankOrder(
                    rank=rank,
                    num_ranks=len(devices),
                    rendezvous=rendezvous,
                    platform=builder.platform.name,
                    device=info,
                    config=builder.config,
                )
                ranks.start(order, builder.platform.child_env("worker", [info]))
            ranks.await_opened()
            group = GroupSpec(0, len(devices), rendezvous)
            communicator = ranks.during(lambda: builder.device.communicator(group))
        finally:
            # Whoever has met needs no place to meet.
            shutil.rmtree(folder, ignore_errors=True)
        on_error.pop_all()
    return ranks, communicator
