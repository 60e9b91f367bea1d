"""The options of ``cardan bench``'s commands, as they are typed."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from cardan.cli.options import EngineOptions, option
from cardan.cli.values import parse_json_object

DatasetOption = Annotated[
    Literal["random", "sharegpt", "custom"],
    typer.Option("--dataset", help="Random prompts, or the requests of a file."),
]
DatasetPath = Annotated[
    Path | None, option("--dataset-path", help="ShareGPT's JSON, or custom JSON lines.")
]
JsonFile = Annotated[
    Path | None, option("--json", metavar="FILE", help="Write the result to this file.")
]
AppendFile = Annotated[
    Path | None,
    option("--append", metavar="FILE", help="Add the result to this file as one line of JSON."),
]
Label = Annotated[str | None, option("--label", help="What the run is called in tables and plots.")]
Metadata = Annotated[
    list[str] | None,
    option("--metadata", metavar="NAME=VALUE", help="Kept in the result (several times)."),
]
SaveRecords = Annotated[
    bool,
    typer.Option("--save-records", help="Keep each request's times in the result, for plots."),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class OfflineBenchOptions(EngineOptions):
    """What latency and throughput share."""

    output_len: Annotated[int, typer.Option("--output-len", min=1, help="Tokens of an answer.")] = (
        128
    )
    ignore_eos: Annotated[
        bool,
        typer.Option("--ignore-eos/--no-ignore-eos", help="Go on to the full length of answers."),
    ] = True
    load_seed: Annotated[int, typer.Option("--load-seed", help="Seed of the random prompts.")] = 0
    warmup: Annotated[int, typer.Option("--warmup", min=0, help="Runs that are not measured.")] = 1
    repeats: Annotated[int, typer.Option("--repeats", min=1, help="Runs that are measured.")] = 3
    save_records: SaveRecords = False
    label: Label = None
    metadata: Metadata = None
    json: JsonFile = None
    append: AppendFile = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyBenchOptions(OfflineBenchOptions):
    """Options of ``cardan bench latency``."""

    batch_size: Annotated[
        int, typer.Option("--batch-size", min=1, help="Requests that start together.")
    ] = 1
    input_len: Annotated[int, typer.Option("--input-len", min=1, help="Tokens of a prompt.")] = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class ThroughputBenchOptions(OfflineBenchOptions):
    """Options of ``cardan bench throughput``."""

    num_prompts: Annotated[
        int, typer.Option("--num-prompts", min=1, help="Requests, all there at the start.")
    ] = 32
    input_len: Annotated[int, typer.Option("--input-len", min=1, help="Tokens of a prompt.")] = 256
    range_ratio: Annotated[
        float,
        typer.Option(
            "--range-ratio", help="Draw lengths between (1 - this) and (1 + this) times theirs."
        ),
    ] = 0.0
    prefix_len: Annotated[
        int, typer.Option("--prefix-len", min=0, help="Tokens before them that prompts share.")
    ] = 0
    num_prefixes: Annotated[
        int, typer.Option("--num-prefixes", min=1, help="Different prefixes, taken in turn.")
    ] = 1
    dataset: DatasetOption = "random"
    dataset_path: DatasetPath = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StartupBenchOptions(EngineOptions):
    """Options of ``cardan bench startup``."""

    page_cache: Annotated[
        Literal["warm", "cold", "as-is"],
        typer.Option("--page-cache", help="State of the weight files before each start."),
    ] = "warm"
    repeats: Annotated[int, typer.Option("--repeats", min=1, help="Measured starts.")] = 3
    timeout: Annotated[
        float, typer.Option("--timeout", min=1.0, help="Seconds that a start may take.")
    ] = 300.0
    label: Label = None
    metadata: Metadata = None
    json: JsonFile = None
    append: AppendFile = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeBenchOptions:
    """Options of ``cardan bench serve``; None is left to the load's own default."""

    base_url: Annotated[
        str | None,
        option("--base-url", help="The server. Default: http://127.0.0.1:8000."),
    ] = None
    model: Annotated[
        str | None, option("--model", help="Name that the server knows. Default: its first.")
    ] = None
    endpoint: Annotated[
        Literal["completions", "chat"] | None,
        option("--endpoint", help="Default: completions."),
    ] = None
    api_key: Annotated[
        str | None, option("--api-key", envvar="OPENAI_API_KEY", help="Sent as a bearer token.")
    ] = None
    header: Annotated[
        list[str] | None,
        option("--header", metavar="NAME=VALUE", help="Of every request (several times)."),
    ] = None
    dataset: Annotated[
        Literal["random", "sharegpt", "custom"] | None,
        option("--dataset", help="Random prompts, or the requests of a file. Default: random."),
    ] = None
    dataset_path: Annotated[
        Path | None, option("--dataset-path", help="ShareGPT's JSON, or custom JSON lines.")
    ] = None
    num_prompts: Annotated[
        int | None, option("--num-prompts", min=1, help="Most requests. Default: 100.")
    ] = None
    input_len: Annotated[
        int | None, option("--input-len", min=1, help="Tokens of a random prompt. Default: 512.")
    ] = None
    output_len: Annotated[
        int | None,
        option("--output-len", min=1, help="Tokens of an answer. Default: 128, or the dataset's."),
    ] = None
    range_ratio: Annotated[
        float | None,
        option(
            "--range-ratio", help="Draw lengths between (1 - this) and (1 + this) times theirs."
        ),
    ] = None
    prefix_len: Annotated[
        int | None,
        option("--prefix-len", min=0, help="Tokens before the prompt that prompts share."),
    ] = None
    num_prefixes: Annotated[
        int | None, option("--num-prefixes", min=1, help="Different prefixes. Default: 1.")
    ] = None
    prompt_kind: Annotated[
        Literal["auto", "ids", "text"] | None,
        option("--prompt-kind", help="auto: ids for completions, text for chat. Default: auto."),
    ] = None
    tokenizer: Annotated[
        str | None,
        option("--tokenizer", help="Model whose tokenizer gives random texts their length."),
    ] = None
    vocab_size: Annotated[
        int | None, option("--vocab-size", help="Ids to draw from. Default: 1000 to 29999.")
    ] = None
    request_rate: Annotated[
        float | None,
        option("--request-rate", help="Requests a second. Default: inf, all at once."),
    ] = None
    arrivals: Annotated[
        Literal["poisson", "constant", "burst"] | None,
        option("--arrivals", help="How requests are spread. Default: poisson."),
    ] = None
    burstiness: Annotated[
        float | None,
        option("--burstiness", help="Below 1 is burstier than poisson, above is steadier."),
    ] = None
    burst_size: Annotated[
        int | None, option("--burst-size", min=1, help="Requests of one burst.")
    ] = None
    ramp_to: Annotated[float | None, option("--ramp-to", help="Rate at the end of a ramp.")] = None
    ramp_seconds: Annotated[
        float | None, option("--ramp-seconds", help="Length of the ramp. Default: 60.")
    ] = None
    trace: Annotated[
        Path | None, option("--trace", help="File of arrival times instead of a rate.")
    ] = None
    max_concurrency: Annotated[
        int | None,
        option(
            "--max-concurrency",
            min=1,
            help="Most requests at once; without a rate so many clients take turns.",
        ),
    ] = None
    duration: Annotated[
        float | None, option("--duration", help="Begin no request after so many seconds.")
    ] = None
    seed: Annotated[int | None, option("--seed", help="Of prompts and arrivals. Default: 0.")] = (
        None
    )
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Ask for the full length of answers.")
    ] = False
    temperature: Annotated[float | None, option("--temperature", help="Default: the server's.")] = (
        None
    )
    extra_body: Annotated[
        dict[str, Any] | None,
        option(
            "--extra-body",
            parser=parse_json_object,
            metavar="JSON",
            help="Further entries of each request.",
        ),
    ] = None
    goodput: Annotated[
        list[str] | None,
        option(
            "--goodput",
            metavar="NAME:MS",
            help="Limit of a good request: ttft:500, tpot:50, e2el:5000 (several times).",
        ),
    ] = None
    percentiles: Annotated[str | None, option("--percentiles", help="Default: 50,90,95,99.")] = None
    warmup: Annotated[
        int | None, option("--warmup", min=0, help="Requests that do not count. Default: 1.")
    ] = None
    timeout: Annotated[
        float | None, option("--timeout", help="Seconds of one request. Default: 600.")
    ] = None
    save_records: SaveRecords = False
    save_text: Annotated[bool, typer.Option("--save-text", help="Keep the answers, too.")] = False
    label: Label = None
    metadata: Metadata = None
    json: JsonFile = None
    append: AppendFile = None
