"""One of the ``n`` samples of a request, as the scheduler keeps it.

The object is touched when the sequence joins, leaves or is preempted. What changes every step is
in the row table.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from cardan.core.interfaces.scheduling import RequestView
from cardan.core.kvcache.manager import SequenceBlocks
from cardan.core.types.request import EngineRequest
from cardan.core.types.sampling_params import SamplingParams

NO_ROW = -1


@dataclass(slots=True, eq=False)
class Sequence:
    """State of one sequence.

    ``token_ids`` are the tokens known when it last entered the waiting queue: the prompt, after a
    preemption also the answer so far. ``limit`` is the number of tokens at which it ends. ``order``
    sorts sequences, first goes first. ``parent`` is the first sample of the same request, which
    may lend its prompt blocks. ``num_prompt_logprobs`` counts the prompt positions (from 1 on)
    whose log-probabilities were delivered.
    """

    key: int
    index: int
    request: EngineRequest
    params: SamplingParams
    view: RequestView
    order: tuple[Any, ...]
    token_ids: npt.NDArray[np.int32]
    limit: int
    seed: int
    blocks: SequenceBlocks
    stop_token_ids: tuple[int, ...]
    parent: "Sequence | None" = None
    num_prompt_logprobs: int = 0
    row: int = NO_ROW
    is_started: bool = False
    is_finished: bool = False

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def num_to_compute(self) -> int:
        """Tokens whose KV the sequence needs when it enters a row."""
        return min(len(self.token_ids), self.limit - 1)

    @property
    def lacks_prompt_logprobs(self) -> bool:
        wanted = self.params.prompt_logprobs is not None
        return wanted and self.num_prompt_logprobs < self.num_prompt_tokens - 1

    @property
    def is_running(self) -> bool:
        return self.row != NO_ROW
