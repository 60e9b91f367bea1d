"""Finding platforms, models and plugins through entry points: listed from metadata, never imported
until one is asked for by name."""

import logging
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from cardan.core.contract_adapters.adapters import adapt
from cardan.core.interfaces.errors import PluginError
from cardan.core.interfaces.version import contract_refusal, version_text

logger = logging.getLogger(__name__)

PLATFORMS = "cardan.platforms"
MODELS = "cardan.models"
QUANTIZATION = "cardan.quantization"
KERNELS = "cardan.kernels"
GGUF = "cardan.gguf"
PARSERS = "cardan.parsers"
POLICIES = "cardan.policies"
LOGITS_PROCESSORS = "cardan.logits_processors"
PLUGINS = "cardan.plugins"

GROUPS: tuple[str, ...] = (
    PLATFORMS,
    MODELS,
    QUANTIZATION,
    KERNELS,
    GGUF,
    PARSERS,
    POLICIES,
    LOGITS_PROCESSORS,
    PLUGINS,
)
# Groups whose objects must state the contract they were written against; in the others an object
# may be a plain function or sequence, and is checked only if it states one.
CONTRACTED: frozenset[str] = frozenset(
    {PLATFORMS, MODELS, QUANTIZATION, GGUF, PARSERS, POLICIES, LOGITS_PROCESSORS, PLUGINS}
)
NOT_INSTALLED = (
    "no platform found: cardan's own entry points are missing, is cardan installed? "
    "In a checkout run: pip install -e ."
)


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry point as its metadata states it; ``target`` is ``module:attribute``."""

    group: str
    name: str
    target: str
    distribution: str
    version: str

    @property
    def origin(self) -> str:
        """The distribution with its version, for messages."""
        return f"{self.distribution} {self.version}".strip()

    def __str__(self) -> str:
        return f"{self.name} of {self.origin} ({self.group}: {self.target})"


@dataclass(frozen=True, slots=True)
class Duplicate:
    """A name that several distributions give to different objects; it cannot be loaded."""

    group: str
    name: str
    entries: tuple[Entry, ...]

    def __str__(self) -> str:
        owners = " and ".join(entry.origin for entry in self.entries)
        return (
            f"{self.group} has {self.name} from {owners}: "
            f"uninstall all but one (pip uninstall {self.entries[-1].distribution})"
        )


class Discovery:
    """A snapshot of all of cardan's entry points that are installed.

    Reading metadata imports nothing. ``load`` imports one object under a guard of its own, so
    that whatever it raises becomes a ``PluginError`` and the caller can go on.
    """

    def __init__(self, found: Iterable[EntryPoint] | None = None) -> None:
        """``found`` replaces the entry points of the running interpreter."""
        if found is None:
            found = (item for group in GROUPS for item in entry_points(group=group))
        # Entries whose authors were told what to change.
        self._told: set[Entry] = set()
        self._points: dict[str, dict[str, list[tuple[Entry, EntryPoint]]]] = {
            group: {} for group in GROUPS
        }
        for point in found:
            if point.group in self._points:
                entry = _entry(point)
                named = self._points[point.group].setdefault(point.name, [])
                if all(entry.target != other.target for other, _ in named):
                    named.append((entry, point))

    def names(self, group: str) -> tuple[str, ...]:
        """Installed names of a group, sorted."""
        return tuple(sorted(self._group(group)))

    def entries(self, group: str) -> tuple[Entry, ...]:
        """Installed entries of a group, sorted by name; a name stands once per distribution."""
        named = self._group(group)
        return tuple(entry for name in sorted(named) for entry, _ in named[name])

    def duplicates(self) -> tuple[Duplicate, ...]:
        """Names that mean different objects, which ``load`` refuses."""
        return tuple(
            Duplicate(group, name, tuple(entry for entry, _ in points))
            for group, named in self._points.items()
            for name, points in sorted(named.items())
            if len(points) > 1
        )

    def is_complete(self) -> bool:
        """Whether cardan's own entry points are there; a bare checkout has none."""
        return any(entry.distribution == "cardan" for entry in self.entries(PLATFORMS))

    def load(self, group: str, name: str) -> Any:
        """Import the object called ``name``, and nothing else.

        One that was written against a former contract is adapted, with a warning.

        Raises:
            PluginError: no such name, an ambiguous one, the import failed for whatever reason,
                or the object was written against another contract.
        """
        points = self._group(group).get(name)
        if not points:
            raise PluginError(self._unknown(group, name))
        if len(points) > 1:
            raise PluginError(str(Duplicate(group, name, tuple(entry for entry, _ in points))))
        entry, point = points[0]
        try:
            loaded = point.load()
        except (Exception, SystemExit) as error:
            raise PluginError(
                f"cannot load {entry}: {describe(error)}; {_remedy(entry, error)}"
            ) from error
        written_against = _checked_contract(entry, loaded)
        if written_against is None:
            return loaded
        adapted = adapt(loaded, written_against)
        if adapted.notices and entry not in self._told:
            self._told.add(entry)
            logger.warning(
                "%s is deprecated: it was written for contract %s; %s",
                entry,
                version_text(written_against),
                "; ".join(adapted.notices),
            )
        return adapted.loaded

    def _group(self, group: str) -> dict[str, list[tuple[Entry, EntryPoint]]]:
        try:
            return self._points[group]
        except KeyError:
            raise PluginError(unknown_name("entry-point group", group, GROUPS)) from None

    def _unknown(self, group: str, name: str) -> str:
        if group == PLATFORMS:
            return unknown_platform(name, self.names(group), self.is_complete())
        return (
            unknown_name(f"entry in group {group}", name, self.names(group))
            + "; install the package that provides it"
        )


