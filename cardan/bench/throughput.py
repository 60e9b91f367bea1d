"""``cardan bench throughput``: many requests at once through ``LLM``, as fast as they go."""

from __future__ import annotations

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
    section_settings,
)
from cardan.bench.prompts import BenchRequest
from cardan.bench.record import RequestRecord
from cardan.bench.result import Result
from cardan.core.config.engine import EngineConfig
from cardan.core.types.outputs import RequestOutput
from cardan.llm import LLM


def run_throughput(config: EngineConfig, options: OfflineOptions, report: Report) -> Result:
    """Measure how long ``options.load.count`` requests take that are all there at the start.

    An interrupt after the first repeat ends the run and keeps what was measured.

    Raises:
        CardanError: the model cannot be opened, or the requests do not fit it.
        KeyboardInterrupt: before the first repeat was complete.
    """
    options.check()
    with LLM(config.model.model, **section_settings(config)) as llm:
        requests = load_requests(options, llm.info.vocab_size, llm.get_tokenizer())
        batches = _Batches(llm, requests, options)
        measured = measure_repeats(batches.run, options, report)
        return offline_result("throughput", config, options, llm.info, measured)


def throughput_figures(outputs: Sequence[RequestOutput], seconds: float) -> dict[str, float]:
    """Rates of one repeat. ``prefix_hit_rate``: share of prompt tokens that were not computed."""
    prompt_tokens = sum(len(output.prompt_token_ids) for output in outputs)
    output_tokens = sum(output.num_output_tokens for output in outputs)
    cached = sum(output.num_cached_tokens for output in outputs)
    return {
        "output_tokens_per_s": output_tokens / seconds,
        "total_tokens_per_s": (prompt_tokens + output_tokens) / seconds,
        "requests_per_s": len(outputs) / seconds,
        "duration_s": seconds,
        "prefix_hit_rate": cached / prompt_tokens,
    }


@dataclass(slots=True)
class _Batches:
    """Runs the same requests again and again; its clock starts with the first."""

    llm: LLM
    requests: Sequence[BenchRequest]
    options: OfflineOptions
    began: float | None = None

    def run(self) -> Sample:
        self.llm.reset_prefix_cache()
        prompts = [as_prompt(request) for request in self.requests]
        params = [greedy_params(request, self.options) for request in self.requests]
        start = time.monotonic()
        self.began = start if self.began is None else self.began
        outputs = self.llm.generate(prompts, params, use_tqdm=False)
        seconds = time.monotonic() - start
        return Sample(throughput_figures(outputs, seconds), self._records(outputs, start))

    def _records(self, outputs: Sequence[RequestOutput], start: float) -> list[RequestRecord]:
        """One for each request, due at the start; times of single tokens are not known offline."""
        began = self.began or 0.0
        records = []
        for index, output in enumerate(outputs):
            times = output.metrics
            if times is None or times.finished_time is None:
                continue
            first = times.first_token_time
            records.append(
                RequestRecord(
                    index=index,
                    due=start - began,
                    sent=times.arrival_time - began,
                    first_token=None if first is None else first - began,
                    end=times.finished_time - began,
                    prompt_tokens=len(output.prompt_token_ids),
                    output_tokens=output.num_output_tokens,
                )
            )
        return records
