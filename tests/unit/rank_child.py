"""A further rank whose executor does what the order's options say. Imports no torch.

Options: ``act``, what goes wrong and when, and ``log``, a file for what the executor was given.
"""

import hashlib
import os
import signal
import socket
import sys
import time
from pathlib import Path

from cardan.core.interfaces.errors import ConfigError, OutOfMemoryError
from cardan.core.interfaces.executor import ModelExecutor, WarmupReport
from cardan.core.runner.rank_channel import RankChannel
from cardan.core.runner.rank_messages import Forward, encode
from cardan.core.runner.rank_server import RankParts, receive_order, serve_rank


def digest_of(step):
    """Of a plan, whatever its arrays are made of."""
    return hashlib.sha256(encode(Forward(step))).hexdigest()


class Executor(ModelExecutor):
    def __init__(self, rank, options):
        self.rank = rank
        self.act = options.get("act", "")
        self.log = Path(options["log"]) if "log" in options else None

    def note(self, text):
        if self.log is not None:
            with self.log.open("a", encoding="utf-8") as file:
                file.write(text + "\n")

    def misbehave(self, when):
        what, _, at = self.act.partition("@")
        if at != when:
            return
        if what == "config":
            raise ConfigError("model.dtype is odd; choose another")
        if what == "fail":
            # The highest rank fails first, the others because of it.
            time.sleep(0.2 * (3 - self.rank))
            raise ValueError(f"nothing left on rank {self.rank}")
        if what == "full":
            raise OutOfMemoryError("no memory left")
        if what == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if what == "hang":
            time.sleep(600)

    def load(self, model, source):
        self.misbehave("load")
        self.note("load")

    def kv_specs(self):
        return []

    def available_kv_bytes(self, utilization):
        return int(1000 * utilization) - self.rank

    def bind_kv(self, config):
        self.note(f"bind_kv {config.num_blocks}")

    def warmup(self):
        return WarmupReport()

    def forward(self, step):
        self.misbehave("forward")
        self.note(f"forward {digest_of(step)}")

    def sample(self, step, mask=None):
        bits = "" if mask is None else f" {list(mask.rows)} {mask.bits.tolist()}"
        self.note(f"sample {step.step_id}{bits}")

    def sleep(self, level):
        self.misbehave("sleep")
        self.note(f"sleep {level}")

    def wake(self, tags):
        self.misbehave("wake")
        self.note(f"wake {list(tags)}")
        return []

    def close(self):
        self.misbehave("close")
        self.note("close")


def main():
    channel = RankChannel(socket.socket(fileno=int(sys.argv[1])))
    order = receive_order(channel)
    executor = Executor(order.rank, order.config.plugins.options)

    def build():
        executor.misbehave("build")
        return RankParts(executor, lambda: executor.load(None, None))

    return serve_rank(
        channel, lambda: executor.misbehave("open"), build, lambda: executor.note("closed")
    )


if __name__ == "__main__":
    sys.exit(main())