def unknown_name(what: str, name: str, known: Sequence[str]) -> str:
    """A message that an unknown name is unknown, with the nearest and all known ones."""
    near = get_close_matches(name, known, 1)
    hint = f", did you mean {near[0]}?" if near else ""
    return f"no {what} named {name!r}{hint} (installed: {', '.join(known) or 'none'})"


def unknown_platform(name: str, installed: Sequence[str], is_complete: bool) -> str:
    """The message for a platform that no installed package provides, with the remedy."""
    if not installed and not is_complete:
        return NOT_INSTALLED
    remedy = "install the package that provides it"
    if re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
        remedy += f", for one of cardan's own: pip install 'cardan[{name}]'"
    return f"{unknown_name('platform', name, installed)}; {remedy}"


def describe(error: BaseException) -> str:
    """An exception in one line, its type first."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _entry(point: EntryPoint) -> Entry:
    distribution = point.dist
    return Entry(
        group=point.group,
        name=point.name,
        target=point.value,
        distribution=distribution.name if distribution is not None else "an unknown distribution",
        version=distribution.version if distribution is not None else "",
    )


def _remedy(entry: Entry, error: BaseException) -> str:
    own_package = entry.target.partition(":")[0].partition(".")[0]
    missing = error.name if isinstance(error, ModuleNotFoundError) else None
    if missing is not None and missing.partition(".")[0] != own_package:
        return f"install what brings {missing}, or uninstall {entry.distribution}"
    if isinstance(error, AttributeError | ImportError | SyntaxError):
        return f"reinstall or upgrade {entry.distribution}, or uninstall it"
    return f"upgrade {entry.distribution}, or uninstall it"


def _checked_contract(entry: Entry, loaded: object) -> tuple[int, int] | None:
    """The contract that ``loaded`` states, which is one that can be used; None: it needs none."""
    written_against: tuple[int, int] | None = getattr(loaded, "contract", None)
    if written_against is None and entry.group not in CONTRACTED:
        return None
    if written_against is None:
        refusal: str | None = "states no contract; set contract = (major, minor) on it"
    else:
        refusal = contract_refusal(written_against)
    if refusal is not None:
        raise PluginError(f"cannot use {entry}: {refusal}")
    return written_against
