"""Captured and padded steps of whole engines on the fake device, against transformers."""

import logging
from dataclasses import replace

import numpy as np
import pytest
import torch
from fake_devices import open_fake

from cardan.bootstrap.engine_builder import build_engine
from cardan.core.interfaces.errors import OutOfMemoryError, UnsupportedError
from cardan.core.interfaces.graphs import ShapePolicy
from cardan.core.runner.graphs import GraphManager
from cardan.core.runner.step_shapes import StepShape, StepShapes
from cardan.core.types.request import EngineRequest
from cardan.core.types.sampling_params import SamplingParams
from cardan.core.types.step import SchedulerOutput
from cardan.llm import config_from_settings
from cardan.testing.fake import attention
from cardan.testing.fake.settings import VARIABLE
from cardan.testing.tiny_models import make_tiny_model, prompt_ids

NUM_TOKENS = 8
LENGTHS = (3, 30, 1, 45, 9)
SETTINGS = {
    "platform": "fake",
    "dtype": "float32",
    "max_num_seqs": 5,
    "max_num_batched_tokens": 64,
    "num_blocks": 64,
}


class TinyModel:
    """A model on disk, and what transformers answers."""

    def __init__(self, name, directory):
        self.directory = directory
        self._model = make_tiny_model(name, directory)
        self.answers = {length: self._greedy(prompt_ids(length, length)) for length in LENGTHS}

    def _greedy(self, prompt):
        tokens = list(prompt)
        for _ in range(NUM_TOKENS):
            tokens.append(int(self._logits(tokens)[-1].argmax()))
        return tokens[len(prompt) :]

    def prompt_logprobs(self, prompt):
        """Of each token of the prompt but the first."""
        table = self._logits(prompt)[:-1].log_softmax(-1)
        return table.gather(1, torch.tensor(prompt[1:])[:, None])[:, 0].tolist()

    @torch.inference_mode()
    def _logits(self, tokens):
        return self._model(torch.tensor([tokens]), use_cache=False).logits[0]


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return TinyModel("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def gemma(tmp_path_factory):
    return TinyModel("gemma2", tmp_path_factory.mktemp("gemma2"))


class Probe:
    """An engine, and what its model and device saw."""

    def __init__(self, parts):
        self.engine = parts.engine
        self.close = parts.close
        self.executor = parts.engine._executor
        self.graphs = self.executor._runner.graphs
        self.device = self.executor._parts.device
        self.counters = self.device.counters
        self.shapes = set()
        self.logit_rows = set()

    def watch(self):
        """Note the shapes that reach the model from now on."""
        model = self.executor._model
        forward, compute_logits = model.forward, model.compute_logits

        def watched_forward(token_ids, step):
            table = step.plans[0].block_table
            self.shapes.add((len(token_ids), *table.shape))
            return forward(token_ids, step)

        def watched_logits(hidden):
            self.logit_rows.add(len(hidden))
            return compute_logits(hidden)

        model.forward, model.compute_logits = watched_forward, watched_logits

    def run(self, lengths=LENGTHS, **params):
        """Tokens of a request of each length; the log-probabilities of their prompts."""
        params = {"temperature": 0.0, "max_tokens": NUM_TOKENS, **params}
        for key, length in enumerate(lengths):
            request = EngineRequest(
                key=key, request_id=str(key), prompt_token_ids=prompt_ids(length, length),
                params=SamplingParams(**params), max_tokens=params["max_tokens"], arrival_time=0.0,
            )  # fmt: skip
            self.engine.add(request)
        tokens = {length: [] for length in lengths}
        self.prompt_logprobs = {length: [] for length in lengths}
        while self.engine.has_work:
            outputs = self.engine.step()
            for key, token_id in zip(outputs.keys, outputs.token_ids, strict=True):
                tokens[lengths[key]].append(token_id)
            for key, tables in outputs.prompt_logprobs.items():
                self.prompt_logprobs[lengths[key]] += tables
            assert all(end.message is None for end in outputs.finished.values())
        assert self.executor.num_live_rows == 0
        return tokens


@pytest.fixture
def start(monkeypatch):
    """Builds engines and closes them."""
    probes = []

    def build(model, fake, **settings):
        monkeypatch.setenv(VARIABLE, fake)
        config = config_from_settings(str(model.directory), {**SETTINGS, **settings})
        probes.append(Probe(build_engine(config)))
        return probes[-1]

    yield build
    for probe in probes:
        probe.close("the test is over")


# -- tokens -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fake",
    ["graphs=none depth=0", "graphs=none", "graphs=decode", "graphs=full depth=2", "static=1"],
)
def test_greedy_tokens_are_those_of_transformers(start, llama, fake):
    probe = start(llama, fake)
    assert probe.run() == llama.answers
    assert (probe.graphs.num_graphs > 0) == ("graphs=none" not in fake and "static" not in fake)


