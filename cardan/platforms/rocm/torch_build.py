"""Which torch is installed, by its files: it is not imported."""

import re
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

# Where builds of torch keep the kernels of their libraries, one file or more for each GPU.
_KERNELS = ("rocblas/library", "hipblaslt/library")
_ARCH = re.compile(r"gfx[0-9a-f]+")


@dataclass(frozen=True, slots=True)
class TorchBuild:
    """``archs``: of the GPUs that its libraries have kernels for; empty: its files do not say."""

    kind: Literal["none", "host", "cuda", "hip"]
    version: str = ""
    archs: frozenset[str] = frozenset()


def installed_torch() -> TorchBuild:
    try:
        spec = find_spec("torch")
    except (ImportError, ValueError):
        return TorchBuild("none")
    places = spec.submodule_search_locations if spec is not None else None
    if not places:
        return TorchBuild("none")
    return build_in(Path(places[0]), package_version("torch"))


def build_in(folder: Path, name: str) -> TorchBuild:
    """The build in torch's folder."""
    libraries = folder / "lib"
    if (libraries / "libtorch_hip.so").exists():
        return TorchBuild("hip", name, _archs(libraries))
    is_cuda = (libraries / "libtorch_cuda.so").exists()
    return TorchBuild("cuda" if is_cuda else "host", name)


def package_version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "missing"


def _archs(libraries: Path) -> frozenset[str]:
    """Named by all libraries that name any: torch needs each of them."""
    named = []
    for place in _KERNELS:
        files = (libraries / place).glob("**/*gfx*")
        named.append(frozenset(arch for file in files for arch in _ARCH.findall(file.name)))
    told = [archs for archs in named if archs]
    return frozenset.intersection(*told) if told else frozenset()
