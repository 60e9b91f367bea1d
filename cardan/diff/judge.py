"""Judging calls: each against its truth on the other side's inputs, and as errors add up."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from cardan.core.interfaces.errors import PluginError
from cardan.core.interfaces.kernels import OpSpec, Tolerance
from cardan.core.ops.compare import Comparison, compare_tensors
from cardan.diff.recorder import CallEvent, Site
from cardan.diff.truth import AttentionTruth, host, op_truth, tensors_of

# A call is at fault beyond its tolerance and so many times the reference's own error. Tolerances
# are for inputs of order 1; a model's may be far larger, and the reference shows what that does.
SLACK = 4.0
_EXACT = Comparison(0.0, 0.0, "none")
_UNSTATED = Tolerance(0.0, 0.0)


@dataclass(frozen=True, slots=True)
class Recorded:
    """One call of the reference.

    ``outputs`` are on the host as it computed them, ``truth`` in float64; ``args`` are live until
    the step is over. ``history``: an attention call's keys and values [L, ...].
    """

    site: Site
    path: str
    args: tuple[Any, ...]
    outputs: list[Tensor]
    truth: list[Tensor]
    error: Comparison
    history: tuple[Tensor, Tensor] | None = None


@dataclass(frozen=True, slots=True)
class PartError:
    """A call that another one made of an operation it is composed of."""

    op: str
    provider: str
    error: Comparison


@dataclass(slots=True)
class CallDiff:
    """One call on both sides. ``error`` is the subject's own error on the reference's inputs,
    ``propagated`` what has come of it where each side goes on with its own results; both, and
    ``reference_error``, in units of the operation's tolerance."""

    step: int
    index: int
    path: str
    op: str
    shapes: tuple[tuple[int, ...], ...]
    dtype: str
    provider: str
    reference_provider: str
    error: Comparison
    reference_error: Comparison
    is_judged: bool
    parts: tuple[PartError, ...] = ()
    propagated: float = 0.0

    @property
    def is_faulty(self) -> bool:
        """Whether the call, by itself, is out of tolerance."""
        return self.is_judged and not _is_near(self.error, self.reference_error)

    @property
    def faulty_part(self) -> PartError | None:
        """The first part that is out of tolerance."""
        return next((part for part in self.parts if not part.error.ok), None)


def _is_near(error: Comparison, reference: Comparison) -> bool:
    return not error.fault and error.ratio <= max(1.0, SLACK * reference.ratio)


class ReferenceListener:
    """Keeps one step of the reference, with the truth of each call."""

    def __init__(self, ops: Mapping[str, OpSpec], attention: AttentionTruth) -> None:
        self._ops = ops
        self._attention = attention
        self.calls: list[Recorded] = []

    def called(self, event: CallEvent) -> Any:
        if event.depth:
            return event.result
        spec = event.site.spec
        if spec is not None:
            truth = op_truth(spec, event.args, self._ops)
            history = None
        else:
            truth = self._attention.of(event)
            history = self._attention.history(event.path)
        outputs = [host(item) for item in tensors_of(event.result)]
        error = worst(outputs, truth, event.site.tolerance)
        self.calls.append(
            Recorded(event.site, event.path, event.args, outputs, truth, error, history)
        )
        return event.result


