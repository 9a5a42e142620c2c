"""Draw the pictures of the documentation from the library itself: ``python docs/site/pictures.py``."""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl
import torch

import opteq
from opteq import data
from opteq import operators as op

mpl.use("Agg")
from matplotlib import pyplot

HERE = Path(__file__).parents[1] / "pictures"


def falling_objective() -> None:
    """The terms of an OptEq's objective, and the residual, step by step, for a digit of the package."""
    torch.manual_seed(0)
    problem = opteq.OptEq(op.Conv2d(8, 16, 3, bound=0.95), torch.nn.Conv2d(1, 16, 3, padding=1))
    layer = opteq.Equilibrium(problem, opteq.Picard(tol=1e-6, max_steps=40))
    x = data.load("digits").test.images[:1].float() / 255
    with torch.no_grad():
        solution = layer.solve(x, trace_objective=True)
    assert solution.term_traces is not None
    assert solution.objective_trace is not None
    assert solution.trace is not None
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(8, 2.8), layout="constrained")
    for name, values in solution.term_traces.items():
        if float(values.abs().max()):
            left.plot(values[:, 0], label=name, linewidth=1.5)
    left.plot(solution.objective_trace[:, 0], label="objective", linewidth=3, color="black")
    left.set(xlabel="solver step", title="the objective falls", xlim=(0, 12))
    left.legend(frameon=False)
    right.semilogy(solution.trace[:, 0])
    right.set(xlabel="solver step", title="relative residual")
    figure.savefig(HERE / "objective.svg", metadata={"Date": None})


def main() -> None:
    """All pictures."""
    HERE.mkdir(exist_ok=True)
    mpl.rcParams["svg.hashsalt"] = "opteq"  # the same file every time
    falling_objective()


if __name__ == "__main__":
    main()
