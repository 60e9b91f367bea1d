"""Facts about a device, as data. Nobody asks who a device is, only what it can do."""

from dataclasses import dataclass, field
from typing import Literal

GraphSupport = Literal["none", "decode", "full"]
Determinism = Literal["none", "run", "batch_invariant"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceInfo:
    """One accelerator as found by its platform, before it is opened.

    ``index`` is stable within the platform. ``memory_bytes`` is None where it cannot be known
    without opening the device. ``details`` holds what ``doctor`` prints besides.
    """

    platform: str
    index: int
    name: str
    arch: str
    memory_bytes: int | None = None
    details: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What a device can do. The defaults describe a device of which nothing is known.

    Attributes:
        dtypes: dtypes it computes in, preferred one first.
        float64: whether tensors may be float64; where not, sampling sums probabilities in float32.
        kv_dtypes: dtypes it can keep the KV cache in, besides the computing ones.
        instruction_sets: names for display and for kernels' needs (``Needs.features``).
        graphs: ``none``; ``decode``: steps of one query token a row; ``full``: any step.
        static_shapes: whether each new shape costs a compilation.
        async_depth: steps that may be in flight while the host plans the next.
        streams: whether streams run concurrently.
        pinned_host_memory: whether host pools can be page-locked.
        unified_memory: whether host and device share memory. A torch ``cpu`` device that says so
            also computes at once, so that the host may write its tensors directly.
        peer_copies: whether two of these devices copy without the host.
        sleep_levels: supported levels of ``MemoryAllocator.sleep``.
        determinism: whether repeated runs, or any batch, give the same bits.
        lora: whether adapters can be applied for each row.
        max_query_tokens: most query tokens a row in a decode-shaped step (speculation).
    """

    dtypes: tuple[str, ...] = ("float32",)
    float64: bool = True
    kv_dtypes: tuple[str, ...] = ()
    instruction_sets: tuple[str, ...] = ()
    graphs: GraphSupport = "none"
    static_shapes: bool = False
    async_depth: int = 0
    streams: bool = False
    pinned_host_memory: bool = False
    unified_memory: bool = False
    peer_copies: bool = False
    sleep_levels: tuple[int, ...] = ()
    determinism: Determinism = "none"
    lora: bool = False
    max_query_tokens: int = 1


@dataclass(frozen=True, slots=True)
class Verdict:
    """Yes, or the reasons why not. ``bool(verdict)`` is the answer."""

    reasons: tuple[str, ...] = ()

    @classmethod
    def yes(cls) -> "Verdict":
        return cls()

    @classmethod
    def no(cls, *reasons: str) -> "Verdict":
        if not reasons:
            raise ValueError("a refusal needs a reason")
        return cls(reasons)

    def __bool__(self) -> bool:
        return not self.reasons
