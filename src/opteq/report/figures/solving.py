"""Figures about convergence: by step, and by the weight lambda of diversity (MOptEq, Figure 4)."""

from __future__ import annotations

import dataclasses
import math
import warnings
from typing import Any

import torch
from torch import Tensor

from opteq.common.errors import ConvergenceWarning
from opteq.equilibrium import Equilibrium
from opteq.problems import MOptEq
from opteq.report.figures.style import COLORS, CaptionedFigure, panels
from opteq.report.figures.subject import FigureUnavailableError, Subject
from opteq.solvers import Picard
from opteq.solvers.base import Solver
from opteq.states import State, blocks

_SAMPLES, _STEPS, _TOL = 64, 50, 1e-6


@torch.no_grad()
def residuals(layer: Equilibrium, given: State, solver: Solver) -> Tensor:
    """Relative residual after every step, ``(steps + 1, B)``; a sample that is finished keeps its last one."""
    before = layer.solver, layer.on_failure
    layer.solver, layer.on_failure = solver, "ignore"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)
            trace = layer.solve(given).report.trace
    finally:
        layer.solver, layer.on_failure = before
    if trace is None:
        raise FigureUnavailableError("its solver records no residuals")
    return trace.double().cpu()


def convergence(subject: Subject) -> CaptionedFigure:
    """Relative residual by step, of the model's own solver and of plain iteration."""
    layer, given, labels = subject.equilibrium(_SAMPLES)
    own = dataclasses.replace(layer.solver, tol=_TOL, max_steps=_STEPS)
    figure, axes = panels(1, 1, (5.4, 3.8))
    words = []
    solvers = {type(own).__name__: own}
    if not isinstance(own, Picard):
        solvers["plain iteration"] = Picard(tol=_TOL, max_steps=_STEPS)
    for (name, solver), color in zip(solvers.items(), COLORS, strict=False):
        trace = residuals(layer, given, solver)
        middle = trace.nanmedian(dim=1).values
        axes[0, 0].semilogy(middle.tolist(), color=color, label=f"{name}, median")
        axes[0, 0].fill_between(
            range(len(trace)),
            trace.amin(dim=1).clamp_min(1e-12).tolist(),
            trace.amax(dim=1).tolist(),
            color=color,
            alpha=0.15,
        )
        words.append(f"{name} reaches {float(middle[-1]):.1e} after {len(trace) - 1} steps")
    axes[0, 0].axhline(layer.solver.tol, color="grey", linestyle=":", label="tolerance of the run")
    _label_steps(axes[0, 0])
    axes[0, 0].legend()
    return CaptionedFigure(
        figure,
        f"Relative residual after every solver step on {len(labels)} test images, median and range. "
        f"{'; '.join(words)} (median).",
    )


def convergence_lambda(subject: Subject) -> CaptionedFigure:
    """Relative residual by step for several weights of diversity, with the trained weights otherwise."""
    layer, given, labels = subject.equilibrium(_SAMPLES)
    problem = layer.problem
    if not isinstance(problem, MOptEq):
        raise FigureUnavailableError(
            f"lambda is the weight of diversity in MOptEq, and this is {type(problem).__name__}"
        )
    trained, channels = problem.coupling, blocks(layer(given))[0].shape[1]
    weights = sorted({0.0, 0.001, 0.01, 0.1, round(1 / channels, 4), trained.diversity, 1.0})
    figure, axes = panels(1, 1, (5.8, 4))
    words = []
    solver = dataclasses.replace(layer.solver, tol=_TOL, max_steps=_STEPS)
    try:
        for place, (weight, color) in enumerate(zip(weights, COLORS, strict=False)):
            problem.coupling = dataclasses.replace(trained, diversity=weight)
            middle = residuals(layer, given, solver).nanmedian(dim=1).values
            label = f"{weight:g}" + (" (trained)" if weight == trained.diversity else "")
            style = ("-", (0, (6, 3)), (0, (3, 6)), (0, (1, 4)))[place % 4]  # small weights give nearly the same curve
            axes[0, 0].semilogy(middle.tolist(), color=color, label=label, linestyle=style, linewidth=2)
            last = float(middle[-1])
            words.append(
                f"{weight:g}: {last:.1e} after {len(middle) - 1}" if math.isfinite(last) else f"{weight:g}: none"
            )
    finally:
        problem.coupling = trained
    _label_steps(axes[0, 0])
    axes[0, 0].legend(title="λ")
    return CaptionedFigure(
        figure,
        f"Median relative residual after every step of {type(solver).__name__} on {len(labels)} test images, for "
        f"several weights λ of diversity; the run was trained with {trained.diversity:g}, and 1/C is "
        f"{1 / channels:.3g}. Residual and number of steps at the end: {'; '.join(words)}.",
    )


def _label_steps(axes: Any) -> None:
    axes.set(xlabel="solver step", ylabel="relative residual |T(y) - y| / |T(y)|")
    axes.xaxis.get_major_locator().set_params(integer=True)
