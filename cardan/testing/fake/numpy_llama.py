"""A Llama in plain NumPy, for the executor tier: arrays in, logits out, no torch.

Float32 throughout, over a paged cache that the caller owns. Written to be read and to be right,
not to be fast.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from cardan.core.interfaces.errors import ConfigError, UnsupportedError, WeightsError

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.integer[Any]]

_EMBEDDING = "model.embed_tokens.weight"
_FINAL_NORM = "model.norm.weight"
_HEAD = "lm_head.weight"
_MLP = ("gate_proj", "up_proj", "down_proj")
_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")


class RowSpan(NamedTuple):
    """One sequence of a step: its tokens are ``start:end`` of the step's.

    ``block_ids`` cover ``context_len`` tokens: those computed before and those of this step.
    """

    start: int
    end: int
    block_ids: Ints
    context_len: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaSizes:
    """The numbers of a Llama."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    tied: bool

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> "LlamaSizes":
        """From a ``config.json``.

        Raises:
            UnsupportedError: the model needs more than a plain Llama; the message says what.
            ConfigError: a number is missing or impossible.
        """
        _refuse_more_than_llama(config)
        num_heads = _size(config, "num_attention_heads")
        hidden_size = _size(config, "hidden_size")
        sizes = cls(
            vocab_size=_size(config, "vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=_size(config, "intermediate_size"),
            num_layers=_size(config, "num_hidden_layers"),
            num_heads=num_heads,
            num_kv_heads=_size(config, "num_key_value_heads", num_heads),
            head_dim=_size(config, "head_dim", hidden_size // num_heads),
            rms_norm_eps=_positive(config, "rms_norm_eps", 1e-6),
            rope_theta=_positive({**config, **_rope(config)}, "rope_theta", 10000.0),
            tied=bool(config.get("tie_word_embeddings", False)),
        )
        if sizes.num_heads % sizes.num_kv_heads:
            raise ConfigError(
                f"num_key_value_heads is {sizes.num_kv_heads}: must divide num_attention_heads "
                f"({sizes.num_heads})"
            )
        if sizes.head_dim % 2:
            raise ConfigError(f"head_dim is {sizes.head_dim}: rotary embeddings need an even one")
        return sizes


class NumpyLlama:
    """A loaded Llama: grouped-query attention, rotary positions, RMS norms, gated MLP, no biases.

    Args:
        config: the model's ``config.json``.
        tensor: the weight of a Hugging Face name, as anything that ``numpy.asarray`` takes; asked
            once for each name of ``weight_shapes(config)``.

    Raises:
        UnsupportedError, ConfigError: as ``LlamaSizes.read``.
        WeightsError: a weight has another shape than the config implies.
    """

    def __init__(self, config: Mapping[str, Any], tensor: Callable[[str], npt.ArrayLike]) -> None:
        self.sizes = LlamaSizes.read(config)
        self._weights = {
            name: _checked(name, tensor(name), shape)
            for name, shape in self.weight_shapes(config).items()
        }
        dim = self.sizes.head_dim
        exponents = np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim)
        self._frequencies = (1.0 / self.sizes.rope_theta**exponents).astype(np.float32)

    @staticmethod
    def weight_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
        """The names of all weights and their shapes."""
        sizes = LlamaSizes.read(config)
        hidden, inner = sizes.hidden_size, sizes.intermediate_size
        queries, keys = sizes.num_heads * sizes.head_dim, sizes.num_kv_heads * sizes.head_dim
        shapes: dict[str, tuple[int, ...]] = {_EMBEDDING: (sizes.vocab_size, hidden)}
        for layer in range(sizes.num_layers):
            prefix = f"model.layers.{layer}."
            shapes[f"{prefix}input_layernorm.weight"] = (hidden,)
            shapes[f"{prefix}post_attention_layernorm.weight"] = (hidden,)
            outs = ((queries, hidden), (keys, hidden), (keys, hidden), (hidden, queries))
            for name, shape in zip(_ATTENTION, outs, strict=True):
                shapes[f"{prefix}self_attn.{name}.weight"] = shape
            for name, shape in zip(
                _MLP, ((inner, hidden), (inner, hidden), (hidden, inner)), strict=True
            ):
                shapes[f"{prefix}mlp.{name}.weight"] = shape
        shapes[_FINAL_NORM] = (hidden,)
        if not sizes.tied:
            shapes[_HEAD] = (sizes.vocab_size, hidden)
        return shapes

    @property
    def weight_bytes(self) -> int:
        """Bytes that the weights take in memory."""
        return sum(weight.nbytes for weight in self._weights.values())

    def kv_bytes(self, num_blocks: int, block_size: int) -> int:
        """Bytes of ``make_cache(num_blocks, block_size)``."""
        sizes = self.sizes
        return 8 * sizes.num_layers * num_blocks * block_size * sizes.num_kv_heads * sizes.head_dim

    def make_cache(self, num_blocks: int, block_size: int) -> Floats:
        """An empty cache [layers, 2, num_blocks, block_size, kv_heads, head_dim] float32.

        Keys lie at index 0 of the second dimension, values at 1.
        """
        sizes = self.sizes
        return np.zeros(
            (sizes.num_layers, 2, num_blocks, block_size, sizes.num_kv_heads, sizes.head_dim),
            dtype=np.float32,
        )

    def forward(
        self,
        token_ids: Ints,
        positions: Ints,
        slots: Ints,
        rows: Sequence[RowSpan | tuple[int, int, Ints, int]],
        cache: Floats,
        chosen: Ints,
    ) -> Floats:
        """Compute one step, write its keys and values, and return logits [S, vocab_size].

        Args:
            token_ids: [T], the tokens of all rows one after another.
            positions: [T], of the tokens within their sequences.
            slots: [T], where each token is kept (block id * block size + offset); negative:
                nowhere, the token is padding.
            rows: the sequences; tokens that belong to none of them are padding.
            cache: from ``make_cache``; written in place.
            chosen: [S], indices into the tokens of those whose next token is wanted.
        """
        x: Floats = self._weights[_EMBEDDING][token_ids]
        angles = positions.astype(np.float32)[:, None] * self._frequencies
        turns = np.cos(angles)[:, None], np.sin(angles)[:, None]
        for layer in range(self.sizes.num_layers):
            normed = self._norm(x, f"model.layers.{layer}.input_layernorm.weight")
            queries, keys, values = self._project(layer, normed, turns)
            _write(cache[layer], slots, keys, values)
            attended: Floats = np.zeros((len(x), queries[0].size), dtype=np.float32)
            for start, end, block_ids, context_len in rows:
                attended[start:end] = self._attend(
                    queries[start:end], positions[start:end], cache[layer], block_ids, context_len
                )
            x = x + attended @ self._weights[f"model.layers.{layer}.self_attn.o_proj.weight"].T
            x = x + self._mlp(layer, x)
        head = self._weights[_EMBEDDING if self.sizes.tied else _HEAD]
        logits: Floats = self._norm(x[chosen], _FINAL_NORM) @ head.T
        return logits

    def _norm(self, x: Floats, name: str) -> Floats:
        mean_square = np.square(x).mean(axis=-1, keepdims=True)
        normed: Floats = x / np.sqrt(mean_square + np.float32(self.sizes.rms_norm_eps))
        return normed * self._weights[name]

    def _project(
        self, layer: int, x: Floats, turns: tuple[Floats, Floats]
    ) -> tuple[Floats, Floats, Floats]:
        """Rotated queries [T, heads, dim], rotated keys and values [T, kv_heads, dim]."""
        queries, keys, values = (
            (x @ self._weights[f"model.layers.{layer}.self_attn.{name}.weight"].T).reshape(
                len(x), -1, self.sizes.head_dim
            )
            for name in _ATTENTION[:3]
        )
        return _rotate(queries, turns), _rotate(keys, turns), values

    def _attend(
        self, queries: Floats, positions: Ints, cache: Floats, block_ids: Ints, context_len: int
    ) -> Floats:
        """[L, heads * dim] of one row's queries [L, heads, dim] over its blocks."""
        sizes = self.sizes
        num_blocks = -(-context_len // cache.shape[2])
        kept = cache[:, np.asarray(block_ids)[:num_blocks]]
        keys, values = kept.reshape(2, -1, sizes.num_kv_heads, sizes.head_dim)[:, :context_len]
        grouped = queries.reshape(len(queries), sizes.num_kv_heads, -1, sizes.head_dim)
        # [kv_heads, group, L, context]
        scores = np.einsum("lhgd,chd->hglc", grouped, keys, optimize=True)
        scores *= np.float32(sizes.head_dim**-0.5)
        scores[..., np.arange(context_len) > positions[:, None]] = -np.inf
        scores -= scores.max(axis=-1, keepdims=True)
        np.exp(scores, out=scores)
        scores /= scores.sum(axis=-1, keepdims=True)
        attended: Floats = np.einsum("hglc,chd->lhgd", scores, values, optimize=True)
        return attended.reshape(len(queries), -1)

    def _mlp(self, layer: int, x: Floats) -> Floats:
        prefix = f"model.layers.{layer}."
        normed = self._norm(x, f"{prefix}post_attention_layernorm.weight")
        gate, up, down = (self._weights[f"{prefix}mlp.{name}.weight"] for name in _MLP)
        gated = normed @ gate.T
        # x * sigmoid(x); the clip keeps exp from overflowing where the sigmoid is 0 anyhow.
        silu: Floats = gated / (1.0 + np.exp(-np.maximum(gated, np.float32(-80.0))))
        out: Floats = (silu * (normed @ up.T)) @ down.T
        return out


def _rotate(x: Floats, turns: tuple[Floats, Floats]) -> Floats:
    """Rotate pairs (i, i + dim / 2) of x [T, heads, dim]."""
    cos, sin = turns
    first, second = np.split(x, 2, axis=-1)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def _write(cache: Floats, slots: Ints, keys: Floats, values: Floats) -> None:
    real = slots >= 0
    blocks, offsets = np.divmod(slots[real], cache.shape[2])
    cache[0, blocks, offsets] = keys[real]
    cache[1, blocks, offsets] = values[real]


def _checked(name: str, value: npt.ArrayLike, shape: tuple[int, ...]) -> Floats:
    array = np.asarray(value, dtype=np.float32)
    if array.shape != shape:
        raise WeightsError(
            f"{name}: has shape {list(array.shape)}, the config implies {list(shape)}; the "
            "weights and the config belong to different models"
        )
    return array


def _refuse_more_than_llama(config: Mapping[str, Any]) -> None:
    architectures = config.get("architectures") or ["LlamaForCausalLM"]
    if "LlamaForCausalLM" not in architectures:
        raise UnsupportedError(f"the NumPy step model is a Llama, not {architectures[0]}")
    for key in ("attention_bias", "mlp_bias"):
        if config.get(key):
            raise UnsupportedError(f"the NumPy step model has no biases, but '{key}' is set")
    activation = config.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise UnsupportedError(f"the NumPy step model has only silu, 'hidden_act' is {activation}")
    rope = _rope(config)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        raise UnsupportedError(f"the NumPy step model does not scale positions, but rope is {kind}")
    for part in (rope, config):
        if part.get("partial_rotary_factor", 1.0) not in (None, 1.0):
            raise UnsupportedError("the NumPy step model rotates whole heads, not a part of them")


def _rope(config: Mapping[str, Any]) -> Mapping[str, Any]:
    return config.get("rope_parameters") or config.get("rope_scaling") or {}


def _size(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = config.get(key)
    value = default if value is None else value
    if not isinstance(value, int) or value < 1:
        raise ConfigError(f"config.json: '{key}' is {value!r}: must be a positive integer")
    return value


def _positive(config: Mapping[str, Any], key: str, default: float) -> float:
    value = config.get(key)
    value = default if value is None else value
    if not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise ConfigError(f"config.json: '{key}' is {value!r}: must be positive and finite")
    return float(value)
