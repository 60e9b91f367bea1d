"""Everything that can be said about a load for a server."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from cardan.bench.arrivals import Arrivals
from cardan.bench.prompts import Endpoint
from cardan.bench.statistics import DEFAULT_PERCENTILES, check_percentiles, parse_goodput
from cardan.bench.synthetic import SyntheticOptions
from cardan.core.types.errors import ConfigError

Dataset = Literal["random", "sharegpt", "custom"]
PromptKind = Literal["auto", "ids", "text"]
_DEFAULT_OUTPUT_LEN = 128
# What a result must not hold: it may be a secret, or says nothing about the load.
_NOT_IN_CONFIG = (
    "base_url",
    "model",
    "api_key",
    "headers",
    "goodput",
    "percentiles",
    "save_records",
    "save_text",
    "label",
    "metadata",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """The load, where it goes, and what to report.

    Attributes:
        base_url: of the server, with or without ``/v1``.
        model: name that the server knows; None asks it.
        endpoint: ``completions`` or ``chat``.
        api_key: sent as a bearer token.
        headers: further headers of every request.
        dataset: ``random`` prompts, or those of ``dataset_path``: ``sharegpt`` or ``custom``.
        dataset_path: file of a dataset other than ``random``.
        num_prompts: requests to send at most.
        input_len, range_ratio, prefix_len, num_prefixes: of random prompts; see
            ``SyntheticOptions``.
        output_len: tokens of an answer; None: 128, or what the dataset says.
        prompt_kind: random prompts as token ``ids`` or as ``text``; ``auto`` sends ids to
            completions and text to chat.
        tokenizer: model whose tokenizer gives random texts their exact length; None: that of
            ``model`` where it is on this machine, else words are counted.
        vocab_size: number of ids to draw from.
        arrivals: when requests are due; a finite rate makes an open load.
        trace: file of due times instead; see ``read_trace``.
        max_concurrency: most requests at once. With no rate and no trace, so many clients each
            send one request after another (a closed load).
        duration: seconds after which no request is begun.
        seed: the same seed gives the same requests at the same times.
        ignore_eos: ask the server to go on to ``output_len`` tokens; not all servers know it.
        temperature: sent if given.
        extra_body: further entries of every request.
        goodput: limits such as ``ttft:500``, milliseconds.
        percentiles: which to report.
        warmup: requests that are sent before the run and counted nowhere.
        timeout: seconds that one request may take.
        save_records, save_text: keep each request's times, and the answers, in the result.
        label, metadata: kept in the result.
    """

    base_url: str = "http://127.0.0.1:8000"
    model: str | None = None
    endpoint: Endpoint = "completions"
    api_key: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    dataset: Dataset = "random"
    dataset_path: Path | None = None
    num_prompts: int = 100
    input_len: int = 512
    output_len: int | None = None
    range_ratio: float = 0.0
    prefix_len: int = 0
    num_prefixes: int = 1
    prompt_kind: PromptKind = "auto"
    tokenizer: str | None = None
    vocab_size: int | None = None
    arrivals: Arrivals = field(default_factory=Arrivals)
    trace: Path | None = None
    max_concurrency: int | None = None
    duration: float | None = None
    seed: int = 0
    ignore_eos: bool = False
    temperature: float | None = None
    extra_body: Mapping[str, Any] = field(default_factory=dict)
    goodput: tuple[str, ...] = ()
    percentiles: tuple[float, ...] = DEFAULT_PERCENTILES
    warmup: int = 1
    timeout: float = 600.0
    save_records: bool = False
    save_text: bool = False
    label: str = ""
    metadata: Mapping[str, str] = field(default_factory=dict)

    def check(self) -> None:
        """Raise ConfigError, naming the setting and the remedy, for what cannot be run."""
        self.arrivals.check()
        check_percentiles(self.percentiles)
        parse_goodput(self.goodput)
        self._check_numbers()
        self.synthetic(self.num_prompts).check()
        self._check_dataset()
        if self.trace is not None and not math.isinf(self.arrivals.rate):
            raise ConfigError("trace: has its own times; leave out --request-rate")
        if self.save_text and not self.save_records:
            raise ConfigError("save_text: texts are kept with the records; add --save-records")
        if self.endpoint == "chat" and self.prompt_kind == "ids":
            raise ConfigError(
                "prompt_kind: chat takes no token ids; use --endpoint completions or text"
            )

    def _check_numbers(self) -> None:
        if self.num_prompts < 1:
            raise ConfigError(f"num_prompts is {self.num_prompts}; it must be at least 1")
        if self.max_concurrency is not None and self.max_concurrency < 1:
            raise ConfigError(f"max_concurrency is {self.max_concurrency}; it must be at least 1")
        if self.warmup < 0:
            raise ConfigError(f"warmup is {self.warmup}; it must be at least 0")
        for name in ("duration", "timeout"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ConfigError(f"{name} is {value}; it must be a number of seconds above 0")
        if self.temperature is not None and not 0 <= self.temperature < math.inf:
            raise ConfigError(f"temperature is {self.temperature}; it must be at least 0")

    def _check_dataset(self) -> None:
        if self.dataset == "random" and self.dataset_path is not None:
            raise ConfigError("dataset_path: random needs no file; name --dataset sharegpt|custom")
        if self.dataset != "random" and self.dataset_path is None:
            raise ConfigError(f"dataset_path: {self.dataset} needs a file; give --dataset-path")

    @property
    def is_open(self) -> bool:
        """Whether requests have due times of their own."""
        has_times = self.trace is not None or not math.isinf(self.arrivals.rate)
        return has_times or self.max_concurrency is None

    def synthetic(self, count: int, seed: int | str | None = None) -> SyntheticOptions:
        """The settings of random prompts."""
        return SyntheticOptions(
            count=count,
            input_len=self.input_len,
            output_len=_DEFAULT_OUTPUT_LEN if self.output_len is None else self.output_len,
            range_ratio=self.range_ratio,
            prefix_len=self.prefix_len,
            num_prefixes=self.num_prefixes,
            seed=self.seed if seed is None else seed,
        )

    def config(self) -> dict[str, Any]:
        """What makes two runs comparable, as plain values: no secret, no place."""
        values = asdict(self)
        for name in _NOT_IN_CONFIG:
            del values[name]
        values["extra_body"] = dict(self.extra_body) or None
        values |= _arrival_values(values.pop("arrivals")) if self.is_open else {"arrivals": None}
        for name in ("dataset_path", "trace"):
            values[name] = None if values[name] is None else Path(values[name]).name
        return {"load": values}


def _arrival_values(arrivals: dict[str, Any]) -> dict[str, Any]:
    """Settings of the arrivals by the names of their options; None for what had no effect."""
    rate, pattern, ramp_to = arrivals["rate"], arrivals["pattern"], arrivals["ramp_to"]
    if math.isinf(rate):
        return {"request_rate": "inf"}  # JSON has no infinity
    return {
        "request_rate": rate,
        "arrivals": pattern,
        "burstiness": arrivals["burstiness"] if pattern == "poisson" else None,
        "burst_size": arrivals["burst_size"] if pattern == "burst" else None,
        "ramp_to": ramp_to,
        "ramp_seconds": None if ramp_to is None else arrivals["ramp_seconds"],
    }
