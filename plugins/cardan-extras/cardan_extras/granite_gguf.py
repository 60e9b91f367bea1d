"""GGUF files of Granite 3, as llama.cpp's ``convert_hf_to_gguf.py`` writes them."""

from collections.abc import Mapping
from math import isfinite
from typing import Any, ClassVar

from cardan.core.interfaces.errors import WeightsError
from cardan.core.interfaces.gguf import GGUFArchitecture

# Settings of a file, and what config.json calls them.
_MULTIPLIERS: Mapping[str, str] = {
    "embedding_scale": "embedding_multiplier",
    "attention.scale": "attention_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}


class GraniteGGUF(GGUFArchitecture):
    """A Llama whose parts are scaled."""

    contract: ClassVar[tuple[int, int]] = (1, 0)
    model: ClassVar[str] = "GraniteForCausalLM"
    model_type: ClassVar[str] = "granite"
    layer_tensors: ClassVar[Mapping[str, str]] = {
        "attn_norm": "input_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_norm": "post_attention_layernorm",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }
    interleaves_heads: ClassVar[bool] = True

    @classmethod
    def config(cls, metadata: Mapping[str, object]) -> Mapping[str, Any]:
        found = {}
        for key, name in _MULTIPLIERS.items():
            value = metadata.get(key)
            if not isinstance(value, int | float) or not isfinite(value) or not value:
                raise WeightsError(f"metadata 'granite.{key}': is {value!r}, must be a number")
            found[name] = value
        return found