def test_windows_and_soft_caps_in_graphs(start, gemma):
    probe = start(gemma, "graphs=full")
    # Decode steps, and mixed ones of 2 to 64 tokens.
    assert probe.graphs.num_graphs == 8 + 6
    assert probe.run() == gemma.answers
    assert probe.graphs.counters.eager == 0


def test_preempted_and_chunked_requests_in_graphs(start, llama):
    probe = start(llama, "graphs=full static=1", num_blocks=12, max_num_batched_tokens=16)
    assert probe.run() == llama.answers
    assert probe.run() == llama.answers  # from the prefix cache
    assert probe.graphs.counters.eager == 0


def test_attention_that_plans_into_its_own_buffers(start, llama, monkeypatch):
    """A replay sees the newest plan of its shape, not the one that was captured."""

    class Deriving(attention.FakeAttention):
        buffers = {}  # noqa: RUF012 (one engine uses it)

        def plan(self, batch):
            key = (batch.num_tokens, batch.num_rows)
            slots = self.buffers.setdefault(key, torch.empty_like(batch.slot_mapping))
            slots.copy_(batch.slot_mapping)
            return replace(batch, slot_mapping=slots)

    monkeypatch.setattr(attention, "backends", lambda faults: (Deriving,))
    probe = start(llama, "graphs=full")
    assert probe.run() == llama.answers
    assert probe.graphs.counters.replayed > 0


# -- replays, syncs ---------------------------------------------------------------------------


def test_decode_steps_are_replays(start, llama):
    probe = start(llama, "graphs=decode")
    report = probe.graphs.num_graphs
    # Rows 1, 2, 4, 8 by contexts of 64 and 128 tokens.
    assert report == probe.counters.captures == 8
    assert probe.graphs.num_bytes == probe.device.memory.stats().by_tag["graphs"] > 0
    probe.run(lengths=(9,))
    counters = probe.graphs.counters
    assert (counters.eager, counters.replayed) == (1, NUM_TOKENS - 1)
    assert probe.counters.replays == NUM_TOKENS - 1
    probe.run()
    assert counters.eager < counters.replayed
    graphs = probe.graphs
    probe.close("done")
    assert graphs.num_graphs == graphs.num_bytes == 0
    assert probe.device.memory.stats().by_tag == {}


@pytest.mark.parametrize("fake", ["graphs=none depth=1", "graphs=decode depth=1"])
def test_nothing_waits_for_the_device_inside_a_step(start, llama, fake):
    probe = start(llama, fake)
    before = probe.counters.syncs
    probe.run(ignore_eos=True)
    assert probe.counters.syncs == before
    probe.run(temperature=0.8, seed=1, logprobs=2, presence_penalty=0.5, ignore_eos=True)
    assert probe.counters.syncs == before


def test_eager_if_told_so(start, llama, caplog):
    probe = start(llama, "graphs=full", enforce_eager=True)
    assert probe.run() == llama.answers
    assert probe.counters.captures == probe.counters.replays == 0
    assert "eager" not in caplog.text


def test_attention_that_cannot_be_captured_runs_eagerly(start, llama, caplog):
    with caplog.at_level(logging.WARNING):
        probe = start(llama, "graphs=full", attention_backend="reference")
    assert probe.run() == llama.answers
    assert probe.counters.captures == 0
    [record] = [r for r in caplog.records if "eager" in r.message]
    assert "reference attention: shapes follow the batch" in record.message


# -- shapes -----------------------------------------------------------------------------------


@pytest.mark.parametrize("graphs", ["none", "full"])
def test_strict_devices_see_only_bucket_shapes(start, llama, graphs):
    probe = start(llama, f"static=1 graphs={graphs}")
    probe.watch()
    assert probe.run(prompt_logprobs=1) == llama.answers
    buckets = {1, 2, 4, 8, 16, 32, 64, 128}
    for tokens, rows, width in probe.shapes:
        assert tokens in buckets
        assert rows in buckets
        assert width in (4, 8)  # blocks of 16: contexts of 64 and 128 tokens
    assert probe.logit_rows <= {1, 2, 4, 8, 256}
    for length in LENGTHS:
        found = [table.logprobs[0] for table in probe.prompt_logprobs[length]]
        want = llama.prompt_logprobs(prompt_ids(length, length))
        np.testing.assert_allclose(found, want, atol=1e-4)


def plan(counts, computed):
    empty = np.zeros(0, np.int32)
    return SchedulerOutput(
        step_id=0, new_rows=[], freed_rows=[], block_edits=(), block_copies=(),
        rows=np.arange(len(counts), dtype=np.int32), keys=empty.astype(np.int64),
        num_scheduled_tokens=np.array(counts, np.int32),
        num_computed_tokens=np.array(computed, np.int32), samples=np.ones(len(counts), bool),
    )  # fmt: skip


def shapes(policy, graphs="none", max_num_blocks=100):
    return StepShapes(policy, graphs, 64, 12, max_num_blocks, 16)


