"""L0: importing a platform and asking it changes nothing that the process shares."""

import json
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from cardan.testing.conformance.child_process import Origin, run_modules
from cardan.testing.conformance.process_state import KINDS
from cardan.testing.conformance.results import not_supported
from cardan.testing.conformance.subject import Subject

LEVEL = "L0"

_CHILD = "cardan.testing.conformance.first_contact"
_DEADLINE_S = 60.0
# Frameworks that take seconds to import; listing platforms must not.
_HEAVY = frozenset(
    {"torch", "jax", "jaxlib", "tensorflow", "torch_xla", "transformers", "triton", "cupy"}
)
_SLOWEST_S = 10.0
_LINUX_ONLY = ("threads", "processes", "device files")

Record = Callable[[str, object], None]


@pytest.fixture(scope="module")
def contact(cardan_subject: Subject, cardan_origin: Origin) -> dict[str, Any]:
    """What a fresh process saw of the platform, stage by stage."""
    return _ask(cardan_subject, cardan_origin)


@pytest.mark.parametrize("kind", KINDS)
def test_leaves_alone(contact: dict[str, Any], kind: str) -> None:
    """Import, probe and listing leave alone what all code of a process shares."""
    if kind in _LINUX_ONLY and not sys.platform.startswith("linux"):
        not_supported(f"{kind} are seen through /proc, which this system lacks")
    changed = [
        f"{stage}: {change}"
        for stage, seen in contact["stages"].items()
        for change in seen["changes"][kind]
    ]
    assert not changed, f"{kind} changed by {'; '.join(changed)}"


def test_import_is_light(contact: dict[str, Any], record_property: Record) -> None:
    """Importing the platform's module imports no framework."""
    imported = contact["stages"]["import"]["imported"]
    record_property("imported", imported)
    heavy = sorted(_HEAVY.intersection(imported))
    assert not heavy, f"the module imports {', '.join(heavy)}; import it where it is used"


def test_import_and_probe_are_quick(contact: dict[str, Any], record_property: Record) -> None:
    """Import and probe together take less than 10 s."""
    took = {name: seen["seconds"] for name, seen in contact["stages"].items()}
    for name, seconds in took.items():
        record_property(f"{name}_seconds", round(seconds, 4))
    both = took["import"] + took.get("probe", 0.0)
    assert both < _SLOWEST_S, f"import and probe took {both:.1f} s, at most {_SLOWEST_S:g} s"


def test_nothing_raises(contact: dict[str, Any]) -> None:
    """Import, probe and, with a device there, listing all facts raise nothing."""
    errors = [f"{name} raised {seen['error']}" for name, seen in _failed(contact)]
    assert not errors, "; ".join(errors)


def test_probe_repeats(contact: dict[str, Any]) -> None:
    """A second probe says what the first one said, all of it JSON-plain."""
    _need_stage(contact, "probe")
    first, second = contact["probes"]
    assert first == second, f"first {first}, then {second}"


def test_probe_is_well_formed(contact: dict[str, Any]) -> None:
    """The probe's state is a known one, with a reason or remedy where one is due."""
    _need_stage(contact, "probe")
    probe = contact["probes"][0]
    assert probe["state"] in ("absent", "present", "broken"), f"unknown state {probe['state']!r}"
    assert type(probe["score"]) is int, f"score must be an int, got {probe['score']!r}"
    for name in ("reason", "fix"):
        assert isinstance(probe[name], str), f"{name} must be a string, got {probe[name]!r}"
    assert probe["state"] == "present" or probe["reason"], f"{probe['state']} without a reason"
    assert probe["state"] != "broken" or probe["fix"], "broken without a remedy in fix"


def test_survives_a_fork(cardan_subject: Subject, cardan_origin: Origin) -> None:
    """A child forked after import and probe can probe, with the same result."""
    if sys.platform == "win32":
        not_supported("this system has no fork")
    answer = _ask(cardan_subject, cardan_origin, "fork")
    assert answer["child"] is not None, "the forked child's probe did not answer within 20 s"
    assert answer["child"] == answer["parent"], (
        f"parent {answer['parent']}, child {answer['child']}"
    )


def _ask(subject: Subject, origin: Origin, *mode: str) -> dict[str, Any]:
    arguments = (subject.module, subject.attribute, *mode)
    (ended,) = run_modules(_CHILD, [arguments], _DEADLINE_S, origin)
    if ended.code != 0:
        pytest.fail(f"meeting the platform in a fresh process: {ended.complaint()}")
    answer: dict[str, Any] = json.loads(ended.output.rstrip().rpartition("\n")[2])
    return answer


def _failed(contact: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    return ((name, seen) for name, seen in contact["stages"].items() if seen["error"])


def _need_stage(contact: dict[str, Any], name: str) -> None:
    seen = contact["stages"].get(name)
    if seen is None or seen["error"]:
        raised = "; ".join(f"{stage} raised {item['error']}" for stage, item in _failed(contact))
        pytest.fail(raised or f"the {name} stage did not run")
