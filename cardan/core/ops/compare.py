"""How far a kernel is from its operation's definition, measured against float64 on the host.

Used by the registry's self-check and by the conformance tests, so that both judge alike.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from cardan.core.interfaces.kernels import Attributes, Case, Kernel, OpSpec, Tolerance


@dataclass(frozen=True, slots=True)
class Comparison:
    """The worst element of all outputs of one case.

    ``ratio`` is its error over the accepted error (<= 1: within tolerance); ``where`` names output
    and index. ``fault`` is set where outputs cannot be compared at all (count, shape, dtype).
    """

    max_error: float
    ratio: float
    where: str
    fault: str = ""

    @property
    def ok(self) -> bool:
        return not self.fault and self.ratio <= 1.0

    def __str__(self) -> str:
        if self.fault:
            return self.fault
        return f"error {self.max_error:.3g} is {self.ratio:.2g} x the tolerance at {self.where}"


def compose(op: OpSpec, parts: Mapping[str, Kernel]) -> Kernel:
    """The body of ``op`` as a kernel, ``parts`` filled in where it is composite."""
    return partial(op.body, parts) if op.parts else op.body


def reference_kernel(op: OpSpec, ops: Mapping[str, OpSpec]) -> Kernel:
    """The body of ``op`` with the bodies of its parts; ``ops`` by name."""
    return compose(op, {name: reference_kernel(ops[name], ops) for name in op.parts})


def copy_args(args: Sequence[Any], device: str | None = None, widen: bool = False) -> list[Any]:
    """Fresh copies of tensor arguments; ``widen`` makes floating ones float64."""
    return [_copy(arg, device, widen) if isinstance(arg, torch.Tensor) else arg for arg in args]


def placed(case: Case, device: torch.device, float64: bool) -> Case:
    """``case``, which is on the host, on ``device``. What is float64 becomes float32 where the
    device has no float64, as in the engine."""
    return Case(tuple(_placed(arg, device, float64) for arg in case.args), case.attributes)


def prepared_args(
    op: OpSpec, args: Sequence[Any], attributes: Attributes, prepare: Kernel | None
) -> list[Any]:
    """``args`` as the kernel of a provider with ``prepare`` takes them; attributes name a dtype."""
    ready = list(args)
    if prepare is not None and op.prepares is not None:
        ready[op.prepares] = prepare(ready[op.prepares], **attributes)
    return ready


def compare_case(
    op: OpSpec,
    kernel: Kernel,
    case: Case,
    ops: Mapping[str, OpSpec],
    tolerance: Tolerance,
    prepare: Kernel | None = None,
) -> Comparison:
    """Run ``kernel`` and the float64 body on ``case`` and compare outputs and mutated arguments.

    The body also runs in the working dtype, whose output dtypes the kernel's must equal; both on
    the host, for the device may have no float64.
    ``prepare`` is the provider's, of an operation that prepares an argument.
    """
    body = reference_kernel(op, ops)
    truth = _outputs(op, body, copy_args(case.args, "cpu", widen=True))
    working = _outputs(op, body, copy_args(case.args, "cpu"))
    own_args = prepared_args(op, copy_args(case.args), case.attributes, prepare)
    actual = _outputs(op, kernel, own_args)
    if len(actual) != len(truth):
        return _fault(f"gives {len(actual)} outputs instead of {len(truth)}")
    found = [
        compare_tensors(got, model.dtype, want, tolerance, f"output {index}")
        for index, (got, model, want) in enumerate(zip(actual, working, truth, strict=True))
    ]
    return max(found, key=lambda item: item.ratio, default=Comparison(0.0, 0.0, "none"))


def compare_tensors(
    actual: torch.Tensor, dtype: torch.dtype, truth: torch.Tensor, tolerance: Tolerance, label: str
) -> Comparison:
    """Compare one output of expected ``dtype`` with its float64 (or integer) ``truth``."""
    if actual.dtype != dtype:
        return _fault(f"{label} is {actual.dtype} instead of {dtype}")
    if actual.shape != truth.shape:
        return _fault(f"{label} is {tuple(actual.shape)} instead of {tuple(truth.shape)}")
    if truth.numel() == 0:
        return Comparison(0.0, 0.0, label)
    got = actual.detach().to(device="cpu", dtype=torch.float64).flatten()
    want = truth.to(torch.float64).flatten()
    same = (got == want) | (got.isnan() & want.isnan())
    error = torch.where(same, 0.0, (got - want).abs().nan_to_num(torch.inf, posinf=torch.inf))
    exact = not truth.dtype.is_floating_point
    accepted = 0.0 * want if exact else tolerance.atol + tolerance.rtol * want.abs()
    # What is not finite accepts only itself.
    ratio = torch.where(error.isfinite(), error / accepted, torch.inf)
    ratio = torch.where(same, 0.0, ratio)
    worst = int(ratio.argmax())
    # torch's function for this imports its compiler's algebra, half a second's work.
    position = [int(i) for i in np.unravel_index(worst, tuple(truth.shape))]
    where = f"{label}{position}: {got[worst].item():.6g} instead of {want[worst].item():.6g}"
    return Comparison(float(error[worst]), float(ratio[worst]), where)


def _outputs(op: OpSpec, kernel: Kernel, args: list[Any]) -> list[torch.Tensor]:
    result = kernel(*args)
    values = [result] if isinstance(result, torch.Tensor) else list(result or ())
    return [*values, *(args[position] for position in op.mutates)]


def _copy(tensor: torch.Tensor, device: str | None, widen: bool) -> torch.Tensor:
    dtype = torch.float64 if widen and tensor.dtype.is_floating_point else tensor.dtype
    return tensor.detach().to(device=device or tensor.device, dtype=dtype, copy=True)


def _placed(value: Any, device: torch.device, float64: bool) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    is_narrowed = value.dtype == torch.float64 and not float64
    return (value.to(torch.float32) if is_narrowed else value).to(device)


def _fault(message: str) -> Comparison:
    return Comparison(float("inf"), float("inf"), "none", message)
