"""Who serves which operation: resolved once for each use, checked, and explained."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from cardan.core.interfaces.errors import ConfigError, PluginError, UnsupportedError
from cardan.core.interfaces.kernels import (
    REFERENCE,
    Attributes,
    Kernel,
    OpSpec,
    Provider,
    Rejection,
    Resolution,
    check_needs,
)
from cardan.core.ops.compare import compose
from cardan.core.ops.loading import load_provider
from cardan.core.ops.pins import nearest, parse_pins
from cardan.core.ops.self_check import CheckResult, LoadedKernel, self_check

_LOG = logging.getLogger(__name__)
_DEFINITION = "is the definition"

_Use = tuple[str, tuple[tuple[str, int | float | str | bool], ...]]


@dataclass(frozen=True, slots=True)
class _Bound:
    loaded: LoadedKernel
    resolution: Resolution


class KernelRegistry:
    """Binds operations to kernels for one device. Implements ``OpTable``.

    Providers are tried in this order: the user's pin; platforms' packages as given, and within a
    package (the provider's name up to the last dot) by priority; the reference body.
    """

    def __init__(  # noqa: PLR0913 (facts and settings, by keyword only)
        self,
        ops: Sequence[OpSpec],
        providers: Sequence[Provider],
        *,
        device: torch.device,
        features: Sequence[str],
        float64: bool = True,
        pins: Sequence[str] = (),
        strict: bool = False,
        unchecked: bool = False,
    ) -> None:
        """``features``: the device's instruction sets; ``float64``: whether it has that dtype.
        ``pins``: the setting ``device.kernels``.

        ``strict`` makes a provider that cannot be loaded or fails its check an error. With
        ``unchecked`` one that fails its check serves all the same, for tools that look for faults.

        Raises:
            ConfigError: a pin names what does not exist.
            PluginError: an op, or a provider of one op, is there twice; a part is missing.
        """
        self._ops = _by_name(ops)
        self._device = device
        self._features = tuple(features)
        self._float64 = float64
        self._strict = strict
        self._unchecked = unchecked
        self._providers = self._sorted_providers(providers)
        pairs = [(item.op, item.name) for group in self._providers.values() for item in group]
        self._pins = parse_pins(pins, self._ops, pairs)
        self._bound: dict[_Use, _Bound] = {}
        # Outcomes by provider and dtype: a provider is loaded and tried once for each dtype.
        self._checks: dict[tuple[str, str, str], CheckResult] = {}
        self._loaded: dict[tuple[str, str], LoadedKernel] = {}

    def bind(self, op: str, **attributes: int | float | str | bool) -> Kernel:
        """The kernel for this use, resolved at the first call.

        Raises:
            KeyError: no such operation.
            ConfigError: ``dtype`` is missing, or the pinned provider cannot serve.
            PluginError: strict, and a provider cannot be loaded or failed its check.
        """
        return self._bind(op, attributes).loaded.run

    def resolve(self, op: str, **attributes: int | float | str | bool) -> Resolution:
        """Who serves this use; as ``bind``, and with its errors."""
        return self._bind(op, attributes).resolution

    def prepare(self, op: str, weight: Any, **attributes: int | float | str | bool) -> Any:
        """What the kernel of this use takes in place of ``weight``; as ``bind``, with its errors.

        It is ``weight`` itself where the provider prepares nothing.
        """
        prepare = self._bind(op, attributes).loaded.prepare
        return weight if prepare is None else prepare(weight, **attributes)

    def explain(self) -> Sequence[Resolution]:
        """All resolutions so far, in order of binding (parts before their composite)."""
        return [bound.resolution for bound in self._bound.values()]

    def table(self, dtype: str) -> Sequence[Resolution]:
        """Resolve every operation of the catalogue for ``dtype``, at the size of its first input.

        Operations that state no tolerance for ``dtype`` are resolved for float32, in which alone
        they are used.
        """
        resolutions = []
        for op in self._ops.values():
            used = dtype if dtype in op.tolerances else "float32"
            case = op.make_inputs(getattr(torch, used), torch.device("cpu"), 0)[0]
            bound = self._bind(op.name, {**case.attributes, "dtype": used})
            resolutions.append(bound.resolution)
        return resolutions

    def _bind(self, op: str, attributes: Attributes) -> _Bound:
        use = (op, tuple(sorted(attributes.items())))
        if use not in self._bound:
            # Parts are bound (and recorded) before the composite that they belong to.
            bound = self._resolve(op, attributes)
            self._bound[use] = bound
        return self._bound[use]

    def _sorted_providers(self, providers: Sequence[Provider]) -> dict[str, list[Provider]]:
        rank: dict[str, int] = {}
        grouped: dict[str, list[Provider]] = {}
        for provider in providers:
            rank.setdefault(_package(provider), len(rank))
            if provider.op not in self._ops:
                _LOG.warning(
                    "kernel provider %s is for the unknown operation %s and is ignored; %s",
                    provider.name,
                    provider.op,
                    nearest(provider.op, self._ops),
                )
                continue
            group = grouped.setdefault(provider.op, [])
            if provider.name in {REFERENCE, *(other.name for other in group)}:
                raise PluginError(f"{provider.op} has two kernel providers named {provider.name}")
            group.append(provider)
        for group in grouped.values():
            group.sort(key=lambda item: (rank[_package(item)], -item.priority))
        return grouped

    def _resolve(self, name: str, attributes: Attributes) -> _Bound:
        if name not in self._ops:
            raise KeyError(f"no operation named {name!r}; {nearest(name, self._ops)}")
        dtype = str(attributes.get("dtype", ""))
        if not isinstance(getattr(torch, dtype, None), torch.dtype):
            raise ConfigError(f"binding {name} needs dtype, a dtype name; got {dtype!r}")
        op = self._ops[name]
        pinned = self._pins.wanted.get(name)
        rejected: list[Rejection] = []
        for provider in self._providers.get(name, []):
            reasons = self._refusals(op, provider, attributes)
            if not reasons:
                check = self._checks[name, provider.name, dtype]
                resolution = Resolution(
                    name, attributes, provider.name, tuple(rejected), check.text
                )
                return _Bound(self._loaded[name, provider.name], resolution)
            if provider.name == pinned:
                raise ConfigError(
                    f"device.kernels pins {name} to {provider.name}, which cannot serve "
                    f"{_describe(attributes)}: {'; '.join(reasons)}; remove the pin"
                )
            rejected.append(Rejection(provider.name, tuple(reasons)))
        parts = {part: self.bind(part, **attributes) for part in op.parts}
        resolution = Resolution(name, attributes, REFERENCE, tuple(rejected), _DEFINITION)
        return _Bound(LoadedKernel(compose(op, parts)), resolution)

    def _refusals(self, op: OpSpec, provider: Provider, attributes: Attributes) -> list[str]:
        """Why ``provider`` cannot serve this use; the costly questions only if the others pass."""
        pinned = self._pins.wanted.get(op.name)
        if pinned is not None and provider.name != pinned:
            return [f"{op.name} is pinned to {pinned}"]
        reasons = []
        if provider.name in self._pins.vetoed_providers:
            reasons.append("vetoed by the user")
        if op.name in self._pins.vetoed_ops:
            reasons.append(f"all providers of {op.name} are vetoed by the user")
        if provider.version != op.version:
            reasons.append(f"is for version {provider.version} of {op.name}, not {op.version}")
        reasons += check_needs(provider.needs, self._features, attributes).reasons
        if reasons:
            return reasons
        check = self._check(op, provider, str(attributes["dtype"]))
        return [] if check.ok else [check.text]

    def _check(self, op: OpSpec, provider: Provider, dtype: str) -> CheckResult:
        key = (op.name, provider.name, dtype)
        if key not in self._checks:
            check = self._load_and_check(op, provider, dtype)
            if not check.ok and self._unchecked and (op.name, provider.name) in self._loaded:
                check = CheckResult(True, check.text)
            is_faulty = not check.ok and check.is_fault
            if is_faulty and self._strict:
                raise PluginError(
                    f"kernel provider {provider.name} of {op.name} {check.text}; "
                    f"veto it with device.kernels -{provider.name}, or leave strict_kernels off"
                )
            if is_faulty:
                _LOG.warning(
                    "kernel provider %s of %s is not used for %s: %s",
                    provider.name,
                    op.name,
                    dtype,
                    check.text,
                )
            self._checks[key] = check
        return self._checks[key]

    def _load_and_check(self, op: OpSpec, provider: Provider, dtype: str) -> CheckResult:
        loaded = self._loaded.get((op.name, provider.name))
        if loaded is None:
            try:
                found = load_provider(op, provider)
            except UnsupportedError as error:
                return CheckResult(False, str(error), is_fault=False)
            if isinstance(found, str):
                return CheckResult(False, found)
            loaded = self._loaded[op.name, provider.name] = found
        facts = (self._ops, self._device, self._features, self._float64)
        return self_check(op, provider, loaded, dtype, *facts)


def _by_name(ops: Sequence[OpSpec]) -> dict[str, OpSpec]:
    table: dict[str, OpSpec] = {}
    for op in ops:
        if op.name in table:
            raise PluginError(f"two operations are named {op.name}")
        table[op.name] = op
    for op in ops:
        for part in op.parts:
            if part not in table:
                raise PluginError(f"operation {op.name} has the unknown part {part}")
    return table


def _package(provider: Provider) -> str:
    return provider.name.rpartition(".")[0] or provider.name


def _describe(attributes: Mapping[str, int | float | str | bool]) -> str:
    return ", ".join(f"{name}={value}" for name, value in sorted(attributes.items()))