class ForcedListener:
    """Judges one step of the subject call by call; each call's result is replaced by the
    reference's, so that the next one gets the reference's inputs."""

    def __init__(self, step: int, calls: Sequence[Recorded], ops: Mapping[str, OpSpec]) -> None:
        self._step = step
        self._calls = calls
        self._ops = ops
        self._parts: list[PartError] = []
        self.found: list[CallDiff] = []

    def called(self, event: CallEvent) -> Any:
        if event.depth:
            self._judge_part(event)
            return event.result
        index = len(self.found)
        reference = expected(self._calls, index, event)
        outputs = [host(item) for item in tensors_of(event.result)]
        tolerance = event.site.tolerance
        diff = CallDiff(
            step=self._step,
            index=index,
            path=event.path,
            op=event.site.op,
            shapes=tuple(tuple(item.shape) for item in event.args if isinstance(item, Tensor)),
            dtype=str(event.site.attributes.get("dtype", "")),
            provider=event.site.provider,
            reference_provider=reference.site.provider,
            error=worst(outputs, reference.truth, tolerance),
            reference_error=reference.error,
            is_judged=tolerance is not None,
            parts=tuple(self._parts),
        )
        self._parts.clear()
        self.found.append(diff)
        return _forced(event.result, reference.outputs)

    def _judge_part(self, event: CallEvent) -> None:
        site = event.site
        if site.spec is None or site.tolerance is None:
            return
        outputs = [host(item) for item in tensors_of(event.result)]
        truth = op_truth(site.spec, event.args, self._ops)
        self._parts.append(PartError(site.op, site.provider, worst(outputs, truth, site.tolerance)))


@dataclass(slots=True)
class FreeListener:
    """Follows one step of the subject that goes on with its own results."""

    calls: Sequence[Recorded]
    found: Sequence[CallDiff]
    index: int = 0
    outputs: list[Tensor] = field(default_factory=list)

    def called(self, event: CallEvent) -> Any:
        if event.depth:
            return event.result
        reference = expected(self.calls, self.index, event)
        self.outputs = [host(item) for item in tensors_of(event.result)]
        if event.site.tolerance not in (None, _UNSTATED):
            wide = [
                item.to(torch.float64) if item.is_floating_point() else item
                for item in reference.outputs
            ]
            error = worst(self.outputs, wide, event.site.tolerance)
            self.found[self.index].propagated = error.ratio
        self.index += 1
        return event.result


def expected(calls: Sequence[Recorded], index: int, event: CallEvent) -> Recorded:
    """The reference's call that ``event`` stands beside.

    Raises:
        PluginError: the reference made another call there.
    """
    other = calls[index] if index < len(calls) else None
    if other is None or (other.site.op, other.path) != (event.site.op, event.path):
        there = "no further one" if other is None else f"{other.site.op} in {other.path}"
        raise PluginError(
            f"call {index} is {event.site.op} in {event.path or 'the model'}, the reference makes "
            f"{there}: the two sides do not run the same operations, so calls cannot be compared. "
            "Where weights are stored in blocks that only one side computes on, take "
            "--quantization none"
        )
    return other


def worst(
    outputs: Sequence[Tensor], truth: Sequence[Tensor], tolerance: Tolerance | None
) -> Comparison:
    """The worst output; without a tolerance anything but equality is infinitely far."""
    if len(outputs) != len(truth):
        fault = f"gives {len(outputs)} outputs instead of {len(truth)}"
        return Comparison(float("inf"), float("inf"), "none", fault)
    found = [
        compare_tensors(
            _unpadded(got, want), got.dtype, want, tolerance or _UNSTATED, f"output {place}"
        )
        for place, (got, want) in enumerate(zip(outputs, truth, strict=True))
    ]
    return max(found, key=lambda item: item.ratio, default=_EXACT)


def _unpadded(x: Tensor, model: Tensor) -> Tensor:
    """The rows that ``model`` has: a platform may pad the tokens of a step."""
    return x[: len(model)] if x.ndim and x.ndim == model.ndim and len(x) > len(model) else x


def _forced(result: Any, outputs: Sequence[Tensor]) -> Any:
    """``result`` with the numbers of ``outputs``; rows beyond them stay."""
    if result is None:
        return None
    forced = []
    for own, other in zip(tensors_of(result), outputs, strict=True):
        copy = own.clone()
        target = copy[: len(other)] if len(copy) > len(other) else copy
        target.copy_(other)
        forced.append(copy)
    return forced[0] if isinstance(result, Tensor) else tuple(forced)
