"""Which model, in which numbers, from where."""

from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Settings of the model.

    Attributes:
        model: ``demo``, a directory, a ``.gguf`` file, or a hub id.
        tokenizer: directory or file to take the tokenizer from; None: the model's own.
        revision: branch, tag or commit of a hub id.
        dtype: ``auto`` or a dtype name; ``auto`` is what the checkpoint and the device prefer.
        max_model_len: most tokens of prompt and answer together; None: the model's own limit,
            reduced (with a warning) to what the KV cache can hold.
        load_format: ``auto``, or ``dummy`` for random weights of the right shapes.
        quantization: name of a quantisation scheme, ``none`` for full precision (what is stored
            in blocks is decoded), or None for the checkpoint's own.
        seed: default seed of requests that name none; None draws one for each request.
        chat_template: path of a Jinja template that replaces the model's own.
        generation_config: ``auto`` takes sampling defaults from the model, ``none`` does not.
        max_logprobs: most log-probabilities a request may ask for at one position; -1: no limit.
        hf_overrides: entries that replace those of the model's ``config.json``.
    """

    model: str
    tokenizer: str | None = None
    revision: str | None = None
    dtype: str = "auto"
    max_model_len: int | None = None
    load_format: Literal["auto", "dummy"] = "auto"
    quantization: str | None = None
    seed: int | None = None
    chat_template: str | None = None
    generation_config: Literal["auto", "none"] = "auto"
    max_logprobs: int = 20
    hf_overrides: dict[str, Any] = field(default_factory=dict)
