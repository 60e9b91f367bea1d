"""What models say about themselves, what they bind, and which configs they refuse."""

import pytest
import torch
from model_helpers import ARCHITECTURES, Sequence, build_model, load_model, reference_ops

from cardan.core.interfaces.attention import AttentionNeed
from cardan.core.interfaces.capabilities import Verdict
from cardan.core.interfaces.errors import ConfigError
from cardan.core.interfaces.quantization import LinearMethod, QuantScheme
from cardan.core.interfaces.version import contract_refusal
from cardan.core.types.kv import KVCacheSpec
from cardan.core.weights.dummy_checkpoint import DummyCheckpoint
from cardan.core.weights.loader import load_weights
from cardan.models.layers.config_reader import ConfigReader
from cardan.testing.tiny_models import make_tiny_model, prompt_ids

SIZES = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "sliding_window": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
}


def config_of(architecture, **changes):
    return {"architectures": [architecture], **SIZES, **changes}


def windows_of(architecture, **changes):
    config = ConfigReader(config_of(architecture, **changes))
    return [layer.window for layer in ARCHITECTURES[architecture].read_config(config).layers]


@pytest.mark.parametrize(
    ("architecture", "changes", "windows"),
    [
        ("LlamaForCausalLM", {}, [None] * 4),
        ("MistralForCausalLM", {}, [8] * 4),
        ("MistralForCausalLM", {"sliding_window": None}, [None] * 4),
        ("Qwen2ForCausalLM", {}, [None] * 4),
        ("Qwen2ForCausalLM", {"use_sliding_window": True}, [None] * 4),
        ("Qwen2ForCausalLM", {"use_sliding_window": True, "max_window_layers": 0}, [8] * 4),
        (
            "Qwen3ForCausalLM",
            {"use_sliding_window": True, "max_window_layers": 3},
            [None, None, None, 8],
        ),
        ("Gemma2ForCausalLM", {}, [8, None, 8, None]),
        ("Gemma3ForCausalLM", {}, [8] * 4),
        ("Gemma3ForCausalLM", {"sliding_window_pattern": 2}, [8, None, 8, None]),
        (
            "Gemma3ForCausalLM",
            {"layer_types": ["full_attention"] * 3 + ["sliding_attention"]},
            [None, None, None, 8],
        ),
    ],
)
def test_windows(architecture, changes, windows):
    assert windows_of(architecture, **changes) == windows


def test_needs_and_specs():
    model = build_model(
        config_of("Gemma2ForCausalLM", head_dim=8, attn_logit_softcapping=50.0), kv_dtype="float16"
    )
    need = AttentionNeed(
        kind="mha",
        num_heads=4,
        num_kv_heads=2,
        k_head_dim=8,
        v_head_dim=8,
        dtype="float32",
        kv_dtype="float16",
        block_size=16,
        windows=frozenset({8}),
        softcap=True,
    )
    assert model.attention_needs()[0] == need
    assert model.attention_needs()[1].windows == frozenset()
    assert model.kv_specs() == [KVCacheSpec("full", 16, 2, 8, 8, "float16")] * 4


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_weights_need_no_gradient_and_the_contract_is_ours(architecture):
    model = build_model(config_of(architecture))
    assert contract_refusal(model.contract) is None
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_kernels_are_bound_with_their_sizes():
    ops = reference_ops()
    build_model(config_of("Qwen3ForCausalLM", head_dim=6, num_hidden_layers=1), ops=ops)
    bound = [(use.op, tuple(sorted(use.attributes.items()))) for use in ops.explain()]
    assert ("linear", (("dtype", "float32"), ("in_features", 16), ("out_features", 48))) in bound
    assert ("qk_norm_rope", (("dtype", "float32"), ("head_dim", 6), ("hidden", 6))) in bound
    assert ("silu_and_mul", (("dtype", "float32"), ("hidden", 24))) in bound
    assert ("rms_norm", (("dtype", "float32"), ("hidden", 16))) in bound


