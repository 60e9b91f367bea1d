"""What fits beside the weights: the KV cache in tokens, and the longest context."""

from collections.abc import Sequence
from dataclasses import dataclass

from cardan.core.kvcache.sizing import fit_model_len, format_bytes, size_cache
from cardan.core.types.errors import ConfigError
from cardan.core.types.kv import DTYPE_BYTES, KVCacheSpec
from cardan.plan.shape import ModelShape

# Float32 numbers for each entry of the logits: they, and copies while they are edited, sorted out,
# sampled and turned into log-probabilities. Fitted, as the next two, to three models on an H200.
_LOGIT_COPIES = 9.5
# Tensors of the hidden size, and of the intermediate size, that are there at once.
_HIDDEN_COPIES = 6
_INTERMEDIATE_COPIES = 3
_GRAPH_BYTES = 400 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryNeed:
    """What goes into the sum, bytes of one rank.

    Attributes:
        total: of the device, None if unknown.
        reserved: of it, not to be had.
        weights: as served.
        step: the largest step (an estimate).
        graphs: captured graphs (an estimate).
        kv_budget: what the user or the platform gives the cache; None: ``utilization``.
        utilization: share of what the weights leave.
    """

    total: int | None
    reserved: int
    weights: int
    step: int
    graphs: int
    kv_budget: int | None
    utilization: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """The answer. ``problem`` is empty where the model fits; ``warning`` may hold all the same.

    ``max_model_len``: the longest context; ``kv_tokens``: what the cache holds.
    """

    free: int | None
    kv_bytes: int
    kv_tokens: int
    max_model_len: int
    problem: str = ""
    warning: str = ""


def step_bytes(shape: ModelShape, dtype: str, num_tokens: int, num_rows: int, ranks: int) -> int:
    """Estimate of what the largest step needs beside weights and cache."""
    experts = shape.experts
    size = shape.intermediate_size / ranks
    if experts is not None:
        size = max(size, experts.top_k * experts.intermediate_size / ranks)
    qkv = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim / ranks
    elements = _HIDDEN_COPIES * shape.hidden_size + qkv + _INTERMEDIATE_COPIES * size
    logits = min(num_rows, num_tokens) * shape.vocab_size * DTYPE_BYTES["float32"] * _LOGIT_COPIES
    return int(num_tokens * elements * DTYPE_BYTES[dtype] + logits)


def graph_bytes(is_captured: bool) -> int:
    """Estimate of what captured graphs hold."""
    return _GRAPH_BYTES if is_captured else 0


def fit(
    need: MemoryNeed, specs: Sequence[KVCacheSpec], wanted_len: int, explicit: bool, num_rows: int
) -> Fit:
    """Size the cache as the engine does. ``explicit``: the user named ``wanted_len``."""
    free = None if need.total is None else need.total - need.reserved - need.weights
    if free is not None and free <= 0:
        return _refused(free, _weights_problem(need))
    budget = need.kv_budget
    beside = need.step + need.graphs
    if budget is None:
        if free is None:
            return _refused(
                free,
                "the device's memory is not known before it is opened; name the size of the KV "
                "cache with --kv-cache-memory-bytes",
            )
        budget = int(free * need.utilization) - beside
    try:
        cache = size_cache(specs, max(budget, 0), None, wanted_len * num_rows)
        length, warning = fit_model_len(cache, wanted_len, explicit)
    except ConfigError as error:
        # The engine's own remedies are those of somebody who cannot plan.
        return _refused(free, str(error).partition(". Remedies")[0])
    if free is not None and cache.num_bytes + beside > free:
        return _refused(
            free,
            f"the KV cache of {format_bytes(cache.num_bytes)} and steps of about "
            f"{format_bytes(beside)} do not fit into the {format_bytes(free)} that the weights "
            "leave",
        )
    return Fit(
        free=free,
        kv_bytes=cache.num_bytes,
        kv_tokens=cache.num_tokens,
        max_model_len=length,
        warning=warning or "",
    )


def _refused(free: int | None, problem: str) -> Fit:
    return Fit(free=free, kv_bytes=0, kv_tokens=0, max_model_len=0, problem=problem)


def _weights_problem(need: MemoryNeed) -> str:
    total = need.total or 0
    return (
        f"weights of {format_bytes(need.weights)} do not fit into the "
        f"{format_bytes(total - need.reserved)} to be had of {format_bytes(total)}"
    )
