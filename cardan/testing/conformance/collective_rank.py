"""One rank of a test of collectives, in a process of its own.

``python -m cardan.testing.conformance.collective_rank JSON``, the fields of ``RankOrder``. Prints
a line of JSON when it has joined, and one after each case.
"""

import json
import sys
from typing import Any

import torch

from cardan.core.interfaces.communication import GroupSpec
from cardan.core.interfaces.device import Device
from cardan.core.interfaces.errors import UnsupportedError
from cardan.testing.conformance.collective_cases import CASES, Rank, digest
from cardan.testing.conformance.rank_group import RankOrder
from cardan.testing.conformance.subject import Subject


def main(order: RankOrder) -> None:
    subject = Subject(
        spec=order.module,
        module=order.module,
        attribute=order.attribute,
        index=order.device_index,
    )
    platform = subject.load()
    try:
        device = platform.open(subject.device_info(platform))
        rank = _join(order, device)
    except UnsupportedError as error:
        _say(joined=False, reason=str(error), is_refusal=True)
        return
    except Exception as error:
        _say(joined=False, reason=_told(error), is_refusal=False)
        return
    _say(joined=True)
    for name in order.cases:
        _say(case=name, **_result(name, rank))
    device.close()


def _join(order: RankOrder, device: Device) -> Rank:
    where = device.torch_device
    if where is None:
        raise UnsupportedError("executor tier: the device has no torch tensors, only whole steps")
    if where.type == "cpu":
        torch.set_num_threads(1)  # the ranks share the host's cores
    group = device.communicator(GroupSpec(order.rank, order.size, order.rendezvous))
    declared = device.capabilities.determinism != "none" or "deterministic" in group.features
    return Rank(
        rank=order.rank,
        size=order.size,
        group=group,
        device=device,
        where=where,
        seed=order.seed,
        folder=order.folder,
        is_repeatable=declared,
    )


def _result(name: str, rank: Rank) -> dict[str, Any]:
    case, _, dtype = name.partition("-")
    try:
        return {"outcome": "passed", "bits": digest(CASES[case](rank, dtype))}
    except UnsupportedError as error:
        return {"outcome": "not supported", "reason": str(error)}
    except Exception as error:
        return {"outcome": "failed", "reason": _told(error)}


def _told(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text if isinstance(error, AssertionError) else f"{type(error).__name__}: {text}"


def _say(**answer: Any) -> None:
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(RankOrder(**json.loads(sys.argv[1])))
