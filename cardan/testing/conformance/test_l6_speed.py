"""L6: how fast providers, attention and whole steps are, beside the device's roofline.

Nothing is judged: a test fails where what it measures does not run.
"""

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cardan.core.interfaces.attention import LayerParams
from cardan.core.interfaces.capabilities import Capabilities, DeviceInfo
from cardan.core.interfaces.device import Device
from cardan.core.interfaces.errors import ConfigError, UnsupportedError
from cardan.core.interfaces.platform import Platform
from cardan.core.interfaces.roofline import Roofline
from cardan.core.ops.compare import copy_args
from cardan.core.types.sampling_params import SamplingParams
from cardan.testing.conformance.attention_bench import AttentionBench, backends_of
from cardan.testing.conformance.engine_session import EngineSession
from cardan.testing.conformance.op_cases import OPS, OpBench, OpUse, computing_dtypes, provider_uses
from cardan.testing.conformance.paged_batches import TORCH_DTYPES, Geometry, PagedBatch, Row
from cardan.testing.conformance.plugin import device_info_of, platform_of
from cardan.testing.conformance.results import SPEED_FACT, not_supported
from cardan.testing.conformance.speed import SpeedRow, Work, dense_llama_work, measure, summary
from cardan.testing.conformance.speed_cases import speed_cases, work_of
from cardan.testing.conformance.subject import Subject

LEVEL = "L6"

Record = Callable[[str, Work, tuple[float, float]], None]

# Query tokens and context length of each row.
_STEPS: dict[str, list[Row]] = {"decode": [(1, 512)] * 8, "prefill": [(256, 256)]}
_ENGINE_RUNS = 5
_DECODE_ROWS, _DECODE_PROMPT, _DECODE_TOKENS, _PREFILL_TOKENS = 8, 16, 33, 512
_CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 4096,
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
_NOTHING = pytest.param(
    None, marks=pytest.mark.skip(reason="the platform provides no kernels"), id="none"
)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Each provider in the dtype that the device prefers, and each backend."""
    platform, info = platform_of(metafunc.config), device_info_of(metafunc.config)
    if "provided" in metafunc.fixturenames:
        dtypes = computing_dtypes(platform.capabilities(info))
        uses = provider_uses(platform.kernels(info), dtypes)
        uses.sort(key=lambda use: _rank(dtypes, use.dtype))
        first = {(use.op, use.provider and use.provider.name): use for use in reversed(uses)}
        metafunc.parametrize("provided", list(first.values())[::-1] or [_NOTHING], ids=str)
    if "backend" in metafunc.fixturenames:
        backends = backends_of(platform, info)
        metafunc.parametrize("backend", backends, ids=lambda item: str(item.name))


@pytest.fixture(scope="module")
def roofline(cardan_platform: Platform, cardan_device_info: DeviceInfo) -> Roofline | None:
    """The device's peaks; measured where no data sheet has them."""
    return cardan_platform.roofline(cardan_device_info, measure=True)


@pytest.fixture
def record(roofline: Roofline | None, record_property: Callable[[str, object], None]) -> Record:
    """Puts a measurement into the report; a test may take several."""
    rows: list[dict[str, Any]] = []

    def put(what: str, work: Work, times: tuple[float, float]) -> None:
        median, spread = times
        row = SpeedRow(what=what, work=work, median_s=median, spread=spread, roofline=roofline)
        if not rows:
            record_property(SPEED_FACT, rows)
        rows.append(row.facts)

    return put


def test_provider(
    provided: OpUse,
    record: Record,
    cardan_platform: Platform,
    cardan_device_info: DeviceInfo,
    cardan_device: Device,
) -> None:
    """The provider on inputs as large as a small model's step has."""
    if cardan_device.torch_device is None:
        not_supported("the platform runs whole steps itself and has no torch device")
    if provided.op not in OPS:
        not_supported(f"{provided.op} is no operation of this cardan")
    try:
        providers = list(cardan_platform.kernels(cardan_device_info))
        bench = OpBench(cardan_device, provided, providers)
    except ConfigError as error:
        not_supported(str(error))
    items = speed_cases(bench)
    if not items:
        not_supported(f"no test input of {provided.op} meets the needs of {provided}")
    for item in items:
        args = copy_args(item.case.args, str(bench.torch_device))
        outputs = bench.run(item.case, bench.kernel).outputs
        with cardan_device.inference():
            prepared = bench.prepared(item.case, args)
            times = measure(lambda: bench.kernel(*prepared), cardan_device.synchronize)  # noqa: B023
        shapes = ["x".join(map(str, x.shape)) for x in args if isinstance(x, torch.Tensor)]
        format = item.case.attributes.get("format")
        what = f"{provided} {' '.join(shapes[:2])}" + (f" {format}" if format else "")
        record(what, work_of(bench, item, outputs), times)


@pytest.mark.parametrize("step", _STEPS)
def test_attention(step: str, bench: AttentionBench, record: Record) -> None:
    """A layer's write and run, on a plan that was made before."""
    geometry = _geometry(bench)
    batch = PagedBatch(geometry, _STEPS[step], 0, bench.placement(geometry))
    layer = LayerParams(scale=geometry.k_dim**-0.5)
    backend = bench.build(geometry, batch.placement.layout)
    q, k, v = (batch.packed(part) for part in (batch.queries, batch.keys, batch.values))
    with bench.device.inference():
        plan = backend.plan(batch.batch)

        def call() -> None:
            backend.write(k, v, batch.cache, plan)
            backend.run(q, batch.cache, plan, layer)

        times = measure(call, bench.device.synchronize)
    record(f"attention-{bench.backend.name}-{geometry.dtype} {step}", _attended(batch), times)


