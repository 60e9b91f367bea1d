"""Steps brought to a device, against loops over requests."""

from contextlib import nullcontext

import numpy as np
import pytest
import torch
from fake_devices import open_fake
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from triton_interpreter import interpreted, interpreting

from cardan.core.interfaces.capabilities import Capabilities, DeviceInfo
from cardan.core.interfaces.memory import MemoryInfo
from cardan.core.interfaces.torch_device import TorchDevice
from cardan.core.ops.reference.step_inputs import step_inputs
from cardan.core.runner import input_batch
from cardan.core.runner.block_tables import BlockTables
from cardan.core.runner.host_input_batch import HostInputBatch
from cardan.core.runner.input_batch import InputBatch
from cardan.core.runner.model_runner import ModelRunner
from cardan.core.runner.request_states import RequestStates
from cardan.core.runner.staging import StagingRing
from cardan.core.runner.step_shapes import StepShape
from cardan.core.sampling.sampler import SampleResult
from cardan.core.types.sampling_params import SamplingParams
from cardan.core.types.step import BlockCopies, BlockEdits, NewRow, SchedulerOutput

BLOCK, ROWS, MAX_LEN, GROUPS = 4, 12, 64, 2
MAX_BLOCKS = MAX_LEN // BLOCK
MOST_TOKENS, MOST_PADDED = 60, 16
CPU = torch.device("cpu")
COPIES = BlockCopies(np.zeros(0, np.int32), np.zeros(0, np.int32))


def host_device():
    info = DeviceInfo(platform="test", index=0, name="test", arch="test")
    return TorchDevice(info, Capabilities(), "cpu", lambda: MemoryInfo(1 << 30, 1 << 30))


