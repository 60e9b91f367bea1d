"""What one platform answers by itself: tokens and their log-probabilities, in an ordinary run."""

import queue
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from cardan.bootstrap import open_client
from cardan.core.config.engine import EngineConfig
from cardan.core.types.errors import EngineDeadError, RequestFailedError
from cardan.core.types.outputs import StepOutputs, TokenLogprobs
from cardan.core.types.request import FinishReason
from cardan.core.types.sampling_params import SamplingParams
from cardan.diff.requests import DiffRequest


@dataclass(slots=True)
class Answer:
    """The likeliest tokens after a prompt; ``logprobs`` has a table for each of them."""

    prompt_token_ids: list[int]
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Answers:
    """Of one platform: who it is, its answers, and their texts token by token."""

    platform: str
    device: str
    dtype: str
    answers: tuple[Answer, ...]
    texts: dict[int, str]


@dataclass(slots=True)
class _Inbox:
    """Engine outputs on their way from the engine's thread to the caller's."""

    items: queue.SimpleQueue[StepOutputs | str] = field(default_factory=queue.SimpleQueue)

    def on_outputs(self, outputs: StepOutputs) -> None:
        self.items.put(outputs)

    def on_death(self, reason: str) -> None:
        self.items.put(reason)


# Likeliest tokens that are kept beside the one taken.
_TOP = 5


def collect_answers(
    config: EngineConfig,
    requests: Sequence[DiffRequest],
    max_tokens: int,
    report: Callable[[str], None],
) -> Answers:
    """Open the model, answer each request with the likeliest tokens, and close it.

    Raises:
        CardanError: the model cannot be opened, or a request failed.
    """
    opened = open_client(config, in_process=True)
    try:
        inbox = _Inbox()
        opened.client.connect(inbox)
        info = opened.client.info
        answers = []
        for number, request in enumerate(requests, 1):
            most = request.max_tokens or max_tokens
            params = SamplingParams(
                max_tokens=most, temperature=0.0, logprobs=_TOP, detokenize=False
            )
            ids = opened.preprocessor.encode(request.prompt)
            made = opened.preprocessor.to_request(ids, params, request_id=str(number))
            opened.client.submit(made)
            answers.append(_wait(inbox, made.key, ids))
            report(f"{info.platform}: request {number} of {len(requests)} answered")
        seen = {token for item in answers for token in item.token_ids}
        texts = {
            token: opened.tokenizer.token_bytes(token).decode("utf-8", "replace") for token in seen
        }
    finally:
        opened.client.close()
    return Answers(info.platform, info.device, info.dtype, tuple(answers), texts)


def _wait(inbox: _Inbox, key: int, prompt: list[int]) -> Answer:
    answer = Answer(prompt)
    while True:
        outputs = inbox.items.get()
        if isinstance(outputs, str):
            raise EngineDeadError(outputs)
        pairs = zip(outputs.keys, outputs.token_ids, strict=True)
        answer.token_ids += [token for of, token in pairs if of == key]
        answer.logprobs += outputs.logprobs.get(key, ())
        finish = outputs.finished.get(key)
        if finish is not None and finish.reason is FinishReason.ERROR:
            raise RequestFailedError(finish.message or "a request could not be computed")
        if finish is not None:
            return answer


@dataclass(frozen=True, slots=True)
class AnswerDiff:
    """How two answers to one request differ.

    ``first`` is the place of the first token that differs, None: none. ``margin`` is how much
    likelier the reference found its own token there than the other one (infinite: the other one
    is not among its likeliest). ``logprob_error`` is the largest difference of log-probabilities
    up to there.
    """

    request: int
    num_tokens: int
    first: int | None
    margin: float
    logprob_error: float

    def is_equal(self, tolerance: float) -> bool:
        """A token may differ where both are about as likely."""
        near = self.first is None or self.margin <= 2 * tolerance
        return near and self.logprob_error <= tolerance


def compare_answers(request: int, subject: Answer, reference: Answer) -> AnswerDiff:
    """Compare up to and at the first token that differs."""
    pairs = list(zip(subject.token_ids, reference.token_ids, strict=False))
    first = next((place for place, (a, b) in enumerate(pairs) if a != b), None)
    if first is None and len(subject.token_ids) != len(reference.token_ids):
        first = len(pairs)
    error = 0.0
    for place in range(len(pairs) if first is None else first):
        own, other = subject.logprobs[place], reference.logprobs[place]
        error = max(error, abs(own.logprobs[0] - other.logprobs[0]))
    margin = 0.0
    if first is not None:
        margin = float("inf")
        if first < len(pairs):
            table = reference.logprobs[first]
            known = dict(zip(table.token_ids, table.logprobs, strict=True))
            other_token = subject.token_ids[first]
            if other_token in known:
                margin = table.logprobs[0] - known[other_token]
    return AnswerDiff(request, len(pairs), first, margin, error)
