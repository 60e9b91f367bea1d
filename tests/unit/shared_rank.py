"""One rank of a group that may share memory: ``shared_rank.py RANK RENDEZVOUS``.

Prints the class of its communicator and the sum that it finds.
"""

import sys

import torch

from cardan.core.interfaces.communication import GroupSpec
from cardan.platforms.cpu.communicator import join


def main(rank, rendezvous):
    torch.set_num_threads(1)
    group = join(GroupSpec(rank, 2, rendezvous))
    found = group.all_reduce(torch.full((3,), rank + 1.0))
    print(type(group).__name__, found.tolist())
    group.close()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
