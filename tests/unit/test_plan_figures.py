"""Plans against what was measured: floors are below it, expectations and capacities near it."""

import json
import sys
from pathlib import Path

import pytest

from cardan.bootstrap.model_source import read_model
from cardan.core.config.engine import EngineConfig
from cardan.core.config.model import ModelConfig
from cardan.core.interfaces.roofline import Roofline
from cardan.core.weights.tensor_table import stored_tensors
from cardan.plan.planner import Load, PlanRequest, make_plan
from cardan.plan.rates import RateModel
from cardan.plan.target import Target, known_target
from cardan.plan.weights import WeightForms, tensors_of_shape
from cardan.platforms.cpu.platform import CpuPlatform
from cardan.platforms.cpu.roofline import cpu_roofline, measured_rates
from cardan.platforms.cuda.platform import CudaPlatform

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

# They are found through the line above.
from gpu_rows.floors import BYTES_PER_S, FLOP_PER_S, decode_floor_s, prefill_floor_s
from gpu_rows.shapes import SHAPES

BAND = 0.25
# Rows of benchmarks/gpu.py --only decode,prefill on one H200, milliseconds: steps at batch 1, 64
# and 256 after prompts of 128 tokens, in the mean of 128 tokens more; a prompt of 8192 tokens.
H200_DECODE = {
    "8B": (3.77, 5.18, 9.44),
    "0.6B": (0.67, 1.43, 2.94),
    "30B-A3B": (2.33, 15.5, 18.1),
}
H200_PREFILL = {"8B": 210, "0.6B": 31}
# Steps of 16 contexts of 16,384 tokens (--only long).
H200_LONG = {"8B": 11.98, "0.6B": 7.67}
# The engine's log at start on the same device, with --memory-utilization 0.9, 8192 tokens and 512
# sequences a step: tokens of the KV cache.
H200_KV_TOKENS = {"8B": 880_192, "0.6B": 1_129_840, "30B-A3B": 766_560}
# What the same log says of memory for 8B, GiB: beside the weights, and for the largest step.
H200_8B_FREE, H200_8B_STEP = 124.01, 3.77
# SmolLM2-135M on two cores of an AVX2 EPYC, whose memory gave 24 to 30 GB/s and whose products 180
# GFLOP/s: scheme, dtype, tokens a second of one stream, and of 32 requests of 256/128 tokens.
CPU_RATES = (27e9, 180e9)
CPU_FIGURES = [("none", "bfloat16", 92, 182), (None, "auto", 210, 267)]
AVX2 = ("sse4_2", "avx2", "fma", "f16c")


def shape_source(name, directory):
    config = {**SHAPES[name], "torch_dtype": "bfloat16"}
    (directory / "config.json").write_text(json.dumps(config))
    return read_model(ModelConfig(model=str(directory)))


@pytest.fixture
def h200():
    platform = CudaPlatform()
    (info,) = (info for info in platform.known_devices() if info.name == "NVIDIA H200")
    return known_target(platform, info)


@pytest.fixture
def plan(h200, tmp_path):
    def make(name, **load):
        source = shape_source(name, tmp_path)
        config = EngineConfig(model=ModelConfig(model=str(tmp_path)))
        return make_plan(PlanRequest(config, source, (), h200, Load(**load)))

    return make


@pytest.mark.parametrize("name", H200_DECODE)
def test_decode_on_an_h200(plan, name):
    rates = plan(name, context=192).decode
    for rate, measured in zip(rates, H200_DECODE[name], strict=True):
        assert 1000 * rate.time.floor_s < measured
        assert 1000 * rate.time.expected_s == pytest.approx(measured, rel=BAND)


@pytest.mark.parametrize("name", H200_LONG)
def test_long_contexts_on_an_h200(plan, name):
    (rate,) = plan(name, batches=(16,), context=16_384).decode
    assert 1000 * rate.time.floor_s < H200_LONG[name]
    assert 1000 * rate.time.expected_s == pytest.approx(H200_LONG[name], rel=BAND)


@pytest.mark.parametrize("name", H200_PREFILL)
def test_prefill_on_an_h200(plan, name):
    time = plan(name, prompt=8192).prefill.time
    assert 1000 * time.floor_s < H200_PREFILL[name]
    assert 1000 * time.expected_s == pytest.approx(H200_PREFILL[name], rel=BAND)
    assert time.limit == "compute"


