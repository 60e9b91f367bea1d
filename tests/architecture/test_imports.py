"""What importing cardan may load, and what the engine may say."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# A vendor or one of its products, as a whole word or the start of one.
VENDOR_WORDS = re.compile(
    r"\b(cuda|rocm|hip|nvidia|amd|intel|xpu|tpu|gpu|mps|hopper|nccl|rccl|triton)\b"
    r"|torch\.(cuda|xpu|mps|hip)|is_(cuda|rocm|xpu|tpu|cpu)\b",
    re.IGNORECASE,
)
# file -> words it may hold, and why
ALLOWED: dict[str, set[str]] = {}


def run_python(code: str) -> str:
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    return result.stdout


def test_import_cardan_is_light():
    out = run_python(
        "import sys, cardan; print([m for m in sys.modules if m.split('.')[0] in "
        "('torch', 'fastapi', 'tokenizers', 'transformers', 'numpy') or "
        "m.startswith(('cardan.platforms', 'cardan.models'))])"
    )
    assert out.strip() == "[]"


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["platforms"], ["doctor"]])
def test_commands_work_without_torch(arguments: list[str]):
    code = (
        "import sys; sys.modules['torch'] = None; from cardan.cli.main import main; "
        f"sys.argv = ['cardan', *{arguments!r}]; main()"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    # doctor and platforms may say that nothing is usable (exit code 1), but they say it.
    assert result.returncode in (0, 1), result.stderr
    assert "Traceback" not in result.stderr
    assert result.stdout.strip()


@pytest.mark.parametrize(
    "module",
    # The last: a platform is chosen, and its device opened, before torch is imported.
    ["cardan.server.app", "cardan.bootstrap", "cardan.cli.main", "cardan.bootstrap.engine_builder"],
)
def test_does_not_load_torch(module: str):
    assert run_python(f"import sys, {module}; print('torch' in sys.modules)").strip() == "False"


@pytest.mark.parametrize(
    "path",
    sorted(
        path
        for folder in ("core", "models", "server")
        for path in (ROOT / "cardan" / folder).rglob("*.py")
    ),
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_no_vendor_word_in_the_engine(path: Path):
    allowed = ALLOWED.get(str(path.relative_to(ROOT)), set())
    found = {match.group().lower() for match in VENDOR_WORDS.finditer(path.read_text())}
    assert found <= allowed
