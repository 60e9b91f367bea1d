"""Runs operations on a device and judges what comes back, on the host, against float64."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from cardan.core.interfaces.capabilities import Capabilities
from cardan.core.interfaces.device import Device
from cardan.core.interfaces.kernels import Case, Kernel, OpSpec, Provider, Tolerance, check_needs
from cardan.core.ops.catalogue import CATALOGUE
from cardan.core.ops.compare import (
    Comparison,
    compare_tensors,
    copy_args,
    placed,
    prepared_args,
    reference_kernel,
)
from cardan.core.ops.registry import KernelRegistry

OPS: Mapping[str, OpSpec] = {op.name: op for op in CATALOGUE}
# Arguments that models pass as views into a wider tensor: the parts of a fused projection.
VIEWED: Mapping[str, tuple[int, ...]] = {
    "rms_norm": (0,),
    "rotary_embedding": (0, 1),
    "qk_norm_rope": (0, 1),
    "block_linear": (0,),
    "int8_linear": (0,),
}


@dataclass(frozen=True, slots=True)
class OpUse:
    """One operation in one dtype, by one provider or (None) by its definition."""

    op: str
    dtype: str
    provider: Provider | None = None

    def __str__(self) -> str:
        served_by = f"-{self.provider.name}" if self.provider else ""
        return f"{self.op}{served_by}-{self.dtype}"


def reference_uses(dtypes: Sequence[str]) -> list[OpUse]:
    """Every operation in each of ``dtypes`` that it is defined for; float32 if in none.

    The sampler's operations take float32 logits whatever the device prefers.
    """
    uses = []
    for op in CATALOGUE:
        used = [dtype for dtype in op.tolerances if dtype in dtypes] or ["float32"]
        uses += [OpUse(op.name, dtype) for dtype in used]
    return uses


def provider_uses(providers: Sequence[Provider], dtypes: Sequence[str]) -> list[OpUse]:
    """Every provider in each dtype that it claims and the device computes in."""
    uses = []
    for provider in providers:
        op = OPS.get(provider.op)
        stated = set(provider.tolerances) | set(op.tolerances if op else ())
        claimed = provider.needs.dtypes or stated or {"float32"}
        used = sorted(claimed & set(dtypes)) or sorted(claimed)
        uses += [OpUse(provider.op, dtype, provider) for dtype in used]
    return uses


class OpBench:
    """Calls one use's kernel on a device as the engine would.

    Inputs are drawn on the host and moved; results are read after the device was synchronised.
    """

    def __init__(self, device: Device, use: OpUse, providers: Sequence[Provider]) -> None:
        """``providers``: all of the platform. The use's own is pinned, or (None) all are vetoed.

        Raises:
            ConfigError: the provider cannot be loaded, or failed the check that the engine makes.
        """
        if device.torch_device is None:
            raise ValueError("operations run on devices with a torch device")
        self.use = use
        self.op = OPS[use.op]
        self.torch_device = device.torch_device
        self._device = device
        self._features = device.capabilities.instruction_sets
        self._registry = KernelRegistry(
            CATALOGUE,
            providers,
            device=self.torch_device,
            features=self._features,
            float64=device.capabilities.float64,
            pins=[f"{use.op}={use.provider.name}"] if use.provider else [],
        )
        self.kernel = self._bind() if use.provider else reference_kernel(self.op, OPS)

    @property
    def tolerance(self) -> Tolerance:
        """The provider's own, else the operation's."""
        own = self.use.provider.tolerances.get(self.use.dtype) if self.use.provider else None
        return own or self.op.tolerances[self.use.dtype]

    def bound_composite(self) -> Kernel:
        """The operation as the engine binds it: the first fit for the whole, or for its parts."""
        return self._registry.bind(self.op.name, **self._first_attributes())

    def cases(self, seed: int) -> list[Case]:
        """Inputs on the host that the provider takes, without float64 where the device has none."""
        host = torch.device("cpu")
        drawn = self.op.make_inputs(getattr(torch, self.use.dtype), host, seed)
        float64 = self._device.capabilities.float64
        return [placed(case, host, float64) for case in drawn if self.takes(case)]

    def takes(self, case: Case) -> bool:
        """Whether the provider's needs are met by ``case``."""
        if self.use.provider is None:
            return True
        attributes = {**case.attributes, "dtype": self.use.dtype}
        return bool(check_needs(self.use.provider.needs, self._features, attributes))

    def run(self, case: Case, kernel: Kernel, viewed: Sequence[int] = ()) -> "OpResult":
        """Run ``kernel`` on ``case``; arguments at ``viewed`` are given as views of wider ones."""
        args = copy_args(case.args, str(self.torch_device))
        for position in viewed:
            args[position] = _as_view(args[position])
        with self._device.inference():
            result = kernel(*self.prepared(case, args))
            outputs = [result] if isinstance(result, torch.Tensor) else list(result or ())
        self._device.synchronize()
        mutated = [args[position] for position in self.op.mutates]
        host = [tensor.detach().cpu() for tensor in (*outputs, *mutated)]
        return OpResult(host, [x.cpu() if isinstance(x, torch.Tensor) else x for x in args])

    def prepared(self, case: Case, args: Sequence[Any]) -> list[Any]:
        """``args``, those of ``case`` on the device, as the use's kernel takes them."""
        prepare = partial(self._registry.prepare, self.op.name) if self.use.provider else None
        attributes = {**case.attributes, "dtype": self.use.dtype}
        return prepared_args(self.op, args, attributes, prepare)

    def judge(self, case: Case, result: "OpResult", tolerance: Tolerance) -> Comparison:
        """The worst element of all outputs."""
        body = reference_kernel(self.op, OPS)
        truth = self._on_host(body, copy_args(case.args, "cpu", widen=True))
        models = self._on_host(body, copy_args(case.args, "cpu"))
        if len(result.outputs) != len(truth):
            text = f"gives {len(result.outputs)} outputs instead of {len(truth)}"
            return Comparison(float("inf"), float("inf"), "none", text)
        found = [
            compare_tensors(got, model.dtype, want, tolerance, f"output {index}")
            for index, (got, model, want) in enumerate(
                zip(result.outputs, models, truth, strict=True)
            )
        ]
        return max(found, key=lambda item: item.ratio)

    def written_inputs(self, case: Case, result: "OpResult") -> list[int]:
        """Positions of arguments that were written and are not declared as written."""
        return [
            position
            for position, (before, after) in enumerate(zip(case.args, result.args, strict=True))
            if isinstance(before, torch.Tensor)
            and position not in self.op.mutates
            and not same_bits(before, after)
        ]

    def _on_host(self, kernel: Kernel, args: list[Any]) -> list[torch.Tensor]:
        with torch.inference_mode():
            result = kernel(*args)
        outputs = [result] if isinstance(result, torch.Tensor) else list(result or ())
        return [*outputs, *(args[position] for position in self.op.mutates)]

    def _bind(self) -> Kernel:
        return self._registry.bind(self.op.name, **self._first_attributes())

    def _first_attributes(self) -> dict[str, int | float | str | bool]:
        cases = self.cases(0)
        attributes = cases[0].attributes if cases else {}
        return {**attributes, "dtype": self.use.dtype}


