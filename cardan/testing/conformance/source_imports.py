"""Which modules the source of a package imports, read without running it."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path


@dataclass(frozen=True, slots=True)
class SourceImport:
    """``module`` is absolute; for ``from a import b`` it is ``a.b``."""

    module: str
    file: Path
    line: int


@dataclass(frozen=True, slots=True)
class PackageSources:
    """The Python files of ``package``, which lies in ``folder``, without its tests."""

    package: str
    folder: Path
    files: tuple[Path, ...]

    def imports(self) -> Iterator[SourceImport]:
        """Every import, those for type checkers and inside functions included."""
        for file in self.files:
            inner = file.relative_to(self.folder).parts[:-1]
            here = ".".join((self.package, *inner))
            for node in ast.walk(ast.parse(file.read_bytes(), str(file))):
                for module in _modules(node, here):
                    yield SourceImport(module, file, getattr(node, "lineno", 0))


def package_sources(module: str) -> PackageSources | None:
    """The package around ``module``; a module in no package stands alone.

    None where the source cannot be had.
    """
    spec = find_spec(module)
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        return None
    file = Path(spec.origin)
    folder = file.parent
    is_package = spec.submodule_search_locations is not None
    if not is_package and "." not in module:
        return PackageSources(module, folder, (file,))
    files = tuple(sorted(path for path in folder.rglob("*.py") if not _is_test(path, folder)))
    return PackageSources(module if is_package else module.rpartition(".")[0], folder, files)


def _modules(node: ast.AST, here: str) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        base = node.module or ""
        if node.level:
            parents = here.split(".")[: len(here.split(".")) - node.level + 1]
            base = ".".join((*parents, base)).rstrip(".")
        return [f"{base}.{alias.name}" for alias in node.names]
    if isinstance(node, ast.Call) and node.args:
        return _called(node)
    return []


def _called(call: ast.Call) -> list[str]:
    """The module that ``import_module("...")`` or ``__import__("...")`` names."""
    name = getattr(call.func, "attr", getattr(call.func, "id", ""))
    first = call.args[0]
    if name in ("import_module", "__import__") and isinstance(first, ast.Constant):
        return [str(first.value)]
    return []


def _is_test(path: Path, folder: Path) -> bool:
    inner = path.relative_to(folder)
    return (
        "tests" in inner.parts[:-1]
        or inner.name.startswith("test_")
        or inner.name in ("conftest.py", "setup.py")
    )
