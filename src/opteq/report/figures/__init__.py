"""Every figure of the papers that a run can have, as PNG and SVG with captions: ``opteq figures RUN...``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from opteq.common.errors import UserError, unknown_name
from opteq.common.files import plain_errors, write_atomically
from opteq.report.figures import branches, maps, robust, settings, solving
from opteq.report.figures.robust import draw_record
from opteq.report.figures.style import CaptionedFigure, save
from opteq.report.figures.subject import FigureUnavailableError, Subject, open_subject
from opteq.training import is_denoiser

FIGURES: dict[str, tuple[Callable[[Subject], CaptionedFigure], str]] = {
    "heritage-diversity": (branches.heritage_diversity, "MOptEq, Figure 2 a, b"),
    "channel-correlations": (branches.channel_correlations, "MOptEq, Figure 2 c, d"),
    "perturbations": (branches.perturbations, "MOptEq, Figure 3 a"),
    "attack-steps": (robust.attack_steps, "MOptEq, Figure 3 b"),
    "accuracy-settings": (settings.accuracy_settings, "MOptEq, Figure 3 c; GEQ, Figure 4"),
    "attack-radius": (robust.attack_radius, "not in the papers"),
    "certified": (robust.certified, "not in the papers"),
    "convergence": (solving.convergence, "MOptEq, Figure 4"),
    "convergence-lambda": (solving.convergence_lambda, "MOptEq, Figure 4 a"),
    "corruptions": (robust.corruptions, "GEQ, Figure 2"),
    "saliency": (maps.saliency, "GEQ, Figure 3"),
    "attention": (maps.attention, "GEQ: the weights of its patches"),
}
"""Figures by name, each with what draws it and where it comes from."""


def write_figures(
    run: str | Path,
    out: str | Path | None = None,
    only: Sequence[str] = (),
    beside: Sequence[str | Path] = (),
    say: Callable[[str], None] = lambda _: None,
    device: str = "auto",
    root: str | None = None,
) -> list[Path]:
    """Write the figures of a finished run, each as PNG and SVG, and ``captions.md`` that says what is seen.

    Args:
        run: the run's folder.
        out: where they go; ``figures`` in the run's folder by default.
        only: names of figures; all that the run can have by default.
        beside: folders of other runs, which are drawn in the same figures where that makes sense.
        say: gets a line for each figure: its file, or why there is none.
        device: ``auto``, ``cpu`` or ``cuda``.
        root: folder of the images, if it differs from the recipe's.

    Returns:
        The PNG files.

    Raises:
        UserError: an unknown name, a folder that holds no finished classifier, or a figure of ``only`` that the run
            can't have.
    """
    for name in only:
        if name not in FIGURES:
            raise unknown_name("figure", name, FIGURES)
    for folder in (run, *beside):
        if is_denoiser(Path(folder)):
            raise UserError(f"figures are for classifiers, and {folder} holds a denoiser")
    subject = open_subject(Path(run), tuple(map(Path, beside)), device, root)
    folder = subject.opened.path / "figures" if out is None else Path(out)
    written, captions = [], _earlier_captions(folder)
    for name, (draw, source) in FIGURES.items():
        if only and name not in only:
            continue
        try:
            drawn = draw(subject)
        except FigureUnavailableError as error:
            if only:
                raise UserError(f"{run} has no figure {name}: {error}") from error
            say(f"{name}: none, {error}")
            continue
        written.append(save(drawn.figure, folder, name)[0])
        captions[name] = f"## {name} ({source})\n\n![{name}]({name}.png)\n\n{drawn.caption}"
        say(f"{name}: {written[-1]}")
    if written:
        with plain_errors(f"writing {folder / 'captions.md'}", "or choose another folder with --out"):
            parts = [f"# Figures of {subject.title}", *(captions[name] for name in FIGURES if name in captions)]
            write_atomically(folder / "captions.md", ("\n\n".join(parts) + "\n").encode())
    return written


def _earlier_captions(folder: Path) -> dict[str, str]:
    """The captions of figures that were drawn before and are still there, by name."""
    try:
        sections = (folder / "captions.md").read_text(encoding="utf-8").strip().split("\n\n## ")[1:]
    except (OSError, ValueError):
        return {}
    captions = {section.split(" (", 1)[0]: f"## {section}" for section in sections}
    return {name: caption for name, caption in captions.items() if (folder / f"{name}.png").exists()}


__all__ = ["FIGURES", "draw_record", "write_figures"]