@dataclass(frozen=True, slots=True)
class OpResult:
    """Host copies of a call's outputs (mutated arguments last) and of all its arguments after."""

    outputs: list[torch.Tensor]
    args: list[object]


def same_bits(first: object, second: object) -> bool:
    """Whether two host tensors are equal in shape, dtype and every bit."""
    if not isinstance(first, torch.Tensor) or not isinstance(second, torch.Tensor):
        return False
    if first.shape != second.shape or first.dtype != second.dtype:
        return False
    a, b = (x.detach().cpu().contiguous().flatten().view(torch.uint8) for x in (first, second))
    return torch.equal(a, b)


def computing_dtypes(capabilities: Capabilities) -> tuple[str, ...]:
    """What the device computes in, as far as operations state tolerances for it."""
    known = {dtype for op in CATALOGUE for dtype in op.tolerances}
    return tuple(dtype for dtype in capabilities.dtypes if dtype in known)


def _as_view(tensor: torch.Tensor) -> torch.Tensor:
    """The same values as every other row of the second to last dimension of a larger tensor."""
    wide = tensor.new_full((*tensor.shape[:-2], 2 * tensor.shape[-2], tensor.shape[-1]), 7.0)
    view = wide[..., : tensor.shape[-2], :]
    view.copy_(tensor)
    return view
