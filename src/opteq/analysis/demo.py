"""A first look: one OptEq on the digits of this package, solved, checked and explained."""

from __future__ import annotations

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from opteq.analysis import compare_gradients
from opteq.data.readers.digits import read_digits
from opteq.equilibrium import Equilibrium
from opteq.gradients import Implicit
from opteq.operators import Dense
from opteq.problems import OptEq
from opteq.solution import Solution
from opteq.solvers import Anderson, Picard


def run(samples: int = 256, console: Console | None = None) -> Solution:
    """Solve one OptEq on the digits; print its objective, convergence, gradients and certificate."""
    console = console or Console()
    torch.manual_seed(0)
    images, labels = map(torch.from_numpy, read_digits())
    x = images[:samples].flatten(1) / 16
    problem = OptEq(Dense(32, 128, bound=0.95), U=nn.Linear(64, 128), activation="relu")
    layer = Equilibrium(problem, Anderson(tol=1e-5), Implicit())

    console.rule("[bold]A network that minimises an objective you can read")
    console.print(
        "The state y of this layer is the minimiser of\n\n"
        "    G(y; x) = 1/2 |y|^2 - 1/2 |W'y|^2 - <U x + b, y>   over y >= 0\n\n"
        "so its activation is relu, the prox of 'y >= 0', and one step is  y <- relu(W W'y + U x + b).\n"
        f"x: {samples} digits of 8x8 pixels; y: 128 units; features W'y: 32 values.\n"
    )
    console.print("[bold]Certificate from the weights[/bold] (before training, from |W| <= 0.95)")
    console.print(str(problem.certificate()), highlight=False)

    solution = layer.solve(x)
    plain = Equilibrium(problem, Picard(tol=1e-5, max_steps=500)).solve(x)
    console.print(
        f"\n[bold]Convergence[/bold]: {int(solution.converged.sum())} of {samples} samples converged; "
        f"Anderson took {float(solution.steps.float().mean()):.1f} steps on average (plain iteration "
        f"{float(plain.steps.float().mean()):.1f}), worst relative residual {float(solution.residual.max()):.1e}."
    )
    console.print(_terms(layer, x, labels, solution))
    console.print("[bold]Gradients[/bold]: each method against the exact gradient, on these digits")
    compare_gradients(layer, x, console=console)
    return solution


def _terms(layer: Equilibrium, x: Tensor, labels: Tensor, solution: Solution) -> Table:
    """The objective of a few digits, term by term, at the start and at the equilibrium."""
    with torch.no_grad():
        hidden = layer.problem(x)
        start, end = hidden.terms(hidden.start()), hidden.terms(solution.state)
        totals = hidden.objective(hidden.start()), hidden.objective(solution.state)
    table = Table(title="The objective, term by term, at the start and at the equilibrium")
    table.add_column("digit")
    for name in end:
        table.add_column(name, justify="right")
    table.add_column("sum", justify="right")
    for index in range(4):
        for place, terms, total in (("start", start, totals[0]), ("end", end, totals[1])):
            values = [f"{float(term[index]):.3f}" for term in terms.values()]
            table.add_row(f"{int(labels[index])}, {place}", *values, f"{float(total[index]):.3f}")
    return table
