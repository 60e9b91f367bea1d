"""What one all_reduce between ranks on this host costs: ``python benchmarks/all_reduce.py``.

Shared memory (the CPU platform's) and sockets (torch's reference) in turns, float32, in µs.
"""

import argparse
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Sequence

import torch

from cardan.core.interfaces.communication import Communicator, GroupSpec
from cardan.core.interfaces.torch_communicator import TorchCommunicator
from cardan.platforms.cpu.communicator import SharedMemoryCommunicator, join

_CALLS = 50


def measure(group: Communicator, count: int, rounds: int) -> list[float]:
    """Microseconds of a call in each of ``rounds`` rounds."""
    tensor = torch.ones(count)
    found = []
    for _ in range(rounds):
        started = time.perf_counter()
        for _ in range(_CALLS):
            group.all_reduce(tensor)
        found.append((time.perf_counter() - started) / _CALLS * 1e6)
        tensor.fill_(1.0)
    return found


def rank_main(rank: int, size: int, folder: str, counts: Sequence[int], rounds: int) -> None:
    torch.set_num_threads(1)
    shared = join(GroupSpec(rank, size, f"file://{folder}/shared"))
    sockets = TorchCommunicator(
        GroupSpec(rank, size, f"file://{folder}/sockets"), torch.device("cpu")
    )
    if not rank and not isinstance(shared, SharedMemoryCommunicator):
        print("memory cannot be shared here; both are sockets")
    for count in counts:
        times: dict[str, list[float]] = {"shared memory": [], "sockets": []}
        for _ in range(4):
            times["shared memory"] += measure(shared, count, rounds)
            times["sockets"] += measure(sockets, count, rounds // 4 or 1)
        for name, values in times.items():
            if not rank:
                middle = statistics.median(values)
                print(
                    f"{count:>9} floats  {name:<14} median {middle:8.1f}  least {min(values):8.1f}"
                )
    shared.close()
    sockets.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--floats", type=int, nargs="+", default=[576, 32 * 576, 512 * 576])
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            context.Process(
                target=rank_main,
                args=(rank, options.ranks, folder, options.floats, options.rounds),
            )
            for rank in range(options.ranks)
        ]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()


if __name__ == "__main__":
    main()
