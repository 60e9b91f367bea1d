"""The options of the engine, each declared once, and the configuration made from them."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import typer

from cardan.cli.config_file import load_config_file
from cardan.cli.values import (
    parse_assignments,
    parse_bytes,
    parse_count,
    parse_json_object,
    parse_model_len,
)
from cardan.core.config.cache import CacheConfig
from cardan.core.config.device import DeviceConfig
from cardan.core.config.engine import EngineConfig
from cardan.core.config.fallbacks import FALLBACKS
from cardan.core.config.model import ModelConfig
from cardan.core.config.parallel import ParallelConfig
from cardan.core.config.plugins import PluginConfig
from cardan.core.config.scheduler import SchedulerConfig

Section = TypeVar("Section")
LogLevel = Literal["debug", "info", "warning", "error"]
LogFormatOption = Literal["auto", "rich", "plain", "json"]


def unset(path: str) -> str:
    """What happens to a setting that is not given, for its help."""
    value = FALLBACKS[path]
    shown = {True: "on", False: "off"}[value] if isinstance(value, bool) else f"{value}"
    return f"Default: the platform's choice, else {shown}."


def option(*names: str, help: str, **more: Any) -> Any:
    """An option whose default, if any, its help states."""
    return typer.Option(*names, help=help, show_default=False, **more)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """What a user can say about the engine; None is left to the configuration's default."""

    model: Annotated[
        str | None,
        typer.Argument(help="demo, a directory, a .gguf file, or a hub id.", show_default=False),
    ] = None
    config: Annotated[
        Path | None,
        option(
            "--config",
            help="Take options from a .json or .toml file; the command line wins.",
            callback=load_config_file,
            is_eager=True,
        ),
    ] = None
    tokenizer: Annotated[
        str | None, option("--tokenizer", help="Tokenizer from another place.")
    ] = None
    revision: Annotated[
        str | None,
        option("--revision", help="Branch, tag or commit of a hub id."),
    ] = None
    dtype: Annotated[
        str | None,
        option("--dtype", help="auto, float32, bfloat16 or float16. Default: auto."),
    ] = None
    max_model_len: Annotated[
        int | None,
        option(
            "--max-model-len",
            parser=parse_model_len,
            metavar="COUNT|auto",
            help="Most tokens of prompt and answer; 32k is 32000, 32K is 32768. Default: auto.",
        ),
    ] = None
    load_format: Annotated[
        Literal["auto", "dummy"] | None,
        option("--load-format", help="dummy: random weights. Default: auto."),
    ] = None
    quantization: Annotated[
        str | None,
        option(
            "--quantization",
            metavar="SCHEME",
            help="How weights are kept: q8, q4, int8, gguf (blocks as they are stored) or none. "
            "Default: the checkpoint's way.",
        ),
    ] = None
    seed: Annotated[
        int | None,
        option("--seed", help="Seed of requests that name none. Default: random."),
    ] = None
    chat_template: Annotated[
        str | None,
        option("--chat-template", help="Jinja file instead of the model's own."),
    ] = None
    generation_config: Annotated[
        Literal["auto", "none"] | None,
        option(
            "--generation-config",
            help="none: do not take sampling defaults from the model. Default: auto.",
        ),
    ] = None
    max_logprobs: Annotated[
        int | None,
        option("--max-logprobs", help="Most a request may ask for. Default: 20."),
    ] = None
    hf_overrides: Annotated[
        dict[str, Any] | None,
        option(
            "--hf-overrides",
            parser=parse_json_object,
            metavar="JSON",
            help="Entries that replace those of config.json.",
        ),
    ] = None
    platform: Annotated[
        str | None,
        option(
            "--platform",
            metavar="NAME[:0,1]",
            help="Platform and devices. Default: the best one present.",
        ),
    ] = None
    kernels: Annotated[
        list[str] | None,
        option(
            "--kernels",
            metavar="OP=PROVIDER|-NAME",
            help="Pin or veto a kernel provider; may be given several times.",
        ),
    ] = None
    attention_backend: Annotated[
        str | None,
        option("--attention-backend", help="Default: the platform's first that fits."),
    ] = None
    enforce_eager: Annotated[
        bool | None,
        option(
            "--enforce-eager/--no-enforce-eager",
            help=f"Never capture graphs. {unset('device.enforce_eager')}",
        ),
    ] = None
    threads: Annotated[
        int | None,
        option("--threads", help="Host threads. Default: all that are usable."),
    ] = None
    tensor_parallel_size: Annotated[
        int | None,
        option(
            "--tensor-parallel-size", "-tp", help="Processes that share each layer. Default: 1."
        ),
    ] = None
    block_size: Annotated[
        int | None,
        option("--block-size", help=f"Tokens in a block. {unset('cache.block_size')}"),
    ] = None
    kv_cache_memory_bytes: Annotated[
        int | None,
        option(
            "--kv-cache-memory-bytes",
            parser=parse_bytes,
            metavar="SIZE",
            help="Size of the KV cache, such as 2GiB or 500M. Default: the platform's choice, else "
            "a share of the memory.",
        ),
    ] = None
    memory_utilization: Annotated[
        float | None,
        option(
            "--memory-utilization",
            "--gpu-memory-utilization",
            help="Share of the memory that the weights leave which the engine may take for the KV "
            f"cache (and, where measured, its steps) if no size is given. "
            f"{unset('cache.memory_utilization')}",
        ),
    ] = None
    kv_cache_dtype: Annotated[
        str | None,
        option(
            "--kv-cache-dtype",
            help="auto (the model's), float32, bfloat16, float16, int8 or, where the platform has "
            "it, fp8. Default: auto.",
        ),
    ] = None
    enable_prefix_caching: Annotated[
        bool | None,
        option(
            "--enable-prefix-caching/--no-enable-prefix-caching",
            help=f"Reuse the cache of equal prefixes. {unset('cache.enable_prefix_caching')}",
        ),
    ] = None
    max_num_seqs: Annotated[
        int | None,
        option(
            "--max-num-seqs",
            parser=parse_count,
            metavar="COUNT",
            help=f"Most sequences that run at once. {unset('scheduler.max_num_seqs')}",
        ),
    ] = None
    max_num_batched_tokens: Annotated[
        int | None,
        option(
            "--max-num-batched-tokens",
            parser=parse_count,
            metavar="COUNT",
            help=f"Token budget of one step. {unset('scheduler.max_num_batched_tokens')}",
        ),
    ] = None
    enable_chunked_prefill: Annotated[
        bool | None,
        option(
            "--enable-chunked-prefill/--no-enable-chunked-prefill",
            help=f"Split prompts over steps. {unset('scheduler.enable_chunked_prefill')}",
        ),
    ] = None
    long_prefill_token_threshold: Annotated[
        int | None,
        option(
            "--long-prefill-token-threshold",
            parser=parse_count,
            metavar="COUNT",
            help="Most tokens of one prompt in one step; 0: no such limit. "
            f"{unset('scheduler.long_prefill_token_threshold')}",
        ),
    ] = None
    mixed_prefill_token_budget: Annotated[
        int | None,
        option(
            "--mixed-prefill-token-budget",
            parser=parse_count,
            metavar="COUNT",
            help="Most prompt tokens in a step that also carries answers: bounds the pauses that "
            "prompts put into them. Default: the platform's.",
        ),
    ] = None
    scheduling_policy: Annotated[
        str | None,
        option("--scheduling-policy", help="fcfs, priority or a plugin's."),
    ] = None
    max_num_queued_reqs: Annotated[
        int | None,
        option(
            "--max-num-queued-reqs",
            help="Refuse requests while this many wait. Default: no cap.",
        ),
    ] = None
    max_num_queued_tokens: Annotated[
        int | None,
        option(
            "--max-num-queued-tokens",
            parser=parse_count,
            metavar="COUNT",
            help="Refuse requests while this many prompt tokens wait. Default: no cap.",
        ),
    ] = None
    plugin: Annotated[
        list[str] | None,
        option("--plugin", help="A plugin that must load (several times)."),
    ] = None
    no_plugin: Annotated[
        list[str] | None,
        option("--no-plugin", help="A plugin not to load (several times)."),
    ] = None
    plugin_option: Annotated[
        list[str] | None,
        option(
            "--plugin-option",
            metavar="NAME=VALUE",
            help="A setting for plugins (several times).",
        ),
    ] = None
    log_level: Annotated[
        LogLevel | None,
        option("--log-level", help="debug shows tracebacks, too."),
    ] = None
    log_format: Annotated[
        LogFormatOption,
        option("--log-format", help="Default: rich on a terminal, else plain."),
    ] = "auto"


