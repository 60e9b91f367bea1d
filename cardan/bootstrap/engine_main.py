"""Main of an engine's process: ``python -m cardan.bootstrap.engine_main DESCRIPTOR``."""

import socket
import sys

import msgspec

from cardan.core.config.engine import EngineConfig
from cardan.core.engine.client import EngineParts
from cardan.core.engine.engine_process import receive_config, run_engine
from cardan.core.observability.logging import configure_logging


def main() -> int:
    sock = socket.socket(fileno=int(sys.argv[1]))
    config = msgspec.msgpack.decode(receive_config(sock), type=EngineConfig)
    configure_logging(config.log_level)

    def build() -> EngineParts:
        from cardan.bootstrap.engine_builder import build_engine

        return build_engine(config)

    return run_engine(sock, build)


if __name__ == "__main__":
    sys.exit(main())
