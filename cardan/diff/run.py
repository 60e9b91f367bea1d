"""The whole comparison: answers first, then the calls behind them, in lockstep."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from cardan.core.config.engine import EngineConfig
from cardan.core.discovery import Discovery
from cardan.core.platform_selection import installed_platforms, select_platform
from cardan.core.types.errors import ConfigError
from cardan.diff.answers import Answer, AnswerDiff, Answers, collect_answers, compare_answers
from cardan.diff.judge import CallDiff, ForcedListener, FreeListener, Recorded, ReferenceListener
from cardan.diff.requests import DiffRequest
from cardan.diff.side import Side, watched_config
from cardan.diff.truth import AttentionTruth

Report = Callable[[str], None]

# Accepted difference of log-probabilities, natural logarithm, by dtype of the model.
LOGPROB_TOLERANCES = {"float32": 2e-3, "bfloat16": 0.15, "float16": 0.03}
# Where either side computes on weights in blocks it may round activations to 8 bits.
_ROUNDED_TOLERANCE = 0.25
_ROUNDED_OPS = frozenset({"block_linear", "int8_linear"})

_FORCED_ROW, _FREE_ROW = 0, 1


@dataclass(frozen=True, slots=True, kw_only=True)
class DiffOptions:
    """What is compared, and how far.

    Attributes:
        requests: what both sides are asked.
        max_tokens: tokens of each answer, unless its request says.
        logprob_tolerance: accepted difference of log-probabilities; None: by dtype.
        unchecked: use kernels of the subject that fail their self-check, too.
    """

    requests: Sequence[DiffRequest]
    max_tokens: int = 8
    logprob_tolerance: float | None = None
    unchecked: bool = False


@dataclass(frozen=True, slots=True)
class FaultyCall:
    """The first call out of tolerance with what is needed to run it again, and its request."""

    request: int
    diff: CallDiff
    recorded: Recorded


@dataclass(slots=True)
class CallsDiff:
    """What watching the calls brought.

    ``calls`` has all calls of all steps by request; ``logprob_errors`` the largest error of any
    log-probability by request, where the subject goes on with its own results on the reference's
    tokens. ``note`` says why nothing was watched.
    """

    calls: list[list[CallDiff]] = field(default_factory=list)
    logprob_errors: list[float] = field(default_factory=list)
    first: FaultyCall | None = None
    note: str = ""

    @property
    def faulty(self) -> list[CallDiff]:
        return [call for calls in self.calls for call in calls if call.is_faulty]


@dataclass(frozen=True, slots=True)
class DiffResult:
    """Two platforms compared."""

    subject: Answers
    reference: Answers
    answers: tuple[AnswerDiff, ...]
    calls: CallsDiff
    logprob_tolerance: float

    @property
    def drifts(self) -> bool:
        """Whether log-probabilities on the reference's tokens are out of tolerance."""
        return any(not error <= self.logprob_tolerance for error in self.calls.logprob_errors)

    @property
    def is_equal(self) -> bool:
        answers = all(item.is_equal(self.logprob_tolerance) for item in self.answers)
        return answers and not self.drifts and not self.calls.faulty


def run_diff(
    subject: EngineConfig, reference: EngineConfig, options: DiffOptions, report: Report
) -> DiffResult:
    """Compare ``subject`` with ``reference``, which differ in their platform alone.

    Raises:
        CardanError: one of them cannot be opened; the message has the cause and the remedy.
    """
    _check(subject, reference)
    own = collect_answers(subject, options.requests, options.max_tokens, report)
    if reference.model.dtype == "auto":
        reference = reference.with_value("model.dtype", own.dtype)
    other = collect_answers(reference, options.requests, options.max_tokens, report)
    if own.dtype != other.dtype:
        raise ConfigError(
            f"model.dtype is {own.dtype} on {own.platform} and {other.dtype} on {other.platform}; "
            "name one that both have with --dtype"
        )
    pairs = list(zip(own.answers, other.answers, strict=True))
    compared = tuple(compare_answers(index, a, b) for index, (a, b) in enumerate(pairs))
    calls = _watch(
        subject.with_value("model.dtype", own.dtype), reference, other.answers, options, report
    )
    return DiffResult(own, other, compared, calls, _tolerance(own.dtype, calls, options))


