"""How fast a device can be at best, and which share of that is reached: facts for planning."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Efficiency:
    """Which share of a device's peaks steps have reached, as somebody measured it.

    Attributes:
        weights: share of ``Roofline.bytes_per_s`` at which weights are read.
        cache: the same of the KV cache.
        products: share of ``Roofline.flop_per_s`` of matrix products with weights, by dtype.
        attention: the same of attention's products over a prompt.
        layer_s: seconds that a layer costs a step besides, whatever the step's size.
        source: on which device, with what, in words.
    """

    weights: float
    cache: float
    products: Mapping[str, float]
    attention: float
    layer_s: float
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Roofline:
    """Peaks of one device; nothing that runs on it is faster.

    Attributes:
        bytes_per_s: of its memory; None: unknown.
        flop_per_s: of dense matrix products, by dtype of the factors; a multiplication and an
            addition are two. ``int8`` stands for weights in quantised blocks, too.
        source: where the peaks are from, in words: a data sheet, a measurement.
        reserved_bytes: of the device's memory, what is not to be had: the driver's, the runtime's,
            and, where host and device share memory, what others use now.
        efficiency: None where nobody has measured it.
    """

    bytes_per_s: float | None = None
    flop_per_s: Mapping[str, float] = field(default_factory=dict)
    source: str
    reserved_bytes: int = 0
    efficiency: Efficiency | None = None
