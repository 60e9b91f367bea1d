"""Chooses an attention backend for each KV group and binds the layers to it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import reduce

from cardan.core.interfaces.attention import AttentionBackend, AttentionNeed, KVLayout
from cardan.core.interfaces.capabilities import DeviceInfo, Verdict
from cardan.core.interfaces.device import Device
from cardan.core.interfaces.errors import ConfigError
from cardan.core.interfaces.kernels import Rejection
from cardan.core.interfaces.memory import KVPool
from cardan.core.interfaces.model import LayerCache
from cardan.core.types.kv import KVCacheConfig, KVCacheGroup

# Allocates a group's pool: the group, the layout, the number of blocks.
PoolMaker = Callable[[KVCacheGroup, KVLayout, int], KVPool]


@dataclass(frozen=True, slots=True)
class AttentionChoice:
    """Who serves one KV group, why the others do not, and whether decode steps (of one query token
    a row) and any steps can be captured."""

    backend: type[AttentionBackend]
    rejected: tuple[Rejection, ...]
    captured_decode: Verdict
    captured: Verdict


@dataclass(frozen=True, slots=True)
class BoundLayers:
    """A backend, a pool and the choice of each group, and the cache of each layer."""

    backends: Sequence[AttentionBackend]
    pools: Sequence[KVPool]
    layers: Sequence[LayerCache]
    choices: Sequence[AttentionChoice]


def merge_needs(needs: Sequence[AttentionNeed]) -> AttentionNeed:
    """One need that covers all layers of a group, whose geometry is the same."""
    return reduce(
        lambda a, b: replace(
            a,
            windows=a.windows | b.windows,
            softcap=a.softcap or b.softcap,
            sinks=a.sinks or b.sinks,
            alibi=a.alibi or b.alibi,
            lse=a.lse or b.lse,
        ),
        needs,
    )


def choose_backend(
    need: AttentionNeed,
    candidates: Sequence[type[AttentionBackend]],
    device: DeviceInfo,
    pinned: str | None,
) -> AttentionChoice:
    """The first candidate that accepts, or the pinned one.

    Raises:
        ConfigError: the pinned backend is unknown or refuses, or none accepts.
    """
    names = [candidate.name for candidate in candidates]
    if pinned is not None:
        if pinned not in names:
            raise ConfigError(
                f"device.attention_backend {pinned} is unknown; there are: {', '.join(names)}"
            )
        candidates = [candidates[names.index(pinned)]]
    rejected: list[Rejection] = []
    for candidate in candidates:
        verdict = candidate.accepts(need, device)
        if verdict:
            captured = replace(need, captured=True)
            return AttentionChoice(
                candidate,
                tuple(rejected),
                captured_decode=candidate.accepts(replace(captured, max_query_len=1), device),
                captured=candidate.accepts(captured, device),
            )
        rejected.append(Rejection(candidate.name, verdict.reasons))
    reasons = "; ".join(f"{item.provider}: {', '.join(item.reasons)}" for item in rejected)
    raise ConfigError(f"no attention backend serves this model ({reasons})")


def bind_layers(
    config: KVCacheConfig,
    needs: Sequence[AttentionNeed],
    candidates: Sequence[type[AttentionBackend]],
    device: Device,
    pinned: str | None,
    make_pool: PoolMaker,
) -> BoundLayers:
    """Allocate every group's pool in its backend's layout and hand each layer its view."""
    backends: list[AttentionBackend] = []
    pools: list[KVPool] = []
    choices: list[AttentionChoice] = []
    layers: dict[int, LayerCache] = {}
    for index, group in enumerate(config.groups):
        need = merge_needs([needs[layer] for layer in group.layers])
        choice = choose_backend(need, candidates, device.info, pinned)
        layout = choice.backend.layout(group.spec, device.info)
        pool = make_pool(group, layout, config.num_blocks)
        backend = choice.backend(group.spec, layout, device)
        for slot, layer in enumerate(group.layers):
            layers[layer] = LayerCache(backend, pool.view(slot), index)
        backends.append(backend)
        pools.append(pool)
        choices.append(choice)
    return BoundLayers(backends, pools, [layers[layer] for layer in range(len(needs))], choices)
