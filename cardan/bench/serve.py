"""``cardan bench serve``: load for any server of OpenAI's API, and what its clients saw."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from cardan.bench.load import INTERRUPTED, Load, LoadOutcome, PreparedRequest, peak_concurrency
from cardan.bench.prompts import BenchRequest, request_body
from cardan.bench.record import RequestRecord
from cardan.bench.result import Result, flatten
from cardan.bench.serve_options import ServeOptions
from cardan.bench.statistics import distribution, parse_goodput, summarize
from cardan.bench.workload import Workload, make_workload
from cardan.core.types.errors import ConfigError, RequestFailedError

if TYPE_CHECKING:
    from cardan.bench.client import Client

__all__ = ["ServeOptions", "run_serve"]

# Beyond it the load generator itself, not the server, shapes the figures.
MAX_LAG_MS = 5.0

OnEnd = Callable[[RequestRecord], None]


def run_serve(options: ServeOptions, on_end: OnEnd | None = None) -> Result:
    """Send the load and report it; blocks until it is done.

    An interrupt (SIGINT, in the main thread) stops it: the result then has what was answered, and
    says that it was interrupted. Failed requests are counted in the result, not raised.

    Args:
        on_end: called with the record of each request that has ended.

    Raises:
        ConfigError: an option cannot be, the server cannot be reached, or a file is bad.
        RequestFailedError: a request of the warm-up failed.
        CardanError: the tokenizer cannot be read.
        KeyboardInterrupt: before the load had begun.
    """
    options.check()
    if find_spec("aiohttp") is None:
        raise ConfigError("bench serve needs aiohttp: pip install 'cardan[bench]'")
    return asyncio.run(_run(options, on_end))


async def _run(options: ServeOptions, on_end: OnEnd | None) -> Result:
    # The client brings aiohttp, which only this benchmark needs.
    from cardan.bench.client import Client, ServerAddress

    headers = dict(options.headers)
    if options.api_key is not None:
        headers["Authorization"] = f"Bearer {options.api_key}"
    address = ServerAddress(base_url=options.base_url, endpoint=options.endpoint, headers=headers)
    async with Client(address, options.timeout, options.save_text) as client:
        model = options.model or (await client.models())[0]
        workload = make_workload(options, model)
        common = _common_body(options, model)
        requests = _prepared(workload.requests, options, common)
        await _warm_up(client, _prepared(workload.warmup, options, common), options)
        client.num_without_usage = 0
        load = Load(
            requests,
            client.send,
            max_concurrency=options.max_concurrency,
            duration=options.duration,
            on_end=on_end,
        )
        if options.is_open:
            outcome = await load.run_open(workload.due_times)
        else:
            outcome = await load.run_closed()
        return _result(options, model, workload, outcome, client.num_without_usage)


def _common_body(options: ServeOptions, model: str) -> dict[str, Any]:
    """What every request's body has."""
    body: dict[str, Any] = {"model": model}
    if options.ignore_eos:
        body["ignore_eos"] = True
    if options.temperature is not None:
        body["temperature"] = options.temperature
    return {**body, **options.extra_body}


def _prepared(
    requests: Sequence[BenchRequest], options: ServeOptions, common: Mapping[str, Any]
) -> list[PreparedRequest]:
    return [
        PreparedRequest(request_body(request, options.endpoint, common), request.prompt_len)
        for request in requests
    ]


async def _warm_up(
    client: Client, requests: Sequence[PreparedRequest], options: ServeOptions
) -> None:
    outcome = await Load(
        requests, client.send, max_concurrency=options.max_concurrency
    ).run_closed()
    if outcome.is_interrupted:
        raise KeyboardInterrupt
    for record in outcome.records:
        if record.error is not None:
            raise RequestFailedError(
                f"warmup: {record.error}. No load was sent; see the server's log, or go on all the "
                "same with --warmup 0"
            )


def _result(
    options: ServeOptions,
    model: str,
    workload: Workload,
    outcome: LoadOutcome,
    num_without_usage: int,
) -> Result:
    records = outcome.records
    metrics = summarize(records, parse_goodput(options.goodput), options.percentiles)
    metrics["peak_concurrency"] = peak_concurrency(records)
    lags = distribution([seconds * 1000 for seconds in outcome.lags], (50.0, 99.0))
    metrics["generator_lag_ms"] = lags
    notes = [
        *workload.notes,
        *_load_notes(options, outcome),
        *_timing_notes(metrics, num_without_usage),
    ]
    return Result(
        kind="serve",
        model=model,
        config=options.config(),
        metrics=metrics,
        samples=[flatten(metrics)],
        label=options.label,
        metadata={"server": _place(options.base_url), **options.metadata},
        notes=notes,
        records=[asdict(record) for record in records] if options.save_records else None,
        interrupted=outcome.is_interrupted,
    )


def _place(base_url: str) -> str:
    """The server without credentials that a URL may hold."""
    parts = urlsplit(base_url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"


def _load_notes(options: ServeOptions, outcome: LoadOutcome) -> list[str]:
    notes = []
    if outcome.is_interrupted:
        stopped = sum(record.error == INTERRUPTED for record in outcome.records)
        notes.append(
            f"interrupted: {stopped} requests on their way count as failed, {outcome.num_unsent} "
            "more were due and not sent yet"
        )
    elif options.duration is not None and len(outcome.records) == options.num_prompts:
        notes.append("the requests ran out before the duration: raise --num-prompts")
    limit = options.max_concurrency
    if options.is_open and limit is not None:
        # A timer is late by a millisecond or so; what waited for a turn waited longer.
        waited = sum(record.sent - record.due > MAX_LAG_MS / 1000 for record in outcome.records)
        if waited:
            notes.append(
                f"{waited} requests waited in the load generator because {limit} (max_concurrency) "
                "were on their way; latencies count from the due time and include the wait"
            )
    return notes


def _timing_notes(metrics: Mapping[str, Any], num_without_usage: int) -> list[str]:
    notes = []
    lag = metrics["generator_lag_ms"]["p99"]
    if lag is not None and lag > MAX_LAG_MS:
        notes.append(
            f"the load generator was late by {lag:.1f} ms (p99): its machine is too busy, and "
            "times have an error of about as much"
        )
    if num_without_usage:
        notes.append(
            f"{num_without_usage} answers came without usage: their tokens were counted by chunks, "
            "which may hold several"
        )
    return notes
