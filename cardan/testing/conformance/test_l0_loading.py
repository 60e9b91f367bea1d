"""L0: the platform's class is found, complete, and written for this contract."""

from difflib import get_close_matches

from cardan.core.discovery import PLATFORMS, Discovery
from cardan.core.interfaces.platform import Platform
from cardan.core.interfaces.version import contract_refusal
from cardan.core.platform_selection import installed_platforms
from cardan.testing.conformance.results import not_supported
from cardan.testing.conformance.source_imports import package_sources
from cardan.testing.conformance.subject import Subject

LEVEL = "L0"

# What a platform may see of cardan.
_CONTRACT = ("cardan.core.interfaces", "cardan.core.types", "cardan.core.observability")


def test_class_is_a_complete_platform(cardan_subject: Subject) -> None:
    """The target is a subclass of Platform with no abstract member left."""
    loaded = cardan_subject.load_class()
    assert isinstance(loaded, type), f"{cardan_subject.target} is no class"
    assert issubclass(loaded, Platform), f"{cardan_subject.target} is no subclass of Platform"
    missing = sorted(getattr(loaded, "__abstractmethods__", ()))
    assert not missing, f"{cardan_subject.target} does not implement {', '.join(missing)}"


def test_members_belong_to_the_contract(cardan_subject: Subject) -> None:
    """No public method is misspelt: each overrides a member, or resembles none."""
    known = {name for name in dir(Platform) if not name.startswith("_")} | {"name", "contract"}
    own = {name for name in vars(cardan_subject.load_class()) if not name.startswith("_")}
    resembling = {
        name: near[0]
        for name in sorted(own - known)
        if (near := get_close_matches(name, known, 1, 0.85))
    }
    told = ", ".join(f"{name} (did you mean {near}?)" for name, near in resembling.items())
    assert not resembling, f"not in the contract, never called: {told}"


def test_contract_version_is_accepted(cardan_subject: Subject) -> None:
    """The contract that the platform was written against is one that this cardan serves."""
    contract = getattr(cardan_subject.load_class(), "contract", None)
    assert contract is not None, "the class states no contract; set contract = (major, minor)"
    refusal = contract_refusal(contract)
    assert refusal is None, refusal


def test_name_and_claims(cardan_subject: Subject) -> None:
    """The class has a name, that of its entry point, and its claims are a frozenset of words."""
    loaded = cardan_subject.load_class()
    name = getattr(loaded, "name", None)
    assert isinstance(name, str), f"name must be a string, got {name!r}"
    assert name, "name is empty"
    assert not set(name) & set(":, /"), f"name {name!r} has a character of --platform's syntax"
    if cardan_subject.entry:
        assert name == cardan_subject.entry, (
            f"the class is named {name!r}, its entry point {cardan_subject.entry!r}"
        )
    assert isinstance(loaded.claims, frozenset), f"claims must be a frozenset: {loaded.claims!r}"
    assert all(isinstance(claim, str) for claim in loaded.claims), loaded.claims


def test_entry_point_loads(cardan_subject: Subject) -> None:
    """The engine's own discovery finds one object under the name, and loads it."""
    if not cardan_subject.entry:
        not_supported("named as MODULE:CLASS, which no entry point was looked up for")
    discovery = Discovery()
    doubled = [item for item in discovery.duplicates() if item.name == cardan_subject.entry]
    assert not [item for item in doubled if item.group == PLATFORMS], str(doubled[0])
    for candidate in installed_platforms(discovery):
        if candidate.name == cardan_subject.entry:
            assert candidate.load().name == cardan_subject.entry


def test_imports_the_contract_alone(cardan_subject: Subject) -> None:
    """No file of the platform's package imports cardan's internals, not even for type checks."""
    sources = package_sources(cardan_subject.module)
    if sources is None:
        not_supported(f"the source of {cardan_subject.module} cannot be read")
    # Platforms of one project may share kernels.
    shared = f"{sources.package.rpartition('.')[0]}.shared"
    allowed = (*_CONTRACT, sources.package, shared)
    internal = [
        f"{found.file.name}:{found.line} imports {found.module}"
        for found in sources.imports()
        if found.module.partition(".")[0] == "cardan" and not _is_within(found.module, allowed)
    ]
    told = "; ".join(internal)
    assert not internal, f"{told}; a platform may import {', '.join(_CONTRACT)} only"


def _is_within(module: str, packages: tuple[str, ...]) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)
