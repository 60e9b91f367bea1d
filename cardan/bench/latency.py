"""``cardan bench latency``: one batch at a time, each token's time taken as it comes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

from cardan.bench.offline import (
    OfflineOptions,
    Report,
    Sample,
    as_prompt,
    greedy_params,
    load_requests,
    measure_repeats,
    offline_result,
)
from cardan.bench.prompts import BenchRequest
from cardan.bench.record import RequestRecord
from cardan.bench.result import Result
from cardan.bench.statistics import summarize
from cardan.bootstrap import open_async_engine
from cardan.core.config.engine import EngineConfig
from cardan.core.engine.async_engine import AsyncEngine
from cardan.core.types.sampling_params import OutputKind


def run_latency(config: EngineConfig, options: OfflineOptions, report: Report) -> Result:
    """Measure batches of ``options.load.count`` requests that all start together.

    The engine runs in this process. An interrupt after the first repeat ends the run and keeps
    what was measured.

    Raises:
        CardanError: the model cannot be opened, or the requests do not fit it.
        KeyboardInterrupt: before the first repeat was complete.
    """
    options.check()
    with asyncio.Runner() as runner:
        engine = runner.run(open_async_engine(config, in_process=True))
        try:
            requests = load_requests(options, engine.info.vocab_size, engine.tokenizer)
            batches = _Batches(engine, requests, options)
            measured = measure_repeats(lambda: _run_batch(runner, batches), options, report)
            return offline_result("latency", config, options, engine.info, measured)
        finally:
            runner.run(engine.close())


def latency_figures(records: Sequence[RequestRecord]) -> dict[str, float]:
    """Figures of one batch: medians over its requests, percentiles over all gaps between chunks.

    ``decode_tokens_per_s``: tokens after the first of each request, over the time from the batch's
    first token to its last; for one request its decoding rate. What no request has (a gap, with
    answers of one token) is left out.
    """
    found = summarize(records)
    figures = {
        "ttft_ms": found["ttft_ms"]["median"],
        "tpot_ms": found["tpot_ms"]["median"],
        "itl_p50_ms": found["itl_ms"]["p50"],
        "itl_p99_ms": found["itl_ms"]["p99"],
        "e2el_ms": found["e2el_ms"]["median"],
        "output_tokens_per_s": found["output_tokens_per_s"],
        "decode_tokens_per_s": decode_rate(records),
    }
    return {name: value for name, value in figures.items() if value is not None}


def decode_rate(records: Sequence[RequestRecord]) -> float | None:
    """Tokens a second after the first ones; None where no request has a second chunk."""
    times = [moment for record in records for moment in record.token_times]
    tokens = sum(sum(record.chunk_tokens[1:]) for record in records)
    if not tokens or max(times) <= min(times):
        return None
    return tokens / (max(times) - min(times))


def _run_batch(runner: asyncio.Runner, batches: _Batches) -> Sample:
    try:
        return runner.run(batches.run())
    except asyncio.CancelledError:
        # How the runner tells of an interrupt that came while it was setting the run up.
        raise KeyboardInterrupt from None


@dataclass(slots=True)
class _Batches:
    """Runs the same batch again and again; its clock starts with the first."""

    engine: AsyncEngine
    requests: Sequence[BenchRequest]
    options: OfflineOptions
    began: float | None = None
    count: int = 0

    async def run(self) -> Sample:
        await self.engine.reset_prefix_cache()
        now = time.perf_counter()
        self.began = now if self.began is None else self.began
        self.count += 1
        records = await asyncio.gather(
            *(
                self._stream(request, RequestRecord(index, now - self.began, now - self.began))
                for index, request in enumerate(self.requests)
            )
        )
        return Sample(latency_figures(records), list(records))

    async def _stream(self, request: BenchRequest, record: RequestRecord) -> RequestRecord:
        params = greedy_params(request, self.options).replace(output_kind=OutputKind.DELTA)
        began = self.began or 0.0
        record.sent = time.perf_counter() - began
        async for output in self.engine.generate(
            as_prompt(request), params, request_id=f"{self.count}-{record.index}"
        ):
            now = time.perf_counter() - began
            record.prompt_tokens = len(output.prompt_token_ids)
            if new := len(output.outputs[0].token_ids):
                record.token_times.append(now)
                record.chunk_tokens.append(new)
            record.output_tokens = output.num_output_tokens
            record.end = now
        record.first_token = record.token_times[0] if record.token_times else None
        return record
