"""A step whose results may still be on the device."""

from dataclasses import dataclass

import numpy as np
import torch

from cardan.core.interfaces.device import Event
from cardan.core.interfaces.executor import StepHandle
from cardan.core.sampling.sampler import SampleResult
from cardan.core.types.step import LogprobsArrays, ModelRunnerOutput


@dataclass(slots=True)
class DeviceStepHandle(StepHandle):
    """Results as tensors; ``event`` is after the last of them, None where the host computes."""

    sampled: SampleResult | None
    prompt_logprobs: dict[int, LogprobsArrays]
    event: Event | None = None

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
            )
        token_ids = self.sampled.token_ids.to("cpu", torch.int32).numpy()
        failed = self.sampled.failed.cpu().numpy()
        return ModelRunnerOutput(
            token_ids=token_ids[:, None],
            num_sampled=np.ones(len(token_ids), np.int32),
            failed=failed,
            failures=self.sampled.failure_reasons() if failed.any() else {},
            logprobs=self.sampled.logprobs,
            prompt_logprobs=self.prompt_logprobs,
        )
