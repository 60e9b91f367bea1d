"""Filling slots from a checkpoint: what is read, and what is refused."""

from dataclasses import replace

import pytest
import torch

from cardan.core.interfaces.errors import WeightsError
from cardan.core.interfaces.model import WeightSlot
from cardan.core.interfaces.quantization import SchemeBlocks, StoredBlocks
from cardan.core.weights.loader import load_weights
from cardan.core.weights.progress import LoadProgress


class FakeModel:
    """Slots that keep what they are given."""

    ignored_weights = (r".*\.inv_freq", "spare")

    def __init__(self, shapes, optional=()):
        self.loaded = {}
        self.finished = 0
        self._shapes, self._optional = shapes, optional

    def weight_slots(self):
        for name, shape in self._shapes.items():
            yield WeightSlot(name, shape, self._loader(name), name in self._optional)

    def finish_loading(self):
        self.finished += 1

    def _loader(self, name):
        return lambda tensor: self.loaded.__setitem__(name, tensor)


class FakeCheckpoint:
    """Tensors in a dictionary; counts what is read."""

    config = {}  # noqa: RUF012

    def __init__(self, tensors, blocks=None):
        self._tensors = tensors
        self._blocks = blocks or {}
        self.reads = []
        self.releases = 0

    def names(self):
        return frozenset(self._tensors)

    def shape(self, name):
        return tuple(self._tensors[name].shape)

    def tensor(self, name, dtype=None):
        assert dtype is None
        self.reads.append(name)
        return self._tensors[name]

    def stored(self, name):
        return self._blocks.get(name)

    def release_pages(self):
        self.releases += 1

    def describe(self, name):
        return f"{name[0]}.safetensors"

    def close(self):
        pass


def test_loads_every_slot_once():
    tensors = {
        "a": torch.ones(2, 3),
        "b": torch.tensor([float("nan"), float("inf")], dtype=torch.bfloat16),
        "x.inv_freq": torch.ones(4),
        "spare": torch.ones(1),
    }
    model = FakeModel({"b": (2,), "a": (2, 3), "c": (5,)}, optional={"c"})
    checkpoint = FakeCheckpoint(tensors)
    seen = []
    num_bytes = load_weights(model, checkpoint, lambda done, total: seen.append((done, total)))
    assert num_bytes == 2 * 3 * 4 + 2 * 2
    assert checkpoint.reads == ["b", "a"]
    assert model.loaded["a"] is tensors["a"]
    assert seen == [(1, 2), (2, 2)]
    assert model.finished == 1
    assert checkpoint.releases == 1


class StoredModel(FakeModel):
    """Slots that may take stored blocks."""

    def __init__(self, shapes, takes):
        super().__init__(shapes)
        self._takes = takes

    def weight_slots(self):
        for slot in super().weight_slots():
            yield replace(slot, load_stored=self._blocks_loader(slot.name))

    def _blocks_loader(self, name):
        def load(blocks):
            self.loaded[name] = blocks
            return name in self._takes

        return load


def test_stored_blocks_are_offered_first():
    tensors = {name: torch.ones(2, 32) for name in "abc"}
    blocks = {
        name: StoredBlocks("q8_0", 32, torch.zeros(2, 34, dtype=torch.uint8)) for name in "ab"
    }
    model = StoredModel(dict.fromkeys("abc", (2, 32)), takes="a")
    checkpoint = FakeCheckpoint(tensors, blocks)
    num_bytes = load_weights(model, checkpoint)
    # What was refused comes again in full precision.
    assert model.loaded == {"a": blocks["a"], "b": tensors["b"], "c": tensors["c"]}
    assert checkpoint.reads == ["b", "c"]
    assert num_bytes == 2 * 34 + 2 * (2 * 32 * 4)


class Halves(SchemeBlocks):
    """A matrix of two tensors of the checkpoint, its upper and its lower half."""

    def rows(self, start, stop):
        return Halves("halves", self.in_features, self.data[start:stop])

    def columns(self, start, stop):
        return None

    def decoded(self):
        return 2 * self.data


