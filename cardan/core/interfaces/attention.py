"""Attention over a paged KV cache.

A backend answers ``accepts`` (yes or reasons) from facts alone, is built once for each KV group,
plans once a step, and runs once a layer. Batches mix rows of any query length. The logical shape
of the cache is ``[layer, block, head, token in block, content]``; a layout permutes it.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from cardan.core.interfaces.capabilities import DeviceInfo, Verdict
from cardan.core.types.kv import KVCacheSpec

if TYPE_CHECKING:
    import torch

    from cardan.core.interfaces.device import Device

AttentionKind = Literal["mha", "mla", "linear", "cross", "encoder"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionNeed:
    """What a group of layers asks of a backend; every field is a fact about the model or engine.

    ``mha`` includes grouped and multi-query attention. ``windows`` and ``softcap`` list what the
    layers use. ``lse``: the log-sum-exp of each query and head is wanted. ``captured``: runs
    inside captured graphs; plans of one shape then lie at the same addresses, each call of
    ``plan`` refreshes them, ``max_query_len`` and ``max_seq_len`` are upper bounds, and the host
    lists must not be used. ``max_query_len`` None: any.
    """

    kind: AttentionKind
    num_heads: int
    num_kv_heads: int
    k_head_dim: int
    v_head_dim: int
    dtype: str
    kv_dtype: str
    block_size: int
    windows: frozenset[int] = frozenset()
    softcap: bool = False
    sinks: bool = False
    alibi: bool = False
    lse: bool = False
    tree_mask: bool = False
    captured: bool = False
    max_query_len: int | None = None


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Physical form of a pool.

    ``order`` permutes the logical axes ``(block, kv, head, token, content)`` of one layer, where
    ``kv`` (size 2) separates keys from values. ``opaque`` caches cannot be addressed by the core:
    only block ids cross the boundary.
    """

    order: tuple[int, int, int, int, int] = (0, 1, 3, 2, 4)
    alignment: int = 64
    opaque: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerParams:
    """Constants of one attention layer.

    ``window`` w lets a query see keys at distance < w, itself included. ``softcap`` c replaces
    scores s by c * tanh(s / c). ``sinks`` [num_heads] are extra logits in the softmax denominator.
    ``alibi_slopes`` [num_heads] multiply the (negative) distance. ``k_scale`` and ``v_scale``,
    float32 with one element or [num_kv_heads], multiply what the cache holds: keys and values are
    written divided by them.
    """

    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: "torch.Tensor | None" = None
    alibi_slopes: "torch.Tensor | None" = None
    k_scale: "torch.Tensor | None" = None
    v_scale: "torch.Tensor | None" = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadRotation:
    """What a layer does to its queries and keys before they meet.

    ``rotate(q, k, positions)`` is the definition: an operation, bound to everything else here.
    ``provider`` names who serves that operation; a backend does its work only where it would
    otherwise be done by the same package's kernels, so that pins and vetoes of the user hold.
    ``cos_sin`` as of ``rotary_embedding``; ``q_weight``, ``k_weight`` and ``eps`` as of
    ``qk_norm_rope``, None: the heads are not normed.
    """

    rotate: (
        "Callable[[torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]"
    )
    provider: str
    cos_sin: "torch.Tensor"
    q_weight: "torch.Tensor | None" = None
    k_weight: "torch.Tensor | None" = None
    eps: float = 0.0


@dataclass(slots=True, kw_only=True)
class BatchView:
    """One step as attention sees it, for one KV group.

    T tokens, R rows; tensors live on the device, are int64 where not said otherwise, and are
    updated in place from step to step where a graph has captured them. Lists are host copies.

    Attributes:
        query_lens: [R] query tokens of each row, host.
        seq_lens_host: [R] context lengths after this step, host.
        query_start_loc: [R + 1] prefix sum of query lengths.
        seq_lens: [R] context length of each row after this step.
        positions: [T] position of each query token in its sequence.
        token_rows: [T] row of each query token.
        slot_mapping: [T] ``block_id * block_size + offset`` to write to; -1: padding.
        block_table: [R, max_blocks] int32 block ids; entries past a row's blocks are 0.
        max_query_len: largest query length.
        max_seq_len: largest context length.
        features: additions in use that a backend must know to be right (``tree_mask``, ...).
        extras: the data of those additions.
    """

    query_lens: Sequence[int]
    seq_lens_host: Sequence[int]
    query_start_loc: "torch.Tensor"
    seq_lens: "torch.Tensor"
    positions: "torch.Tensor"
    token_rows: "torch.Tensor"
    slot_mapping: "torch.Tensor"
    block_table: "torch.Tensor"
    max_query_len: int
    max_seq_len: int
    features: frozenset[str] = frozenset()
    extras: dict[str, Any] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        return int(self.positions.shape[0])

    @property
    def num_rows(self) -> int:
        return len(self.query_lens)


class AttentionBackend(ABC):
    """One implementation of attention, for one KV group on one device."""

    name: ClassVar[str]
    # Values of ``BatchView.features`` that this backend honours.
    features: ClassVar[frozenset[str]] = frozenset()

    @classmethod
    @abstractmethod
    def accepts(cls, need: AttentionNeed, device: DeviceInfo) -> Verdict:
        """Whether this backend serves ``need`` on ``device``; touches no device."""

    @classmethod
    @abstractmethod
    def layout(cls, spec: KVCacheSpec, device: DeviceInfo) -> KVLayout:
        """The cache layout this backend wants for ``spec``."""

    @abstractmethod
    def __init__(self, spec: KVCacheSpec, layout: KVLayout, device: "Device") -> None: ...

    @abstractmethod
    def plan(self, batch: BatchView) -> Any:
        """Prepare one step for all layers of the group. The result is opaque to the core."""

    @abstractmethod
    def write(self, k: "torch.Tensor", v: "torch.Tensor", cache: "torch.Tensor", plan: Any) -> None:
        """Store keys [T, num_kv_heads, k_head_dim] and values at the plan's slots."""

    def rotate_and_write(
        self,
        qkv: "tuple[torch.Tensor, torch.Tensor, torch.Tensor]",
        positions: "torch.Tensor",
        rotation: HeadRotation,
        cache: "torch.Tensor",
        plan: Any,
    ) -> "torch.Tensor":
        """Rotate queries and keys, store keys and values; returns the rotated queries.

        A backend may do all of it in one kernel: it alone knows where and in what form the cache
        holds them. Shapes as of ``run`` and ``write``.
        """
        q, k, v = qkv
        q, k = rotation.rotate(q, k, positions)
        self.write(k, v, cache, plan)
        return q

    @abstractmethod
    def run(
        self,
        q: "torch.Tensor",
        cache: "torch.Tensor",
        plan: Any,
        layer: LayerParams,
        lse: "torch.Tensor | None" = None,
    ) -> "torch.Tensor":
        """Attend from q [T, num_heads, k_head_dim] to the cache; causal within each row.

        Returns [T, num_heads, v_head_dim] in q's dtype; fills ``lse`` [T, num_heads] float32
        when given. The step's own keys and values have been written before.
        """
