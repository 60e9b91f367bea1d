"""Which quantisation scheme stores the weights."""

from cardan.bootstrap.model_source import ModelSource
from cardan.core.config.model import ModelConfig
from cardan.core.discovery import QUANTIZATION, Discovery, unknown_name
from cardan.core.interfaces.errors import ConfigError
from cardan.core.interfaces.quantization import QuantScheme

# Full precision, whatever the checkpoint stores.
NO_SCHEME = "none"
# The scheme of GGUF files.
_STORED = "gguf"


def choose_scheme(
    config: ModelConfig, source: ModelSource, discovery: Discovery
) -> QuantScheme | None:
    """The scheme that the user names, else the checkpoint's own; None: full precision.

    Raises:
        ConfigError: there is no such scheme, or it does not fit the checkpoint.
        PluginError: the scheme cannot be loaded.
    """
    names = discovery.names(QUANTIZATION)
    name = config.quantization
    is_gguf = source.files.gguf is not None and config.load_format != "dummy"
    if name is None:
        name = _own_scheme(source, discovery, is_gguf)
    if name in (None, NO_SCHEME):
        return None
    if name not in names:
        raise ConfigError(
            f"model.quantization: {unknown_name('scheme', name, (*names, NO_SCHEME))}"
        )
    if name == _STORED and not is_gguf:
        others = ", ".join(other for other in names if other != _STORED)
        raise ConfigError(
            f"model.quantization {name} keeps the blocks of a GGUF file, and {source.files.name} "
            f"is loaded from none; choose one of {others}, or give a .gguf file"
        )
    scheme: QuantScheme = discovery.load(QUANTIZATION, name).for_checkpoint(source.config)
    return scheme


def _own_scheme(source: ModelSource, discovery: Discovery, is_gguf: bool) -> str | None:
    """The scheme that the checkpoint is stored in, if it is in one."""
    names = discovery.names(QUANTIZATION)
    if is_gguf:
        return _STORED if _STORED in names else None
    stated = source.config.get("quantization_config")
    if stated is None:
        return None
    for name in names:
        if discovery.load(QUANTIZATION, name).detect(source.config):
            return name
    method = stated.get("quant_method") if isinstance(stated, dict) else stated
    raise ConfigError(
        f"{source.files.name}: config.json: its quantization_config ({method}) is of no installed "
        f"scheme ({', '.join(names) or 'none'}); use a checkpoint in full precision, a GGUF file, "
        "or --quantization none if the weights are not quantised after all"
    )
