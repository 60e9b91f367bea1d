"""Torch modules that are traced: what they read, and when."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from cardan.core.interfaces.errors import UnsupportedError
from cardan.platforms.tpu.placement import Placement
from cardan.platforms.tpu.traced_model import TracedModel


class TwoTables(torch.nn.Module):
    """Looks its tokens up, those of longer steps in another table where ``fickle``."""

    narrows = False

    def __init__(self, fickle):
        super().__init__()
        self.fickle = fickle
        self.short, self.long = torch.randn(2, 5, 3)

    def forward(self, token_ids, step):
        is_long = self.fickle and len(token_ids) > 1
        return torch.nn.functional.embedding(token_ids, self.long if is_long else self.short)

    def compute_logits(self, hidden):
        return hidden * 2


def hidden_of(model, tokens):
    traced = TracedModel(model)
    traced.upload(Placement.on(jax.devices("cpu")[:1]))
    ids = jnp.asarray(tokens, jnp.int32)

    def run(weights):
        return traced.hidden_states(weights, (ids, jnp.arange(len(tokens))), None, None)

    return np.asarray(jax.jit(run)(traced.weights))


def test_weights_are_inputs():
    model = TwoTables(fickle=False)
    truth = model.short.numpy().copy()
    np.testing.assert_array_equal(hidden_of(model, [3, 1, 4]), truth[[3, 1, 4]])


def test_a_weight_that_no_first_trace_met_is_no_zero():
    with pytest.raises(UnsupportedError, match=r"tensors \[5, 3\] in some steps only"):
        hidden_of(TwoTables(fickle=True), [3, 1, 4])
