"""Named operations, their providers, and how a provider is chosen.

An operation is defined by a plain-torch body. Providers offer faster implementations and state as
data what they need; the core resolves each operation once at load, checks the choice against the
body on small inputs, and hands plain callables to the layers.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from cardan.core.interfaces.capabilities import Verdict

Kernel = Callable[..., Any]
# Facts about one use of an operation: dtype name under "dtype", sizes and switches by name.
Attributes = Mapping[str, int | float | str | bool]
# What stands in a provider's place where the operation's body serves.
REFERENCE = "reference"


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Largest accepted error against a float64 run of the body: atol + rtol * |truth|."""

    atol: float
    rtol: float


@dataclass(frozen=True, slots=True)
class Case:
    """One set of inputs: positional arguments of the operation, and the attributes they imply."""

    args: tuple[Any, ...]
    attributes: Attributes


class InputMaker(Protocol):
    """Makes fresh random inputs for an operation on a torch device, in a torch dtype."""

    def __call__(self, dtype: Any, device: Any, seed: int) -> Sequence[Case]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class OpSpec:
    """A named operation. ``body`` is the definition.

    Tensors may be views into wider ones (parts of a fused projection): only the last axis is
    known to be dense.

    A composite operation names its ``parts``; its body then takes, before the other arguments, a
    mapping from part name to kernel, so that providers may serve the whole or the parts.
    ``mutates`` lists positions of arguments that are written in place.

    ``prepares`` is the position of the argument, a weight, that a provider may bring into a form
    of its own once, after loading; the body takes it as it was loaded.
    """

    name: str
    body: Kernel
    version: int
    tolerances: Mapping[str, Tolerance]
    make_inputs: InputMaker
    parts: tuple[str, ...] = ()
    mutates: tuple[int, ...] = ()
    prepares: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """What a provider requires; empty fields require nothing.

    ``dtypes`` of use; ``features`` that must be in the device's instruction sets; ``multiple_of``
    and ``at_most`` bound attributes; ``equals`` fixes them, ``one_of`` to any of several values;
    ``modules`` must be importable.
    """

    dtypes: frozenset[str] = frozenset()
    features: frozenset[str] = frozenset()
    multiple_of: Mapping[str, int] = field(default_factory=dict)
    at_most: Mapping[str, float] = field(default_factory=dict)
    equals: Mapping[str, int | float | str | bool] = field(default_factory=dict)
    modules: tuple[str, ...] = ()
    one_of: Mapping[str, frozenset[int | float | str | bool]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Provider:
    """An implementation of one operation, loaded only when chosen.

    A module whose import raises ``UnsupportedError`` says that this machine lacks what it needs:
    the provider is passed over with that reason, and that is no fault.

    ``name`` is ``package.kernel``; ``load`` is ``module:function``. Higher ``priority`` is tried
    first. ``traits`` are promises such as ``graph_safe`` and ``batch_invariant``.

    ``prepare``, ``module:function`` of an operation that ``prepares`` a weight, is called
    ``prepare(weight, **attributes)`` with the attributes of the use, and must not write to the
    weight. The kernel then gets what it returned, any object, in the weight's place.
    """

    op: str
    name: str
    load: str
    version: int = 1
    needs: Needs = field(default_factory=Needs)
    traits: frozenset[str] = frozenset()
    priority: int = 0
    tolerances: Mapping[str, Tolerance] = field(default_factory=dict)
    prepare: str = ""


@dataclass(frozen=True, slots=True)
class Rejection:
    """A provider that was not chosen, and why."""

    provider: str
    reasons: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Resolution:
    """Who serves one use of an operation: a provider by its name, or ``REFERENCE``."""

    op: str
    attributes: Attributes
    provider: str
    rejected: tuple[Rejection, ...]
    self_check: str


class OpTable(Protocol):
    """What layers see of the registry, at construction only."""

    def bind(self, op: str, **attributes: int | float | str | bool) -> Kernel:
        """The kernel for this use. ``attributes`` include ``dtype``, a dtype name.

        Raises:
            KeyError: no such operation.
        """

    def resolve(self, op: str, **attributes: int | float | str | bool) -> Resolution:
        """Who serves this use; as ``bind``, and with its errors."""

    def prepare(self, op: str, weight: Any, **attributes: int | float | str | bool) -> Any:
        """What the kernel of this use takes in place of ``weight``, which it may keep.

        It is ``weight`` itself where the provider prepares nothing.
        """

    def explain(self) -> Sequence[Resolution]:
        """All resolutions so far, in order of binding."""


def check_needs(needs: Needs, features: Sequence[str], attributes: Attributes) -> Verdict:
    """Whether ``needs`` are met, without loading anything."""
    reasons: list[str] = []
    dtype = str(attributes.get("dtype", ""))
    if needs.dtypes and dtype not in needs.dtypes:
        reasons.append(f"dtype {dtype} is not among {', '.join(sorted(needs.dtypes))}")
    reasons += [f"needs {name}" for name in sorted(needs.features) if name not in features]
    for name, factor in needs.multiple_of.items():
        value = attributes.get(name)
        if not isinstance(value, int) or value % factor:
            reasons.append(f"{name}={value} is not a multiple of {factor}")
    for name, bound in needs.at_most.items():
        value = attributes.get(name)
        if not isinstance(value, int | float) or value > bound:
            reasons.append(f"{name}={value} exceeds {bound:g}")
    for name, wanted in needs.equals.items():
        if attributes.get(name) != wanted:
            reasons.append(f"{name}={attributes.get(name)} is not {wanted}")
    for name, accepted in needs.one_of.items():
        if attributes.get(name) not in accepted:
            listed = ", ".join(sorted(map(str, accepted)))
            reasons.append(f"{name}={attributes.get(name)} is not among {listed}")
    reasons += [f"module {name} is missing" for name in needs.modules if not _importable(name)]
    return Verdict(tuple(reasons))


def _importable(module: str) -> bool:
    from importlib.util import find_spec

    try:
        return find_spec(module) is not None
    except (ImportError, ValueError):
        return False
