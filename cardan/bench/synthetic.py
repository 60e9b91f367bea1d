"""Random prompts of chosen lengths, with or without shared prefixes, drawn from a seed.

Request i of a seed is the same however many are made and whatever the arrivals are.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Protocol

from cardan.bench.prompts import BenchRequest
from cardan.core.types.errors import ConfigError

# Inside every common vocabulary, and above the control and byte tokens at its start.
DEFAULT_ID_RANGE = (1000, 30000)
_FIRST_PLAIN_ID = 1000
# Tries to give a text its length; with one token a word the first one succeeds.
_MAX_FITS = 300
# Common enough to be one token each, with the space before, in the usual vocabularies.
_WORD_LIST = (
    "about after again all also and another any around ask away back because been before big both "
    "call came can change city come could country day different does down each earth end even "
    "every example far father few find first follow food for form found four from get give good "
    "great group grow hand hard has have head help her here high him home house how idea important "
    "into just keep kind know land large last later learn leave left let letter life light like "
    "line list little live long look made make man many may mean men might mother move much must "
    "name near need never new next night now number off often old one only open other our out over "
    "own page paper part people place plant play point read real right river run said same saw say "
    "school sea second see seem sentence set she should show side small some something song sound "
    "spell start state still stop story study such take talk tell than that the their them then "
    "there these they thing think this those thought three through time together too took tree "
    "try turn two under until upon use very walk want watch water way well went were what when "
    "where which while white who why will with without word work world would write year you young"
)
_WORDS = tuple(_WORD_LIST.split())


class TokenCounter(Protocol):
    """What is needed of a tokenizer."""

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`, with the special tokens that a server would add."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SyntheticOptions:
    """Lengths and sharing of random prompts.

    Attributes:
        count: number of requests.
        input_len: tokens of a prompt, without the shared prefix.
        output_len: tokens of an answer.
        range_ratio: lengths are uniform in ``[len * (1 - ratio), len * (1 + ratio)]``.
        prefix_len: tokens before them that prompts share.
        num_prefixes: different prefixes, taken in turn.
        seed: the same seed gives the same requests.
    """

    count: int
    input_len: int = 512
    output_len: int = 128
    range_ratio: float = 0.0
    prefix_len: int = 0
    num_prefixes: int = 1
    seed: int | str = 0

    def check(self) -> None:
        """Raise ConfigError, naming the setting, for lengths that no prompt can have."""
        for name in ("count", "input_len", "output_len", "num_prefixes"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.prefix_len < 0:
            raise ConfigError(f"prefix_len is {self.prefix_len}; it must be at least 0")
        if not 0 <= self.range_ratio < 1:
            raise ConfigError(
                f"range_ratio is {self.range_ratio}; it must be at least 0 and less than 1"
            )


@dataclass(frozen=True, slots=True)
class _Plan:
    """Lengths and prefix of one request."""

    index: int
    prefix: int
    input_len: int
    output_len: int


def _plans(options: SyntheticOptions) -> list[_Plan]:
    options.check()
    plans = []
    for index in range(options.count):
        rng = random.Random(f"{options.seed}:lengths:{index}")
        plans.append(
            _Plan(
                index,
                index % options.num_prefixes,
                _draw_length(rng, options.input_len, options.range_ratio),
                _draw_length(rng, options.output_len, options.range_ratio),
            )
        )
    return plans


def _draw_length(rng: random.Random, mean: int, ratio: float) -> int:
    return rng.randint(max(1, round(mean * (1 - ratio))), round(mean * (1 + ratio)))


def id_range(vocab_size: int | None) -> tuple[int, int]:
    """First id and end of the ids to draw from.

    Raises:
        ConfigError: the vocabulary is too small to be one.
    """
    if vocab_size is None:
        return DEFAULT_ID_RANGE
    if vocab_size < 2:
        raise ConfigError(f"vocab_size is {vocab_size}; it must be at least 2")
    return min(_FIRST_PLAIN_ID, vocab_size // 2), vocab_size


def make_requests(options: SyntheticOptions, vocab_size: int | None = None) -> list[BenchRequest]:
    """Prompts of random token ids, of exactly the lengths asked for.

    Args:
        vocab_size: number of ids of the model; None draws from 1000 to 29999, which every common
            vocabulary has. Special tokens at the vocabulary's start are not drawn.

    Raises:
        ConfigError: a length is out of range.
    """
    ids = range(*id_range(vocab_size))
    prefixes = [
        random.Random(f"{options.seed}:prefix:{prefix}").choices(ids, k=options.prefix_len)
        for prefix in range(options.num_prefixes)
    ]
    requests = []
    for plan in _plans(options):
        rng = random.Random(f"{options.seed}:prompt:{plan.index}")
        prompt = (*prefixes[plan.prefix], *rng.choices(ids, k=plan.input_len))
        requests.append(
            BenchRequest(token_ids=prompt, max_tokens=plan.output_len, prompt_len=len(prompt))
        )
    return requests


def make_text_requests(
    options: SyntheticOptions, tokenizer: TokenCounter | None = None
) -> list[BenchRequest]:
    """Prompts of random common words.

    Args:
        tokenizer: the model's; prompts then have exactly the tokens asked for, the special ones
            that go around a text included. Without it a word stands for a token, which is near.

    Raises:
        ConfigError: a length is out of range, or shorter than a text can be made.
    """
    plans = _plans(options)
    prefixes = [
        _words(random.Random(f"{options.seed}:prefix:{prefix}"), options.prefix_len)
        for prefix in range(options.num_prefixes)
    ]
    requests = []
    for plan in plans:
        rng = random.Random(f"{options.seed}:prompt:{plan.index}")
        shared, own = prefixes[plan.prefix], _words(rng, plan.input_len)
        length = options.prefix_len + plan.input_len
        if tokenizer is not None:
            own = _fitted(tokenizer, shared, own, length, rng)
        requests.append(
            BenchRequest(
                text=" ".join(shared + own),
                max_tokens=plan.output_len,
                prompt_len=length if tokenizer is not None else None,
            )
        )
    return requests


def _words(rng: random.Random, count: int) -> list[str]:
    return rng.choices(_WORDS, k=count)


def _fitted(
    tokenizer: TokenCounter, shared: list[str], own: list[str], length: int, rng: random.Random
) -> list[str]:
    """`own` with words added or taken away until the prompt has `length` tokens."""
    own = list(own)
    for _ in range(_MAX_FITS):
        surplus = len(tokenizer.encode(" ".join(shared + own))) - length
        if surplus == 0:
            return own
        # A word may be several tokens, so half of what is missing or too much is changed at once.
        step = max(1, abs(surplus) // 2)
        if surplus < 0:
            own += _words(rng, step)
        else:
            del own[-step:]
            own[-1:] = _words(rng, 1)  # at least one stays; another may fit
    raise ConfigError(
        f"input_len: no text of {length} tokens could be made with this tokenizer; ask for more, "
        "or send token ids (--endpoint completions --prompt-kind ids)"
    )
