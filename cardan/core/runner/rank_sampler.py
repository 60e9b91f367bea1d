"""Sampling once for all ranks."""

import numpy.typing as npt
import torch
from torch import Tensor

from cardan.core.interfaces.communication import Communicator
from cardan.core.interfaces.executor import TokenMask
from cardan.core.interfaces.kernels import OpTable
from cardan.core.sampling.sampler import Sampler, SampleResult
from cardan.core.sampling.sampling_states import SamplingStates
from cardan.core.types.step import Int64


class RankSampler(Sampler):
    """Rank 0 samples, the others are told the tokens.

    All ranks have the whole logits and could sample alike, but then each logits processor and
    each rounding would have to agree on all of them, or their sequences would part unnoticed. One
    exchange of a few ids a step rules that out, and the others need no states of sampling.
    """

    def __init__(self, states: SamplingStates, ops: OpTable, communicator: Communicator) -> None:
        super().__init__(states, ops)
        self._communicator = communicator

    @torch.inference_mode()
    def sample(
        self,
        logits: Tensor,
        rows: npt.ArrayLike,
        num_output_tokens: Int64,
        mask: TokenMask | None = None,
    ) -> SampleResult:
        """As ``Sampler.sample``. Ranks above 0 know the tokens alone, not which failed or why."""
        if self._communicator.rank == 0:
            result = super().sample(logits, rows, num_output_tokens, mask)
            # Some communicators hand back what they were given, some a copy; it is not needed.
            self._communicator.broadcast(result.token_ids, 0)
            return result
        tokens = torch.zeros(len(logits), dtype=torch.int64, device=logits.device)
        tokens = self._communicator.broadcast(tokens, 0)
        return SampleResult(tokens, torch.zeros_like(tokens, dtype=torch.bool))
