"""What the offline benchmarks share: their options, their repeats, and the result made of them."""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import msgspec

from cardan.bench.prompts import BenchRequest
from cardan.bench.record import RequestRecord
from cardan.bench.result import Result, engine_facts
from cardan.bench.sharegpt import read_custom, read_sharegpt
from cardan.bench.statistics import distribution
from cardan.bench.synthetic import SyntheticOptions, make_requests
from cardan.core.config.engine import EngineConfig
from cardan.core.config.model import ModelConfig
from cardan.core.text.tokenizer import Tokenizer
from cardan.core.types.engine_info import EngineInfo
from cardan.core.types.errors import ConfigError
from cardan.core.types.prompt import ChatPrompt, Prompt, TextPrompt, TokenPrompt
from cardan.core.types.sampling_params import SamplingParams

Dataset = Literal["random", "sharegpt", "custom"]
Report = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class OfflineOptions:
    """An offline run.

    Attributes:
        load: Lengths, number and seed of the requests.
        dataset: ``random`` token ids, or the first ``load.count`` requests of ``dataset_path``.
        dataset_path: File of a dataset other than ``random``.
        ignore_eos: Whether answers always have their full length.
        warmup: Unmeasured runs before the first repeat.
        repeats: Measured runs, each with an empty prefix cache.
        save_records: Keep the records of requests in the result.
        label: What the run is called in tables and plots.
        metadata: What else to remember.
    """

    load: SyntheticOptions
    dataset: Dataset = "random"
    dataset_path: Path | None = None
    ignore_eos: bool = True
    warmup: int = 1
    repeats: int = 3
    save_records: bool = False
    label: str = ""
    metadata: dict[str, str] = field(default_factory=dict)

    def check(self) -> None:
        """Raise ConfigError, naming the setting, for a run that cannot be."""
        self.load.check()
        if self.repeats < 1:
            raise ConfigError(f"repeats is {self.repeats}; it must be at least 1")
        if self.warmup < 0:
            raise ConfigError(f"warmup is {self.warmup}; it must be at least 0")
        if (self.dataset == "random") != (self.dataset_path is None):
            raise ConfigError(
                "dataset_path: goes with --dataset sharegpt or custom, and they need it"
            )


@dataclass(frozen=True, slots=True)
class Sample:
    """One repeat: its figures by flat names, and what was seen of each request."""

    figures: dict[str, float]
    records: list[RequestRecord]


@dataclass(frozen=True, slots=True)
class Measured:
    """All repeats that were completed."""

    samples: list[Sample]
    interrupted: bool


def load_requests(
    options: OfflineOptions, vocab_size: int, tokenizer: Tokenizer
) -> list[BenchRequest]:
    """The requests of a run, the same for each repeat.

    Raises:
        ConfigError: a length is out of range, or the dataset is unreadable or too small.
    """
    load, path = options.load, options.dataset_path
    if path is None:
        return make_requests(load, vocab_size)
    if options.dataset == "sharegpt":
        requests = read_sharegpt(path, int(load.seed), lambda text: len(tokenizer.encode(text)))
    else:
        requests = read_custom(path, load.output_len)
    if len(requests) < load.count:
        raise ConfigError(
            f"dataset {path} has {len(requests)} requests, {load.count} are asked for; "
            f"give --num-prompts {len(requests)} or a larger file"
        )
    return requests[: load.count]


def as_prompt(request: BenchRequest) -> Prompt:
    """A request's prompt as the engine takes it."""
    if request.token_ids is not None:
        return TokenPrompt(token_ids=request.token_ids)
    if request.messages is not None:
        return ChatPrompt(messages=request.messages)
    return TextPrompt(text=request.text or "")


def greedy_params(request: BenchRequest, options: OfflineOptions) -> SamplingParams:
    """Greedy, and without detokenizing: the engine alone is measured."""
    return SamplingParams(
        temperature=0.0,
        max_tokens=request.max_tokens,
        ignore_eos=options.ignore_eos,
        detokenize=False,
    )


