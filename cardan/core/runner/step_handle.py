"""A step whose results may still be on the device."""

from dataclasses import dataclass, field

import numpy as np
import torch

from cardan.core.interfaces.device import Event
from cardan.core.interfaces.executor import StepHandle
from cardan.core.runner.host_results import HostResult, HostResults
from cardan.core.sampling.sampler import NO_TOKEN_LEFT, SampleResult
from cardan.core.types.step import Bool, Int32, LogprobsArrays, ModelRunnerOutput


@dataclass(frozen=True, slots=True)
class StepResults:
    """What a step made: tensors on the device.

    Attributes:
        num_rows: rows of the plan.
        sampled: None where no row sampled.
        prompt_logprobs: tables by row.
        corrupt: [R] bool, padding included; None where every computed token gave logits.
    """

    num_rows: int = 0
    sampled: SampleResult | None = None
    prompt_logprobs: dict[int, LogprobsArrays] = field(default_factory=dict)
    corrupt: torch.Tensor | None = None

    def copy_to(self, room: HostResult) -> None:
        """Queue copies of what every step's results are read from."""
        sampled = self.sampled
        token_ids, failed = (sampled.token_ids, sampled.failed) if sampled else (None, None)
        room.fill(token_ids, failed, self.corrupt)


class DeviceStepHandle(StepHandle):
    """Results on the device, or in ``room`` on the host, which is given back once they are read or
    the handle is dropped.

    ``event`` is after the last of them, None where the device computes at once.
    """

    def __init__(
        self,
        results: StepResults,
        event: Event | None = None,
        room: HostResult | None = None,
        rooms: HostResults | None = None,
    ) -> None:
        """``rooms``: the owner of ``room``."""
        self._results = results
        self._event = event
        self._room = room
        self._rooms = rooms

    def __del__(self) -> None:
        # Ranks that do not answer read no results.
        room, self._room = self._room, None
        if room is not None and self._rooms is not None:
            self._rooms.take_back(room)

    def done(self) -> bool:
        return self._event is None or self._event.query()

    def result(self) -> ModelRunnerOutput:
        if self._event is not None:
            self._event.synchronize()
        token_ids, failed, corrupt = self._read()
        sampled = self._results.sampled
        reasons = sampled.failure_reasons() if sampled is not None and failed.any() else {}
        return ModelRunnerOutput(
            token_ids=token_ids[:, None],
            num_sampled=np.ones(len(token_ids), np.int32),
            failed=failed,
            failures=reasons,
            infeasible=frozenset(i for i, reason in reasons.items() if reason == NO_TOKEN_LEFT),
            logprobs={} if sampled is None else sampled.logprobs,
            prompt_logprobs=self._results.prompt_logprobs,
            corrupt=corrupt if corrupt is not None and corrupt.any() else None,
        )

    def _read(self) -> tuple[Int32, Bool, Bool | None]:
        """Tokens [S], failed [S] and corrupt [R]."""
        results, sampled = self._results, self._results.sampled
        num_samples = 0 if sampled is None else len(sampled.token_ids)
        room, self._room = self._room, None
        if room is not None and self._rooms is not None:
            corrupt = None if results.corrupt is None else room.corrupt(results.num_rows)
            found = room.token_ids(num_samples), room.failed(num_samples), corrupt
            self._rooms.take_back(room)
            return found
        corrupt = None if results.corrupt is None else _on_host(results.corrupt[: results.num_rows])
        if sampled is None:
            return np.zeros(0, np.int32), np.zeros(0, np.bool_), corrupt
        token_ids: Int32 = sampled.token_ids.to("cpu", torch.int32).numpy()
        return token_ids, _on_host(sampled.failed), corrupt


def _on_host(flags: torch.Tensor) -> Bool:
    found: Bool = flags.cpu().numpy()
    return found
