"""The plan of one step and its result: plain arrays, sent whole to every rank."""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from cardan.core.types.sampling_params import SamplingParams

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
Float32 = npt.NDArray[np.float32]
Bool = npt.NDArray[np.bool_]


@dataclass(slots=True)
class NewRow:
    """A sequence that enters a row; sent once, later steps refer to the row.

    ``token_ids`` are all tokens known so far (more than the prompt after a preemption).
    ``block_ids`` has one array for each KV group and covers ``num_computed_tokens`` plus what
    this step computes. ``seed`` drives this sequence's random stream.
    """

    row: int
    key: int
    token_ids: Int32
    num_prompt_tokens: int
    num_computed_tokens: int
    params: SamplingParams
    seed: int
    stop_token_ids: tuple[int, ...]
    bad_words_token_ids: tuple[tuple[int, ...], ...]
    block_ids: tuple[Int32, ...]
    adapter: str | None = None


@dataclass(slots=True)
class BlockEdits:
    """Edits of a group's block table: ``table[rows[i], columns[i]] = block_ids[i]``."""

    rows: Int32
    columns: Int32
    block_ids: Int32


@dataclass(slots=True)
class BlockCopies:
    """Blocks to copy inside a group's pool before anything of this step writes (copy-on-write)."""

    sources: Int32
    targets: Int32


@dataclass(slots=True)
class SchedulerOutput:
    """One step's plan. Applied in this order: free rows, new rows, edits, copies, compute.

    The arrays of the batch run over the scheduled rows: row ``rows[i]`` computes
    ``num_scheduled_tokens[i]`` tokens after its ``num_computed_tokens[i]``; where ``samples[i]``
    is set the step also yields its next token. ``block_edits`` and ``block_copies`` have one
    entry for each KV group.
    """

    step_id: int
    new_rows: list[NewRow]
    freed_rows: list[int]
    block_edits: tuple[BlockEdits, ...]
    block_copies: tuple[BlockCopies, ...]
    rows: Int32
    keys: Int64
    num_scheduled_tokens: Int32
    num_computed_tokens: Int32
    samples: Bool

    @property
    def num_tokens(self) -> int:
        return int(self.num_scheduled_tokens.sum())


@dataclass(slots=True)
class LogprobsArrays:
    """Log-probabilities at P positions: ``token_ids``/``logprobs`` [P, 1 + k], ``ranks`` [P].

    Column 0 is the sampled (or given) token, whose 1-based rank is in ``ranks``.
    """

    token_ids: Int32
    logprobs: Float32
    ranks: Int32


@dataclass(slots=True)
class ModelRunnerOutput:
    """Result of a step over its S sampling rows (``plan.rows[plan.samples]``, in that order).

    ``token_ids`` [S, width] and ``num_sampled`` [S]: speculation may yield several tokens a row,
    of which the first ``num_sampled`` count. ``failed`` [S]: there is no token; ``failures`` says
    why, by index, and ``infeasible`` where the request's own settings allow none.
    ``corrupt`` [R], over all rows of the plan: a computed token's hidden state was
    not finite, so what the step wrote for this row must not be used; None: all are sound.
    ``logprobs`` maps a row to its table over the sampled tokens, ``prompt_logprobs`` to the table
    over the prompt positions whose log-probabilities this step made known.
    """

    token_ids: Int32
    num_sampled: Int32
    failed: Bool
    failures: dict[int, str] = field(default_factory=dict)
    infeasible: frozenset[int] = frozenset()
    corrupt: Bool | None = None
    logprobs: dict[int, LogprobsArrays] = field(default_factory=dict)
    prompt_logprobs: dict[int, LogprobsArrays] = field(default_factory=dict)
