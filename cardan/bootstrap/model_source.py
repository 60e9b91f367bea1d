"""A model's files, read as far as planning and the front need them; no torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cardan.bootstrap.model_sizes import check_sizes, with_common_names
from cardan.core.config.model import ModelConfig
from cardan.core.discovery import GGUF, Discovery
from cardan.core.interfaces.gguf import GGUFArchitecture
from cardan.core.text import Tokenizer, load_tokenizer, tokenizer_from_gguf
from cardan.core.text.errors import TextError
from cardan.core.types.errors import ConfigError, shown
from cardan.core.types.kv import DTYPE_BYTES, KV_DTYPES
from cardan.core.weights.gguf_config import hf_config_from_gguf
from cardan.core.weights.gguf_file import GGUFFile
from cardan.core.weights.hf_config import load_hf_config
from cardan.core.weights.resolve import ModelFiles, resolve_model

_DTYPE_NAMES = {
    "half": "float16",
    "fp16": "float16",
    "bf16": "bfloat16",
    "float": "float32",
    "fp32": "float32",
}
_KV_DTYPE_NAMES = {"fp8": "float8_e4m3", "fp8_e4m3": "float8_e4m3", "fp8_e5m2": "float8_e5m2"}


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Where a model is and what its configuration says."""

    files: ModelFiles
    config: Mapping[str, Any]

    @property
    def architecture(self) -> str:
        names = self.config.get("architectures")
        if not isinstance(names, list) or not names or not isinstance(names[0], str):
            raise ConfigError(
                f"{self.files.name}: config.json: 'architectures' is {shown(names)}: must be a "
                "list that starts with a name, such as LlamaForCausalLM"
            )
        return names[0]

    @property
    def generation_config(self) -> dict[str, Any]:
        found = self.config.get("generation_config")
        return dict(found) if isinstance(found, Mapping) else {}

    @property
    def dtype(self) -> str | None:
        """The dtype that the checkpoint names, if it does."""
        name = self.config.get("dtype") or self.config.get("torch_dtype")
        return None if name is None else normal_dtype(str(name))


def normal_dtype(name: str) -> str:
    """The full name of a dtype that has several."""
    return _DTYPE_NAMES.get(name, name.removeprefix("torch."))


def normal_kv_dtype(name: str) -> str:
    """The full name of a dtype of caches, or ``auto``.

    Raises:
        ConfigError: there is no such dtype.
    """
    dtype = _KV_DTYPE_NAMES.get(name) or normal_dtype(name)
    if dtype not in ("auto", *DTYPE_BYTES):
        raise ConfigError(
            f"cache.kv_cache_dtype {shown(name)} is unknown; choose auto (the model's), "
            f"{', '.join(KV_DTYPES)}, or what else the platform's attention takes"
        )
    return dtype


def check_kv_dtype(dtype: str, platform_dtypes: Sequence[str], device_name: str) -> None:
    """Whether a cache can be kept in ``dtype``; ``platform_dtypes`` are ``Capabilities.kv_dtypes``.

    Raises:
        ConfigError: it cannot; the message has what can be chosen.
    """
    choices = tuple(dict.fromkeys(("auto", *KV_DTYPES, *platform_dtypes)))
    if dtype not in choices:
        raise ConfigError(
            f"cache.kv_cache_dtype {dtype} is not available on {device_name}; "
            f"choose one of {', '.join(choices)}"
        )


def read_model(config: ModelConfig) -> ModelSource:
    """Find the model and read its configuration."""
    files = resolve_model(config.model, config.revision)
    if files.gguf is not None:
        with GGUFFile(files.gguf) as file:
            values = hf_config_from_gguf(file, gguf_plugin)
    else:
        values = load_hf_config(files.path)
    values = with_common_names({**values, **config.hf_overrides})
    try:
        check_sizes(values)
    except ConfigError as error:
        raise ConfigError(f"{files.name}: {error}") from error
    return ModelSource(files, values)


def gguf_plugin(architecture: str) -> type[GGUFArchitecture] | None:
    """The installed plugin that reads GGUF files of ``architecture``.

    Raises:
        PluginError: it cannot be loaded.
    """
    discovery = Discovery()
    if architecture not in discovery.names(GGUF):
        return None
    found: type[GGUFArchitecture] = discovery.load(GGUF, architecture)
    return found


def read_tokenizer(config: ModelConfig, source: ModelSource) -> Tokenizer:
    """The tokenizer of the model, or of ``config.tokenizer``."""
    files = resolve_model(config.tokenizer, None) if config.tokenizer else source.files
    if files.gguf is not None:
        with GGUFFile(files.gguf) as file:
            try:
                return tokenizer_from_gguf(file.metadata)
            except TextError as error:
                raise TextError(f"{files.gguf}: {error}") from error
    return load_tokenizer(files.path)


def read_chat_template(config: ModelConfig) -> str | None:
    """The template file that replaces the model's own, if one was named."""
    if config.chat_template is None:
        return None
    try:
        return Path(config.chat_template).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"model.chat_template {config.chat_template}: {error}") from error


def max_model_len(config: ModelConfig, source: ModelSource) -> int:
    """The context length that the model has, or the user's shorter one.

    Raises:
        ConfigError: the user wants more than the model was made for.
    """
    own = source.config.get("max_position_embeddings")
    wanted = config.max_model_len
    if not isinstance(own, int) or isinstance(own, bool) or own < 1:
        if wanted is None:
            raise ConfigError("the model names no max_position_embeddings; set --max-model-len")
        return wanted
    if wanted is not None and wanted > own:
        raise ConfigError(
            f"model.max_model_len is {wanted}, the model's positions end at {own}. Choose a "
            "smaller one, or name a rope scaling with --hf-overrides"
        )
    return wanted or own
