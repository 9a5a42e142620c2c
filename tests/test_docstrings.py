"""The examples in docstrings run, module by module."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest

import opteq
import opteq_bench

ROOTS = [Path(package.__file__).parent for package in (opteq, opteq_bench)]


def name_of(path: Path) -> str:
    root = next(root for root in ROOTS if root in path.parents)
    parts = path.relative_to(root.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


# Found by their text: pytest's own collection would import every module of the library in every process.
EXAMPLES = sorted(
    name_of(path) for root in ROOTS for path in root.rglob("*.py") if ">>> " in path.read_text(encoding="utf-8")
)


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_run(name: str) -> None:
    found = doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS)
    assert found.attempted > 0
    assert found.failed == 0
