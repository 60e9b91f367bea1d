"""GGUF tensor names to Hugging Face names, and what the GGUF converter did to each tensor.

The names are those of llama.cpp's `gguf-py/gguf/tensor_mapping.py`; the changes that have to be
undone are made by the `modify_tensors` methods of its `convert_hf_to_gguf.py`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Final

from cardan.core.interfaces.errors import WeightsError
from cardan.core.interfaces.gguf import GGUFArchitecture
from cardan.core.types.errors import shown

# The plugin that reads files of an architecture, if there is one.
FindPlugin = Callable[[str], "type[GGUFArchitecture] | None"]

# Frequency factors of Llama 3's RoPE scaling: no Hugging Face checkpoint has such a tensor.
ROPE_FREQS: Final = "rope_freqs.weight"


class Stored(Enum):
    """How a tensor in the file differs from the one in the Hugging Face checkpoint."""

    SAME = "same"
    # Rows of each head are interleaved (0, d/2, 1, d/2 + 1, ...) instead of in two halves.
    INTERLEAVED_QUERY = "interleaved query"
    INTERLEAVED_KEY = "interleaved key"
    # Gemma's norms scale by 1 + weight; the file holds the sum.
    PLUS_ONE = "plus one"


@dataclass(frozen=True, slots=True)
class TensorSource:
    """Where the tensor of a Hugging Face name comes from.

    ``expert``: which part of a stack of all experts' tensors it is, along the first axis.
    """

    gguf_name: str
    stored: Stored
    expert: int | None = None


_TOP: Final = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER: Final = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# Stacks of all experts' tensors, whose names get the expert's number behind `EXPERTS`.
EXPERTS: Final = ".mlp.experts."
_MIXTURE: Final = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.gate_proj",
    "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
}
_PRE_NORM: Final = {"ffn_norm": "post_attention_layernorm"}
_QK_NORM: Final = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_SANDWICH_NORM: Final = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_LAYER_NAMES: Final[dict[str, dict[str, str]]] = {
    "llama": _LAYER | _PRE_NORM,
    "qwen2": _LAYER | _PRE_NORM,
    "qwen3": _LAYER | _PRE_NORM | _QK_NORM,
    "qwen3moe": _LAYER | _PRE_NORM | _QK_NORM | _MIXTURE,
    "gemma2": _LAYER | _SANDWICH_NORM,
    "gemma3": _LAYER | _SANDWICH_NORM | _QK_NORM,
}
_BLOCK_NAME: Final = re.compile(r"blk\.(0|[1-9][0-9]*)\.(\w+)\.(weight|bias)", re.ASCII)

KNOWN_ARCHITECTURES: Final = tuple(sorted(_LAYER_NAMES))


def no_plugin(architecture: str) -> None:
    """A `FindPlugin` that knows none."""


def check_architecture(
    architecture: object, find: FindPlugin = no_plugin
) -> tuple[str, type[GGUFArchitecture] | None]:
    """Return `general.architecture` if it is one that is mapped here, or by a plugin: with that.

    Raises:
        WeightsError: it is not; the message lists the known ones.
        PluginError: the plugin cannot be loaded.
    """
    if isinstance(architecture, str):
        if architecture in _LAYER_NAMES:
            return architecture, None
        plugin = find(architecture)
        if plugin is not None:
            return architecture, plugin
    raise WeightsError(
        f"metadata 'general.architecture': {shown(architecture)} is not a known GGUF architecture "
        f"(known: {', '.join(KNOWN_ARCHITECTURES)}, and those of plugins); use the model's "
        "safetensors files instead"
    )


def map_tensor_names(
    architecture: str, gguf_names: Iterable[str], find: FindPlugin = no_plugin
) -> dict[str, TensorSource]:
    """Map Hugging Face names to their sources in a GGUF file.

    `rope_freqs.weight` is left out: see `ROPE_FREQS`. Stacks of experts are mapped as a whole.

    Raises:
        WeightsError: the architecture is unknown, or a tensor has no place in it.
    """
    plugin = check_architecture(architecture, find)[1]
    layer_names = _LAYER_NAMES[architecture] if plugin is None else plugin.layer_tensors
    sources: dict[str, TensorSource] = {}
    unknown: list[str] = []
    for name in gguf_names:
        if name == ROPE_FREQS:
            continue
        hf_name = _TOP.get(name)
        match = _BLOCK_NAME.fullmatch(name)
        if match is not None and match[2] in layer_names:
            hf_name = f"model.layers.{match[1]}.{layer_names[match[2]]}.{match[3]}"
        if hf_name is None:
            unknown.append(shown(name))
        else:
            sources[hf_name] = TensorSource(name, _stored(architecture, plugin, hf_name))
    if unknown:
        more = f" and {len(unknown) - 5} more" if len(unknown) > 5 else ""
        raise WeightsError(
            f"tensors {', '.join(unknown[:5])}{more} have no place in a {architecture!r} model; "
            "use the model's safetensors files instead"
        )
    return sources


def _stored(architecture: str, plugin: type[GGUFArchitecture] | None, hf_name: str) -> Stored:
    interleaves = architecture == "llama" if plugin is None else plugin.interleaves_heads
    is_gemma = architecture in ("gemma2", "gemma3")
    adds_one = is_gemma if plugin is None else plugin.adds_one_to_norms
    if interleaves:
        if ".q_proj." in hf_name:
            return Stored.INTERLEAVED_QUERY
        if ".k_proj." in hf_name:
            return Stored.INTERLEAVED_KEY
    if adds_one and hf_name.endswith("norm.weight"):
        return Stored.PLUS_ONE
    return Stored.SAME
