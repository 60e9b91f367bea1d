"""Greedy and temperature sampling with log-probabilities, in NumPy."""

import numpy as np
import numpy.typing as npt

from cardan.core.types.sampling_params import SamplingParams
from cardan.core.types.step import LogprobsArrays, ModelRunnerOutput
from cardan.testing.fake.rows import DeviceRows, StepBatch

Floats = npt.NDArray[np.float64]

_NEUTRAL = SamplingParams()
# A request that sets one of these fails: this sampler would ignore it.
_CHECKED = (
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "bad_words",
    "allowed_token_ids",
)


def sample_rows(
    logits: npt.NDArray[np.float32], batch: StepBatch, rows: DeviceRows
) -> ModelRunnerOutput:
    """Sample from logits [S, vocab]; a row whose settings are not honoured fails with the reason.

    A temperature's draw depends on the seed and the position alone.
    """
    places = batch.rows[batch.sampling].tolist()
    lengths = (batch.computed + batch.counts)[batch.sampling].tolist()
    token_ids = logits.argmax(axis=-1).astype(np.int32)
    failures: dict[int, str] = {}
    logprobs: dict[int, LogprobsArrays] = {}
    for index, (row, length) in enumerate(zip(places, lengths, strict=True)):
        params = rows.params(row)
        if unknown := _not_honoured(params):
            failures[index] = f"the fake executor does not sample with {', '.join(unknown)}"
            continue
        scores = _log_softmax(logits[index].astype(np.float64))
        if not params.is_greedy:
            generator = np.random.default_rng((int(rows.seeds[row]) & (2**64 - 1), length))
            weights = np.exp(_log_softmax(logits[index].astype(np.float64) / params.temperature))
            token_ids[index] = generator.choice(len(weights), p=weights / weights.sum())
        if params.logprobs is not None:
            logprobs[row] = _table(scores, int(token_ids[index]), params.logprobs)
    failed = np.zeros(len(places), np.bool_)
    failed[list(failures)] = True
    return ModelRunnerOutput(
        token_ids=token_ids[:, None],
        num_sampled=np.ones(len(places), np.int32),
        failed=failed,
        failures=failures,
        logprobs=logprobs,
    )


def _not_honoured(params: SamplingParams) -> list[str]:
    return [name for name in _CHECKED if getattr(params, name) != getattr(_NEUTRAL, name)]


def _log_softmax(values: Floats) -> Floats:
    shifted = values - values.max()
    result: Floats = shifted - np.log(np.exp(shifted).sum())
    return result


def _table(scores: Floats, token_id: int, count: int) -> LogprobsArrays:
    """The token's own entry, then the ``count`` likeliest (-1: all)."""
    best = np.argsort(-scores, kind="stable")[: len(scores) if count < 0 else count]
    ids = np.concatenate([[token_id], best])
    return LogprobsArrays(
        token_ids=ids[None].astype(np.int32),
        logprobs=scores[ids][None].astype(np.float32),
        ranks=np.array([1 + int((scores > scores[token_id]).sum())], np.int32),
    )
