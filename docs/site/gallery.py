"""Run the notebooks of the documentation: ``python docs/site/gallery.py`` writes pages and ``.ipynb`` files.

A notebook is a Python file in ``docs/notebooks``: ``# %% [markdown]`` begins text in comments, ``# %%`` code. Every
cell is run, in one namespace; what it prints, the value of its last line and its figures go below it.
"""

from __future__ import annotations

import ast
import base64
import contextlib
import io
import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import matplotlib as mpl
import torch

mpl.use("Agg")
from matplotlib import pyplot

DOCS = Path(__file__).parents[1]
NOTEBOOKS = DOCS / "notebooks"
GALLERY = DOCS / "gallery"


@dataclass
class Cell:
    """A cell, and what came of it."""

    text: bool
    source: str
    printed: str = ""
    figures: list[bytes] = field(default_factory=list)


def cells(path: Path) -> list[Cell]:
    """The cells of a notebook."""
    found = []
    for part in path.read_text(encoding="utf-8").split("# %%")[1:]:
        kind, _, source = part.partition("\n")
        text = kind.strip() == "[markdown]"
        if text:
            source = "\n".join(line.removeprefix("#").removeprefix(" ") for line in source.splitlines())
        found.append(Cell(text, source.strip()))
    return found


def run(path: Path) -> list[Cell]:
    """The cells of a notebook with their outputs; an error stops it."""
    torch.manual_seed(0)
    torch.set_num_threads(1)  # the examples are small
    namespace: dict[str, Any] = {"__name__": "__main__"}
    found = cells(path)
    for cell in found:
        if cell.text:
            continue
        tree = ast.parse(cell.source, filename=str(path))
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(compile(tree, str(path), "exec"), namespace)
            if isinstance(last, ast.Expr):
                value = eval(compile(ast.Expression(last.value), str(path), "eval"), namespace)
                if value is not None:
                    print(repr(value))
        cell.printed = printed.getvalue().rstrip()
        for number in pyplot.get_fignums():
            buffer = io.BytesIO()
            pyplot.figure(number).savefig(buffer, dpi=110, metadata={"Software": None})
            cell.figures.append(buffer.getvalue())
        pyplot.close("all")
    return found


def write(name: str, found: list[Cell]) -> None:
    """The page and the notebook file."""
    page, notebook = [], []
    for number, cell in enumerate(found):
        if cell.text:
            page.append(cell.source)
            notebook.append({"cell_type": "markdown", "metadata": {}, "source": cell.source})
            continue
        page.append(f"```python\n{cell.source}\n```")
        outputs: list[dict[str, Any]] = []
        if cell.printed:
            page.append(f"```text\n{cell.printed}\n```")
            outputs.append({"output_type": "stream", "name": "stdout", "text": cell.printed + "\n"})
        for place, figure in enumerate(cell.figures):
            file = f"{name}-{number}-{place}.png"
            (GALLERY / file).write_bytes(figure)
            page.append(f"![figure]({file})")
            shown = {"image/png": base64.b64encode(figure).decode()}
            outputs.append({"output_type": "display_data", "data": shown, "metadata": {}})
        notebook.append(
            {
                "cell_type": "code",
                "execution_count": None,
                "metadata": {},
                "outputs": outputs,
                "source": cell.source,
            }
        )
    page.append(f"[This page as a notebook]({name}.ipynb)")
    kernel = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    stored = {"cells": notebook, "metadata": kernel, "nbformat": 4, "nbformat_minor": 4}
    (GALLERY / f"{name}.md").write_text("\n\n".join(page) + "\n", encoding="utf-8")
    (GALLERY / f"{name}.ipynb").write_text(json.dumps(stored, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    """All notebooks."""
    GALLERY.mkdir(exist_ok=True)
    for path in sorted(NOTEBOOKS.glob("*.py")):
        print(path.stem, file=sys.stderr)
        write(path.stem, run(path))


if __name__ == "__main__":
    main()
