"""Figures about branches: heritage and diversity, correlations of channels, perturbations (MOptEq, Figures 2, 3a)."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from opteq.analysis.branches import (
    BranchMeasures,
    compare_perturbations,
    measure_branches,
    plot_averages,
    plot_correlation,
    plot_perturbations,
)
from opteq.common.errors import ConvergenceWarning
from opteq.report.figures.style import COLORS, CaptionedFigure, panels
from opteq.report.figures.subject import FigureUnavailableError, Subject
from opteq.states import State, blocks

_SAMPLES = 100  # as in the paper
_ATTACKED = 256  # images whose accuracy is measured
_KINDS = ("reconstructed", "random signs", "uniform noise")
_SIZES = (0.0, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0)


@torch.no_grad()
def _measures(subject: Subject) -> BranchMeasures:
    layer, given, _ = subject.equilibrium(_SAMPLES)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        features = layer.solve(given).features
    parts = blocks(features)
    if len(parts) < 2:
        raise FigureUnavailableError(f"it compares branches, and {subject.title} has one")
    if any(part.ndim != 4 for part in parts) or len({part.shape[1] for part in parts}) > 1:
        raise FigureUnavailableError(
            f"it needs branches with the same number of channels, and {subject.title} has others"
        )
    return measure_branches(tuple(parts))


def heritage_diversity(subject: Subject) -> CaptionedFigure:
    """Average diversity against average heritage, a point per image."""
    measures = {one.title: _measures(one) for one in (subject, *subject.beside)}
    figure, axes = panels(1, 1, (5, 4))
    plot_averages(measures, axes[0, 0])
    for points, color in zip(axes[0, 0].collections, COLORS, strict=False):
        points.set_color(color)
    axes[0, 0].legend()
    axes[0, 0].set(xlabel="average heritage H (inner product per channel)", ylabel="average diversity term D")
    words = "; ".join(
        f"{name}: mean H {float(one.heritage.mean()):.3g}, mean D {float(one.diversity.mean()):.3g}"
        for name, one in measures.items()
    )
    count = len(next(iter(measures.values())).heritage)
    return CaptionedFigure(
        figure,
        f"Heritage and diversity of {count} test images at the equilibrium, a point per image. H is how alike the same "
        f"channels of neighbouring branches are, D how alike different channels are; lower D is more diverse. {words}.",
    )


def channel_correlations(subject: Subject) -> CaptionedFigure:
    """The products of the channels of the first two branches, of one image and on average."""
    runs = (subject, *subject.beside)
    figure, axes = panels(len(runs), 2, (4.6, 3.9))
    words = []
    for row, one in zip(axes, runs, strict=True):
        measures = _measures(one)
        plot_correlation(measures, axes=row[0])
        mean = BranchMeasures(
            measures.heritage, measures.diversity, tuple(m.mean(dim=0)[None] for m in measures.correlations)
        )
        plot_correlation(mean, axes=row[1])
        row[0].set_title(f"{one.title}: one image")
        row[1].set_title(f"{one.title}: mean of {len(measures.heritage)}")
        for each in row:
            each.images[0].set_clim(vmin=0)  # dark is unrelated
        words.append(f"{_diagonal(mean.correlations[0][0]):.3g} times as large ({one.title})")
    return CaptionedFigure(
        figure,
        "Absolute products of the channels of branch 0 (rows) and branch 1 (columns), for one test image and on "
        "average. A bright diagonal means that corresponding channels agree and others are unrelated. Entries on the "
        f"diagonal are on average {', '.join(words)} as the others.",
    )


def _diagonal(matrix: Tensor) -> float:
    """The mean of the diagonal relative to the mean of all other entries."""
    count = matrix.shape[0]
    own = matrix.diagonal().sum()
    return float(own / count / ((matrix.sum() - own) / max(1, count * (count - 1))).clamp_min(1e-30))


def perturbations(subject: Subject) -> CaptionedFigure:
    """Accuracy under the reconstructed perturbation and under random ones of the same size."""
    subject.check_classifies()
    layer, given, labels = subject.equilibrium(_ATTACKED)
    if layer is not subject.model.equilibrium:
        raise FigureUnavailableError("it needs a model with one equilibrium layer between stem and head")
    if not isinstance(given, Tensor):
        raise FigureUnavailableError(
            "the perturbation is one of the input that all branches share, and here each has its own"
        )
    spread = float(given.std())

    def accuracy(features: State) -> float:
        return float((subject.model.head(features).argmax(dim=1) == labels).float().mean())

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        try:
            generator = torch.Generator(given.device).manual_seed(0)
            effects = compare_perturbations(layer, given, accuracy, [s * spread for s in _SIZES], 5, generator)
        except (TypeError, ValueError) as error:
            raise FigureUnavailableError(str(error)) from error
    figure, axes = panels(1, 1, (5, 3.8))
    plot_perturbations(effects, axes[0, 0])
    for line, color, name in zip(axes[0, 0].get_lines(), COLORS, _KINDS, strict=False):
        line.set(color=color, label=name)
    axes[0, 0].legend()
    axes[0, 0].set_ylim(bottom=0)
    axes[0, 0].yaxis.set_major_formatter(lambda value, _: f"{100 * value:g} %")
    axes[0, 0].set(
        xlabel="largest entry of the perturbation",
        ylabel=f"accuracy on {len(labels)} test images",
    )
    last = effects[-1]
    return CaptionedFigure(
        figure,
        "Accuracy against the size of a perturbation of the equilibrium's input: reconstructed from the equilibrium "
        "(it raises the objective most), random signs, and uniform noise, the random ones as means of five. At the "
        f"largest size, {last.size:.3g} (the standard deviation of that input), it is {last.reconstructed:.1%}, "
        f"{last.signs:.1%} and {last.uniform:.1%}.",
    )