def _check(*configs: EngineConfig) -> None:
    """What can be refused before any model is opened."""
    candidates = installed_platforms(Discovery())
    for config in configs:
        watched_config(config, num_rows=1)
        select_platform(config.device.platform, candidates)


def _tolerance(dtype: str, calls: CallsDiff, options: DiffOptions) -> float:
    if options.logprob_tolerance is not None:
        return options.logprob_tolerance
    rounds = any(call.op in _ROUNDED_OPS for found in calls.calls for call in found)
    return max(LOGPROB_TOLERANCES.get(dtype, 0.15), _ROUNDED_TOLERANCE if rounds else 0.0)


def _watch(
    subject: EngineConfig,
    reference: EngineConfig,
    answers: Sequence[Answer],
    options: DiffOptions,
    report: Report,
) -> CallsDiff:
    found = CallsDiff()
    with Side(subject, num_rows=2, unchecked=options.unchecked) as own:
        if not own.is_watchable:
            found.note = _whole_steps(own)
            return found
        with Side(reference, num_rows=1) as other:
            if not other.is_watchable:
                found.note = _whole_steps(other)
                return found
            lockstep = _Lockstep(own, other, found)
            longest = max(len(item.prompt_token_ids) + len(item.token_ids) for item in answers)
            own.bind(longest)
            other.bind(longest)
            for index, answer in enumerate(answers):
                lockstep.run(index, answer)
                report(f"calls of request {index + 1} of {len(answers)} compared")
    return found


def _whole_steps(side: Side) -> str:
    return (
        f"platform {side.platform} runs whole steps itself: only tokens and log-probabilities can "
        "be compared"
    )


class _Lockstep:
    """Runs each step on the reference, then twice on the subject: once call by call on the
    reference's inputs, once on its own."""

    def __init__(self, subject: Side, reference: Side, found: CallsDiff) -> None:
        self._subject = subject
        self._reference = reference
        self._found = found
        self._most = min(subject.max_step_tokens, reference.max_step_tokens)

    def run(self, index: int, answer: Answer) -> None:
        """Compare all steps of a request, on the reference's tokens."""
        token_ids = [*answer.prompt_token_ids, *answer.token_ids]
        truth = AttentionTruth(self._reference.ops)
        calls: list[CallDiff] = []
        worst = 0.0
        for step, (start, stop) in enumerate(self._spans(answer)):
            listener = ReferenceListener(self._reference.ops, truth)
            self._reference.run(0, token_ids, start, stop, listener)
            forced = ForcedListener(step, listener.calls, self._subject.ops)
            self._subject.run(_FORCED_ROW, token_ids, start, stop, forced)
            free = FreeListener(listener.calls, forced.found)
            self._subject.run(_FREE_ROW, token_ids, start, stop, free)
            self._keep_first(index, forced.found, listener.calls)
            calls += forced.found
            worst = max(worst, logprob_error(free.outputs[0], listener.calls[-1].outputs[0]))
        self._found.calls.append(calls)
        self._found.logprob_errors.append(worst)

    def _spans(self, answer: Answer) -> list[tuple[int, int]]:
        """The prompt, in parts of what a step can take, then one token after the other; the last
        token is not computed."""
        length = len(answer.prompt_token_ids)
        end = length + len(answer.token_ids) - 1
        starts = [*range(0, length, self._most), *range(length, end)]
        stops = [*starts[1:], end]
        return list(zip(starts, stops, strict=True))

    def _keep_first(
        self, request: int, diffs: Sequence[CallDiff], calls: Sequence[Recorded]
    ) -> None:
        if self._found.first is not None:
            return
        for diff, recorded in zip(diffs, calls, strict=True):
            if diff.is_faulty:
                self._found.first = FaultyCall(request, diff, recorded)
                return


def logprob_error(logits: Tensor, reference: Tensor) -> float:
    """The largest difference of log-probabilities that the reference finds likely enough to be
    ever taken (above e^-10), over logits [n, vocab]; infinite if one is not a number."""
    own = logits[: len(reference)].to(torch.float64).log_softmax(-1)
    other = reference.to(torch.float64).log_softmax(-1)
    error = torch.where(other > -10.0, (own - other).abs(), 0.0)
    return float(error.nan_to_num(torch.inf).max())
