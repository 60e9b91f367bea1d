"""Trying a provider on an operation's small inputs before it is trusted."""

import random
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from cardan.core.interfaces.kernels import Kernel, OpSpec, Provider, check_needs
from cardan.core.ops.compare import compare_case, placed


@dataclass(frozen=True, slots=True)
class CheckResult:
    """Outcome of a check: whether the provider may serve, and ``Resolution.self_check``.

    ``is_fault``: it is the provider's fault that it may not; False where it says itself that this
    machine lacks what it needs.
    """

    ok: bool
    text: str
    is_fault: bool = True


@dataclass(frozen=True, slots=True)
class LoadedKernel:
    """A provider's functions; ``prepare`` is None where it takes weights as they are."""

    run: Kernel
    prepare: Kernel | None = None


def self_check(  # noqa: PLR0913 (a kernel, and all about where it runs)
    op: OpSpec,
    provider: Provider,
    loaded: LoadedKernel,
    dtype: str,
    ops: Mapping[str, OpSpec],
    device: torch.device,
    features: Sequence[str],
    float64: bool = True,
) -> CheckResult:
    """Compare ``loaded`` with the float64 body on fresh random inputs; exceptions are failures.

    Cases that the provider's needs exclude are left out. ``float64`` says whether the device has
    that dtype. The random seed is in the text, so that a failure can be repeated.
    """
    tolerance = provider.tolerances.get(dtype) or op.tolerances.get(dtype)
    if tolerance is None:
        return CheckResult(True, f"unchecked: {op.name} states no tolerance for {dtype}")
    seed = random.SystemRandom().randrange(2**31)
    worst = 0.0
    checked = 0
    try:
        with torch.inference_mode(), _current(device):
            for drawn in op.make_inputs(getattr(torch, dtype), torch.device("cpu"), seed):
                if not check_needs(provider.needs, features, {"dtype": dtype, **drawn.attributes}):
                    continue
                case = placed(drawn, device, float64)
                found = compare_case(op, loaded.run, case, ops, tolerance, loaded.prepare)
                if not found.ok:
                    return CheckResult(False, f"failed: {found} (seed {seed})")
                worst = max(worst, found.max_error)
                checked += 1
    except Exception as error:
        return CheckResult(False, f"failed: {type(error).__name__}: {error} (seed {seed})")
    if not checked:
        return CheckResult(True, f"unchecked: no test input of {op.name} meets its needs")
    return CheckResult(True, f"passed: {checked} cases, largest error {worst:.2g}")


def _current(device: torch.device) -> AbstractContextManager[object]:
    """Kernels that are not torch's are launched on the current device, wherever tensors are."""
    if device.type == "cpu" or device.index is None:
        return nullcontext()
    make = getattr(torch.get_device_module(device), "device", nullcontext)
    current: AbstractContextManager[object] = make(device)
    return current
