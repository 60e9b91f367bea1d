"""Whole steps of models compile for TPUs that are not here, and say what they would take."""

from functools import cache

import pytest
import torch
from jax.experimental import topologies
from topologies import TOPOLOGIES

from cardan.core.discovery import MODELS, Discovery
from cardan.core.interfaces.model import BuildContext
from cardan.core.ops.catalogue import CATALOGUE
from cardan.core.ops.registry import KernelRegistry
from cardan.platforms.tpu.attention import PallasKernels
from cardan.platforms.tpu.buckets import demanding
from cardan.platforms.tpu.placement import Placement
from cardan.platforms.tpu.programs import Programs
from cardan.platforms.tpu.step_layout import StepShape
from cardan.platforms.tpu.step_state import ProgramSizes, abstract_state
from cardan.platforms.tpu.traced_model import TracedModel

BLOCK_SIZE = 32
MAX_LEN = 4096
ROWS = 64
GIB = 1 << 30

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "max_position_embeddings": MAX_LEN,
}
SMOLLM2 = {
    **LLAMA,
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "tie_word_embeddings": True,
    "rope_theta": 100000.0,
}
LLAMA_8B = {
    **LLAMA,
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "tie_word_embeddings": False,
    "rope_theta": 500000.0,
}
DECODE = StepShape(ROWS, ROWS, MAX_LEN // BLOCK_SIZE, False)
MIXED = StepShape(256, ROWS, MAX_LEN // BLOCK_SIZE, True)
DEMANDING = demanding(MIXED, num_logprobs=32)


# With few layers, so that every run can compile what takes minutes with all.
SHORT = {**SMOLLM2, "num_hidden_layers": 2}

# A few of the layers for one chip in every run; all of them for each where there is time, since
# choosing tokens alone is a minute's work for the compiler.
each_depth = pytest.mark.parametrize(
    ("name", "chip"),
    [
        ("short", TOPOLOGIES[0]),
        *(pytest.param("smollm2", chip, marks=pytest.mark.scheduled) for chip in TOPOLOGIES),
    ],
)


@cache
def built(name):
    """The model's modules, whose tensors hold nothing."""
    config = {"smollm2": SMOLLM2, "short": SHORT, "8b": LLAMA_8B}[name]
    build = BuildContext(
        dtype=torch.bfloat16,
        device=torch.device("meta"),
        ops=KernelRegistry(CATALOGUE, (), device=torch.device("cpu"), features=()),
        max_model_len=MAX_LEN,
        block_size=BLOCK_SIZE,
        kv_dtype="bfloat16",
    )
    model = Discovery().load(MODELS, "LlamaForCausalLM")(config, build)
    for slot in model.weight_slots():
        slot.load(torch.empty(slot.shape, dtype=torch.bfloat16, device="meta"))
    model.finish_loading()
    return model


def compiled(name, chip, shape, num_devices, num_blocks):
    topology = topologies.get_topology_desc(topology_name=chip, platform="tpu")
    placement = Placement.on(topology.devices[:num_devices])
    model, sizes = built(name), ProgramSizes(BLOCK_SIZE, 49152, ROWS, MAX_LEN)
    kernels = PallasKernels(BLOCK_SIZE, placement)
    programs = Programs(TracedModel(model), kernels, placement, sizes, precise=False)
    state = abstract_state(model.kv_specs(), kernels, placement, sizes, num_blocks)
    return programs.step(shape, state), state


def weight_bytes(name):
    return sum(2 * torch.Size(slot.shape).numel() for slot in built(name).weight_slots())


def check(program, expected, most_temporary):
    """Inputs are ``expected`` bytes and a little; caches are written where they lie."""
    memory = program.memory_analysis()
    assert program.as_text().count("tpu_custom_call") >= 2
    assert expected < memory.argument_size_in_bytes < 1.03 * expected + (16 << 20)
    assert memory.temp_size_in_bytes < most_temporary
    return memory


def cache_bytes(state):
    return sum(cache.size * cache.dtype.itemsize for cache in state.caches)


def check_smollm2(name, chip, shape):
    program, state = compiled(name, chip, shape, 1, num_blocks=4000)
    caches = cache_bytes(state)
    memory = check(program, weight_bytes(name) + caches, 256 << 20)
    assert memory.alias_size_in_bytes >= caches


@pytest.mark.parametrize("chip", TOPOLOGIES)
def test_decode_step(chip):
    check_smollm2("smollm2", chip, DECODE)


@each_depth
def test_mixed_step(name, chip):
    check_smollm2(name, chip, MIXED)


@each_depth
def test_all_that_requests_may_ask_for(name, chip):
    program, state = compiled(name, chip, DEMANDING, 1, num_blocks=4000)
    # Not read as text, which XLA cannot make of some of its own programs.
    memory = program.memory_analysis()
    assert memory.alias_size_in_bytes >= cache_bytes(state)
    assert memory.temp_size_in_bytes < 256 << 20


@pytest.mark.parametrize(("chip", "num_devices"), list(zip(TOPOLOGIES, (4, 1, 1), strict=True)))
def test_8b(chip, num_devices):
    """Weights of 16 GB: four of the chips that have 16 GB each, one of the others."""
    program, state = compiled("8b", chip, DECODE, num_devices, num_blocks=2048)
    caches = cache_bytes(state)
    expected = (weight_bytes("8b") + caches) / num_devices
    memory = check(program, expected, GIB)
    assert memory.alias_size_in_bytes >= caches / num_devices
    if num_devices > 1:
        assert "all-reduce" in program.as_text()