def test_shapes_without_buckets_are_those_of_the_step():
    plain = shapes(ShapePolicy())
    assert plain.of(plan([5, 1], [0, 40])) == StepShape(6, 2, 3, False)
    assert plain.of(plan([1, 1, 1], [0, 15, 16])) == StepShape(3, 3, 2, True)
    assert plain.of(plan([1], [5000])) == StepShape(1, 1, 100, True)
    assert plain.buffer_sizes == (64, 12)
    assert plain.captured() == []
    assert plain.num_logit_rows(3) == 3


POLICY = ShapePolicy((2, 8, 32), (4, 16), (64, 256), strict=True)


def test_shapes_in_buckets():
    some = shapes(POLICY)
    assert some.of(plan([5, 1], [0, 40])) == StepShape(8, 4, 4, False)
    assert some.of(plan([1], [64])) == StepShape(8, 4, 16, True)
    assert some.of(plan([1], [257])) == StepShape(8, 4, 100, True)
    assert some.of(plan([40], [0])) == StepShape(40, 4, 4, False)
    assert some.buffer_sizes == (64, 16)
    assert some.num_logit_rows(3) == 4


def test_captured_shapes_are_those_that_steps_have():
    decode, full = shapes(POLICY, "decode"), shapes(POLICY, "full")
    assert decode.captured() == [
        StepShape(tokens, rows, width, True)
        for tokens, rows in ((32, 16), (8, 4))
        for width in (100, 16, 4)
    ]
    mixed = [StepShape(tokens, 16, 100, False) for tokens in (32, 8, 2)]
    assert sorted(full.captured()) == sorted([*decode.captured(), *mixed])
    assert full.of(plan([5, 1], [0, 40])) == StepShape(8, 16, 100, False)
    assert full.of(plan([33], [0])) == StepShape(33, 4, 4, False)
    rng = np.random.default_rng(0)
    for _ in range(200):
        counts = rng.integers(1, 4, size=rng.integers(1, 13))
        step = plan(counts, rng.integers(0, 1500, size=len(counts)))
        if step.num_tokens <= 32:
            assert full.of(step) in full.captured()
        if step.num_tokens == len(counts):
            assert decode.of(step) in decode.captured()


def test_without_kv_buckets_captured_tables_have_their_full_width():
    policy = ShapePolicy((8,), (8,))
    assert {shape.num_blocks for shape in shapes(policy, "decode").captured()} == {100}
    assert shapes(policy, "decode").of(plan([1], [3])).num_blocks == 100
    assert shapes(policy).of(plan([1], [3])).num_blocks == 1


# -- the manager ------------------------------------------------------------------------------

SHAPES = [StepShape(4, 4, 8, True), StepShape(2, 2, 8, True), StepShape(1, 1, 8, True)]


@pytest.fixture
def manager():
    device = open_fake("graphs=full memory_mb=1")
    yield GraphManager(device), device
    device.close()


def test_a_shape_without_memory_is_left_out(manager, caplog):
    graphs, device = manager

    def prepare(shape):
        return lambda: torch.zeros(shape.num_tokens * (1 << 17))

    with device.inference(), caplog.at_level(logging.WARNING):
        report = graphs.capture(SHAPES, prepare)
    assert report.num_graphs == graphs.num_graphs == 2
    assert report.graph_bytes == graphs.num_bytes == 1 << 20
    [record] = caplog.records
    assert "2 of 3 step shapes are captured, other steps run eagerly: graphs need" in record.message
    with device.inference():
        for shape in SHAPES:
            assert len(graphs.run(shape, prepare(shape))) == shape.num_tokens << 17
    assert (graphs.counters.replayed, graphs.counters.eager) == (2, 1)


@pytest.mark.parametrize("error", [UnsupportedError, OutOfMemoryError])
def test_what_cannot_be_captured_runs_eagerly(manager, caplog, error):
    graphs, device = manager
    calls = []

    def prepare(shape):
        def forward():
            calls.append(shape)
            if len(calls) % 2 == 0:
                raise error("this op cannot")
            return torch.zeros(shape.num_tokens)

        return forward

    with device.inference(), caplog.at_level(logging.WARNING):
        report = graphs.capture(SHAPES, prepare)
    assert (report.num_graphs, report.graph_bytes) == (0, 0)
    assert len(caplog.records) == 1
    assert "0 of 3 step shapes are captured" in caplog.text
    # Another shape would not fare better where the operation is not supported.
    assert len(calls) == (2 if error is UnsupportedError else 6)


def test_closing_releases(manager):
    graphs, device = manager
    with device.inference():
        graphs.capture(SHAPES, lambda shape: lambda: torch.zeros(shape.num_tokens) + 1)
    assert graphs.num_graphs == 3
    assert graphs.num_bytes == 2 * 16  # the pool of the largest
    graphs.close()
    graphs.close()
    assert graphs.num_graphs == graphs.num_bytes == 0
    assert device.memory.stats().by_tag == {}
