"""One rank of the gloo test: ``gloo_rank.py RANK WORLD_SIZE RENDEZVOUS``; exit code 0 is a pass."""

import sys

import torch

from cardan.core.interfaces.communication import GroupSpec
from cardan.core.interfaces.errors import ConfigError
from cardan.core.interfaces.torch_communicator import TorchCommunicator


def main(rank, world_size, rendezvous):
    from test_communicators import exercise

    torch.set_num_threads(1)
    group = TorchCommunicator(GroupSpec(rank, world_size, rendezvous), torch.device("cpu"))
    exercise(group)
    group.close()
    group.close()
    try:
        group.all_reduce(torch.ones(1))
    except ConfigError:
        return
    raise AssertionError("a closed communicator still works")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
