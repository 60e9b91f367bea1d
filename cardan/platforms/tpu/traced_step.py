"""A step as models see it while it is traced: attention goes to functions of jax."""

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

import torch

from cardan.core.interfaces.attention import AttentionNeed, HeadRotation, LayerParams
from cardan.core.interfaces.model import StepContext

if TYPE_CHECKING:
    import jax


class AttentionFunctions(ABC):
    """Writes to the caches of all layers, and reads of them, within one trace."""

    @abstractmethod
    def write(self, layer: int, keys: "jax.Array", values: "jax.Array") -> None:
        """Keep keys and values [T, num_kv_heads, head_dim] of the step's tokens."""

    @abstractmethod
    def run(self, layer: int, queries: "jax.Array", params: LayerParams) -> "jax.Array":
        """Attend from queries [T, num_heads, head_dim]; the result is like them."""


class TracedStep(StepContext):
    """Has no backends and no plans: the program knows the step."""

    def __init__(
        self,
        positions: torch.Tensor,
        row_ends: torch.Tensor | None,
        functions: AttentionFunctions,
        environment: Any,
    ) -> None:
        super().__init__(positions=positions, layers=(), plans=(), row_ends=row_ends)
        self._functions = functions
        self._environment = environment

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        params: LayerParams,
        rotation: HeadRotation | None = None,
    ) -> torch.Tensor:
        if rotation is not None:
            q, k = rotation.rotate(q, k, self.positions)
        queries, keys, values = self._environment.t2j_iso((q, k, v))
        self._functions.write(layer, keys, values)
        out: torch.Tensor = self._environment.j2t_iso(self._functions.run(layer, queries, params))
        return out


def refusals(need: AttentionNeed) -> list[str]:
    """What of a layer's attention the programs cannot do."""
    reasons = []
    if need.kind != "mha":
        reasons.append(f"attention of kind {need.kind}")
    if need.k_head_dim != need.v_head_dim:
        reasons.append(f"keys of {need.k_head_dim} elements and values of {need.v_head_dim}")
    if need.kv_dtype != need.dtype:
        reasons.append(f"a KV cache in {need.kv_dtype} beside {need.dtype}; leave it to auto")
    for name in ("sinks", "alibi", "tree_mask"):
        if getattr(need, name):
            reasons.append(f"attention with {name.replace('_', ' ')}")
    return reasons