@pytest.mark.parametrize("name", H200_KV_TOKENS)
def test_capacity_of_an_h200(plan, name):
    found = plan(name)
    assert found.does_fit
    assert found.fit.kv_tokens == pytest.approx(H200_KV_TOKENS[name], rel=0.03)


def test_memory_beside_the_weights_of_an_h200(plan):
    found = plan("8B")
    assert found.fit.free / 2**30 == pytest.approx(H200_8B_FREE, rel=0.001)
    assert found.need.step / 2**30 == pytest.approx(H200_8B_STEP, rel=0.15)


@pytest.mark.model
@pytest.mark.parametrize(("scheme", "dtype", "one", "many"), CPU_FIGURES)
def test_the_demo_on_two_cores(scheme, dtype, one, many):
    platform = CpuPlatform()
    info = platform.devices()[0]
    model = ModelConfig(model="demo", quantization=scheme, dtype=dtype)
    source = read_model(model)
    target = Target(
        platform, (info,), platform.capabilities(info), cpu_roofline(CPU_RATES, AVX2, 0), False
    )

    def plan(context):
        load = Load((1, 32), context, 256)
        config = EngineConfig(model=model)
        return make_plan(PlanRequest(config, source, stored_tensors(source.files), target, load))

    time = plan(192).decode[0].time
    assert 1 / time.floor_s > one
    assert 1 / time.expected_s == pytest.approx(one, rel=BAND)
    # Prompts of 256 tokens, then answers of 128 in steps of all 32.
    found = plan(320)
    step, prompt = found.decode[1].time, found.prefill.time
    assert 32 * 128 / (32 * prompt.floor_s + 128 * step.floor_s) > many
    expected = 32 * 128 / (32 * prompt.expected_s + 128 * step.expected_s)
    assert expected == pytest.approx(many, rel=BAND)


@pytest.mark.parametrize("name", H200_DECODE)
def test_floors_are_those_of_the_benchmark(plan, name):
    """Which adds the cache's time to that of products, where here only bytes are added."""
    shape = plan(name).shape
    roofline = Roofline(
        bytes_per_s=BYTES_PER_S, flop_per_s={"bfloat16": FLOP_PER_S}, source="the benchmark"
    )
    forms = WeightForms("bfloat16", "none", 1, lambda *use: False, False)
    weights = forms.serve(tensors_of_shape(shape, "bf16"), shape)
    kv_bytes = 4 * shape.num_kv_heads * shape.head_dim
    model = RateModel(shape, weights, kv_bytes, "bfloat16", 1, roofline, BYTES_PER_S)
    for batch in (1, 16):
        time = model.decode(batch, 192)
        want = decode_floor_s(SHAPES[name], batch, 192)
        assert time.floor_s == pytest.approx(want, rel=0.001)
        assert time.expected_s is None
    # The benchmark leaves the head out, which is for one token.
    want = prefill_floor_s(SHAPES[name], 8192)
    assert model.prefill(8192, 8192).floor_s == pytest.approx(want, rel=0.001)


def test_peaks_that_were_not_measured_are_unknown():
    roofline = cpu_roofline(None, AVX2, 5)
    assert roofline.bytes_per_s is None
    assert roofline.reserved_bytes == 5
    assert not roofline.flop_per_s


def test_peaks_follow_from_instruction_sets():
    plain = cpu_roofline((1e9, 2e9), AVX2, 0).flop_per_s
    assert plain == {"float32": 2e9, "float16": 2e9, "bfloat16": 2e9, "int8": 8e9}
    tiles = cpu_roofline((1e9, 2e9), (*AVX2, "amx_bf16", "amx_int8"), 0).flop_per_s
    assert tiles["bfloat16"] == 32e9
    assert tiles["int8"] == 64e9


def test_measured_rates_are_rates():
    assert all(rate > 0 for rate in measured_rates(1))


def test_parts_and_strangers_have_no_data_sheet(h200):
    platform = h200.platform
    for name in ("NVIDIA H200 MIG 1g.18gb", "NVIDIA H300", ""):
        info = type(h200.info)(platform="cuda", index=0, name=name, arch="sm_90")
        assert platform.roofline(info) is None
    names = [info.name for info in platform.known_devices()]
    assert len(set(names)) == len(names)
    for info in platform.known_devices():
        assert info.memory_bytes > 10 << 30
        assert platform.capabilities(info).dtypes[0] == "bfloat16"
        assert platform.roofline(info).flop_per_s["bfloat16"] > 1e13
