"""Files and functions stay short: a limit that a test keeps, not a plea."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "cardan"
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
# path -> why it may be longer
LONGER: dict[str, str] = {}

# Device code takes pointers, strides and sizes one by one, a line each: its bodies are counted.
DEVICE_CODE = "platforms/shared/triton/kernels/"

FILES = sorted(PACKAGE.rglob("*.py"))


def test_there_are_files():
    assert len(FILES) > 100


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_file_and_functions_are_short(path: Path):
    name = str(path.relative_to(PACKAGE))
    source = path.read_text()
    if name not in LONGER:
        assert source.count("\n") <= MAX_FILE_LINES
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = (
                node.body[-1 if len(node.body) == 1 else 1]
                if name.startswith(DEVICE_CODE)
                else node
            )
            length = (node.end_lineno or node.lineno) - first.lineno + 1
            assert length <= MAX_FUNCTION_LINES, f"{name}:{node.lineno} {node.name} has {length}"