class HalvesScheme:
    """Stores everything but vectors in halves; what a loader needs of a scheme."""

    def tensors_of(self, name, shape):
        half = (shape[0] // 2, *shape[1:])
        return {f"{name}.up": half, f"{name}.low": half} if len(shape) > 1 else {}

    def assemble(self, name, shape, tensors):
        assert list(tensors) == [f"{name}.up", f"{name}.low"]
        return Halves("halves", shape[1], torch.cat(list(tensors.values())))


def test_tensors_of_a_scheme_stand_for_those_of_the_model():
    halves = {f"{name}.{part}": torch.randn(1, 3) for name in "abc" for part in ("up", "low")}
    plain = {"d": torch.ones(2, 3), "v": torch.ones(5)}
    model = StoredModel({**dict.fromkeys("abcd", (2, 3)), "v": (5,)}, takes="ab")
    num_bytes = load_weights(model, FakeCheckpoint({**halves, **plain}), scheme=HalvesScheme())
    for name in "ab":
        assert torch.equal(
            model.loaded[name].data, torch.cat((halves[f"{name}.up"], halves[f"{name}.low"]))
        )
    # What was declined comes decoded; what has its own name is as it is.
    assert torch.equal(model.loaded["c"], 2 * torch.cat((halves["c.up"], halves["c.low"])))
    assert model.loaded["d"] is plain["d"]
    assert model.loaded["v"] is plain["v"]
    assert num_bytes == sum(tensor.nbytes for tensor in (*halves.values(), *plain.values()))


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"a.up": (1, 3)}, r"1 missing tensors: a\.low \[1, 3\]"),
        ({"a.up": (1, 3), "a.low": (2, 3)}, r"a\.low in a\.safetensors is \[2, 3\]"),
        ({"a.up": (1, 3), "a.low": (1, 3), "a.mid": (1,)}, r"no place for: 'a\.mid'"),
        # One of both kinds is too much.
        (
            {"a": (2, 3), "a.up": (1, 3), "a.low": (1, 3)},
            r"2 tensors that .* no place for: 'a\.low'",
        ),
    ],
)
def test_tensors_of_a_scheme_must_all_be_there(tensors, message):
    checkpoint = FakeCheckpoint({name: torch.ones(shape) for name, shape in tensors.items()})
    with pytest.raises(WeightsError, match=message):
        load_weights(FakeModel({"a": (2, 3)}), checkpoint, scheme=HalvesScheme())
    assert not checkpoint.reads


def test_pages_are_let_go_on_the_way():
    # Views of a single element: no memory is used.
    tensors = {name: torch.zeros(1).expand(1 << 20, 10) for name in "abcdefg"}
    checkpoint = FakeCheckpoint(tensors)
    load_weights(FakeModel(dict.fromkeys("abcdefg", (1 << 20, 10))), checkpoint)
    # After every second tensor of 40 MiB, and at the end.
    assert checkpoint.releases == 3 + 1


def test_only_long_loads_are_told_of(caplog):
    caplog.set_level("INFO", logger="cardan.engine")
    now = [0.0]
    progress = LoadProgress("M", lambda: now[0])
    for done in range(1, 51):
        progress(done, 50)
    assert caplog.messages == []
    progress = LoadProgress("M", lambda: now[0])
    for done in range(1, 51):
        now[0] += 0.125
        progress(done, 50)
    assert caplog.messages == [
        "loading M: 32 % of 50 tensors",
        "loading M: 52 % of 50 tensors",
        "loading M: 72 % of 50 tensors",
        "loading M: 92 % of 50 tensors",
    ]


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({}, r"1 missing tensors: a \[2, 3\]"),
        (
            {"a": torch.ones(3, 2)},
            r"wrong shape: a in a\.safetensors is \[3, 2\], the model needs \[2, 3\]",
        ),
        ({"a": torch.ones(6)}, r"is \[6\], the model needs \[2, 3\]"),
        (
            {"a": torch.ones(2, 3), "q": torch.ones(7)},
            r"1 tensors that the model has no place for: 'q' \[7\] in q\.safetensors$",
        ),
        # Patterns match whole names.
        ({"a": torch.ones(2, 3), "spare2": torch.ones(1)}, r"no place for: 'spare2'"),
        ({"b": torch.ones(1)}, r"1 missing tensors: a.*; 1 tensors that .* no place for: 'b'"),
    ],
)
def test_misfits_are_refused_before_anything_is_read(tensors, message):
    model, checkpoint = FakeModel({"a": (2, 3)}), FakeCheckpoint(tensors)
    with pytest.raises(WeightsError, match=message):
        load_weights(model, checkpoint)
    assert not checkpoint.reads
    assert not model.finished


def test_long_lists_are_cut():
    shapes = {f"layer{number:02}": (1,) for number in range(13)}
    with pytest.raises(WeightsError, match=r"13 missing.*layer09 \[1\] and 3 more$") as caught:
        load_weights(FakeModel(shapes), FakeCheckpoint({}))
    assert "layer10" not in str(caught.value)


def test_an_optional_tensor_must_have_the_right_shape():
    model = FakeModel({"a": (2,)}, optional={"a"})
    with pytest.raises(WeightsError, match=r"wrong shape: a"):
        load_weights(model, FakeCheckpoint({"a": torch.ones(3)}))
