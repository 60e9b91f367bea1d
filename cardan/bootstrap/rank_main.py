"""Main of a further rank's process: ``python -m cardan.bootstrap.rank_main DESCRIPTOR``."""

import signal
import socket
import sys
from typing import TYPE_CHECKING

from cardan.core.interfaces.errors import PluginError
from cardan.core.observability.logging import configure_logging
from cardan.core.runner.rank_channel import RankChannel
from cardan.core.runner.rank_messages import RankOrder
from cardan.core.runner.rank_server import RankParts, receive_order, serve_rank

if TYPE_CHECKING:
    from cardan.core.interfaces.device import Device
    from cardan.core.interfaces.platform import Platform


def main() -> int:
    # Rank 0 tells this process when to stop; a Ctrl-C of the terminal is for its parent.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    channel = RankChannel(socket.socket(fileno=int(sys.argv[1])))
    order = receive_order(channel)
    # What is worth saying once is said by rank 0.
    configure_logging("debug" if order.config.log_level == "debug" else "warning")
    rank = _Rank(order)
    return serve_rank(channel, rank.open_device, rank.build, rank.close)


class _Rank:
    """Builds what this rank runs, from a configuration that was solved for all ranks."""

    def __init__(self, order: RankOrder) -> None:
        from cardan.core.runtime import Runtime

        self._order = order
        self._runtime = Runtime()
        self._opened: tuple[Platform, Device] | None = None

    def open_device(self) -> None:
        from cardan.core.discovery import Discovery
        from cardan.core.platform_selection import installed_platforms, select_platform

        selection = select_platform(self._order.platform, installed_platforms(Discovery()))
        device = self._runtime.open(selection.platform, self._order.device)
        self._opened = (selection.platform, device)

    def build(self) -> RankParts:
        """Meet the other ranks and build the executor; the first blocks until all are there."""
        # Imported here because it brings torch, and a failure before has no use for it.
        from cardan.bootstrap.executor_builder import ExecutorBuilder
        from cardan.bootstrap.model_source import read_model
        from cardan.core.discovery import Discovery
        from cardan.core.interfaces.communication import GroupSpec
        from cardan.core.plugin_manager import PluginManager

        order = self._order
        if self._opened is None:
            raise PluginError("the device was not opened")
        platform, device = self._opened
        discovery = Discovery()
        plugins = PluginManager(order.config.plugins, discovery)
        communicator = device.communicator(GroupSpec(order.rank, order.num_ranks, order.rendezvous))
        source = read_model(order.config.model)
        builder = ExecutorBuilder(
            platform, order.device, order.config, discovery, plugins, source, device
        )
        summary = builder.summary()
        executor = builder.kernel_executor(summary, builder.kernels(), communicator=communicator)
        return RankParts(executor, lambda: executor.load(summary, builder.open_weights))

    def close(self) -> None:
        self._runtime.close()


if __name__ == "__main__":
    sys.exit(main())
