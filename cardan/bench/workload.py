"""The requests of a load, from the options that describe them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import cycle, islice
from pathlib import Path

from cardan.bench.arrivals import due_times, read_trace
from cardan.bench.prompts import BenchRequest
from cardan.bench.serve_options import ServeOptions
from cardan.bench.sharegpt import count_words, read_custom, read_sharegpt
from cardan.bench.synthetic import make_requests, make_text_requests
from cardan.bootstrap.model_source import read_model, read_tokenizer
from cardan.core.config.model import ModelConfig
from cardan.core.text.tokenizer import Tokenizer

_LOCAL_NAMES = ("demo",)


@dataclass(slots=True)
class Workload:
    """What to send.

    Attributes:
        requests: in the order of sending.
        warmup: sent before, different from ``requests`` so that no cache knows those.
        due_times: of an open load, as many as there are requests or more.
        notes: what the reader of the figures needs to know about the prompts.
    """

    requests: list[BenchRequest]
    warmup: list[BenchRequest]
    due_times: Iterable[float]
    notes: list[str] = field(default_factory=list)


def make_workload(options: ServeOptions, model: str) -> Workload:
    """Read or draw the requests of `options` for `model`, the same for the same seed.

    Raises:
        ConfigError: a file is bad; names the line.
        CardanError: the tokenizer that was asked for cannot be read.
    """
    notes: list[str] = []
    tokenizer = _tokenizer(options, model) if _needs_tokenizer(options) else None
    if _needs_tokenizer(options) and tokenizer is None:
        notes.append("prompt lengths are approximate (words were counted): name a --tokenizer")
    times: Iterable[float] = due_times(options.arrivals, options.seed)
    count = options.num_prompts
    if options.trace is not None:
        times = read_trace(options.trace)
        count = min(count, len(times))
    requests = _requests(options, count, tokenizer, notes)
    # A seed of its own: were the prompts those of the run, their prefixes would be cached.
    warmup = []
    if options.warmup:
        warmup = _random_requests(options, options.warmup, tokenizer, f"{options.seed}:warmup")
    return Workload(requests, warmup, times, notes)


def _sends_ids(options: ServeOptions) -> bool:
    kind = options.prompt_kind
    return kind == "ids" or (kind == "auto" and options.endpoint == "completions")


def _needs_tokenizer(options: ServeOptions) -> bool:
    if options.dataset == "random":
        return not _sends_ids(options)
    return options.dataset == "sharegpt" and options.output_len is None


def _tokenizer(options: ServeOptions, model: str) -> Tokenizer | None:
    """The tokenizer asked for, else the model's if that needs no download."""
    name = options.tokenizer
    if name is None and (model in _LOCAL_NAMES or Path(model).exists()):
        name = model
    if name is None:
        return None
    config = ModelConfig(model=name)
    return read_tokenizer(config, read_model(config))


def _requests(
    options: ServeOptions, count: int, tokenizer: Tokenizer | None, notes: list[str]
) -> list[BenchRequest]:
    if options.dataset_path is None:
        return _random_requests(options, count, tokenizer, options.seed)
    if options.dataset == "sharegpt":

        def count_tokens(text: str) -> int:
            return count_words(text) if tokenizer is None else len(tokenizer.encode(text))

        found = read_sharegpt(options.dataset_path, options.seed, count_tokens, options.output_len)
    else:
        found = read_custom(options.dataset_path, options.output_len)
    if len(found) < count:
        notes.append(
            f"the dataset has {len(found)} requests for {count}: they repeat, and prefix caches "
            "will know them; lower --num-prompts to avoid it"
        )
    return list(islice(cycle(found), count))


def _random_requests(
    options: ServeOptions, count: int, tokenizer: Tokenizer | None, seed: int | str
) -> list[BenchRequest]:
    synthetic = options.synthetic(count, seed)
    if _sends_ids(options):
        return make_requests(synthetic, options.vocab_size)
    return make_text_requests(synthetic, tokenizer)
