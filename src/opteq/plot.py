"""Plots of solutions; matplotlib is imported when one is drawn."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from opteq.solution import Solution


def convergence(solution: Solution, sample: int | None = None, axes: Any = None) -> Any:
    """Draw the residual, and the objective with its terms where they were traced, against the number of steps.

    Args:
        solution: that of ``layer.solve(x, trace_objective=True)``; without a trace the residual alone is drawn.
        sample: the sample to draw; the mean over the batch by default.
        axes: one axes of matplotlib for each panel, residual and objective; a new figure by default.

    Returns:
        The figure.
    """
    from matplotlib import pyplot

    traces = solution.term_traces
    panels = 1 if traces is None else 2
    if axes is None:
        _, axes = pyplot.subplots(1, panels, figsize=(5 * panels, 3.5), squeeze=False, layout="constrained")
        axes = axes[0]
    else:
        axes = [axes] if not hasattr(axes, "__len__") else axes
        if len(axes) != panels:
            raise ValueError(f"convergence draws {panels} panels here, so it needs as many axes; got {len(axes)}")

    def chosen(trace: torch.Tensor) -> list[float]:
        trace = trace.detach().double().cpu()
        numbers: list[float] = (trace.mean(dim=1) if sample is None else trace[:, sample]).tolist()
        return numbers

    whose = "mean over the batch" if sample is None else f"sample {sample}"
    residual = axes[0]
    if solution.trace is not None:
        residual.semilogy(chosen(solution.trace), color="black")
    residual.axhline(solution.report.tol, color="grey", linestyle=":", label="tolerance")
    residual.set(xlabel="step", ylabel="relative residual", title=f"{solution.report.method}, {whose}")
    residual.legend()
    if traces is not None and solution.objective_trace is not None:
        panel = axes[1]
        panel.plot(chosen(solution.objective_trace), color="black", linewidth=2, label="objective")
        for name, trace in traces.items():
            panel.plot(chosen(trace), label=name)
        panel.set(xlabel="step", ylabel="value", title="objective, term by term")
        panel.legend()
    return residual.figure
