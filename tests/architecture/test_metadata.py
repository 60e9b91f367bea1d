"""Names that must agree in several places."""

import ast
import tomllib
from importlib.metadata import entry_points
from pathlib import Path

import pytest

import cardan

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_version_agrees():
    assert cardan.__version__ == PROJECT["version"]


def test_all_equals_what_is_exported():
    assert cardan.__all__ == sorted(cardan.__all__, key=lambda n: (not n.isupper(), n[0] == "_", n))
    for name in cardan.__all__:
        assert getattr(cardan, name) is not None
    assert dir(cardan) == sorted(cardan.__all__)


def test_entry_points_match_installed_metadata():
    declared = {
        (group, name, target)
        for group, items in PROJECT["entry-points"].items()
        for name, target in items.items()
    }
    groups = {group for group, _name, _target in declared}
    installed = {
        (point.group, point.name, point.value)
        for group in groups
        for point in entry_points(group=group)
        if point.dist is not None and point.dist.name == "cardan"
    }
    assert installed == declared, "reinstall: pip install -e ."


def test_every_entry_point_loads():
    for group in PROJECT["entry-points"]:
        for point in entry_points(group=group):
            if point.dist is not None and point.dist.name == "cardan":
                assert point.load() is not None


@pytest.mark.parametrize(
    "path", sorted((ROOT / "cardan/core/config").glob("[!_]*.py")), ids=lambda path: path.name
)
def test_every_config_field_is_documented(path: Path):
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ClassDef):
            doc = ast.get_docstring(node) or ""
            for item in node.body:
                if isinstance(item, ast.AnnAssign):
                    name = ast.unparse(item.target)
                    assert f"\n    {name}: " in doc, f"{node.name}.{name} has no line"
