"""A group of rank processes: starting them, and what they said."""

import json
import socket
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest

from cardan.testing.conformance.child_process import Ended, Origin, run_modules
from cardan.testing.conformance.results import not_supported
from cardan.testing.conformance.subject import Subject

_CHILD = "cardan.testing.conformance.collective_rank"
_DEADLINE_S = 120.0
_FLOAT = ("all_reduce_sum", "all_reduce_max", "reduce_scatter", "repeats")
_PLAIN = ("all_gather", "all_to_all", "broadcast", "send_recv")
_ONCE = ("split", "second_group", "misuse", "close")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankOrder:
    """Which rank this is, of what, on which device, and what it is to do."""

    module: str
    attribute: str
    device_index: int
    rank: int
    size: int
    rendezvous: str
    folder: str
    seed: int
    cases: Sequence[str]


def case_names(dtypes: Sequence[str]) -> list[str]:
    """``CASE-DTYPE`` in the order in which they run; ``close`` is the last."""
    return [
        *(f"{case}-{dtype}" for case in _FLOAT for dtype in dtypes),
        *(f"{case}-{dtype}" for case in _PLAIN for dtype in (*dtypes, "int64")),
        *(f"{case}-{dtypes[0]}" for case in _ONCE),
    ]


class RankGroup:
    """What the ranks of one group said: whether they joined, and the result of each case."""

    def __init__(self, ended: Sequence[Ended], num_devices: int) -> None:
        self._ended = ended
        self._num_devices = num_devices
        self._joined: list[dict[str, Any] | None] = []
        self._results: list[dict[str, dict[str, Any]]] = []
        for rank in ended:
            said = [json.loads(line) for line in rank.output.splitlines() if line[:1] == "{"]
            self._joined.append(said[0] if said else None)
            self._results.append({item["case"]: item for item in said[1:]})

    def require_joined(self) -> None:
        """End the running test unless all ranks have come together."""
        size = len(self._ended)
        for rank, told in enumerate(self._joined):
            if told is None or told["joined"]:
                continue
            if told["is_refusal"]:
                not_supported(told["reason"])
            if self._num_devices < size:
                not_supported(f"{size} ranks on {self._num_devices} device(s): {told['reason']}")
            pytest.fail(f"rank {rank} of {size} did not join: {told['reason']}")
        for rank, told in enumerate(self._joined):
            if told is None:
                pytest.fail(f"rank {rank} of {size} did not join: {self._complaint(rank)}")

    def results(self, case: str) -> list[dict[str, Any]]:
        """Every rank's result of one case; a missing one ends the running test."""
        for rank, results in enumerate(self._results):
            if case not in results:
                pytest.fail(f"rank {rank} did not come to an end with it: {self._complaint(rank)}")
        return [results[case] for results in self._results]

    def _complaint(self, rank: int) -> str:
        return self._ended[rank].complaint()


def run_ranks(
    subject: Subject,
    device_indices: Sequence[int],
    cases: Sequence[str],
    seed: int,
    folder: Path,
    origin: Origin,
) -> RankGroup:
    """Run ``cases`` between processes, one for each of ``device_indices``, which may repeat.

    Groups of two meet at a port, others at a file, since both forms of a rendezvous are to work.
    """
    size = len(device_indices)
    rendezvous = f"tcp://127.0.0.1:{_free_port()}" if size == 2 else f"file://{folder}/meet"
    orders = [
        RankOrder(
            module=subject.module,
            attribute=subject.attribute,
            device_index=index,
            rank=rank,
            size=size,
            rendezvous=rendezvous,
            folder=str(folder),
            seed=seed,
            cases=cases,
        )
        for rank, index in enumerate(device_indices)
    ]
    arguments = [(json.dumps(asdict(order)),) for order in orders]
    ended = run_modules(_CHILD, arguments, _DEADLINE_S, origin)
    return RankGroup(ended, len(set(device_indices)))


def _free_port() -> int:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        return int(holder.getsockname()[1])
