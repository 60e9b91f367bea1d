"""A model in a few numbers, for planning before it is built."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSummary:
    """Facts about a model. ``config``: its ``config.json``, or what stands for it."""

    architecture: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    max_model_len: int
    dtype: str
    config: Mapping[str, Any] = field(default_factory=dict)
