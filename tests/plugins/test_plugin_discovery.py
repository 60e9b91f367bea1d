"""Finding entry points without importing them, and the guard around each import."""

import shutil
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from cardan.core.discovery import GROUPS, PLATFORMS, PLUGINS, POLICIES, Discovery
from cardan.core.interfaces.errors import PluginError


def test_listing_imports_nothing(acme):
    discovery = Discovery()
    assert {"acme", "acme_broken"} <= set(discovery.names(PLATFORMS))
    assert "acme_shortest" in discovery.names(POLICIES)
    assert not [name for name in sys.modules if name.startswith("cardan_acme")]


def test_load_imports_only_the_one(acme):
    platform = Discovery().load(PLATFORMS, "acme")
    assert platform.name == "acme"
    loaded = [name for name in sys.modules if name.startswith("cardan_acme.")]
    assert loaded == ["cardan_acme.platform"]


def test_entries_name_their_distribution(acme):
    (entry,) = [item for item in Discovery().entries(PLUGINS) if item.name == "acme_watch"]
    assert entry.origin == "cardan-acme 1.2.3"
    assert entry.target == "cardan_acme.watch:WatchPlugin"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("raise OSError('no driver')", ["OSError: no driver", "upgrade bad"]),
        ("raise SystemExit(3)", ["SystemExit: 3"]),
        ("def (:", ["SyntaxError", "reinstall or upgrade bad"]),
        ("import no_such_module_anywhere", ["install what brings no_such_module_anywhere"]),
        ("import bad_module.part", ["ModuleNotFoundError", "reinstall or upgrade bad"]),
        ("other = 1", ["AttributeError", "thing", "reinstall or upgrade bad"]),
        ("raise RuntimeError", ["RuntimeError; upgrade bad"]),
    ],
)
def test_a_failing_import_is_a_plugin_error(site, source, expected):
    site.install("bad", {PLATFORMS: {"bad": "bad_module:thing"}}, {"bad_module": source}, "2.5")
    with pytest.raises(PluginError) as caught:
        Discovery().load(PLATFORMS, "bad")
    message = str(caught.value)
    assert "cannot load bad of bad 2.5 (cardan.platforms: bad_module:thing)" in message
    for text in expected:
        assert text in message
    assert caught.value.__cause__ is not None


def test_interrupt_passes_the_guard(site):
    site.install("bad", {PLUGINS: {"bad": "bad_module"}}, {"bad_module": "raise KeyboardInterrupt"})
    with pytest.raises(KeyboardInterrupt):
        Discovery().load(PLUGINS, "bad")


def test_unknown_platform_gets_nearest_installed_and_remedy(acme):
    with pytest.raises(PluginError) as caught:
        Discovery().load(PLATFORMS, "acne")
    message = str(caught.value)
    assert "no platform named 'acne', did you mean acme?" in message
    assert "acme_broken" in message
    assert "pip install 'cardan[acne]'" in message


def test_remedy_never_repeats_a_shell_metacharacter(acme):
    with pytest.raises(PluginError) as caught:
        Discovery().load(PLATFORMS, "x]; rm -rf ~ #")
    assert "pip install" not in str(caught.value)


def test_unknown_policy(acme):
    with pytest.raises(PluginError, match="did you mean acme_shortest"):
        Discovery().load(POLICIES, "acme_shortes")


def test_unknown_group():
    with pytest.raises(PluginError, match=r"did you mean cardan\.platforms"):
        Discovery().names("cardan.platform")


def test_bare_checkout_says_what_to_do():
    bare = Discovery([])
    assert not bare.is_complete()
    with pytest.raises(PluginError, match=r"is cardan installed\? .* pip install -e \."):
        bare.load(PLATFORMS, "cpu")


def test_duplicates_are_reported_and_refused(acme):
    acme.install("rival", {PLATFORMS: {"acme": "rival:Other"}})
    discovery = Discovery()
    (duplicate,) = discovery.duplicates()
    assert duplicate.name == "acme"
    with pytest.raises(PluginError) as caught:
        discovery.load(PLATFORMS, "acme")
    for text in ("cardan-acme 1.2.3", "rival 1.0", "uninstall all but one"):
        assert text in str(caught.value)
    assert not [name for name in sys.modules if name.startswith("cardan_acme.")]


def test_the_same_object_twice_is_no_duplicate(acme):
    target = "cardan_acme.platform:AcmePlatform"
    acme.install("cardan-acme-renamed", {PLATFORMS: {"acme": target}})
    discovery = Discovery()
    assert discovery.duplicates() == ()
    assert discovery.load(PLATFORMS, "acme").name == "acme"


@pytest.mark.parametrize(
    ("contract", "expected"),
    [
        ("(9, 0)", "needs contract 9.0, this cardan has 1.0"),
        ("(0, 99)", "written for contract 0.99, this cardan has 1.0.* adapts: 0.1"),
        ("'0.1'", "must be a pair of integers"),
        (None, "states no contract"),
    ],
)
def test_contract_is_checked(site, contract, expected):
    line = "" if contract is None else f"    contract = {contract}\n"
    source = f"class Policy:\n    pass\n{line}"
    site.install("odd", {POLICIES: {"odd": "odd_module:Policy"}}, {"odd_module": source})
    with pytest.raises(PluginError, match=expected):
        Discovery().load(POLICIES, "odd")


def test_functions_of_other_groups_need_no_contract(site):
    site.install(
        "kernels", {"cardan.kernels": {"fast": "fast_kernels:all"}}, {"fast_kernels": "all = ()"}
    )
    assert Discovery().load("cardan.kernels", "fast") == ()


def test_foreign_groups_are_ignored():
    assert Discovery([EntryPoint("x", "y:z", "console_scripts")]).names(PLATFORMS) == ()


def test_groups_are_those_of_the_contract():
    assert len(set(GROUPS)) == 9
    assert all(group.startswith("cardan.") for group in GROUPS)


@pytest.mark.slow
def test_the_distribution_installs_with_pip(tmp_path):
    source, target = tmp_path / "source", tmp_path / "target"
    shutil.copytree(Path(__file__).parent / "acme", source)
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
    command += ["--no-build-isolation", "--target", str(target), str(source)]
    subprocess.run(command, check=True, capture_output=True)
    code = (
        "from cardan.core.discovery import *; d = Discovery(); "
        "print(d.load(PLATFORMS, 'acme').name, d.load(LOGITS_PROCESSORS, 'acme_shift').name)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": str(target)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == ["acme", "acme_shift"]
