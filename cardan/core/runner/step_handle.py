"""A step whose results may still be on the device."""

from dataclasses import dataclass

import numpy as np
import torch

from cardan.core.interfaces.device import Event
from cardan.core.interfaces.executor import StepHandle
from cardan.core.sampling.sampler import NO_TOKEN_LEFT, SampleResult
from cardan.core.types.step import Bool, LogprobsArrays, ModelRunnerOutput


@dataclass(slots=True)
class DeviceStepHandle(StepHandle):
    """Results as tensors; ``event`` is after the last of them, None where the host computes."""

    sampled: SampleResult | None
    prompt_logprobs: dict[int, LogprobsArrays]
    event: Event | None = None
    # [R] bool, padding included; None where every computed token gave logits.
    corrupt: torch.Tensor | None = None
    num_rows: int = 0

    def done(self) -> bool:
        return self.event is None or self.event.query()

    def result(self) -> ModelRunnerOutput:
        if self.event is not None:
            self.event.synchronize()
        if self.sampled is None:
            return ModelRunnerOutput(
                token_ids=np.zeros((0, 1), np.int32),
                num_sampled=np.zeros(0, np.int32),
                failed=np.zeros(0, np.bool_),
                prompt_logprobs=self.prompt_logprobs,
                corrupt=self._corrupt_rows(),
            )
        token_ids = self.sampled.token_ids.to("cpu", torch.int32).numpy()
        failed = self.sampled.failed.cpu().numpy()
        reasons = self.sampled.failure_reasons() if failed.any() else {}
        return ModelRunnerOutput(
            token_ids=token_ids[:, None],
            num_sampled=np.ones(len(token_ids), np.int32),
            failed=failed,
            failures=reasons,
            infeasible=frozenset(i for i, reason in reasons.items() if reason == NO_TOKEN_LEFT),
            logprobs=self.sampled.logprobs,
            prompt_logprobs=self.prompt_logprobs,
            corrupt=self._corrupt_rows(),
        )

    def _corrupt_rows(self) -> Bool | None:
        if self.corrupt is None:
            return None
        found: Bool = self.corrupt[: self.num_rows].cpu().numpy()
        return found if found.any() else None
