"""A device-free torch model as a function that jax traces."""

from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import torch

from cardan.core.interfaces.attention import LayerParams
from cardan.core.interfaces.errors import UnsupportedError
from cardan.core.interfaces.model import CausalLM
from cardan.platforms.tpu.host_tensors import HostTensors, as_numpy, jax_dtype
from cardan.platforms.tpu.placement import Placement
from cardan.platforms.tpu.torchax_import import torchax_environment
from cardan.platforms.tpu.traced_step import AttentionFunctions, TracedStep
from cardan.platforms.tpu.weight_split import split_axes


class TracedModel:
    """Owner of a model's modules and of its weights on the device.

    The modules are built and loaded on the host. A first trace finds the tensors that they read;
    these become inputs of every program, so that programs share them.
    """

    def __init__(self, model: CausalLM) -> None:
        self._model = model
        self._environment = torchax_environment()
        self._tensors: tuple[torch.Tensor, ...] = ()
        self.weights: list[jax.Array] = []

    @property
    def narrows(self) -> bool:
        return self._model.narrows

    def find_weights(self) -> Sequence[torch.Tensor]:
        """The host tensors that the model reads, in the order of ``weights``."""
        found: dict[int, torch.Tensor] = {}

        def run() -> jax.Array:
            mode = HostTensors(self._environment, {})
            hidden = self._forward(mode, _one_token(), _Unattended(), None)
            logits = self._logits(mode, hidden)
            found.update(mode.found)
            return logits

        jax.eval_shape(run)
        self._tensors = tuple(found.values())
        return self._tensors

    def upload(self, placement: Placement) -> int:
        """Put the weights on the devices and give up the host's copies; the bytes that they take
        there."""
        tensors = self._tensors or self.find_weights()
        for tensor, places in zip(tensors, self._places(placement), strict=True):
            self.weights.append(placement.put(as_numpy(tensor), places))
        for tensor in tensors:
            _give_up(tensor)
        return sum(weight.nbytes for weight in self.weights)

    def abstract_weights(self, placement: Placement) -> list[jax.ShapeDtypeStruct]:
        """Shapes, dtypes and places of the weights, for models whose tensors hold no numbers."""
        tensors = self._tensors or self.find_weights()
        return [
            jax.ShapeDtypeStruct(tuple(tensor.shape), jax_dtype(tensor.dtype), sharding=places)
            for tensor, places in zip(tensors, self._places(placement), strict=True)
        ]

    def _places(self, placement: Placement) -> list[jax.sharding.NamedSharding]:
        """Of the weights, in their order."""
        axes = split_axes(self._model)
        return [
            placement.split_on(axes.get(id(tensor)), tuple(tensor.shape))
            for tensor in self._tensors
        ]

    def hidden_states(
        self,
        weights: Sequence[jax.Array],
        tokens: tuple[jax.Array, jax.Array],
        attention: AttentionFunctions,
        ends: jax.Array | None,
    ) -> jax.Array:
        """Traced: ``tokens`` are ids and positions [T]; of a model that narrows ``ends`` [R] may
        name the last tokens of rows.

        Returns hidden states: [R, hidden_size] of ``ends``, or [T, hidden_size] where it is None.
        """
        mode = HostTensors(self._environment, self._values(weights))
        hidden = self._forward(mode, tokens, attention, ends)
        _check_found(mode)
        return hidden

    def logits(self, weights: Sequence[jax.Array], hidden: jax.Array) -> jax.Array:
        """Traced: hidden states [N, hidden_size] -> logits [N, vocab_size] float32."""
        mode = HostTensors(self._environment, self._values(weights))
        logits = self._logits(mode, hidden)
        _check_found(mode)
        return logits

    def _values(self, weights: Sequence[jax.Array]) -> Mapping[int, jax.Array]:
        return dict(zip(map(id, self._tensors), weights, strict=True))

    def _forward(
        self,
        mode: HostTensors,
        tokens: tuple[jax.Array, jax.Array],
        attention: AttentionFunctions,
        ends: jax.Array | None,
    ) -> jax.Array:
        wrap, unwrap = self._environment.j2t_iso, self._environment.t2j_iso
        with torch.no_grad(), self._environment, mode:
            token_ids, positions = wrap(tokens)
            row_ends = None if ends is None else wrap(ends)
            step = TracedStep(positions, row_ends, attention, self._environment)
            found: jax.Array = unwrap(self._model.forward(token_ids, step))
        return found

    def _logits(self, mode: HostTensors, hidden: jax.Array) -> jax.Array:
        wrap, unwrap = self._environment.j2t_iso, self._environment.t2j_iso
        with torch.no_grad(), self._environment, mode:
            logits: jax.Array = unwrap(self._model.compute_logits(wrap(hidden)))
        return logits


class _Unattended(AttentionFunctions):
    """Stands for attention where only the weights are looked for."""

    def write(self, layer: int, keys: jax.Array, values: jax.Array) -> None:
        pass

    def run(self, layer: int, queries: jax.Array, params: LayerParams) -> jax.Array:
        return queries


def _one_token() -> tuple[jax.Array, jax.Array]:
    return jnp.zeros(1, jnp.int32), jnp.zeros(1, jnp.int32)


def _check_found(mode: HostTensors) -> None:
    """Raises UnsupportedError where a program would compute with zeros instead of a weight."""
    if mode.found:
        shapes = ", ".join(str(list(tensor.shape)) for tensor in mode.found.values())
        raise UnsupportedError(
            f"the model reads tensors {shapes} in some steps only, which the tpu platform has not "
            "put on the device"
        )


def _give_up(tensor: torch.Tensor) -> None:
    """Free a tensor's memory; pages of a mapped file are the kernel's to take."""
    storage = tensor.untyped_storage()
    if storage.resizable():
        storage.resize_(0)