@pytest.fixture(scope="module")
def engine(
    cardan_subject: Subject,
    cardan_platform: Platform,
    cardan_capabilities: Capabilities,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[EngineSession]:
    """A model of 15 million random weights in the device's preferred dtype."""
    if not cardan_subject.entry:
        not_supported("engines find platforms by their entry points; install the package")
    try:
        from cardan.testing.tiny_models import make_tokenizer
    except ImportError as error:
        not_supported(f"{error.name} is missing; pip install 'cardan[conformance]'")
    folder: Path = tmp_path_factory.mktemp("speed")
    (folder / "config.json").write_text(json.dumps(_CONFIG), encoding="utf-8")
    make_tokenizer().save(str(folder / "tokenizer.json"))
    index = cardan_subject.index
    settings = {
        "platform": cardan_subject.entry if index is None else f"{cardan_subject.entry}:{index}",
        "dtype": cardan_capabilities.dtypes[0],
        "load_format": "dummy",
        "num_blocks": 256,
        "max_num_seqs": _DECODE_ROWS,
        "max_model_len": _CONFIG["max_position_embeddings"],
    }
    try:
        session = EngineSession(str(folder), settings)
    except (ConfigError, UnsupportedError) as error:
        if type(cardan_platform).executor is Platform.executor:
            raise
        not_supported(str(error))
    with session:
        yield session


def test_decode_step(
    engine: EngineSession,
    cardan_capabilities: Capabilities,
    cardan_rng: np.random.Generator,
    record: Record,
) -> None:
    """A step that adds a token to each of several answers, in a whole engine."""
    dtype = cardan_capabilities.dtypes[0]

    def seconds(max_tokens: int) -> float:
        return _answer_s(engine, cardan_rng, [_DECODE_PROMPT] * _DECODE_ROWS, max_tokens)

    seconds(_DECODE_TOKENS)
    steps = _DECODE_TOKENS - 1
    samples = [(seconds(_DECODE_TOKENS) - seconds(1)) / steps for _ in range(_ENGINE_RUNS)]
    context = _DECODE_PROMPT + _DECODE_TOKENS // 2
    work = _step_work(dtype, _DECODE_ROWS, _DECODE_ROWS, context)
    record(f"engine-{dtype} decode, {_DECODE_ROWS} rows", work, summary(samples))


def test_prefill_step(
    engine: EngineSession,
    cardan_capabilities: Capabilities,
    cardan_rng: np.random.Generator,
    record: Record,
) -> None:
    """From a prompt to its first token, in a whole engine."""
    dtype = cardan_capabilities.dtypes[0]
    _answer_s(engine, cardan_rng, [_PREFILL_TOKENS], 1)
    samples = [_answer_s(engine, cardan_rng, [_PREFILL_TOKENS], 1) for _ in range(_ENGINE_RUNS)]
    work = _step_work(dtype, _PREFILL_TOKENS, 1, _PREFILL_TOKENS)
    record(f"engine-{dtype} prefill, {_PREFILL_TOKENS} tokens", work, summary(samples))


def _rank(dtypes: tuple[str, ...], dtype: str) -> int:
    return dtypes.index(dtype) if dtype in dtypes else len(dtypes)


def _geometry(bench: AttentionBench) -> Geometry:
    """What the backend takes, with as many heads as a small model has if it takes those."""
    usual = bench.usual_geometry()
    if not isinstance(usual, Geometry):
        not_supported(f"{bench.backend.name}: {'; '.join(usual.reasons)}")
    wide = replace(usual, heads=16, kv_heads=4)
    return wide if bench.accepts(wide.need) else usual


def _attended(batch: PagedBatch) -> Work:
    """Keys and values of the contexts are read, queries read, outputs written."""
    geometry, item = batch.geometry, batch.geometry.torch_dtype.itemsize
    width = geometry.k_dim + geometry.v_dim
    cached = sum(length for _, length in batch.rows) * geometry.kv_heads * width
    passed = batch.num_query_tokens * geometry.heads * width
    # A query sees itself and all before.
    pairs = sum(count * length - count * (count - 1) // 2 for count, length in batch.rows)
    flop = 2 * pairs * geometry.heads * width
    return Work(num_bytes=item * (cached + passed), flop=flop, dtype=geometry.dtype)


def _step_work(dtype: str, tokens: int, rows: int, context: int) -> Work:
    item_bytes = TORCH_DTYPES[dtype].itemsize
    return dense_llama_work(_CONFIG, dtype, item_bytes, tokens, rows, context)


def _answer_s(
    engine: EngineSession, rng: np.random.Generator, lengths: list[int], max_tokens: int
) -> float:
    """Seconds for answers to new prompts, none of which is in the prefix cache."""
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    requests = [(rng.integers(3, 500, size=length).tolist(), params) for length in lengths]
    began = time.perf_counter()
    engine.generate(requests)
    return time.perf_counter() - began
