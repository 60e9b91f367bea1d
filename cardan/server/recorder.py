"""Keeps the metrics of one engine request while its outputs pass by."""

import time

from cardan.core.types.outputs import CompletionOutput, RequestOutput
from cardan.core.types.sampling_params import SamplingParams
from cardan.server.metrics import ServerMetrics


class RequestRecorder:
    """Observes outputs in order; `finish` exactly once ends the record."""

    def __init__(self, metrics: ServerMetrics, params: SamplingParams) -> None:
        self._metrics = metrics
        self._params = params
        self._last: RequestOutput | None = None
        self._last_token_times: dict[int, float] = {}
        self._reason = "abort"

    def observe(self, output: RequestOutput) -> None:
        metrics = self._metrics
        before = 0
        if self._last is None:
            metrics.prompt_tokens.add(len(output.prompt_token_ids))
            metrics.cached_tokens.add(output.num_cached_tokens)
        else:
            before = self._last.num_output_tokens
        metrics.generation_tokens.add(max(0, output.num_output_tokens - before))
        for piece in output.outputs:
            self._observe_piece(piece, output)
        if before == 0 and output.num_output_tokens > 0:
            times = output.metrics
            if times is not None and times.first_token_time is not None:
                metrics.time_to_first_token.observe(times.first_token_time - times.arrival_time)
        metrics.observe_stats()
        self._last = output

    def finish(self, error_reason: str | None = None) -> None:
        """Count the end. ``error_reason`` overrides what the outputs said."""
        metrics, last = self._metrics, self._last
        ended = last is not None and last.finished
        reason = error_reason or (self._reason if ended else "abort")
        metrics.requests.add(value=reason)
        metrics.params_n.observe(self._params.n)
        if self._params.max_tokens is not None:
            metrics.params_max_tokens.observe(self._params.max_tokens)
        if last is None:
            return
        metrics.request_prompt_tokens.observe(len(last.prompt_token_ids))
        metrics.request_generation_tokens.observe(last.num_output_tokens)
        if last.metrics is not None:
            metrics.observe_times(last.metrics, last.num_output_tokens)

    def _observe_piece(self, piece: CompletionOutput, output: RequestOutput) -> None:
        if piece.finish_reason is not None:
            self._reason = piece.finish_reason
        count = len(piece.token_ids)
        if count == 0:
            return
        times = output.metrics
        now = times.last_token_time if times is not None else None
        if now is None:
            now = time.monotonic()
        before = self._last_token_times.get(piece.index)
        if before is None and times is not None and times.first_token_time is not None:
            before, count = times.first_token_time, count - 1
        if before is not None and count > 0:
            self._metrics.inter_token_latency.observe((now - before) / count, count)
        self._last_token_times[piece.index] = now
