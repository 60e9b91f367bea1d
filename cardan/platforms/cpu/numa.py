"""Which CPUs and memory nodes each of several ranks gets. Reads files alone."""

import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Node:
    """Memory, and the CPUs that are near to it."""

    index: int
    cpus: frozenset[int]


@dataclass(frozen=True, slots=True)
class Share:
    """What one rank computes on: CPUs, how many cores they are, and the nodes that have them.

    ``is_exclusive``: no other rank has the same CPUs.
    """

    cpus: frozenset[int]
    num_cores: int
    nodes: tuple[int, ...]
    is_exclusive: bool


def allowed_cpus() -> set[int]:
    """CPUs that the calling thread may run on."""
    if hasattr(os, "sched_getaffinity"):
        return set(os.sched_getaffinity(0))
    return set(range(os.cpu_count() or 1))


def read_nodes(root: Path) -> tuple[Node, ...]:
    """The nodes that have CPUs, by number; none where the system does not say."""
    found = []
    for folder in (root / "sys/devices/system/node").glob("node[0-9]*"):
        number = folder.name.removeprefix("node")
        cpus = _read_list(folder / "cpulist")
        if number.isdigit() and cpus:
            found.append(Node(int(number), cpus))
    return tuple(sorted(found, key=lambda node: node.index))


def usable_nodes(root: Path, cpus: Collection[int]) -> tuple[int, ...]:
    """Numbers of the nodes that have some of ``cpus``."""
    wanted = set(cpus)
    return tuple(node.index for node in read_nodes(root) if wanted & node.cpus)


def cores_of(root: Path, cpus: Collection[int]) -> list[frozenset[int]]:
    """``cpus`` by core, siblings together; a CPU of unknown topology is a core of its own."""
    found: dict[frozenset[int], None] = {}
    wanted = frozenset(cpus)
    for cpu in sorted(wanted):
        file = root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
        siblings = _read_list(file) or frozenset({cpu})
        found[(siblings | {cpu}) & wanted] = None
    return list(found)


def plan_shares(root: Path, cpus: Collection[int], num_ranks: int) -> list[Share]:
    """Share ``cpus`` out among ranks, whole cores each, nobody on more nodes than needed.

    Where the number of ranks is a multiple of that of the nodes, each rank has one node.
    Otherwise the cores, in order of their nodes, are cut into equal parts. With fewer cores than
    ranks all have all.
    """
    nodes = read_nodes(root)
    cores = cores_of(root, cpus)
    if len(cores) < num_ranks:
        everything = frozenset(cpus)
        used = tuple(node.index for node in nodes if node.cpus & everything)
        return [Share(everything, len(cores), used, num_ranks == 1)] * num_ranks
    # A core of no known node comes last, as if it were on a node of its own.
    by_node: dict[int, list[frozenset[int]]] = {}
    for core in cores:
        near = [node.index for node in nodes if core & node.cpus]
        by_node.setdefault(near[0] if near else -1, []).append(core)
    groups = [by_node[index] for index in sorted(by_node, key=lambda index: (index < 0, index))]
    per_node, rest = divmod(num_ranks, len(groups))
    if rest or any(len(group) < per_node for group in groups):
        groups, per_node = [[core for group in groups for core in group]], num_ranks
    parts = [part for group in groups for part in _cut(group, per_node)]
    return [_share(part, nodes) for part in parts]


def _cut(cores: Sequence[frozenset[int]], count: int) -> list[Sequence[frozenset[int]]]:
    """``count`` consecutive parts whose lengths differ by one at most."""
    ends = [len(cores) * turn // count for turn in range(count + 1)]
    return [cores[begin:end] for begin, end in pairwise(ends)]


def _share(cores: Sequence[frozenset[int]], nodes: Sequence[Node]) -> Share:
    cpus = frozenset().union(*cores)
    used = tuple(node.index for node in nodes if node.cpus & cpus)
    return Share(cpus, len(cores), used, True)


def list_text(numbers: Collection[int]) -> str:
    """``0-3,8`` for 0, 1, 2, 3, 8, as Linux writes it."""
    parts: list[str] = []
    ordered = sorted(numbers)
    while ordered:
        length = 1
        while length < len(ordered) and ordered[length] == ordered[0] + length:
            length += 1
        first, last = ordered[0], ordered[length - 1]
        parts.append(str(first) if length == 1 else f"{first}-{last}")
        ordered = ordered[length:]
    return ",".join(parts)


def parse_list(text: str) -> frozenset[int]:
    """Numbers of a list such as ``0-3,8``; none if it is no such list."""
    found: set[int] = set()
    try:
        for part in filter(None, text.strip().split(",")):
            first, dash, last = part.partition("-")
            found.update(range(int(first), int(last if dash else first) + 1))
    except ValueError:
        return frozenset()
    return frozenset(found)


def _read_list(file: Path) -> frozenset[int]:
    try:
        return parse_list(file.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return frozenset()