@pytest.mark.parametrize(
    ("architecture", "changes", "message"),
    [
        ("LlamaForCausalLM", {"vocab_size": None}, r"'vocab_size' is missing"),
        ("LlamaForCausalLM", {"hidden_size": "16"}, r"'hidden_size' is '16': must be a positive"),
        ("LlamaForCausalLM", {"num_hidden_layers": 0}, r"'num_hidden_layers' is 0"),
        ("LlamaForCausalLM", {"num_hidden_layers": True}, r"'num_hidden_layers' is True"),
        ("LlamaForCausalLM", {"attention_bias": 1}, r"'attention_bias' is 1: must be true or"),
        ("LlamaForCausalLM", {"hidden_act": "relu"}, r"'hidden_act' is 'relu': is not one of"),
        ("LlamaForCausalLM", {"num_key_value_heads": 3}, r"must divide num_attention_heads \(4\)"),
        ("LlamaForCausalLM", {"hidden_size": 18}, r"'hidden_size' is 18: without head_dim"),
        ("LlamaForCausalLM", {"head_dim": 5}, r"'head_dim' is 5: .* even number"),
        ("LlamaForCausalLM", {"rms_norm_eps": float("nan")}, r"'rms_norm_eps' is nan"),
        (
            "MistralForCausalLM",
            {"layer_types": ["full_attention"] * 4},
            r"'layer_types'.*all layers of a Mistral model are sliding_attention",
        ),
        ("MistralForCausalLM", {"sliding_window": 0}, r"'sliding_window' is 0"),
        (
            "Qwen2ForCausalLM",
            {"layer_types": ["sliding_attention"] * 4},
            r"use_sliding_window or sliding_window is off",
        ),
        ("Qwen3ForCausalLM", {"layer_types": ["full_attention"]}, r"must have 4 entries"),
        ("Gemma2ForCausalLM", {"layer_types": ["chunked"] * 4}, r"'chunked' is not one of"),
        ("Gemma2ForCausalLM", {"layer_types": "full"}, r"must be a list of strings"),
        ("Gemma2ForCausalLM", {"sliding_window": None}, r"'sliding_window' is missing"),
        ("Gemma3ForCausalLM", {"use_bidirectional_attention": True}, r"only causal attention"),
        ("Gemma3ForCausalLM", {"attn_logit_softcapping": 50.0}, r"must be null"),
        (
            "Gemma3ForCausalLM",
            {"rope_parameters": {"rope_theta": 1.0}},
            r"'rope_parameters.rope_theta' is 1.0: keys must be among full_attention",
        ),
    ],
)
def test_bad_configs_are_refused(architecture, changes, message):
    with pytest.raises(ConfigError, match=message):
        build_model(config_of(architecture, **changes))


def test_gemma_norms_keep_what_a_short_dtype_would_lose():
    config = config_of("Gemma2ForCausalLM")
    model = build_model(config, dtype=torch.bfloat16)
    slots = {slot.name: slot for slot in model.weight_slots()}
    slots["model.norm.weight"].load(torch.full((16,), 0.00123, dtype=torch.bfloat16))
    stored = torch.tensor(0.00123, dtype=torch.bfloat16).float()
    assert model.norm.weight.dtype == torch.float32
    assert torch.equal(model.norm.weight, (1 + stored).expand(16))


def test_embedding_scale_is_rounded_to_the_dtype():
    config = config_of("Gemma2ForCausalLM", hidden_size=3072, num_hidden_layers=1)
    model = build_model(config, dtype=torch.bfloat16)
    model.embed_tokens.load(torch.ones(32, 3072))
    # sqrt(3072) is 55.4256..., in bfloat16 it is 55.5.
    assert model.embed_tokens(torch.tensor([3]))[0, 0].item() == 55.5


class RecordedLinear(LinearMethod):
    """Keeps spans until ``finish``, in whatever order they come."""

    def __init__(self, in_features, out_features):
        self._parts = {}
        self._shape = (out_features, in_features)
        self._weight = None

    def load(self, row, weight):
        self._parts[row] = weight.clone()

    def finish(self):
        assert self._weight is None
        self._weight = torch.cat([part for _, part in sorted(self._parts.items())])
        assert self._weight.shape == self._shape

    def apply(self, x, bias):
        return torch.nn.functional.linear(x, self._weight, bias)


class PartialScheme(QuantScheme):
    """Takes the head and the MLPs only."""

    name = "partial"
    contract = (1, 0)

    @classmethod
    def detect(cls, config):
        return False

    def __init__(self):
        self.asked = []

    def accepts(self, layer, in_features, out_features):
        self.asked.append((layer, in_features, out_features))
        return Verdict.yes() if "mlp" in layer or layer == "lm_head" else Verdict.no("attention")

    def linear(self, ops, layer, in_features, out_features, dtype, device):
        assert dtype == "float32"
        assert self.asked[-1] == (layer, in_features, out_features)
        return RecordedLinear(in_features, out_features)


@pytest.mark.parametrize("name", ["llama", "llama_tied_biased"])
def test_a_scheme_takes_the_layers_that_it_accepts(name, tmp_path):
    make_tiny_model(name, tmp_path)
    scheme = PartialScheme()
    plain, quantized = load_model(tmp_path), load_model(tmp_path, quantization=scheme)
    token_ids = prompt_ids(16)
    expected = Sequence(plain).extend(token_ids)
    assert torch.equal(Sequence(quantized).extend(token_ids), expected)
    assert ("model.layers.0.mlp.gate_up_proj", 64, 192) in scheme.asked
    assert isinstance(quantized.lm_head.method, RecordedLinear)
    assert not isinstance(quantized.layers[0].self_attn.qkv_proj.method, RecordedLinear)


def test_dummy_weights_fill_every_slot():
    model = build_model(config_of("Gemma3ForCausalLM", head_dim=4))
    shapes = {slot.name: slot.shape for slot in model.weight_slots()}
    load_weights(model, DummyCheckpoint(config_of("Gemma3ForCausalLM"), shapes, seed=1))
    logits = Sequence(model).extend([1, 2, 3])
    assert logits.shape == (3, 32)
    assert logits.isfinite().all()


def test_bfloat16_stays_near_float32(tmp_path):
    make_tiny_model("gemma3", tmp_path)
    token_ids = prompt_ids(16)
    exact = Sequence(load_model(tmp_path)).extend(token_ids)
    short = Sequence(load_model(tmp_path, dtype=torch.bfloat16, kv_dtype="bfloat16")).extend(
        token_ids
    )
    assert short.dtype == torch.float32
    assert torch.nn.functional.cosine_similarity(exact, short).min() > 0.99
