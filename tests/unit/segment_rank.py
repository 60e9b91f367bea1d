"""One rank of the tests of shared memory: ``segment_rank.py JSON``. Imports no torch."""

import hashlib
import json
import os
import signal
import sys
import time

import numpy as np

from cardan.core.types.errors import CardanError
from cardan.platforms.cpu.native.library import open_library
from cardan.platforms.cpu.segment import Segment

KINDS = ("float32", "bfloat16", "float16")
EPS = {"float32": 2.0**-24, "bfloat16": 2.0**-8, "float16": 2.0**-11}
SIZES = (0, 1, 7, 31, 576, 1031, 5000)


class Rank:
    def __init__(self, order):
        self.rank, self.size, self.seed = order["rank"], order["size"], order["seed"]
        self.threads = order["threads"]
        self.digest = hashlib.sha256()
        environment = {**os.environ, **order["environment"]}
        self.segment = Segment(
            open_library(environment),
            order["descriptor"],
            self.rank,
            self.size,
            order["patience"],
            order["slot_bytes"],
        )

    def everyone(self, count, kind):
        """The ranks' inputs, as stored and in float64."""
        rng = np.random.default_rng([self.seed, count, KINDS.index(kind)])
        wide = rng.standard_normal((self.size, count)).astype(np.float32) * 8
        stored = store(wide, kind)
        return stored, load(stored, kind)

    def take(self, array):
        self.digest.update(array.tobytes())

    def all_reduce(self, count, kind):
        stored, exact = self.everyone(count, kind)
        # At any alignment that the type allows.
        buffer = np.zeros(count + 3, stored.dtype)[1 : 1 + count]
        for op in (0, 1):
            buffer[:] = stored[self.rank]
            self.segment.all_reduce(buffer.ctypes.data, count, KINDS.index(kind), op, self.threads)
            self.take(buffer)
            found = load(buffer, kind)
            if op:
                assert (found == exact.max(0)).all()
            else:
                bound = np.abs(exact).sum(0) * (EPS[kind] + (self.size - 1) * EPS["float32"])
                assert (np.abs(found - exact.sum(0)) <= bound).all()

    def reduce_scatter(self, count, kind):
        stored, exact = self.everyone(count * self.size, kind)
        out = np.zeros(count, stored.dtype)
        mine = np.ascontiguousarray(stored[self.rank])
        self.segment.reduce_scatter(
            mine.ctypes.data, out.ctypes.data, count, KINDS.index(kind), self.threads
        )
        parts = exact[:, self.rank * count : (self.rank + 1) * count]
        bound = np.abs(parts).sum(0) * (EPS[kind] + (self.size - 1) * EPS["float32"])
        assert (np.abs(load(out, kind) - parts.sum(0)) <= bound).all()

    def all_gather(self, rows, columns):
        stored, _ = self.everyone(rows * columns, "float32")
        parts = stored.reshape(self.size, rows, columns)
        out = np.zeros((rows, self.size, columns), np.float32)
        mine = np.ascontiguousarray(parts[self.rank])
        self.segment.all_gather(mine.ctypes.data, out.ctypes.data, rows, columns * 4, self.threads)
        assert (out == parts.transpose(1, 0, 2)).all()

    def broadcast(self, count, root):
        stored, _ = self.everyone(count, "float32")
        buffer = np.ascontiguousarray(stored[self.rank])
        self.segment.broadcast(buffer.ctypes.data, buffer.nbytes, root, self.threads)
        assert (buffer == stored[root]).all()


def store(wide, kind):
    if kind == "float16":
        return wide.astype(np.float16)
    if kind == "float32":
        return wide
    bits = wide.view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def load(stored, kind):
    if kind == "bfloat16":
        return (stored.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return stored.astype(np.float64)


def sums(rank):
    for kind in KINDS:
        for count in SIZES:
            rank.all_reduce(count, kind)
            rank.reduce_scatter(count, kind)
    for rows, columns in ((1, 1), (3, 509), (7, 64), (0, 5), (1, 3000)):
        rank.all_gather(rows, columns)
    for root in range(rank.size):
        rank.broadcast(2049, root)
    for _ in range(200):  # halves in turns, without a pause
        rank.all_reduce(33, "float32")
    rank.segment.barrier()


def failing(rank, how):
    """Rank 1 is lost between two collectives; the others say what they are told."""
    rank.all_reduce(8, "float32")
    if rank.rank == 1 and how == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if rank.rank == 1 and how == "leave":
        rank.segment.close()
        time.sleep(0.5)
        return
    if rank.rank == 1 and how == "stop":
        time.sleep(3.0)
        return
    told = []
    for _ in range(2):
        try:
            rank.all_reduce(8, "float32")
        except CardanError as error:
            told.append(str(error))
    print(json.dumps({"told": told}))


def main():
    order = json.loads(sys.argv[1])
    rank = Rank(order)
    if order["act"] == "sums":
        sums(rank)
        print(json.dumps({"digest": rank.digest.hexdigest()}))
    else:
        failing(rank, order["act"])
    rank.segment.close()


if __name__ == "__main__":
    main()