def measure_repeats(
    run_once: Callable[[], Sample], options: OfflineOptions, report: Report
) -> Measured:
    """Warm up, then repeat. An interrupt ends it and keeps the repeats that were completed.

    Raises:
        KeyboardInterrupt: no repeat was completed.
    """
    samples: list[Sample] = []
    try:
        for number in range(options.warmup):
            run_once()
            report(f"warm-up {number + 1} of {options.warmup} done")
        for number in range(options.repeats):
            samples.append(run_once())
            report(f"repeat {number + 1} of {options.repeats}: {_brief(samples[-1].figures)}")
    except KeyboardInterrupt:
        if not samples:
            report("interrupted before the first repeat was complete: nothing was measured")
            raise
        return Measured(samples, interrupted=True)
    return Measured(samples, interrupted=False)


def offline_result(
    kind: str, config: EngineConfig, options: OfflineOptions, info: EngineInfo, measured: Measured
) -> Result:
    """The result of an offline run; each metric is a distribution over the repeats."""
    samples = [sample.figures for sample in measured.samples]
    metrics: dict[str, Any] = {
        name: distribution([sample[name] for sample in samples], ()) for name in samples[0]
    }
    metrics["startup_s"] = info.startup_seconds.get("total")
    metrics["peak_rss_bytes"] = peak_rss_bytes()
    return Result(
        kind=kind,
        model=config.model.model,
        config={"load": load_facts(options), "engine": changed_settings(config)},
        metrics=metrics,
        samples=samples,
        device=engine_facts(info),
        label=options.label,
        metadata=options.metadata,
        records=_kept_records(measured) if options.save_records else None,
        interrupted=measured.interrupted,
    )


def _kept_records(measured: Measured) -> list[dict[str, Any]]:
    """Records of all repeats, numbered, on a clock that starts with the first repeat."""
    records = [record for sample in measured.samples for record in sample.records]
    start = min((record.due for record in records), default=0.0)
    return [
        asdict(
            replace(
                record,
                index=index,
                due=record.due - start,
                sent=record.sent - start,
                first_token=None if record.first_token is None else record.first_token - start,
                token_times=[moment - start for moment in record.token_times],
                end=record.end - start,
            )
        )
        for index, record in enumerate(records)
    ]


def load_facts(options: OfflineOptions) -> dict[str, Any]:
    """What was asked for; lengths that a dataset decides are left out."""
    facts: dict[str, Any] = msgspec.to_builtins(options.load)
    facts = {"num_prompts": facts.pop("count"), **facts, "ignore_eos": options.ignore_eos}
    facts["dataset"] = options.dataset
    if options.dataset_path is not None:
        for name in ("input_len", "range_ratio", "prefix_len", "num_prefixes"):
            del facts[name]
        facts["dataset_path"] = options.dataset_path.name
    return facts


def changed_settings(config: EngineConfig) -> dict[str, dict[str, Any]]:
    """Settings that differ from their defaults, by section; the model's name is not one."""
    name = config.model.model
    given = msgspec.to_builtins(config)
    usual = msgspec.to_builtins(EngineConfig(model=ModelConfig(model=name)))
    changed = {
        section: {key: value for key, value in values.items() if value != usual[section][key]}
        for section, values in given.items()
        if isinstance(values, dict)
    }
    return {section: values for section, values in changed.items() if values}


def section_settings(config: EngineConfig) -> dict[str, Any]:
    """The changed settings by their plain names, as ``LLM`` takes them."""
    return {
        key: getattr(getattr(config, section), key)
        for section, values in changed_settings(config).items()
        for key in values
    }


def peak_rss_bytes() -> int:
    """Most memory that this process has held, bytes; the engine runs in it."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def median_of(values: Sequence[float | None]) -> float | None:
    """Median of the values that are known; None if none is."""
    return distribution([value for value in values if value is not None], ())["median"]


def _brief(figures: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.4g}" for name, value in list(figures.items())[:3])
