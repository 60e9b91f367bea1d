"""Checks of sampling settings that need to know the vocabulary."""

from collections.abc import Iterable

from cardan.core.types.errors import InputError
from cardan.core.types.sampling_params import SamplingParams


def check_token_ids(
    params: SamplingParams, vocab_size: int, bad_words_token_ids: Iterable[tuple[int, ...]] = ()
) -> None:
    """Check that all token ids of the settings exist; meant for admission.

    Raises:
        InputError: an id is outside the vocabulary, a table of log-probabilities larger than it,
            or a bad word without tokens; ``field`` names the setting.
    """
    _check("logit_bias", params.logit_bias or (), vocab_size)
    _check("allowed_token_ids", params.allowed_token_ids or (), vocab_size)
    _check("stop_token_ids", params.stop_token_ids, vocab_size)
    for word in bad_words_token_ids:
        if not word:
            raise InputError("bad_words: a word has no tokens; remove it", "bad_words")
        _check("bad_words", word, vocab_size)
    for name in ("logprobs", "prompt_logprobs"):
        value = getattr(params, name)
        if value is not None and value > vocab_size:
            raise InputError(
                f"{name} is {value} but the vocabulary has {vocab_size} tokens; "
                "use -1 for all of them",
                name,
            )


def _check(name: str, token_ids: Iterable[int], vocab_size: int) -> None:
    for token_id in token_ids:
        if not 0 <= token_id < vocab_size:
            raise InputError(
                f"{name} holds token id {token_id}, but the vocabulary has ids 0 to "
                f"{vocab_size - 1}",
                name,
            )
