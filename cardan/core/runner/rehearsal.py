"""The largest step that an engine can meet, run before there is a KV cache."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from cardan.core.interfaces.attention import KVLayout
from cardan.core.interfaces.errors import UnsupportedError
from cardan.core.interfaces.memory import KVPool
from cardan.core.interfaces.torch_device import TorchKVPool, physical_shape
from cardan.core.interfaces.torch_kv_content import torch_kv_dtype
from cardan.core.types.kv import KVCacheGroup
from cardan.core.types.sampling_params import SamplingParams
from cardan.core.types.step import BlockCopies, BlockEdits, Int32, Int64, NewRow, SchedulerOutput


@dataclass(frozen=True, slots=True)
class StepMemory:
    """What steps need of the device besides weights and KV cache, bytes.

    Attributes:
        step_bytes: the largest step, with the buffers of all steps.
        graph_bytes: captured graphs, estimated.
    """

    step_bytes: int
    graph_bytes: int


@dataclass(frozen=True, slots=True)
class StepLimits:
    """The largest step that settings and model allow.

    Attributes:
        num_tokens: tokens of a step.
        num_rows: sequences of a step.
        max_len: tokens of a sequence.
        num_logprobs: log-probabilities at a position; -1: the whole vocabulary.
    """

    num_tokens: int
    num_rows: int
    max_len: int
    num_logprobs: int

    def __str__(self) -> str:
        num_rows = min(self.num_rows, self.num_tokens)
        return f"a step of {self.num_tokens} tokens and {num_rows} sequences"


def largest_step(limits: StepLimits, num_groups: int) -> SchedulerOutput:
    """A plan that asks for all that a step can take.

    As many rows as there may be share as many tokens; the first row has as many of them as it can
    and ends at the longest context. All rows sample, with every kind of setting. All tokens lie in
    the null block, so that no pool has to hold them, and their values are of no use.
    """
    # The last position of a sequence is sampled, never computed.
    longest = max(1, limits.max_len - 1)
    num_rows = min(limits.num_rows, limits.num_tokens)
    counts = _share(min(limits.num_tokens, num_rows * longest), num_rows, longest)
    lengths = counts.copy()
    lengths[0] = longest
    params = SamplingParams(
        temperature=1.0, top_k=50, top_p=0.9, min_p=0.01,
        repetition_penalty=1.1, presence_penalty=0.1, frequency_penalty=0.1,
        logprobs=limits.num_logprobs,
    )  # fmt: skip
    with_prompt = params.replace(prompt_logprobs=limits.num_logprobs)
    kinds = [with_prompt] + [params] * (num_rows - 1)
    return _plan(counts, lengths, kinds, num_groups, limits.max_len > 1)


def longest_prompt(limits: StepLimits, num_groups: int) -> SchedulerOutput:
    """A plan for the longest new prompt that fits a step, after ``largest_step``: many short rows
    and one long one may have kernels of their own, which no request should wait for."""
    count = min(limits.num_tokens, max(1, limits.max_len - 1))
    counts = np.full(1, count, np.int32)
    kinds = [SamplingParams(temperature=0.0)]
    plan = _plan(counts, counts, kinds, num_groups, limits.max_len > 1)
    plan.freed_rows = list(range(min(limits.num_rows, limits.num_tokens)))
    return plan


def _plan(
    counts: Int32,
    lengths: Int32,
    params: Sequence[SamplingParams],
    num_groups: int,
    samples: bool,
) -> SchedulerOutput:
    """New rows that compute the last ``counts`` of their ``lengths`` tokens, in the null block."""
    num_rows = len(counts)
    none = np.zeros(0, np.int32)
    rows = [
        NewRow(
            row=row,
            key=row,
            token_ids=np.zeros(length, np.int32),
            num_prompt_tokens=length,
            num_computed_tokens=length - count,
            params=params[row],
            seed=row,
            stop_token_ids=(),
            bad_words_token_ids=(),
            block_ids=(none,) * num_groups,
        )
        for row, (count, length) in enumerate(zip(counts.tolist(), lengths.tolist(), strict=True))
    ]
    return SchedulerOutput(
        step_id=0,
        new_rows=rows,
        freed_rows=[],
        block_edits=(BlockEdits(none, none, none),) * num_groups,
        block_copies=(BlockCopies(none, none),) * num_groups,
        rows=np.arange(num_rows, dtype=np.int32),
        keys=np.arange(num_rows, dtype=np.int64),
        num_scheduled_tokens=counts,
        num_computed_tokens=lengths - counts,
        samples=np.full(num_rows, samples),
    )


def null_pool(
    group: KVCacheGroup, layout: KVLayout, num_blocks: int, device: torch.device
) -> KVPool:
    """Zeroed blocks that belong to whoever holds them, not to the device's allocator."""
    if layout.opaque:
        raise UnsupportedError("a cache that only its device can see is not rehearsed with")
    shape = (len(group.layers), *physical_shape(group.spec, layout, num_blocks))
    dtype = torch_kv_dtype(group.spec.dtype)
    return TorchKVPool(group, layout, torch.zeros(shape, dtype=dtype, device=device))


def _share(num_tokens: int, num_rows: int, longest: int) -> Int32:
    """[num_rows] int32 of at least 1 and at most ``longest``, the first ones as large as can be."""
    room = np.full(num_rows, longest - 1, np.int64)
    before = np.cumsum(room) - room
    extra: Int64 = np.clip(num_tokens - num_rows - before, 0, room)
    return (extra + 1).astype(np.int32)
