"""Sampling settings and history of all live rows, as arrays over rows."""

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from cardan.core.interfaces.kernels import OpTable
from cardan.core.interfaces.logits import LogitsProcessor
from cardan.core.interfaces.random_stream import random_streams
from cardan.core.sampling.bad_words import BadWords
from cardan.core.sampling.batch import BatchRows
from cardan.core.sampling.penalties import Penalties
from cardan.core.sampling.plan import Draw, LogprobsGroup, SamplingPlan
from cardan.core.sampling.processors import ProcessorChain
from cardan.core.sampling.token_rules import TokenRules
from cardan.core.sampling.validation import check_token_ids
from cardan.core.types.sampling_params import SamplingParams
from cardan.core.types.step import Int64, NewRow

_NO_LOGPROBS = -1


class SamplingStates:
    """Owns the sampling state of rows from ``add`` to ``remove``.

    Settings of a row live in host arrays, history (token counts, tails) on the device and only for
    rows that need it. ``plan`` gathers what a batch needs; its result is reused until the batch or
    its rows change, so a steady step does no work for each row here.
    """

    def __init__(
        self,
        max_num_rows: int,
        vocab_size: int,
        device: torch.device | str,
        ops: OpTable,
        processors: Sequence[LogitsProcessor] = (),
        wide_dtype: torch.dtype = torch.float64,
    ) -> None:
        """
        Args:
            max_num_rows: rows are 0 to ``max_num_rows`` - 1.
            vocab_size: width of the logits.
            device: where logits are and history is kept.
            ops: binds the operations.
            processors: logits processors of plugins, in order of application.
            wide_dtype: dtype of probabilities that are summed over the vocabulary; float32 for
                devices without float64.
        """
        self.vocab_size = vocab_size
        self.device = torch.device(device)
        self.wide_dtype = wide_dtype
        self._max_num_rows = max_num_rows
        self._occupied = np.zeros(max_num_rows, np.bool_)
        self._greedy = np.zeros(max_num_rows, np.bool_)
        self._temperature = np.ones(max_num_rows, np.float32)
        self._top_k = np.zeros(max_num_rows, np.int64)
        self._top_p = np.ones(max_num_rows, np.float64)
        self._min_p = np.zeros(max_num_rows, np.float64)
        self._seeds = np.zeros(max_num_rows, np.int64)
        self._logprobs = np.full(max_num_rows, _NO_LOGPROBS, np.int64)
        self._rules = TokenRules(vocab_size)
        self._bad_words = BadWords(max_num_rows, self.device)
        self._penalties = Penalties(max_num_rows, vocab_size, self.device)
        self._penalty_kernel = self._penalties.bind(ops)
        self._chain = ProcessorChain(processors)
        self._plan: SamplingPlan | None = None

    @property
    def num_rows(self) -> int:
        """Occupied rows."""
        return int(np.count_nonzero(self._occupied))

    @property
    def num_bytes(self) -> int:
        """Device bytes held for histories; 0 when no row needs one."""
        return self._penalties.num_bytes + self._bad_words.num_bytes

    def add(self, new_row: NewRow) -> None:
        """Take up a sequence; its tokens after the prompt count as output.

        Raises:
            InputError: a token id outside the vocabulary; nothing was changed.
            ValueError: the row does not exist or is occupied.
        """
        row, params = new_row.row, new_row.params
        if not 0 <= row < self._max_num_rows:
            raise ValueError(f"row {row} is not among the {self._max_num_rows} rows")
        if self._occupied[row]:
            raise ValueError(f"row {row} is occupied; remove it first")
        check_token_ids(params, self.vocab_size, new_row.bad_words_token_ids)
        tokens = np.asarray(new_row.token_ids, np.int64)
        prompt, output = np.split(tokens, [new_row.num_prompt_tokens])
        self._plan = None
        self._occupied[row] = True
        self._set_scalars(row, params, new_row.seed)
        self._rules.add(row, params, new_row.stop_token_ids)
        self._bad_words.add(row, new_row.bad_words_token_ids, output)
        self._penalties.add(row, params, prompt, output)
        self._chain.add(row, params, prompt, output)

    def remove(self, rows: Iterable[int]) -> None:
        """Forget rows; a row that is not occupied is an error (ValueError)."""
        for row in rows:
            if not (0 <= row < self._max_num_rows and self._occupied[row]):
                raise ValueError(f"row {row} is not occupied")
            self._plan = None
            self._occupied[row] = False
            self._rules.remove(row)
            self._bad_words.remove(row)
            self._penalties.remove(row)
            self._chain.remove(row)

    def plan(self, rows: npt.ArrayLike) -> SamplingPlan:
        """The plan for a batch of distinct occupied rows [S], in this order.

        Raises:
            ValueError: a row occurs twice or is not occupied.
        """
        wanted = np.asarray(rows, np.int64)
        key = wanted.tobytes()
        if self._plan is None or self._plan.key != key:
            self._plan = self._new_plan(self._batch(wanted.copy()), key)
        return self._plan

    def _set_scalars(self, row: int, params: SamplingParams, seed: int) -> None:
        # The likeliest token has at least the probability 1/V, so it alone reaches such a top_p.
        self._greedy[row] = params.is_greedy or params.top_p * self.vocab_size <= 1
        self._temperature[row] = params.temperature
        self._top_k[row] = params.top_k
        self._top_p[row] = params.top_p
        self._min_p[row] = params.min_p
        self._seeds[row] = seed
        k = _NO_LOGPROBS if params.logprobs is None else params.logprobs
        self._logprobs[row] = self.vocab_size if params.logprobs == -1 else k

    def _batch(self, rows: Int64) -> BatchRows:
        if len(rows) and not (rows.min() >= 0 and rows.max() < self._max_num_rows):
            raise ValueError(f"rows must be among the {self._max_num_rows} rows, got {rows}")
        if not self._occupied[rows].all():
            raise ValueError(f"rows {rows[~self._occupied[rows]].tolist()} are not occupied")
        places = np.full(self._max_num_rows, -1, np.int64)
        places[rows] = np.arange(len(rows))
        if np.count_nonzero(places >= 0) < len(rows):
            raise ValueError(f"a row occurs twice among {rows.tolist()}")
        return BatchRows(rows, places, self.device)

    def _new_plan(self, batch: BatchRows, key: bytes) -> SamplingPlan:
        edits = (
            self._rules.allowed(batch),
            self._bad_words.select(batch),
            self._rules.early_stops(batch),
            self._rules.bias(batch),
            self._penalties.select(batch, self._penalty_kernel),
        )
        return SamplingPlan(
            batch=batch,
            key=key,
            edits=tuple(edit for edit in edits if edit is not None),
            processors=self._chain.select(batch),
            draw=self._draw(batch),
            logprobs=self._logprobs_groups(batch),
        )

    def _draw(self, batch: BatchRows) -> Draw | None:
        places = np.flatnonzero(~self._greedy[batch.rows])
        if not len(places):
            return None
        rows = batch.rows[places]
        temperature, top_k = self._temperature[rows], self._top_k[rows]
        top_p, min_p = self._top_p[rows], self._min_p[rows]
        is_tempered = bool((temperature != 1.0).any())
        is_cut = bool(((top_k > 0) | (top_p < 1) | (min_p > 0)).any())
        return Draw(
            places=places,
            index=batch.index(places),
            streams=random_streams(self._seeds[rows]),
            temperature=batch.upload(temperature) if is_tempered else None,
            top_k=batch.upload(top_k) if is_cut else None,
            shares=batch.upload(np.stack((top_p, min_p)), self.wide_dtype) if is_cut else None,
        )

    def _logprobs_groups(self, batch: BatchRows) -> tuple[LogprobsGroup, ...]:
        wanted = self._logprobs[batch.rows]
        groups = []
        for k in np.unique(wanted[wanted != _NO_LOGPROBS]).tolist():
            places = np.flatnonzero(wanted == k)
            groups.append(LogprobsGroup(k, batch.rows[places], batch.index(places)))
        return tuple(groups)
