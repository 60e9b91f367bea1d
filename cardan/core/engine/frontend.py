"""Live requests at the front: engine outputs in, what users wait for out."""

from dataclasses import dataclass, field, fields

from cardan.core.text.postprocess import RequestState, SequenceOutput
from cardan.core.text.tokenizer import Tokenizer
from cardan.core.types.errors import (
    EngineAsleepError,
    InputError,
    QueueFullError,
    RequestFailedError,
)
from cardan.core.types.outputs import EngineStats, Finish, StepOutputs, TokenLogprobs
from cardan.core.types.request import EngineRequest, FinishReason

_GAUGES = frozenset({"num_running", "num_waiting", "kv_usage", "last_step_time"})


@dataclass(slots=True)
class Changes:
    """Requests with news, and sequences that the engine should end (a stop string was found)."""

    states: list[RequestState] = field(default_factory=list)
    keys_to_abort: list[int] = field(default_factory=list)


class Frontend:
    """Owner of the request map. One thread calls it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._live: dict[int, tuple[RequestState, SequenceOutput]] = {}
        self._totals = EngineStats()

    @property
    def num_live(self) -> int:
        """Sequences that the engine may still report about."""
        return len(self._live)

    def open(self, request: EngineRequest, prompt: str | None) -> RequestState:
        """Expect outputs for ``request``."""
        state = RequestState(self._tokenizer, request, prompt)
        for sequence in state.sequences:
            self._live[request.key + sequence.index] = (state, sequence)
        return state

    def drop(self, state: RequestState) -> list[int]:
        """Expect nothing more; the keys of sequences that the engine still works on."""
        keys = [
            key
            for key in range(state.request.key, state.request.key + state.request.num_sequences)
            if self._live.pop(key, None) is not None
        ]
        return keys

    def fail_all(self, error: Exception) -> list[RequestState]:
        """End every request with ``error``: the engine that had them is gone."""
        states = list({id(state): state for state, _sequence in self._live.values()}.values())
        for state in states:
            state.error = error
        self._live.clear()
        for name in _GAUGES:
            setattr(self._totals, name, type(getattr(self._totals, name))())
        return states

    def apply(self, outputs: StepOutputs, now: float) -> Changes:
        """Book a step's outputs; ``now`` is monotonic seconds."""
        self._add_stats(outputs.stats)
        changes = Changes()
        changed: dict[int, RequestState] = {}
        for key, started in outputs.started.items():
            if entry := self._live.get(key):
                self._note_start(entry[0], started.num_cached_tokens, started.scheduled_time)
        for key, tables in outputs.prompt_logprobs.items():
            if entry := self._live.get(key):
                entry[0].add_prompt_logprobs(tables)
        for key, token_ids in _by_key(outputs).items():
            entry = self._live.get(key)
            if entry is None:
                continue
            finish = outputs.finished.get(key)
            logprobs = outputs.logprobs.get(key, [])
            if self._advance(entry, token_ids, logprobs, finish, now):
                changes.keys_to_abort.append(key)
                del self._live[key]
            elif finish is not None:
                del self._live[key]
            changed[id(entry[0])] = entry[0]
        changes.states = list(changed.values())
        return changes

    def stats(self) -> EngineStats:
        """The newest gauges, and totals of the counters."""
        return self._totals

    def _advance(
        self,
        entry: tuple[RequestState, SequenceOutput],
        token_ids: list[int],
        logprobs: list[TokenLogprobs],
        finish: Finish | None,
        now: float,
    ) -> bool:
        state, sequence = entry
        if finish is not None and finish.reason is FinishReason.ERROR:
            state.error = _error_of(finish)
            return False
        if token_ids:
            state.metrics.first_token_time = state.metrics.first_token_time or now
            state.metrics.last_token_time = now
        stopped = sequence.advance(token_ids, logprobs, finish)
        if state.is_finished:
            state.metrics.finished_time = now
        return stopped and finish is None

    @staticmethod
    def _note_start(state: RequestState, num_cached: int, scheduled_time: float) -> None:
        if state.metrics.first_scheduled_time is None:
            state.metrics.first_scheduled_time = scheduled_time
            state.num_cached_tokens = num_cached

    def _add_stats(self, stats: EngineStats | None) -> None:
        if stats is None:
            return
        for item in fields(EngineStats):
            value = getattr(stats, item.name)
            if item.name not in _GAUGES:
                value += getattr(self._totals, item.name)
            setattr(self._totals, item.name, value)


def _by_key(outputs: StepOutputs) -> dict[int, list[int]]:
    """Tokens of each key, and the keys that ended without one."""
    tokens: dict[int, list[int]] = {}
    for key, token_id in zip(outputs.keys, outputs.token_ids, strict=True):
        tokens.setdefault(key, []).append(token_id)
    for key in outputs.finished:
        tokens.setdefault(key, [])
    return tokens


def _error_of(finish: Finish) -> Exception:
    message = finish.message or "the request failed"
    match finish.kind:
        case "invalid":
            return InputError(message, finish.field)
        case "queue_full":
            return QueueFullError(message)
        case "asleep":
            return EngineAsleepError(message)
        case _:
            return RequestFailedError(message)
