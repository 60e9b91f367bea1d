"""Mixtures of experts that can be traced: tokens sorted by expert, and ragged products."""

from typing import Any

import jax
import jax.numpy as jnp
import torch
from torch.utils.dlpack import from_dlpack

from cardan.platforms.tpu.host_tensors import as_numpy
from cardan.platforms.tpu.torchax_import import torchax_environment


def expert_mlp(
    x: torch.Tensor, experts: torch.Tensor, expert_ids: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """The operation of this name. Of torchax's tensors, while a step is traced; or of the host's,
    for checks."""
    arrays: Any = (x, experts, expert_ids, weights)
    environment = torchax_environment()
    if type(x) is not torch.Tensor:
        # A call of torch's makes a traced value of the weights, too.
        traced = environment.t2j_iso(tuple(array.contiguous() for array in arrays))
        out: torch.Tensor = environment.j2t_iso(mixed(*traced))
        return out
    with jax.default_matmul_precision("highest"):
        found = mixed(*(jnp.asarray(as_numpy(array)) for array in arrays))
    made: torch.Tensor = from_dlpack(found)
    return made.clone()


def mixed(x: jax.Array, experts: jax.Array, ids: jax.Array, weights: jax.Array) -> jax.Array:
    """x [T, H], experts [E, 3 * I * H], ids [T, k] int32, weights [T, k] float32 -> [T, H].

    Each of the T * k pairs is a row of two ragged products, whose groups are the experts.
    """
    num_tokens, hidden = x.shape
    num_experts, num_choices = len(experts), ids.shape[1]
    inner = experts.shape[1] // (3 * hidden)
    gate_up = experts[:, : 2 * inner * hidden].reshape(num_experts, 2 * inner, hidden)
    down = experts[:, 2 * inner * hidden :].reshape(num_experts, hidden, inner)
    flat = ids.reshape(-1)
    order = jnp.argsort(flat, stable=True)
    sizes = jnp.bincount(flat, length=num_experts).astype(jnp.int32)
    rows = x[order // num_choices]
    both = _product(rows, gate_up, sizes, x.dtype)
    gate, up = both[:, :inner], both[:, inner:]
    wide = gate.astype(jnp.float32)
    product = (jax.nn.silu(wide) * up.astype(jnp.float32)).astype(x.dtype)
    parts = _product(product, down, sizes, x.dtype)
    back = jnp.zeros_like(parts).at[order].set(parts)
    shares = back.reshape(num_tokens, num_choices, hidden).astype(jnp.float32)
    return jnp.sum(shares * weights[:, :, None], axis=1).astype(x.dtype)


def _product(rows: jax.Array, weights: jax.Array, sizes: jax.Array, dtype: Any) -> jax.Array:
    """rows [N, I], sorted by group, times the transposes of weights [E, O, I]."""
    wide = jax.lax.ragged_dot(
        rows, jnp.swapaxes(weights, 1, 2), sizes, preferred_element_type=jnp.float32
    )
    return wide.astype(dtype)
