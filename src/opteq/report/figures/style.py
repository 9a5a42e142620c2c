"""New figures of one look, and files of them."""

from __future__ import annotations

import io
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from opteq.common.errors import needs_extra
from opteq.common.files import plain_errors, write_atomically

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLORS = ("#2f6fb3", "#d65e28", "#3f8f4f", "#8a56a8", "#b8860b", "#4a9aa5", "#a0455a", "#666666")
"""Told apart by color-blind readers, and in grey."""

DPI = 160
"""Pixels per inch of PNG files."""


@dataclass(frozen=True)
class CaptionedFigure:
    """A figure and what is seen in it."""

    figure: Figure
    caption: str


def panels(rows: int, columns: int, size: tuple[float, float] = (4.2, 3.2)) -> tuple[Figure, Any]:
    """A figure with ``rows x columns`` axes, each of ``size`` in inches; the axes as an array of that shape."""
    with needs_extra("report"):
        from matplotlib.figure import Figure as New

    figure = New(figsize=(columns * size[0], rows * size[1]), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False)
    for one in axes.flat:
        one.spines[["top", "right"]].set_visible(False)
    return figure, axes


def save(figure: Figure, folder: Path, name: str) -> list[Path]:
    """Write ``name.png`` and ``name.svg``; returns their paths."""
    from matplotlib import rc_context

    paths = [folder / f"{name}.png", folder / f"{name}.svg"]
    with plain_errors(f"writing the figure {name}", "or choose another folder"), rc_context({"svg.hashsalt": name}):
        folder.mkdir(parents=True, exist_ok=True)
        for path in paths:
            drawn = io.BytesIO()
            # Without its date, the same figure gives the same file.
            figure.savefig(
                drawn, format=path.suffix[1:], dpi=DPI, metadata={"Date": None} if path.suffix == ".svg" else {}
            )
            write_atomically(path, drawn.getvalue())
    return paths
