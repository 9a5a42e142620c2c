"""How good and how dear each gradient is, measured on a user's own layer and batch."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from opteq.equilibrium import Equilibrium
from opteq.gradients import Gradient, Implicit, OneStep, Phantom, Shine, Unrolled
from opteq.states import State, blocks

Loss = Callable[[State], Tensor]


@dataclass(frozen=True)
class GradientCost:
    """One row of :func:`compare_gradients`.

    Attributes:
        gradient: the gradient that was measured.
        angle: degrees between it and the exact one, over all parameters and the input.
        ratio: its length over the exact one's.
        forward_seconds: median time of the forward pass.
        backward_seconds: median time of the backward pass.
        kept_bytes: what autograd keeps between the two passes, parameters not counted.
    """

    gradient: Gradient
    angle: float
    ratio: float
    forward_seconds: float
    backward_seconds: float
    kept_bytes: int


def compare_gradients(
    layer: Equilibrium,
    x: Tensor,
    loss: Loss | None = None,
    gradients: Sequence[Gradient] | None = None,
    repeats: int = 3,
    show: bool = True,
    console: Console | None = None,
) -> list[GradientCost]:
    """Measure each gradient's angle to the exact one, its time and its memory, and print a table.

    The exact gradient is the implicit one, solved as far as the dtype allows at the state that the layer's solver
    finds with its tolerance lowered to match.

    Args:
        layer: the layer to measure; its solver is used for every row. It is left as it was.
        x: a batch.
        loss: from the layer's features to one number; by default their inner product with fixed random numbers,
            which favours no direction.
        gradients: what to compare; by default one of each kind.
        repeats: timed runs, of which the median is shown.
        show: print the table.
        console: where to print it; standard output by default.
    """
    chosen = list(gradients) if gradients is not None else [Implicit(), Phantom(), OneStep(), Shine(), Unrolled()]
    loss = loss or _random_loss
    exact = _flat_gradient(_exact(layer, x), x, loss)[0]
    rows = []
    for gradient in chosen:
        probe = Equilibrium(layer.problem, layer.solver, gradient, on_failure="ignore").train(layer.training)
        runs = [_flat_gradient(probe, x, loss) for _ in range(repeats)]
        found = runs[0][0]
        rows.append(
            GradientCost(
                gradient,
                angle=_angle(found, exact),
                ratio=float(found.norm() / exact.norm()) if float(exact.norm()) > 0 else math.nan,
                forward_seconds=sorted(run[1] for run in runs)[repeats // 2],
                backward_seconds=sorted(run[2] for run in runs)[repeats // 2],
                kept_bytes=runs[0][3],
            )
        )
    if show:
        (console or Console()).print(_table(rows))
    return rows


def _exact(layer: Equilibrium, x: Tensor) -> Equilibrium:
    eps = torch.finfo(x.dtype).eps
    solver = replace(layer.solver, tol=min(layer.solver.tol, 10 * eps), max_steps=4 * layer.solver.max_steps)
    gradient = Implicit(tol=10 * eps, max_steps=1000)
    return Equilibrium(layer.problem, solver, gradient, on_failure="ignore").train(layer.training)


def _flat_gradient(layer: Equilibrium, x: Tensor, loss: Loss) -> tuple[Tensor, float, float, int]:
    """The gradient as one vector, the seconds of both passes, and the bytes kept between them."""
    x = x.detach().clone().requires_grad_()
    weights = [p for p in layer.parameters() if p.requires_grad]
    own = {w.untyped_storage().data_ptr() for w in weights}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    begun = _clock(x.device)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), torch.enable_grad():
        value = loss(layer(x))
    between = _clock(x.device)
    slopes = torch.autograd.grad(value, [x, *weights], allow_unused=True)
    ended = _clock(x.device)
    wide = [slope.flatten().double() for slope in slopes if slope is not None]
    return torch.cat(wide), between - begun, ended - between, sum(kept.values())


def _clock(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _random_loss(features: State) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    total = blocks(features)[0].new_zeros((), dtype=torch.float32)
    for part in blocks(features):
        total = total + (part * torch.randn(part.shape, generator=generator).to(part)).sum()
    return total


def _angle(a: Tensor, b: Tensor) -> float:
    """Degrees between two vectors, accurate for small angles too (where the cosine is 1 to rounding)."""
    u, v = a / a.norm(), b / b.norm()
    return math.degrees(2 * math.atan2(float((u - v).norm()), float((u + v).norm())))


def _short_name(gradient: Gradient) -> str:
    """``Phantom(5, 0.8)``: the class and the options that were set."""
    values = [getattr(gradient, field.name) for field in fields(gradient)]
    return f"{type(gradient).__name__}({', '.join(str(value) for value in values if value is not None)})"


def _table(rows: list[GradientCost]) -> Table:
    table = Table(title="Gradients against the exact one")
    for heading in ("gradient", "angle", "length ratio", "forward", "backward", "kept"):
        table.add_column(heading, justify="left" if heading == "gradient" else "right")
    for row in rows:
        table.add_row(
            _short_name(row.gradient),
            f"{row.angle:.3g}°",
            f"{row.ratio:.3f}",
            f"{1e3 * row.forward_seconds:.1f} ms",
            f"{1e3 * row.backward_seconds:.1f} ms",
            f"{row.kept_bytes / 2**20:.2f} MiB",
        )
    return table
