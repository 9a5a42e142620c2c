"""Draw the images of the documentation from the library itself: ``python docs/site/images.py``."""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl
import torch

import opteq
from opteq import data
from opteq import operators as op

mpl.use("Agg")
from matplotlib import animation, pyplot

HERE = Path(__file__).parents[1] / "images"


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
    left.legend(frameon=False, ncols=2, loc="upper right", bbox_to_anchor=(1, 0.94))
    right.semilogy(solution.trace[:, 0])
    right.set(xlabel="solver step", title="relative residual")
    figure.savefig(HERE / "objective.svg", metadata={"Date": None})


def signal_becoming_smooth() -> None:
    """An animation: the state of a ten-line denoiser and its objective, step by step."""
    torch.manual_seed(0)

    class Denoiser(opteq.Objective):
        def __init__(self) -> None:
            super().__init__()
            self.jumps = opteq.potentials.Huber(scale=0.05)

        def start(self, x: torch.Tensor) -> torch.Tensor:
            return x

        def terms(self, y: torch.Tensor, x: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"data": 0.5 * (y - x).square().sum(1), "jumps": 5.0 * self.jumps(y.diff(dim=1)).sum(1)}

    places = torch.linspace(0, 1, 120)
    clean = (places > 0.25).float() - 0.6 * (places > 0.55).float() + 0.4 * (places > 0.8).float()
    x = clean[None] + 0.15 * torch.randn(1, 120)
    with torch.no_grad():
        hidden = Denoiser()(x)
        states = [hidden.start()]
        for _ in range(96):
            states.append(hidden.step(states[-1]))
        terms = [hidden.terms(state) for state in states]
    values = {name: [float(one[name]) for one in terms] for name in ("data", "jumps")}
    values["objective"] = [sum(pair) for pair in zip(*values.values(), strict=True)]
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(7.2, 2.4), layout="constrained", dpi=90)
    left.plot(x[0], color="0.75", linewidth=1, label="input x")
    (curve,) = left.plot(states[0][0], color="tab:blue", linewidth=2, label="state y")
    left.set(xticks=[], title="the state")
    left.legend(frameon=False, loc="upper right", fontsize=8)
    lines = {name: right.plot([], [], label=name)[0] for name in values}
    lines["objective"].set(color="black", linewidth=2.5)
    right.set(xlim=(0, 96), ylim=(0, 1.05 * max(values["objective"])), xlabel="solver step", title="its objective")
    right.legend(frameon=False, fontsize=8)

    def draw(frame: int) -> None:
        curve.set_ydata(states[frame][0])
        for name, line in lines.items():
            line.set_data(range(frame + 1), values[name][: frame + 1])

    frames = [*range(20), *range(20, 97, 6), *[96] * 8]
    animation.FuncAnimation(figure, draw, frames=frames).save(HERE / "falling.gif", animation.PillowWriter(fps=8))


def main() -> None:
    """Draw all images."""
    HERE.mkdir(exist_ok=True)
    mpl.rcParams["svg.hashsalt"] = "opteq"  # the same file every time
    falling_objective()
    signal_becoming_smooth()


if __name__ == "__main__":
    main()
