"""From logits to tokens."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from cardan.core.interfaces.executor import TokenMask
from cardan.core.interfaces.kernels import OpTable
from cardan.core.interfaces.random_stream import uniforms
from cardan.core.sampling.batch import BatchRows, put, take
from cardan.core.sampling.logprobs import LogprobsTable, chunked_logprobs, logprobs_table
from cardan.core.sampling.plan import LogprobsGroup, SamplingPlan
from cardan.core.sampling.processors import failure_mask
from cardan.core.sampling.sampling_states import SamplingStates
from cardan.core.types.step import Int64, LogprobsArrays

BAD_LOGITS = "the model's logits hold NaN or infinity, or no finite value"
NO_TOKEN_LEFT = (
    "no token is left to sample: allowed_token_ids, bad_words, min_tokens, logits processors and "
    "masks together forbid all of them"
)

# What ``choose_tokens`` takes beside the logits where no row is drawn.
_ALL_GREEDY = (None,) * 5


@dataclass(frozen=True, slots=True)
class SampleResult:
    """Tokens of S rows, still on the device.

    ``token_ids`` [S] int64; where ``failed`` [S] bool is set there is no token (the id is 0), and
    ``failure_reasons`` says why. A row fails when the model gave NaN, +inf or nothing finite, when
    settings and masks leave no token, or when a logits processor that it asked for raised.
    ``bad_logits`` [S] bool tells the first of these apart; None where it is the only possible one.
    """

    token_ids: Tensor
    failed: Tensor
    tables: tuple[LogprobsTable, ...] = ()
    bad_logits: Tensor | None = None
    processor_failures: Mapping[int, str] = field(default_factory=dict)

    @property
    def logprobs(self) -> dict[int, LogprobsArrays]:
        """One position for each row that wants log-probabilities; waits for the device."""
        return {row: arrays for table in self.tables for row, arrays in table.by_row().items()}

    def failure_reasons(self) -> dict[int, str]:
        """Reason by index in the batch; waits for the device."""
        failed = np.flatnonzero(self.failed.cpu().numpy()).tolist()
        bad = self.failed if self.bad_logits is None else self.bad_logits
        is_bad = bad.tolist()
        return {
            i: BAD_LOGITS if is_bad[i] else self.processor_failures.get(i, NO_TOKEN_LEFT)
            for i in failed
        }


class Sampler:
    """Samples one token for each row of a batch.

    Nothing here waits for the device unless a logits processor needs the tokens sampled before, or
    a kernel does.

    Attributes:
        states: settings and history of the rows that it samples for.
    """

    def __init__(self, states: SamplingStates, ops: OpTable) -> None:
        self.states = states
        use: dict[str, int | str] = {"dtype": "float32", "vocab_size": states.vocab_size}
        self._choose = ops.bind("choose_tokens", **use)
        self._mask = ops.bind("apply_token_mask", **use)
        self._logprobs = ops.bind("token_logprobs", **use)

    @torch.inference_mode()
    def sample(
        self,
        logits: Tensor,
        rows: npt.ArrayLike,
        num_output_tokens: Int64,
        mask: TokenMask | None = None,
    ) -> SampleResult:
        """Sample the next token of each row and take note of it.

        Log-probabilities are those of the model: of the logits as they come in. Then apply, in this
        order: allowed ids, bad words, min_tokens, logit bias, penalties, logits processors, the
        mask; temperature; top-k, top-p, min-p. A row's token depends on its own logits, settings,
        seed and number of outputs, on nothing else in the batch.

        Args:
            logits: [S, V] float32; the sampler owns it and may write into it.
            rows: [S] distinct occupied rows.
            num_output_tokens: [S] int64, tokens that each row has generated before this one.
            mask: allowed tokens of some of these rows.

        Raises:
            ValueError: shapes, dtype, rows or the mask do not fit.
        """
        plan = self.states.plan(rows)
        self._check(logits, plan.batch, num_output_tokens)
        edited = bool(plan.edits) or plan.processors is not None or mask is not None
        originals = [(group, _kept(logits, group, edited)) for group in plan.logprobs]
        bad_logits: Tensor | None = None
        failures: dict[int, str] = {}
        if edited and len(logits):
            bad_logits = ~torch.isfinite(logits.amax(-1))
            logits, failures = self._edit(logits, plan, num_output_tokens, mask)
        tokens, failed = self._chosen(logits, plan, num_output_tokens)
        if bad_logits is not None:
            failed = failed | bad_logits
            if failures:
                failed = failed | failure_mask(failures, len(tokens), tokens.device)
            tokens = tokens.masked_fill(failed, 0)
        plan.record(tokens)
        tables = tuple(
            logprobs_table(self._logprobs, group.rows, raw, take(tokens, group.index), group.k)
            for group, raw in originals
        )
        return SampleResult(tokens, failed, tables, bad_logits, failures)

    def prompt_logprobs(self, logits: Tensor, token_ids: Tensor, k: int) -> LogprobsArrays:
        """Log-probabilities of given tokens; waits for the device.

        Args:
            logits: [P, V] of any float dtype, each position's prediction.
            token_ids: [P] int64, the token that followed.
            k: size of the table of likeliest tokens; -1 for the whole vocabulary.
        """
        size = self.states.vocab_size if k == -1 else k
        return chunked_logprobs(self._logprobs, logits, token_ids, size)

    def _check(self, logits: Tensor, batch: BatchRows, num_output_tokens: Int64) -> None:
        wanted = (len(batch.rows), self.states.vocab_size)
        if tuple(logits.shape) != wanted or logits.dtype != torch.float32:
            raise ValueError(
                f"logits must be float32 {wanted}, got {logits.dtype} {tuple(logits.shape)}"
            )
        if len(num_output_tokens) != len(batch.rows):
            raise ValueError(
                f"num_output_tokens has {len(num_output_tokens)} entries for {wanted[0]} rows"
            )

    def _edit(
        self,
        logits: Tensor,
        plan: SamplingPlan,
        num_output_tokens: Int64,
        mask: TokenMask | None,
    ) -> tuple[Tensor, dict[int, str]]:
        failures: dict[int, str] = {}
        for edit in plan.edits:
            logits = edit.apply(logits, num_output_tokens)
        if plan.processors is not None:
            logits, failures = plan.processors.apply(logits)
        if mask is not None:
            logits = self._masked(logits, plan.batch, mask)
        return logits, failures

    def _masked(self, logits: Tensor, batch: BatchRows, mask: TokenMask) -> Tensor:
        rows = np.asarray(mask.rows, np.int64)
        num_words = -(-self.states.vocab_size // 32)
        if mask.bits.shape != (len(rows), num_words):
            raise ValueError(
                f"mask bits must be [{len(rows)}, {num_words}], got {list(mask.bits.shape)}"
            )
        strangers = rows[~np.isin(rows, batch.rows)]
        if len(strangers):
            raise ValueError(f"mask rows {strangers.tolist()} are not in this batch")
        index = batch.index(batch.places[rows])
        bits = batch.upload(mask.bits, torch.int32)
        return put(logits, index, self._mask(take(logits, index), bits))

    def _chosen(
        self, logits: Tensor, plan: SamplingPlan, num_output_tokens: Int64
    ) -> tuple[Tensor, Tensor]:
        """Tokens [S] and failed [S]: rows whose largest logit is NaN or not finite."""
        if not len(logits):
            return (
                torch.empty(0, dtype=torch.int64, device=logits.device),
                torch.empty(0, dtype=torch.bool, device=logits.device),
            )
        chosen: tuple[Tensor, Tensor]
        draw = plan.draw
        if draw is None:
            chosen = self._choose(logits, *_ALL_GREEDY)
            return chosen
        positions = num_output_tokens if draw.index is None else num_output_tokens[draw.places]
        uniform = plan.batch.upload(uniforms(draw.streams, positions), self.states.wide_dtype)
        chosen = self._choose(
            logits, draw.index, uniform, draw.temperature, draw.top_k, draw.shares
        )
        return chosen


def _kept(logits: Tensor, group: LogprobsGroup, edited: bool) -> Tensor:
    """The group's logits as they are now, whatever is written into ``logits`` later."""
    if group.index is None and edited:
        return logits.clone()
    return take(logits, group.index)