class Requests:
    """Requests as Python lists: what a step must give, and random plans for it."""

    def __init__(self, seed):
        self.rng = np.random.default_rng(seed)
        self.tokens, self.blocks, self.computed = {}, {}, {}
        self.free = list(range(ROWS))

    def leave(self):
        gone = [row for row in self.tokens if self.rng.random() < 0.15]
        for row in gone:
            del self.tokens[row], self.blocks[row], self.computed[row]
        self.free += gone
        return gone

    def join(self):
        new = []
        for _ in range(self.rng.integers(0, 3)):
            if not self.free:
                break
            row = self.free.pop(self.rng.integers(len(self.free)))
            self.tokens[row] = self.ids(self.rng.integers(1, 30))
            self.computed[row] = int(self.rng.integers(len(self.tokens[row])))
            self.blocks[row] = [[] for _ in range(GROUPS)]
            new.append(row)
        return new

    def ids(self, count):
        return self.rng.integers(1, 9999, count).tolist()

    def plan(self, only_decode=False):
        """A step over some of the rows, and the rows that it is over."""
        gone, new = ([], []) if only_decode else (self.leave(), self.join())
        rows, counts, left = [], [], MOST_TOKENS
        for row in self.rng.permutation(list(self.tokens)).tolist():
            known = len(self.tokens[row]) - self.computed[row]
            count = known if only_decode else min(int(self.rng.integers(1, known + 1)), left)
            if count <= 0 or (row not in new and self.rng.random() < 0.2 and not only_decode):
                continue
            rows.append(row)
            counts.append(count)
            left -= count
        edits = self.grow(new, rows, counts)
        news = [self.new_row(row) for row in new]
        samples = [
            self.computed[row] + count == len(self.tokens[row])
            for row, count in zip(rows, counts, strict=True)
        ]
        return SchedulerOutput(
            step_id=0, new_rows=news, freed_rows=gone, block_edits=edits,
            block_copies=(COPIES,) * GROUPS, rows=np.array(rows, np.int32),
            keys=np.array(rows, np.int64), num_scheduled_tokens=np.array(counts, np.int32),
            num_computed_tokens=np.array([self.computed[row] for row in rows], np.int32),
            samples=np.array(samples, np.bool_),
        )  # fmt: skip

    def grow(self, new, rows, counts):
        """Give rows the blocks they need, now and then more, and exchange some."""
        counts = dict(zip(rows, counts, strict=True))
        edits = []
        for group in range(GROUPS):
            changes = []
            for row, tables in self.blocks.items():
                needed = -(-(self.computed[row] + counts.get(row, 0)) // BLOCK)
                needed = min(MAX_BLOCKS, needed + int(self.rng.random() < 0.1))
                while len(tables[group]) < needed:
                    changes.append((row, len(tables[group]), self.ids(1)[0]))
                    tables[group].append(changes[-1][2])
                if row not in new and tables[group] and self.rng.random() < 0.1:
                    column = int(self.rng.integers(len(tables[group])))
                    tables[group][column] = self.ids(1)[0]
                    changes.append((row, column, tables[group][column]))
            changes = [change for change in changes if change[0] not in new]
            edits.append(BlockEdits(*np.array(changes, np.int32).reshape(-1, 3).T))
        return tuple(edits)

    def new_row(self, row):
        return NewRow(
            row=row, key=row, token_ids=np.array(self.tokens[row], np.int32),
            num_prompt_tokens=len(self.tokens[row]), num_computed_tokens=self.computed[row],
            params=SamplingParams(), seed=0, stop_token_ids=(), bad_words_token_ids=(),
            block_ids=tuple(np.array(ids, np.int32) for ids in self.blocks[row]),
        )  # fmt: skip

    def expected(self, plan):
        """(ids, positions, rows of tokens, slots by group, lengths, last tokens of samples)"""
        ids, positions, token_rows, lengths, last = [], [], [], [], []
        slots = [[] for _ in range(GROUPS)]
        for place, row in enumerate(plan.rows.tolist()):
            start = self.computed[row]
            end = start + int(plan.num_scheduled_tokens[place])
            for position in range(start, end):
                ids.append(self.tokens[row][position])
                positions.append(position)
                token_rows.append(place)
                for group in range(GROUPS):
                    block = self.blocks[row][group][position // BLOCK]
                    slots[group].append(block * BLOCK + position % BLOCK)
            lengths.append(end)
            if plan.samples[place]:
                last.append(len(ids) - 1)
        return ids, positions, token_rows, slots, lengths, last

    def advance(self, plan, sampled):
        sampled = iter(sampled)
        for place, row in enumerate(plan.rows.tolist()):
            self.computed[row] += int(plan.num_scheduled_tokens[place])
            if plan.samples[place]:
                self.tokens[row].append(next(sampled))
        for row in [row for row, ids in self.tokens.items() if len(ids) > MAX_LEN - 8]:
            self.tokens[row] = self.tokens[row][: self.computed[row] + 1]


class Runner:
    """Rows, tables and a batch of one kind, driven as the model runner drives them."""

    def __init__(self, kind, device=None):
        on_host = kind == "host"
        self.device = device or host_device()
        self.kind = kind
        self.states = RequestStates(ROWS, MAX_LEN, CPU, on_host=on_host)
        self.tables = BlockTables(GROUPS, ROWS, MAX_BLOCKS)
        sizes = (MOST_TOKENS + MOST_PADDED, ROWS + MOST_PADDED, self.tables, BLOCK)
        if on_host:
            self.batch = HostInputBatch(*sizes)
        else:
            kernel = interpreted("step_inputs").step_inputs if kind == "triton" else step_inputs
            self.batch = InputBatch(*sizes, self.device, kernel)

    def gather(self, plan, shape, num_logit_rows):
        for rows in (self.states, self.tables):
            rows.remove(plan.freed_rows)
        for row in plan.new_rows:
            self.states.add(row)
            self.tables.add(row)
        self.tables.edit(plan.block_edits)
        with interpreting() if self.kind == "triton" else nullcontext():
            return self.batch.gather(plan, self.states, shape, num_logit_rows)


def padded(values, size, fill):
    return [*values, *[fill] * (size - len(values))]


def check(inputs, requests, plan, shape):
    """Compare all tensors with what loops over requests give."""
    ids, positions, token_rows, slots, lengths, last = requests.expected(plan)
    num_rows, tokens = len(plan.rows), shape.num_tokens
    assert inputs.token_ids.tolist() == padded(ids, tokens, 0)
    assert inputs.positions.tolist() == padded(positions, tokens, 0)
    assert inputs.logit_places.tolist() == padded(last, len(inputs.logit_places), 0)
    targets = [
        int(row) * MAX_LEN + length
        for row, length, samples in zip(plan.rows, lengths, plan.samples, strict=True)
        if samples
    ]
    assert inputs.append_places.tolist() == targets
    counts = plan.num_scheduled_tokens.tolist()
    starts = np.cumsum([0, *padded(counts, shape.num_rows, 0)]).tolist()
    for group, view in enumerate(inputs.views):
        assert view.positions is inputs.positions
        assert view.token_rows.tolist() == padded(token_rows, tokens, 0)
        assert view.query_start_loc.tolist() == starts
        assert view.seq_lens.tolist() == padded(lengths, shape.num_rows, 0)
        assert view.slot_mapping.tolist() == padded(slots[group], tokens, -1)
        assert view.query_lens == padded(counts, shape.num_rows, 0)
        assert view.seq_lens_host == view.seq_lens.tolist()
        assert (view.max_query_len, view.max_seq_len) == (max(counts), max(lengths))
        assert view.block_table.shape == (shape.num_rows, shape.num_blocks)
        for place, row in enumerate(plan.rows.tolist()):
            held = -(-lengths[place] // BLOCK)
            found = view.block_table[place].tolist()
            assert found[:held] == requests.blocks[row][group][:held]
        assert not view.block_table[num_rows:].any()


def shape_of(plan, rng):
    """A shape that fits, with some padding."""
    longest = int((plan.num_computed_tokens + plan.num_scheduled_tokens).max())
    tokens, rows = (int(extra) for extra in rng.integers(0, MOST_PADDED, 2))
    width = int(rng.integers(-(-longest // BLOCK), MAX_BLOCKS + 1))
    return StepShape(plan.num_tokens + tokens, len(plan.rows) + rows, width, False)


def run_steps(runner, seed, num_steps):
    requests = Requests(seed)
    for _ in range(num_steps):
        plan = requests.plan()
        if not len(plan.rows):
            for rows in (runner.states, runner.tables):
                rows.remove(plan.freed_rows)
            runner.tables.edit(plan.block_edits)
            continue
        shape = shape_of(plan, requests.rng)
        extra = int(requests.rng.integers(0, shape.num_rows - len(plan.rows) + 1))
        inputs = runner.gather(plan, shape, int(plan.samples.sum()) + extra)
        check(inputs, requests, plan, shape)
        sampled = requests.ids(len(inputs.append_places))
        runner.states.append(inputs.append_places, torch.tensor(sampled, dtype=torch.int64))
        requests.advance(plan, sampled)


@pytest.mark.parametrize("kind", ["host", "reference"])
@pytest.mark.parametrize("seed", range(4))
def test_steps_are_those_of_loops_over_requests(kind, seed):
    run_steps(Runner(kind), seed, 60)


@pytest.mark.parametrize(("block", "programs"), [(512, 16), (8, 2)])
def test_the_triton_kernel_does_the_same(block, programs, monkeypatch):
    """Also where rows take several programs, and these several rounds."""
    launches = interpreted("step_inputs")
    monkeypatch.setattr(launches, "_BLOCK", block)
    monkeypatch.setattr(launches, "_MOST_PROGRAMS", programs)
    run_steps(Runner("triton"), 9, 5)


def test_what_finds_no_room_is_copied_alone(monkeypatch):
    monkeypatch.setattr(input_batch, "_FEW_WORDS", 8)
    runner = Runner("reference")
    for step in runner.batch._steps:
        step.staged = step.staged[:20]
    run_steps(runner, 5, 60)


def test_rows_that_are_not_computed_keep_their_changes():
    """A new row and an edit may wait for a later step than the one that brought them."""
    runner, requests = Runner("reference"), Requests(1)
    while len(requests.tokens) < 4:
        requests.join()
    plan = requests.plan(only_decode=True)
    plan.new_rows[:] = [requests.new_row(row) for row in requests.tokens]
    first, rest = plan.rows[:1], plan.rows[1:]
    for rows in (first, rest):
        keep = np.isin(plan.rows, rows)
        part = SchedulerOutput(
            step_id=0, new_rows=[] if rows is rest else plan.new_rows, freed_rows=[],
            block_edits=plan.block_edits if rows is first else (), block_copies=(), rows=rows,
            keys=plan.keys[keep], num_scheduled_tokens=plan.num_scheduled_tokens[keep],
            num_computed_tokens=plan.num_computed_tokens[keep], samples=plan.samples[keep],
        )  # fmt: skip
        shape = StepShape(part.num_tokens, len(rows), MAX_BLOCKS, False)
        check(runner.gather(part, shape, int(part.samples.sum())), requests, part, shape)
    assert not runner.states.fresh
    assert not runner.tables.has_changes


@pytest.mark.parametrize("kind", ["host", "reference"])
def test_a_harmless_step(kind):
    runner = Runner(kind)
    run_steps(runner, 2, 5)
    for shape in (StepShape(8, 3, 5, False), StepShape(4, 6, MAX_BLOCKS, True)):
        inputs = runner.batch.harmless(shape)
        real = min(shape.num_rows, shape.num_tokens)
        assert not inputs.token_ids.any()
        assert not inputs.positions.any()
        for view in inputs.views:
            assert view.seq_lens.tolist() == padded([1] * real, shape.num_rows, 0)
            assert view.query_start_loc.diff().tolist() == view.seq_lens.tolist()
            assert view.token_rows.tolist() == padded(range(real), shape.num_tokens, 0)
            assert (view.slot_mapping == -1).all()
            assert not view.block_table.any()
            assert view.max_query_len == (1 if shape.is_decode else shape.num_tokens)
            assert view.max_seq_len == shape.num_blocks * BLOCK


def test_steps_of_a_shape_lie_at_the_same_addresses():
    runner, requests = Runner("reference"), Requests(3)
    shape = StepShape(70, 20, MAX_BLOCKS, False)
    fields = ("query_start_loc", "seq_lens", "positions", "token_rows", "slot_mapping")

    def addresses(inputs):
        tensors = [inputs.token_ids, *(v.block_table for v in inputs.views)]
        tensors += [getattr(view, name) for view in inputs.views for name in fields]
        return [tensor.data_ptr() for tensor in tensors]

    wanted = addresses(runner.batch.harmless(shape))
    assert all(address % 64 == 0 for address in wanted)
    for number in range(140):
        while not len((plan := requests.plan()).rows):
            pass
        runner.batch.harmless(StepShape(1 + number % 70, 1, 1, False))  # views are dropped
        assert addresses(runner.gather(plan, shape, int(plan.samples.sum()))) == wanted
        requests.advance(plan, requests.ids(int(plan.samples.sum())))


# -- staging ------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [0, 1, 2, 5])
def test_no_step_in_flight_is_overwritten(depth):
    """The device is behind: what it copies then must be what was packed. Nothing waits for it
    before more steps are in flight than there are buffers."""
    device = open_fake("step_ms=1")
    try:
        runner, requests = Runner("reference", device), Requests(depth)
        in_flight = []
        while len(in_flight) < 12:
            plan = requests.plan()
            if not len(plan.rows):
                continue
            shape = shape_of(plan, requests.rng)
            wanted = requests.expected(plan)
            with device.inference():
                inputs = runner.gather(plan, shape, int(plan.samples.sum()))
                sampled = requests.ids(len(inputs.append_places))
                runner.states.append(inputs.append_places, torch.tensor(sampled))
                kept = inputs.token_ids.clone(), inputs.views[1].slot_mapping.clone()
                event = device.event()
            runner.batch.hold_until(event)
            requests.advance(plan, sampled)
            in_flight.append((event, kept, wanted))
            if len(in_flight) > depth:
                in_flight[-1 - depth][0].synchronize()
        device.synchronize()
        for _, (ids, slots), wanted in in_flight:
            assert ids.tolist() == padded(wanted[0], len(ids), 0)
            assert slots.tolist() == padded(wanted[3][1], len(slots), -1)
        assert device.counters.syncs == 0
        runner.batch.close()
        assert not any(pool.num_bytes for pool in device.memory._host_pools)
    finally:
        device.close()


class Marks:
    """A device whose events note that they were waited for."""

    def __init__(self):
        self.waits = []
        self.memory = host_device().memory

    def event(self, name):
        mark = type("Mark", (), {})()
        mark.synchronize = lambda: self.waits.append(name)
        return mark

    def synchronize(self):
        self.waits.append("all")


def test_a_buffer_is_taken_again_after_its_step():
    device = Marks()
    ring = StagingRing(device, 8, 4)
    turns = []
    for number in range(6):
        turns.append(ring.take())
        ring.hold_until(device.event(number))
    assert device.waits == [0, 1]
    assert turns[:4] != turns[1:5]
    assert sorted(turns[:4]) == [0, 1, 2, 3]
    ring.take()  # its step fails: no event is known
    for _ in range(3):
        ring.take()
        ring.hold_until(None)
    assert device.waits == [0, 1, 2, 3, 4, 5]
    ring.take()
    assert device.waits[-1] == "all"
    ring.hold_until(None)
    ring.take()
    assert device.waits[-1] == "all"
    assert len(device.waits) == 7


# -- what a step costs the host -----------------------------------------------------------------


class Calls(TorchDispatchMode):
    """Counts torch operations."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


def uncounted(function):
    def call(*args):
        with _disable_current_modes():
            return function(*args)

    return call


class Stub:
    """Model and sampler whose own work does not count."""

    narrows = False

    def __init__(self):
        self.states = self
        self.hidden = torch.zeros(64, 4)
        self.forward = uncounted(lambda token_ids, step: self.hidden[: len(token_ids)])
        self.compute_logits = uncounted(lambda hidden: hidden.clone())

    def finite_rows(self, hidden):
        return torch.ones(len(hidden), dtype=torch.bool)

    def add(self, row):
        """Take no note of its settings."""

    remove = add

    def sample(self, logits, rows, num_output, mask):
        with _disable_current_modes():
            return SampleResult(torch.arange(len(rows)), torch.zeros(len(rows), dtype=torch.bool))


class Plain:
    def plan(self, view):
        return view


def test_a_decode_step_makes_few_calls_for_any_number_of_rows():
    runner, stub = Runner("reference"), Stub()
    runner.batch._kernel = uncounted(step_inputs)
    shapes = type("Shapes", (), {"is_lazy": False, "of": lambda self, plan: shape})()
    shapes.num_logit_rows = lambda samples: samples
    model_runner = ModelRunner(
        stub, runner.device, runner.states, stub, runner.batch, shapes, stub.finite_rows
    )
    model_runner.bind_kv([Plain()] * GROUPS, [None] * GROUPS, [])
    requests, counts = Requests(4), {}
    for num_rows in (2, ROWS):
        while len(requests.tokens) < num_rows:
            requests.join()
        new = [row for row in requests.tokens if row not in runner.states._live]
        plan = requests.plan(only_decode=True)
        plan.new_rows = [requests.new_row(row) for row in new]
        shape = StepShape(MOST_TOKENS, ROWS, MAX_BLOCKS, False)
        for step in range(8):
            if step:
                plan = requests.plan(only_decode=True)
            shape = shape if not step else StepShape(ROWS, ROWS, MAX_BLOCKS, True)
            with Calls() as calls:
                model_runner.forward(plan)
                handle = model_runner.sample(plan, None)
            requests.advance(plan, handle.result().token_ids[:, 0].tolist())
        counts[num_rows] = calls.names
    # The copy; rows of hidden states and logits; the sampled tokens, converted and written.
    wanted = ["copy_.default", "slice.Tensor", "_to_copy.default", "index_copy_.default"]
    assert counts[2] == counts[ROWS] == wanted
