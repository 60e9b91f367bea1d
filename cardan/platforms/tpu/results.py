"""From a program's results to what the engine books."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cardan.core.types.step import Bool, Int32, LogprobsArrays, ModelRunnerOutput
from cardan.platforms.tpu.programs import StepResult
from cardan.platforms.tpu.step_fields import PromptTable

BAD_LOGITS = "the model's logits hold NaN or infinity, or no finite value"
NO_TOKEN_LEFT = (
    "no token is left to sample: allowed_token_ids, bad_words, min_tokens and masks together "
    "forbid all of them"
)


@dataclass(frozen=True, slots=True)
class ResultRows:
    """The rows of a step [R] as they were when it was launched: permanent numbers, whether they
    sample, and the size of the table of log-probabilities that each wants (-1: none); and the
    tables over prompts."""

    rows: Int32
    samples: Bool
    num_logprobs: Int32
    prompts: Sequence[PromptTable] = ()


def output_of(result: StepResult | None, of: ResultRows) -> ModelRunnerOutput:
    """Waits for the device. None: the step had no rows."""
    if result is None:
        nothing = np.zeros(0, np.int32)
        return ModelRunnerOutput(nothing[:, None], nothing, np.zeros(0, np.bool_))
    numbers = np.asarray(result.rows)[:, : len(of.rows)]
    tokens, is_sound, is_left, _ = numbers[:, of.samples]
    failed = (is_sound == 0) | (is_left == 0)
    failures = {
        int(index): NO_TOKEN_LEFT if is_sound[index] else BAD_LOGITS
        for index in np.flatnonzero(failed)
    }
    corrupt = numbers[3] == 0
    return ModelRunnerOutput(
        token_ids=tokens[:, None],
        num_sampled=np.ones(len(tokens), np.int32),
        failed=failed,
        failures=failures,
        infeasible=frozenset(
            index for index, reason in failures.items() if reason == NO_TOKEN_LEFT
        ),
        corrupt=corrupt if corrupt.any() else None,
        logprobs=_tables(result, of),
        prompt_logprobs=_prompt_tables(result, of),
    )


def _tables(result: StepResult, of: ResultRows) -> dict[int, LogprobsArrays]:
    """One position for each row that samples and wants log-probabilities."""
    if result.table is None:
        return {}
    token_ids, logprobs, ranks = (np.asarray(array) for array in result.table)
    tables = {}
    for place in np.flatnonzero(of.samples & (of.num_logprobs >= 0)).tolist():
        width = 1 + int(of.num_logprobs[place])
        tables[int(of.rows[place])] = LogprobsArrays(
            token_ids[place : place + 1, :width],
            logprobs[place : place + 1, :width],
            ranks[place : place + 1],
        )
    return tables


def _prompt_tables(result: StepResult, of: ResultRows) -> dict[int, LogprobsArrays]:
    """Of each row that wants them, one position for each token of its prompt that followed."""
    if result.prompt_table is None:
        return {}
    token_ids, logprobs, ranks = (np.asarray(array) for array in result.prompt_table)
    tables = {}
    for table in of.prompts:
        part, width = slice(table.start, table.start + table.count), 1 + table.size
        tables[table.row] = LogprobsArrays(
            token_ids[part, :width], logprobs[part, :width], ranks[part]
        )
    return tables
