"""README and documentation run: every Python block, top to bottom, one namespace a file."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_code_runs(page: Path) -> None:
    namespace: dict[str, object] = {"__name__": page.stem}
    text = page.read_text(encoding="utf-8")
    torch.manual_seed(0)
    for match in FENCE.finditer(text):
        line = text.count("\n", 0, match.start(1))
        # Blank lines in front make a traceback point at the line of the page.
        exec(compile("\n" * line + match.group(1), str(page), "exec"), namespace)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_the_runner_finds_code() -> None:
    assert sum(len(FENCE.findall(page.read_text(encoding="utf-8"))) for page in PAGES) >= 15
