"""What is made once for all workers of a run of tests; among it transformers' own reading of the
demo model."""

import fcntl
import functools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Read when a kernel is defined, which the first test that imports it does for all of its process.
os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(scope="session")
def made_once(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Callable[[str, Callable[[Path], object]], Path]]:
    """``made_once(name, make)`` is a file that ``make(path)`` wrote in this worker or another one.

    A worker removes at its end what it asked for; another that still needs it makes it again.
    """
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    asked = []

    def made(name: str, make: Callable[[Path], object]) -> Path:
        path = shared / name
        asked.append(path)
        with (shared / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.exists():
                unfinished = shared / f"{name}.part"
                make(unfinished)
                unfinished.rename(path)
        return path

    yield made
    for path in asked:
        path.unlink(missing_ok=True)


@pytest.fixture(scope="session")
def demo_gguf() -> Path:
    from cardan.core.weights.resolve import resolve_model

    gguf = resolve_model("demo").gguf
    assert gguf is not None
    return gguf


@pytest.fixture(scope="session")
def hf_demo(made_once, demo_gguf: Path) -> tuple[Any, Any]:
    """Tokenizer and model, in float32, as transformers reads the demo file.

    Which takes half a minute, so the workers share what comes out of it, pickled.
    """
    import torch

    path = made_once("hf_demo.pt", lambda path: torch.save(_read_by_transformers(demo_gguf), path))
    with path.open("rb") as file:
        return torch.load(file, weights_only=False)


def _read_by_transformers(path: Path) -> tuple[Any, Any]:
    import gguf
    import torch
    import transformers

    with pytest.MonkeyPatch.context() as patch:
        # Of one file, and yet read three times; of one architecture, and made for every module.
        for name in ("GGUFReader", "get_tensor_name_map"):
            patch.setattr(gguf, name, functools.cache(getattr(gguf, name)))
        tokenizer = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
        model = transformers.AutoModelForCausalLM.from_pretrained(
            path.parent, gguf_file=path.name, dtype=torch.float32
        )
    return tokenizer, model.eval()
