"""The page of operations is what the definitions say."""

from dataclasses import replace
from pathlib import Path

import pytest

from cardan.core.ops.catalogue import CATALOGUE
from cardan.testing.operations_page import operations_page

PAGE = Path(__file__).parents[2] / "docs" / "operations.md"


def test_the_page_is_current():
    assert PAGE.read_text(encoding="utf-8") == operations_page(CATALOGUE), "run scripts/operations"


def test_what_it_says():
    page = operations_page(CATALOGUE)
    assert [line for line in page.splitlines() if line.startswith("## ")] == [
        f"## {name}" for name in sorted(op.name for op in CATALOGUE)
    ]
    assert "rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor" in page
    # A composite is called without its parts.
    assert "fused_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float)" in page
    assert "Version 1; made of `rms_norm`." in page
    assert "Version 1; a provider may prepare `weight`." in page


def test_an_operation_without_words():
    silent = replace(CATALOGUE[0], body=lambda x: x)
    with pytest.raises(ValueError, match="the body of embedding has no docstring"):
        operations_page([silent])
