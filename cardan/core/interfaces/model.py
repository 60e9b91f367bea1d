"""A model as the runner sees it. Models are written once and know no device."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from cardan.core.interfaces.attention import (
    AttentionBackend,
    AttentionNeed,
    HeadRotation,
    LayerParams,
)
from cardan.core.interfaces.communication import Communicator
from cardan.core.interfaces.kernels import OpTable
from cardan.core.interfaces.quantization import QuantScheme, StoredBlocks
from cardan.core.types.kv import KVCacheSpec

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class WeightSlot:
    """A place for one checkpoint tensor.

    ``shape`` is the tensor's whole shape; ``load`` takes the whole tensor and keeps this rank's
    part of it. ``optional`` slots may be missing from the checkpoint.

    A tensor that is stored in quantised blocks, or in the tensors of a scheme's own
    (``QuantScheme.tensors_of``), is offered to ``load_stored`` first. Where that returns False, or
    is None, ``load`` gets the tensor in full precision.
    """

    name: str
    shape: tuple[int, ...]
    load: "Callable[[torch.Tensor], None]"
    optional: bool = False
    load_stored: Callable[[StoredBlocks], bool] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildContext:
    """What a model is built with. ``communicator`` is None for a single rank."""

    dtype: "torch.dtype"
    device: "torch.device"
    ops: OpTable
    max_model_len: int
    block_size: int
    kv_dtype: str
    communicator: Communicator | None = None
    quantization: QuantScheme | None = None

    @property
    def rank(self) -> int:
        return self.communicator.rank if self.communicator else 0

    @property
    def world_size(self) -> int:
        return self.communicator.world_size if self.communicator else 1


@dataclass(slots=True)
class LayerCache:
    """One layer's attention, bound: which backend, which cache, which group's plan."""

    backend: AttentionBackend
    cache: "torch.Tensor"
    group: int


@dataclass(slots=True)
class StepContext:
    """What layers need of the running step; passed down, never looked up.

    The object and its tensors are the same from step to step where a graph has captured them.
    ``plans`` has one attention plan for each KV group. ``row_ends`` [R] int64 are the last tokens
    of the step's rows, where nobody will read the hidden states of others, else None; see
    ``CausalLM.narrows``.
    """

    positions: "torch.Tensor"
    layers: Sequence[LayerCache]
    plans: Sequence[Any]
    adapters: "torch.Tensor | None" = None
    row_ends: "torch.Tensor | None" = None
    extras: dict[str, Any] = field(default_factory=dict)

    def attend(
        self,
        layer: int,
        q: "torch.Tensor",
        k: "torch.Tensor",
        v: "torch.Tensor",
        params: LayerParams,
        rotation: HeadRotation | None = None,
    ) -> "torch.Tensor":
        """Rotate q and k if there is a rotation, write k and v to layer's cache, then attend.

        Shapes as ``AttentionBackend``.
        """
        bound = self.layers[layer]
        plan = self.plans[bound.group]
        if rotation is None:
            bound.backend.write(k, v, bound.cache, plan)
        else:
            q = bound.backend.rotate_and_write(
                (q, k, v), self.positions, rotation, bound.cache, plan
            )
        return bound.backend.run(q, bound.cache, plan, params)


class CausalLM(ABC):
    """A decoder. Found by architecture name in the entry-point group ``cardan.models``."""

    contract: ClassVar[tuple[int, int]]
    # Checkpoint tensors that are known and not needed: regular expressions over whole names.
    ignored_weights: ClassVar[Sequence[str]] = ()
    # Whether ``forward`` gives ``row_ends`` alone where there are some. A model may say so whose
    # last layer attends to all tokens before: a bad number in what the cache was given for any
    # token must show in those behind it.
    narrows: bool = False

    @abstractmethod
    def __init__(self, config: Mapping[str, Any], build: BuildContext) -> None:
        """Allocate weights (uninitialised) on ``build.device``; ``config`` as config.json."""

    @abstractmethod
    def weight_slots(self) -> Iterator[WeightSlot]:
        """All tensors that the checkpoint must hold."""

    @abstractmethod
    def finish_loading(self) -> None:
        """Called once after every slot was loaded."""

    @abstractmethod
    def kv_specs(self) -> Sequence[KVCacheSpec]:
        """What each layer keeps, in layer order."""

    @abstractmethod
    def attention_needs(self) -> Sequence[AttentionNeed]:
        """What each layer asks of attention, in layer order."""

    @abstractmethod
    def forward(self, token_ids: "torch.Tensor", step: StepContext) -> "torch.Tensor":
        """token_ids [T] int64 -> hidden states [T, hidden_size]; of a model that narrows
        [R, hidden_size], where the step has ``row_ends``."""

    @abstractmethod
    def compute_logits(self, hidden: "torch.Tensor") -> "torch.Tensor":
        """hidden [N, hidden_size] -> logits [N, vocab_size] float32."""