def engine_config(options: EngineOptions) -> EngineConfig:
    """The engine's configuration, each value checked.

    Raises:
        ConfigError: a value is out of range.
    """
    if options.model is None:
        raise typer.BadParameter("which model? Give demo, a directory, a .gguf file or a hub id")
    config = EngineConfig(
        model=make_section(
            ModelConfig,
            model=options.model,
            tokenizer=options.tokenizer,
            revision=options.revision,
            dtype=options.dtype,
            max_model_len=options.max_model_len or None,
            load_format=options.load_format,
            quantization=options.quantization,
            seed=options.seed,
            chat_template=options.chat_template,
            generation_config=options.generation_config,
            max_logprobs=options.max_logprobs,
            hf_overrides=options.hf_overrides,
        ),
        cache=make_section(
            CacheConfig,
            block_size=options.block_size,
            kv_cache_memory_bytes=options.kv_cache_memory_bytes,
            memory_utilization=options.memory_utilization,
            kv_cache_dtype=options.kv_cache_dtype,
            enable_prefix_caching=options.enable_prefix_caching,
        ),
        scheduler=make_section(
            SchedulerConfig,
            max_num_seqs=options.max_num_seqs,
            max_num_batched_tokens=options.max_num_batched_tokens,
            enable_chunked_prefill=options.enable_chunked_prefill,
            long_prefill_token_threshold=options.long_prefill_token_threshold,
            mixed_prefill_token_budget=options.mixed_prefill_token_budget,
            policy=options.scheduling_policy,
            max_num_queued_reqs=options.max_num_queued_reqs,
            max_num_queued_tokens=options.max_num_queued_tokens,
        ),
        device=make_section(
            DeviceConfig,
            platform=options.platform,
            kernels=tuple(options.kernels or ()),
            attention_backend=options.attention_backend,
            enforce_eager=options.enforce_eager,
            num_threads=options.threads,
        ),
        parallel=make_section(ParallelConfig, tensor_parallel_size=options.tensor_parallel_size),
        plugins=PluginConfig(
            required=tuple(options.plugin or ()),
            blocked=tuple(options.no_plugin or ()),
            options=parse_assignments(options.plugin_option),
        ),
    )
    return config.check()


def make_section(section: type[Section], **values: Any) -> Section:
    """A section from what was given; None takes the section's default."""
    return section(**{name: value for name, value in values.items() if value is not None})
