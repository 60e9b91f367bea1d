"""Distributions for tests: metadata and modules in a folder on ``sys.path``, as pip leaves them."""

import importlib
import shutil
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path

import pytest

ACME = Path(__file__).parent / "acme"


class Site:
    """A folder that stands for ``site-packages``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def install(
        self,
        name: str,
        entry_points: Mapping[str, Mapping[str, str]],
        modules: Mapping[str, str] | None = None,
        version: str = "1.0",
    ) -> None:
        """Write a distribution: its metadata, and modules given as source text."""
        info = self.folder / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        (info / "METADATA").write_text(metadata)
        lines = []
        for group, entries in entry_points.items():
            lines.append(f"[{group}]")
            lines += [f"{entry} = {target}" for entry, target in entries.items()]
        (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
        for module, source in (modules or {}).items():
            (self.folder / f"{module}.py").write_text(source)
        importlib.invalidate_caches()

    def install_acme(self) -> None:
        """Install the distribution in ``acme`` as its pyproject.toml describes it."""
        project = tomllib.loads((ACME / "pyproject.toml").read_text())["project"]
        shutil.copytree(ACME / "cardan_acme", self.folder / "cardan_acme")
        self.install(project["name"], project["entry-points"], version=project["version"])


@pytest.fixture
def site(tmp_path, monkeypatch):
    before = set(sys.modules)
    monkeypatch.syspath_prepend(tmp_path)
    yield Site(tmp_path)
    for name in set(sys.modules) - before:
        module = sys.modules[name]
        if str(getattr(module, "__file__", None) or "").startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.fixture
def acme(site):
    site.install_acme()
    return site
