"""Minimise energies that are not convex, with a measurement that does not see everything."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from opteq.diagnostics.minimum import curvature_at_solution
from opteq.equilibrium import Equilibrium
from opteq.models.restoration.energy import Restoration
from opteq.solution import Report
from opteq.solvers import FISTA, Status

MAX_STEPS = 3000
_AWAY = 200
"""Steps that are taken away from a saddle whatever the residual is."""


@torch.no_grad()
def minimise(
    problem: Restoration, x: Tensor, sigma: Tensor, tol: float = 1e-4, max_steps: int = MAX_STEPS, attempts: int = 3
) -> tuple[Tensor, Report]:
    """The images of least energy, and how they were found; residuals are estimates of the relative distance to them.

    The residual is small beside a saddle, too. Samples whose energy curves downwards at their solution move a little
    along the direction that does, and go on.

    Args:
        problem: the energy.
        x: measurements, batch first.
        sigma: noise levels ``(B,)``.
        tol: estimated relative distance to the minimiser.
        max_steps: of every solve at most.
        attempts: how often a saddle is left.
    """
    solver = FISTA(tol=tol, max_steps=max_steps, measure="error")
    state, report = _solved(problem, x, sigma, None, solver)
    for _ in range(attempts):
        rows = (report.codes == int(Status.NOT_A_MINIMUM)).nonzero()[:, 0]
        if not len(rows):
            break
        given = (problem, x[rows], sigma[rows])
        start, away = _solved(*given, _beside(*given, state[rows]), FISTA(tol=0, max_steps=_AWAY))
        found, further = _solved(*given, start, solver)
        state = state.index_copy(0, rows, found)
        report = replace(
            report,
            residual=report.residual.index_copy(0, rows, further.residual),
            steps=report.steps.index_add(0, rows, away.steps + further.steps),
            codes=report.codes.index_copy(0, rows, further.codes),
        )
    return state, report


def _beside(problem: Restoration, x: Tensor, sigma: Tensor, y: Tensor) -> Tensor:
    """Images with less energy: some pixels move by a tenth of the noise along the direction of least curvature."""
    hidden = problem((x, sigma))
    curvature = curvature_at_solution(hidden, y, direction=True)
    assert curvature is not None
    assert curvature.direction is not None
    direction = curvature.direction.reshape(y.shape).to(y.dtype)
    change = hidden.step(y)
    assert isinstance(change, Tensor)
    downhill = torch.where((direction * (change - y)).flatten(1).sum(dim=1) < 0, -1, 1)
    length = downhill * 0.1 * sigma / direction.flatten(1).abs().amax(dim=1)
    return y + length.to(y.dtype).reshape(-1, *[1] * (y.ndim - 1)) * direction


def _solved(
    problem: Restoration, x: Tensor, sigma: Tensor, start: Tensor | None, solver: FISTA
) -> tuple[Tensor, Report]:
    solution = Equilibrium(problem, solver, on_failure="ignore").solve((x, sigma), start)
    assert isinstance(solution.state, Tensor)
    return solution.state, solution.report
