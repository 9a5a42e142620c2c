"""README and documentation run: every Python block, top to bottom, one namespace a file.

A block whose first line is ``# not run`` is only compiled.
"""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import opteq
from opteq.engine.values_read import values_read
from opteq.models.table import MODELS

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.py"))
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


@pytest.fixture
def registry() -> Iterator[None]:
    """Models that are registered in between are gone afterwards."""
    before = set(MODELS)
    yield
    for name in set(MODELS) - before:
        opteq.models.unregister_model(name)


@pytest.mark.usefixtures("registry")
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_code_runs(page: Path) -> None:
    namespace: dict[str, object] = {"__name__": page.stem}
    text = page.read_text(encoding="utf-8")
    torch.manual_seed(0)
    for number, match in enumerate(FENCE.finditer(text), start=1):
        block = match.group(1)
        line = text.count("\n", 0, match.start(1))
        # Blank lines in front make a traceback point at the line of the page.
        code = compile("\n" * line + block, str(page), "exec", dont_inherit=True)  # not the annotations of this file
        if block.startswith("# not run"):
            continue
        try:
            exec(code, namespace)
        except Exception as error:
            raise AssertionError(f"block {number} of {page.name}, from line {line + 1} on, failed: {error}") from error
    for value in namespace.values():
        if isinstance(value, type) and issubclass(value, opteq.HiddenProblem | opteq.Objective):
            values_read(value)  # raises where the engine would not trace it


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_the_site_names_every_page() -> None:
    """Pages of the documentation are in the navigation, and the reference names objects that exist."""
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    pages = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    gallery = {f"gallery/{path.stem}.md" for path in NOTEBOOKS}  # written by `make docs`
    assert set(re.findall(r"[\w/-]+\.md", text)) == pages | gallery
    for page in sorted((ROOT / "docs" / "api").glob("*.md")):
        for name in re.findall(r"^::: (\S+)$", page.read_text(encoding="utf-8"), re.MULTILINE):
            module, _, last = name.rpartition(".")
            try:
                importlib.import_module(name)
            except ModuleNotFoundError:
                assert hasattr(importlib.import_module(module), last), name


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_run(notebook: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    if "import torchdeq" in notebook.read_text(encoding="utf-8"):
        pytest.importorskip("torchdeq", reason="torchdeq is not installed; pip install 'opteq[docs]'")
    monkeypatch.syspath_prepend(str(ROOT / "docs" / "site"))
    gallery = importlib.import_module("gallery")
    monkeypatch.setattr(gallery, "GALLERY", tmp_path)
    whole = gallery.cells

    def shortened(path: Path) -> list[Any]:
        """Two steps of a training run all of its code, and the second one what the first has left."""
        found = whole(path)
        for cell in found:
            cell.source = re.sub(r"for _ in range\(\d+\):", "for _ in range(2):", cell.source)
        return found

    monkeypatch.setattr(gallery, "cells", shortened)
    threads = torch.get_num_threads()
    try:
        cells = gallery.run(notebook)
    finally:
        torch.set_num_threads(threads)
    assert cells[0].source.startswith("# ")
    assert sum(bool(cell.printed) for cell in cells) >= 2
    gallery.write(notebook.stem, cells)
    stored = json.loads((tmp_path / f"{notebook.stem}.ipynb").read_text(encoding="utf-8"))
    assert len(stored["cells"]) == len(cells)
    page = (tmp_path / f"{notebook.stem}.md").read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)]+)\)", page):
        assert (tmp_path / target).exists()


def test_the_runner_finds_code() -> None:
    assert sum(len(FENCE.findall(page.read_text(encoding="utf-8"))) for page in PAGES) >= 15
