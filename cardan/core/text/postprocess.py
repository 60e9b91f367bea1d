"""From the engine's tokens to what a user reads: text, stop strings, log-probabilities."""

from collections.abc import Sequence

from cardan.core.text.detokenizer import Detokenizer
from cardan.core.text.stop import StopMatcher
from cardan.core.text.tokenizer import Tokenizer
from cardan.core.types.outputs import (
    CompletionOutput,
    Finish,
    Logprob,
    LogprobTable,
    RequestMetrics,
    RequestOutput,
    TokenLogprobs,
)
from cardan.core.types.request import EngineRequest, FinishReason
from cardan.core.types.sampling_params import OutputKind, SamplingParams


def logprob_table(tokenizer: Tokenizer, entry: TokenLogprobs) -> LogprobTable:
    """One position's table for users; the token itself comes first."""
    table: LogprobTable = {}
    for token_id, value, rank in zip(entry.token_ids, entry.logprobs, entry.ranks, strict=True):
        if token_id not in table:
            text = tokenizer.token_text(token_id) if token_id < tokenizer.vocab_size else ""
            table[token_id] = Logprob(value, rank, text)
    return table


class SequenceOutput:
    """Everything that one sequence has produced, and how much of it was handed out."""

    def __init__(self, tokenizer: Tokenizer, request: EngineRequest, index: int) -> None:
        params = request.params
        self._tokenizer = tokenizer
        self._params = params
        self.index = index
        self.text = ""
        self.token_ids: list[int] = []
        self.text_offsets: list[int] = []
        self.logprobs: list[LogprobTable] = []
        self.cumulative_logprob = 0.0
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self._detokenizer: Detokenizer | None = None
        if params.detokenize:
            self._detokenizer = Detokenizer(
                tokenizer,
                skip_special_tokens=params.skip_special_tokens,
                spaces_between_special_tokens=params.spaces_between_special_tokens,
                prompt_token_ids=request.prompt_token_ids,
            )
        self._stop = StopMatcher(params.stop, params.include_stop_str_in_output)
        self._sent_text = self._sent_tokens = 0
        self._sent_finish = False

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def has_news(self) -> bool:
        unsent = len(self.token_ids) > self._sent_tokens or len(self.text) > self._sent_text
        return unsent or (self.is_finished and not self._sent_finish)

    def advance(
        self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs], finish: Finish | None
    ) -> bool:
        """Take new tokens; True when a stop string ended the sequence here (engine goes on)."""
        for place, token_id in enumerate(token_ids):
            if self.is_finished:
                return False
            entry = logprobs[place] if place < len(logprobs) else None
            is_last = finish is not None and place == len(token_ids) - 1
            self._add_token(token_id, entry, hidden=is_last and self._hides(finish))
        stopped_here = self.is_finished
        if finish is not None and not self.is_finished:
            self._end(finish)
        return stopped_here

    def _hides(self, finish: Finish | None) -> bool:
        """Whether the last token ended the sequence by itself and is not part of its text."""
        is_stop = finish is not None and finish.reason is FinishReason.STOP
        return is_stop and not self._params.include_stop_str_in_output

    def _add_token(self, token_id: int, entry: TokenLogprobs | None, hidden: bool) -> None:
        self.token_ids.append(token_id)
        if entry is not None:
            self.logprobs.append(logprob_table(self._tokenizer, entry))
            self.cumulative_logprob += entry.logprobs[0]
        if self._detokenizer is None:
            return
        self.text_offsets.append(self._detokenizer.text_length)
        if not hidden:
            self._add_text(self._detokenizer.push([token_id]))

    def _add_text(self, text: str) -> None:
        if len(self.token_ids) <= self._params.min_tokens:
            self.text += text  # stop strings do not count yet
            return
        result = self._stop.push(text)
        self.text += result.text_to_emit
        if result.matched is not None:
            self.finish_reason = FinishReason.STOP.value
            self.stop_reason = result.matched

    def _end(self, finish: Finish) -> None:
        if self._detokenizer is not None:
            self._add_text(self._detokenizer.flush())
            if self.is_finished:
                return
            self.text += self._stop.flush()
        self.finish_reason = finish.reason.value
        self.stop_reason = finish.stop_token_id

    def take(self, whole: bool) -> CompletionOutput:
        """All so far, or only what was not handed out before."""
        text, first = (0, 0) if whole else (self._sent_text, self._sent_tokens)
        wants_logprobs = self._params.logprobs is not None
        output = CompletionOutput(
            index=self.index,
            text=self.text[text:],
            token_ids=self.token_ids[first:],
            cumulative_logprob=self.cumulative_logprob if wants_logprobs else None,
            logprobs=self.logprobs[first:] if wants_logprobs else None,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            text_offsets=self.text_offsets[first:],
        )
        self._sent_text, self._sent_tokens = len(self.text), len(self.token_ids)
        self._sent_finish = self.is_finished
        return output

    @property
    def num_unsent_tokens(self) -> int:
        return len(self.token_ids) - self._sent_tokens


class RequestState:
    """A request at the front: its sequences, its prompt, its times."""

    def __init__(self, tokenizer: Tokenizer, request: EngineRequest, prompt: str | None) -> None:
        self._tokenizer = tokenizer
        self.request = request
        self.prompt = prompt
        self.sequences = [SequenceOutput(tokenizer, request, i) for i in range(request.params.n)]
        self.metrics = RequestMetrics(arrival_time=request.arrival_time)
        self.num_cached_tokens = 0
        self.error: Exception | None = None
        self._prompt_logprobs: list[LogprobTable | None] = [None]
        self._sent_any = False

    @property
    def params(self) -> SamplingParams:
        return self.request.params

    @property
    def is_finished(self) -> bool:
        return self.error is not None or all(item.is_finished for item in self.sequences)

    def add_prompt_logprobs(self, entries: Sequence[TokenLogprobs | None]) -> None:
        self._prompt_logprobs += [
            None if entry is None else logprob_table(self._tokenizer, entry) for entry in entries
        ]

    @property
    def is_ready(self) -> bool:
        """Whether an output is due, by output kind and stream interval."""
        if self.is_finished:
            return True
        if self.params.output_kind is OutputKind.FINAL_ONLY:
            return False
        news = [item for item in self.sequences if item.has_news]
        if not news:
            return False
        unsent = max(item.num_unsent_tokens for item in news)
        is_due = not self._sent_any or unsent >= self.params.stream_interval
        return is_due or any(item.is_finished for item in news)

    def take(self) -> RequestOutput:
        """The output that is due; with DELTA only sequences with news are in it."""
        is_delta = self.params.output_kind is OutputKind.DELTA
        sequences = [item for item in self.sequences if item.has_news or not is_delta]
        first_output = not self._sent_any
        self._sent_any = True
        has_table = self.params.prompt_logprobs is not None and (first_output or not is_delta)
        return RequestOutput(
            request_id=self.request.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.request.prompt_token_ids,
            outputs=[item.take(whole=not is_delta) for item in sequences],
            finished=self.is_finished,
            prompt_logprobs=self._prompt_logprobs if has_table else None,
            num_cached_tokens=self.num_cached_tokens,
            metrics=self.metrics,
            num_output_tokens=sum(len(item.token_ids) for item in self.sequences),
        )
