"""The commands of ``cardan bench`` that need no running server: latency, throughput, startup."""

import json
import tempfile
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cardan.cli.bench_options import (
    LatencyBenchOptions,
    OfflineBenchOptions,
    StartupBenchOptions,
    ThroughputBenchOptions,
)
from cardan.cli.bench_output import Destination, as_usage_error, destination
from cardan.cli.bootstrapping import import_bootstrap
from cardan.cli.console import print_note
from cardan.cli.options import EngineOptions, engine_config
from cardan.core.observability.logging import configure_logging, is_debugging

if TYPE_CHECKING:
    from cardan.bench.offline import OfflineOptions


def latency(options: LatencyBenchOptions) -> int:
    """Token times of one batch, without a server."""
    _configure_logging(options)
    config = engine_config(options)
    target = _destination(options)
    import_bootstrap()
    from cardan.bench.latency import run_latency

    run = _offline_options(
        options, target, {"count": options.batch_size, "input_len": options.input_len}
    )
    return target.deliver(run_latency(config, run, print_note))


def throughput(options: ThroughputBenchOptions) -> int:
    """Rates of many requests at once, without a server."""
    _configure_logging(options)
    config = engine_config(options)
    target = _destination(options)
    import_bootstrap()
    from cardan.bench.throughput import run_throughput

    load = {
        "count": options.num_prompts,
        "input_len": options.input_len,
        "range_ratio": options.range_ratio,
        "prefix_len": options.prefix_len,
        "num_prefixes": options.num_prefixes,
    }
    run = _offline_options(
        options, target, load, dataset=options.dataset, dataset_path=options.dataset_path
    )
    return target.deliver(run_throughput(config, run, print_note))


def startup(options: StartupBenchOptions) -> int:
    """Time and memory that `cardan serve` needs to start."""
    _configure_logging(options)
    config = engine_config(options)
    target = _destination(options)
    from cardan.bench.startup import StartupOptions, run_startup

    settings = given_options(options)
    with tempfile.TemporaryDirectory(prefix="cardan-") as folder:
        file = Path(folder) / "options.json"
        file.write_text(json.dumps(settings), encoding="utf-8")
        run = StartupOptions(
            model=config.model.model,
            arguments=("--config", str(file)),
            settings=settings,
            repeats=options.repeats,
            page_cache=options.page_cache,
            timeout=options.timeout,
            label=target.label,
            metadata=target.metadata,
        )
        return target.deliver(run_startup(run, print_note))


def given_options(options: EngineOptions) -> dict[str, Any]:
    """The engine's options that were given, as a configuration file says them."""
    skipped = ("model", "config", "log_level", "log_format")
    names = [item.name for item in fields(EngineOptions) if item.name not in skipped]
    given = {name: getattr(options, name) for name in names}
    if given["max_model_len"] == 0:
        given["max_model_len"] = "auto"
    # An option that may be given several times is an empty list if it was not.
    return {name: value for name, value in given.items() if value is not None and value != []}


def _offline_options(
    options: OfflineBenchOptions, target: Destination, load: dict[str, Any], **dataset: Any
) -> "OfflineOptions":
    from cardan.bench.offline import OfflineOptions
    from cardan.bench.synthetic import SyntheticOptions

    run = OfflineOptions(
        load=SyntheticOptions(output_len=options.output_len, seed=options.load_seed, **load),
        ignore_eos=options.ignore_eos,
        warmup=options.warmup,
        repeats=options.repeats,
        save_records=options.save_records,
        label=target.label,
        metadata=target.metadata,
        **dataset,
    )
    with as_usage_error():
        run.check()
    return run


def _destination(options: OfflineBenchOptions | StartupBenchOptions) -> Destination:
    return destination(options.json, options.append, options.label, options.metadata)


def _configure_logging(options: EngineOptions) -> None:
    level = options.log_level or ("debug" if is_debugging() else "warning")
    configure_logging(level, options.log_format)
