"""Filling slots from a checkpoint: what is read, and what is refused."""

import pytest
import torch

from cardan.core.interfaces.errors import WeightsError
from cardan.core.interfaces.model import WeightSlot
from cardan.core.weights.loader import load_weights


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

    def __init__(self, tensors):
        self._tensors = tensors
        self.reads = []

    def names(self):
        return frozenset(self._tensors)

    def shape(self, name):
        return tuple(self._tensors[name].shape)

    def tensor(self, name, dtype=None):
        assert dtype is None
        self.reads.append(name)
        return self._tensors[name]

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
