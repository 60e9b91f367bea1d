"""The committed hash of the contract, and what changes it."""

import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from cardan.core.interfaces.signature import (
    HASH_FILE,
    contract_hash,
    contract_signatures,
    recorded_hash,
)
from cardan.core.interfaces.version import REVISIONS

SCRIPT = Path(__file__).parents[2] / "scripts" / "contract"


def test_the_committed_hash_is_that_of_the_sources():
    recorded, present = recorded_hash(), contract_hash()
    assert recorded is not None, "no contract.sha256 yet: run scripts/contract --write"
    if recorded == present:
        return
    if recorded.version == present.version:
        pytest.fail(
            "a public signature under cardan/core/interfaces changed: raise CONTRACT_VERSION in "
            "cardan/core/interfaces/version.py (minor for additions with defaults, major for "
            "anything else) and the interface's revision, then run scripts/contract --write"
        )
    pytest.fail("CONTRACT_VERSION changed: run scripts/contract --write")


@pytest.fixture
def copied(tmp_path):
    """A copy of the interfaces in which a test may change one place."""
    for file in HASH_FILE.parent.glob("*.py"):
        shutil.copy(file, tmp_path)
    before = contract_hash(tmp_path).digest

    def changed(module, old, new):
        file = tmp_path / f"{module}.py"
        text = file.read_text()
        assert old in text
        file.write_text(text.replace(old, new, 1))
        return contract_hash(tmp_path).digest != before

    return changed


@pytest.mark.parametrize(
    ("module", "old", "new"),
    [
        ("platform", "def child_env(", "def child_environment("),
        ("platform", "score: int = 0", "score: int = 1"),
        ("platform", "def probe(self) -> Probe", "def probe(self, budget: float) -> Probe"),
        ("platform", 'Literal["absent", "present", "broken"]', 'Literal["absent", "present"]'),
        ("platform", "    @abstractmethod\n    def probe", "    def probe"),
        ("hooks", "@hookspec(firstresult=True)", "@hookspec"),
        ("hooks", "def cardan_health(self) -> str | None", "def cardan_health(self) -> str"),
        (
            "constraints",
            "    path: str\n    op: ConstraintOp",
            "    op: ConstraintOp\n    path: str",
        ),
        ("constraints", "frozen=True, slots=True", "slots=True"),
        ("device", "priority: int = 0", "priority: int"),
        ("errors", "class PluginError(CardanError)", "class PluginError(Exception)"),
        ("executor", "frozenset[str] = frozenset()", "frozenset[str]"),
        ("model", "class CausalLM(ABC):", "class CausalLM(ABC):\n    extra: int = 1"),
    ],
)
def test_signatures_count(copied, module, old, new):
    assert copied(module, old, new)


@pytest.mark.parametrize(
    ("module", "old", "new"),
    [
        ("platform", '"""Is this platform here?', '"""Is it here?'),
        ("platform", "    # Exclusive resources", "    # The exclusive resources"),
        ("platform", "return ShapePolicy()", "return ShapePolicy(strict=False)"),
        ("platform", '-> "Probe"', "-> Probe"),
        ("kernels", "def _importable(module", "def _importable(name"),
        ("platform", "ConfigView(Protocol):", "ConfigView( Protocol ) :"),
        ("platform", "def child_env(self, role", "def child_env(\n        self, role"),
    ],
)
def test_the_rest_does_not(copied, module, old, new):
    assert not copied(module, old, new)


def test_a_change_shows_which_interface_it_is_in(copied, tmp_path):
    before = contract_hash(tmp_path)
    copied("platform", "def child_env(", "def child_environment(")
    after = contract_hash(tmp_path)
    assert after.unraised(before) == ("platform",)
    assert before.unraised(before) == ()
    raised = replace(
        after.interfaces["platform"], revision=after.interfaces["platform"].revision + 1
    )
    interfaces = {**after.interfaces, "platform": raised}
    assert replace(after, interfaces=interfaces).unraised(before) == ()


def test_every_interface_has_a_revision():
    names = {line.partition(".")[0] for line in contract_signatures()}
    assert names - {"version"} == set(REVISIONS)


def test_the_file_is_read_as_it_is_written(tmp_path):
    present = contract_hash()
    (tmp_path / "hash").write_text(f"{present}\n")
    assert recorded_hash(tmp_path / "hash") == present
    assert recorded_hash(tmp_path / "none") is None


def test_signatures_do_not_depend_on_the_order_of_functions(tmp_path):
    first, second = tmp_path / "a", tmp_path / "b"
    one, two = "def f(a: int = 1, *, b: 'str') -> None: ...\n", "def g(*a: int, **b: int): ...\n"
    for folder, text in ((first, one + two), (second, two + one)):
        folder.mkdir()
        (folder / "m.py").write_text(text)
    assert contract_signatures(first) == contract_signatures(second)
    assert contract_signatures(first) == [
        "m.f (a: int = 1, *, b: str) -> None",
        "m.g (*a: int, **b: int) -> ",
    ]


def test_the_script_prints_the_hash():
    done = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == str(contract_hash())
