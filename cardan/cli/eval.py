"""``cardan eval``: what quantising weights or the KV cache costs in quality."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cardan.cli.bench_options import AppendFile, JsonFile, Label, Metadata
from cardan.cli.bench_output import Destination, as_usage_error, destination
from cardan.cli.bootstrapping import import_bootstrap
from cardan.cli.console import print_note
from cardan.cli.expansion import with_options
from cardan.cli.options import EngineOptions, engine_config, option
from cardan.cli.values import parse_count
from cardan.core.config.engine import EngineConfig
from cardan.core.observability.logging import configure_logging, is_debugging

if TYPE_CHECKING:
    from cardan.eval.run import EvalOptions

evaluation = typer.Typer(
    name="eval",
    help="Measure the quality of a model as it is served: quantised weights, a short KV cache.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TextOptions(EngineOptions):
    """What perplexity and kl share."""

    text: Annotated[
        Path | None,
        option("--text", metavar="FILE", help="UTF-8 text. Default: 22 KB that are shipped."),
    ] = None
    context: Annotated[
        int,
        typer.Option("--context", parser=parse_count, metavar="COUNT", help="Tokens of a window."),
    ] = 512
    stride: Annotated[
        int | None,
        option(
            "--stride",
            parser=parse_count,
            metavar="COUNT",
            help="Tokens from one window's start to the next's; so many, the last of each, are "
            "scored. Default: half of the context.",
        ),
    ] = None
    max_tokens: Annotated[
        int,
        typer.Option(
            "--max-tokens",
            parser=parse_count,
            metavar="COUNT",
            help="Tokens of the text that are used; 0: all.",
        ),
    ] = 4096
    label: Label = None
    metadata: Metadata = None
    json: JsonFile = None
    append: AppendFile = None


@dataclass(frozen=True, slots=True, kw_only=True)
class KlOptions(TextOptions):
    """Options of ``cardan eval kl``. What has a name of its own is not taken over by the base."""

    against: Annotated[
        str | None,
        option("--against", metavar="MODEL", help="The base. Default: the same model."),
    ] = None
    against_revision: Annotated[
        str | None, option("--against-revision", help="--revision of the base.")
    ] = None
    against_dtype: Annotated[
        str | None, option("--against-dtype", help="--dtype of the base. Default: auto.")
    ] = None
    against_quantization: Annotated[
        str | None,
        option(
            "--against-quantization",
            help="--quantization of the base. Default: the checkpoint's way.",
        ),
    ] = None
    against_kv_cache_dtype: Annotated[
        str | None,
        option("--against-kv-cache-dtype", help="--kv-cache-dtype of the base. Default: auto."),
    ] = None
    against_attention_backend: Annotated[
        str | None,
        option("--against-attention-backend", help="--attention-backend of the base."),
    ] = None
    against_kernels: Annotated[
        list[str] | None,
        option("--against-kernels", metavar="OP=PROVIDER|-NAME", help="--kernels of the base."),
    ] = None


def perplexity(options: TextOptions) -> int:
    """How well a model predicts a text: perplexity, bits per byte."""
    config, run, target = _prepare(options)
    from cardan.eval.perplexity import run_perplexity

    return target.deliver(run_perplexity(config, run, print_note))


def kl(options: KlOptions) -> int:
    """How far a model's predictions are from those of a base.

    All options hold for both models but those that the base has with --against-.
    """
    against = engine_config(base_options(options))
    config, run, target = _prepare(options)
    from cardan.eval.kl import run_kl

    return target.deliver(run_kl(config, against, run, print_note))


def base_options(options: KlOptions) -> KlOptions:
    """The options as they are for the base."""
    return replace(
        options,
        model=options.against or options.model,
        revision=options.against_revision,
        dtype=options.against_dtype,
        quantization=options.against_quantization,
        kv_cache_dtype=options.against_kv_cache_dtype,
        attention_backend=options.against_attention_backend,
        kernels=options.against_kernels,
    )


evaluation.command(name="perplexity")(with_options(TextOptions)(perplexity))
evaluation.command(name="kl")(with_options(KlOptions)(kl))


def _prepare(options: TextOptions) -> tuple[EngineConfig, "EvalOptions", Destination]:
    """Check all that can be checked before a model is opened."""
    level = options.log_level or ("debug" if is_debugging() else "warning")
    configure_logging(level, options.log_format)
    config = engine_config(options)
    target = destination(options.json, options.append, options.label, options.metadata)
    import_bootstrap()
    from cardan.eval.run import EvalOptions
    from cardan.eval.windows import WindowOptions

    windows = WindowOptions(
        context=options.context, stride=options.stride, max_tokens=options.max_tokens
    )
    with as_usage_error():
        windows.check()
    run = EvalOptions(
        windows=windows, text=options.text, label=target.label, metadata=target.metadata
    )
    return config, run, target
