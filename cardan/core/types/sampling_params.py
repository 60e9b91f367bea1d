"""What a caller asks of generation, validated once at construction."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from typing import Any, Self

from cardan.core.types.errors import InputError

# Below this a temperature is taken for greedy decoding.
GREEDY_TEMPERATURE = 1e-5
MAX_N = 1024
MAX_STOP_STRINGS = 64
MAX_STOP_LENGTH = 4096
MAX_BAD_WORDS = 1024
MAX_STOP_TOKEN_IDS = 256
# Arrays and messages hold no larger integers.
_MAX_INT = 2**63 - 1


class OutputKind(StrEnum):
    """What each streamed output holds: all text so far, only the new part, or only the end."""

    CUMULATIVE = "cumulative"
    DELTA = "delta"
    FINAL_ONLY = "final_only"


def _as_strings(value: str | Sequence[str] | None, name: str) -> tuple[str, ...]:
    if value is None:
        return ()
    items = (value,) if isinstance(value, str) else tuple(value)
    for item in items:
        if not isinstance(item, str):
            raise InputError(f"{name} must be a string or a list of strings", name)
        if not item:
            raise InputError(f"{name} must not contain an empty string", name)
    return items


def _as_ids(value: Sequence[int] | None, name: str) -> tuple[int, ...]:
    if value is None:
        return ()
    ids = tuple(value)
    for token_id in ids:
        if isinstance(token_id, bool) or not isinstance(token_id, int) or token_id < 0:
            raise InputError(f"{name} must hold token ids (integers >= 0)", name)
    return ids


def _check_range(
    name: str, value: float, low: float, high: float, *, open_low: bool = False
) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    above = is_number and (value > low if open_low else value >= low)
    if not (above and value <= high):  # NaN fails both comparisons
        left = "(" if open_low else "["
        raise InputError(f"{name} must be in {left}{low:g}, {high:g}], got {value!r}", name)


def _check_int(name: str, value: int | None, low: int, high: int | None = None) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise InputError(f"{name} must be an integer, got {value!r}", name)
    top = _MAX_INT if high is None else high
    if not low <= value <= top:
        is_open = high is None and value < low
        limit = f"at least {low}" if is_open else f"between {low} and {top}"
        raise InputError(f"{name} must be {limit}, got {value}", name)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling settings of one request.

    Names and defaults follow the OpenAI API and its common extensions, except that
    ``max_tokens=None`` means the rest of the context. ``top_k`` of 0 or -1, ``top_p`` of 1 and
    ``min_p`` of 0 are off. ``logprobs`` and ``prompt_logprobs`` of -1 mean the whole vocabulary.
    With ``seed`` the tokens of a request depend on nothing else in the batch; the i-th of ``n``
    samples draws from the stream of ``seed + i``.

    Raises:
        InputError: a value out of range; ``field`` names it.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    max_tokens: int | None = None
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] = ()
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    truncate_prompt_tokens: int | None = None
    stream_interval: int = 1
    output_kind: OutputKind = OutputKind.CUMULATIVE
    extra_args: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._normalise()
        self._check_ranges()
        self._check_counts()
        self._check_relations()

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Build from a plain mapping; an unknown name is an error that suggests the nearest."""
        known = {f.name for f in fields(cls)}
        for name in values:
            if name not in known:
                from difflib import get_close_matches

                near = get_close_matches(name, known, 1)
                hint = f"; did you mean {near[0]}?" if near else ""
                raise InputError(f"unknown sampling parameter {name}{hint}", name)
        return cls(**values)

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is taken; any spelling of it counts."""
        return self.temperature < GREEDY_TEMPERATURE or self.top_k == 1

    @property
    def has_penalties(self) -> bool:
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )

    def replace(self, **changes: Any) -> Self:
        return replace(self, **changes)

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)  # only while constructing: the object is frozen

    def _normalise(self) -> None:
        self._set("stop", _as_strings(self.stop, "stop"))
        self._set("bad_words", _as_strings(self.bad_words, "bad_words"))
        self._set("stop_token_ids", _as_ids(self.stop_token_ids, "stop_token_ids"))
        if self.allowed_token_ids is not None:
            self._set("allowed_token_ids", _as_ids(self.allowed_token_ids, "allowed_token_ids"))
            if not self.allowed_token_ids:
                raise InputError("allowed_token_ids must not be empty", "allowed_token_ids")
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if isinstance(value, bool):
                self._set(name, 1 if value else None)
        if self.seed == -1:
            self._set("seed", None)
        if self.top_k == -1:
            self._set("top_k", 0)
        if self.logit_bias is not None:
            self._set("logit_bias", self._checked_bias(self.logit_bias))

    @staticmethod
    def _checked_bias(bias: Mapping[int, float]) -> dict[int, float]:
        checked: dict[int, float] = {}
        for key, value in bias.items():
            try:
                token_id = int(key)
            except (TypeError, ValueError):
                raise InputError(
                    f"logit_bias key {key!r} is not a token id", "logit_bias"
                ) from None
            if token_id < 0:
                raise InputError(f"logit_bias key {token_id} is negative", "logit_bias")
            _check_range("logit_bias", value, -100.0, 100.0)
            checked[token_id] = float(value)
        return checked

    def _check_ranges(self) -> None:
        _check_range("temperature", self.temperature, 0.0, 2.0)
        _check_range("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _check_range("min_p", self.min_p, 0.0, 1.0)
        _check_range("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_range("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _check_range("repetition_penalty", self.repetition_penalty, 0.01, 100.0)

    def _check_counts(self) -> None:
        _check_int("n", self.n, 1, MAX_N)
        _check_int("top_k", self.top_k, 0)
        _check_int("seed", self.seed, -(2**63), 2**63 - 1)
        _check_int("max_tokens", self.max_tokens, 0)
        _check_int("min_tokens", self.min_tokens, 0)
        _check_int("logprobs", self.logprobs, -1)
        _check_int("prompt_logprobs", self.prompt_logprobs, -1)
        _check_int("truncate_prompt_tokens", self.truncate_prompt_tokens, -1)
        _check_int("stream_interval", self.stream_interval, 1)
        if self.truncate_prompt_tokens == 0:
            raise InputError(
                "truncate_prompt_tokens must be -1 or at least 1", "truncate_prompt_tokens"
            )

    def _check_relations(self) -> None:
        if len(self.stop) > MAX_STOP_STRINGS:
            raise InputError(
                f"stop holds {len(self.stop)} strings, at most {MAX_STOP_STRINGS}", "stop"
            )
        if any(len(text) > MAX_STOP_LENGTH for text in self.stop):
            raise InputError(f"a stop string is longer than {MAX_STOP_LENGTH} characters", "stop")
        if len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS:
            message = f"stop_token_ids holds more than {MAX_STOP_TOKEN_IDS} ids"
            raise InputError(message, "stop_token_ids")
        if len(self.bad_words) > MAX_BAD_WORDS:
            raise InputError(f"bad_words holds more than {MAX_BAD_WORDS} entries", "bad_words")
        if self.stop and not self.detokenize:
            raise InputError("stop needs detokenize=True", "stop")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InputError(
                f"min_tokens ({self.min_tokens}) is greater than max_tokens ({self.max_tokens})",
                "min_tokens",
            )
        if self.max_tokens == 0 and self.prompt_logprobs is None:
            raise InputError("max_tokens of 0 needs prompt_logprobs", "max_tokens")
