"""Accuracy and cost of each gradient method, measured on a layer and a batch."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from opteq.common.errors import needs_extra
from opteq.equilibrium import Equilibrium
from opteq.gradients import Gradient, Implicit, OneStep, Phantom, Shine, Unrolled
from opteq.solvers import SAM, Solver
from opteq.states import State, blocks, map_state

if TYPE_CHECKING:
    from rich.console import Console

Loss = Callable[[State], Tensor]


@dataclass(frozen=True)
class GradientCost:
    """One row of :func:`compare_gradients`.

    Attributes:
        gradient: the method.
        angle: angle to the exact gradient in degrees, over all parameters and the input.
        ratio: norm divided by that of the exact gradient.
        forward_seconds: median time of the forward pass.
        backward_seconds: median time of the backward pass.
        kept_bytes: memory held between forward and backward pass, without parameters and input.
    """

    gradient: Gradient
    angle: float
    ratio: float
    forward_seconds: float
    backward_seconds: float
    kept_bytes: int


def compare_gradients(
    layer: Equilibrium,
    x: State,
    loss: Loss | None = None,
    gradients: Sequence[Gradient] | None = None,
    repeats: int = 3,
    show: bool = True,
    console: Console | None = None,
) -> list[GradientCost]:
    """Measure each gradient's angle to the exact one, its time and its memory, and print a table.

    The exact gradient is the implicit one, solved to the precision of the dtype at a state solved to the same
    precision. SAM is refused: it does not end at an equilibrium, and the gradient of its steps is
    :class:`~opteq.gradients.Unrolled`.

    Args:
        layer: the layer to measure; its solver is used for every row. Its buffers, such as the statistics of batch
            normalisation, and the random state are restored; every run uses the same random numbers.
        x: a batch; a tuple where each branch has its own.
        loss: from the layer's features to a scalar; by default their inner product with fixed random values.
        gradients: the methods to compare; by default one of each class.
        repeats: timed runs, of which the median is shown.
        show: print the table, which needs rich.
        console: where to print it; standard output by default.
    """
    if show and console is None:
        with needs_extra("cli"):
            from rich.console import Console

        console = Console()
    if repeats < 1:
        raise ValueError(f"repeats should be at least 1; got {repeats}")
    if isinstance(layer.solver, SAM):
        raise ValueError("SAM does not end at an equilibrium, so there is no exact gradient to compare with")
    chosen = list(gradients) if gradients is not None else [Implicit(), Phantom(), OneStep(), Shine(), Unrolled()]
    loss = loss or _random_loss
    rows = []
    with _preserved_state(layer, x) as rewind:
        exact = _flat_gradient(_exact(layer, x), x, loss, rewind)[0]
        for gradient in chosen:
            probe = _probe(layer, layer.solver, gradient)
            runs = [_flat_gradient(probe, x, loss, rewind) for _ in range(repeats)]
            found = runs[0][0]
            rows.append(
                GradientCost(
                    gradient,
                    angle=_angle(found, exact),
                    ratio=float(found.norm() / exact.norm()) if float(exact.norm()) > 0 else math.nan,
                    forward_seconds=sorted(run[1] for run in runs)[repeats // 2],
                    backward_seconds=sorted(run[2] for run in runs)[repeats // 2],
                    kept_bytes=_kept_bytes(probe, x, loss, rewind),
                )
            )
    if show and console is not None:
        _print(rows, console)
    return rows


def _exact(layer: Equilibrium, x: State) -> Equilibrium:
    eps = torch.finfo(blocks(x)[0].dtype).eps
    solver = replace(layer.solver, tol=min(layer.solver.tol, 10 * eps), max_steps=4 * layer.solver.max_steps)
    return _probe(layer, solver, Implicit(tol=10 * eps, max_steps=1000))


def _probe(layer: Equilibrium, solver: Solver, gradient: Gradient) -> Equilibrium:
    """A layer with another solver and gradient that shares the problem."""
    return Equilibrium(layer.problem, solver, gradient, on_failure="ignore")


@contextmanager
def _preserved_state(layer: Equilibrium, x: State) -> Iterator[Callable[[], None]]:
    """Yield a function that restores buffers and random state; leaving the block restores them too."""
    buffers = [(buffer, buffer.clone()) for buffer in layer.buffers()]
    on_cpu = torch.get_rng_state()
    device = blocks(x)[0].device
    on_device = torch.cuda.get_rng_state(device) if device.type == "cuda" else None

    def rewind() -> None:
        torch.set_rng_state(on_cpu)
        if on_device is not None:
            torch.cuda.set_rng_state(on_device, device)
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)

    try:
        yield rewind
    finally:
        rewind()


def _flat_gradient(layer: Equilibrium, x: State, loss: Loss, rewind: Callable[[], None]) -> tuple[Tensor, float, float]:
    """The gradient as one vector, and the seconds of both passes."""
    rewind()
    x = map_state(_leaf, x)
    device = blocks(x)[0].device
    inputs = [*blocks(x), *(p for p in layer.parameters() if p.requires_grad)]
    begun = _clock(device)
    with torch.enable_grad():
        value = loss(layer(x))
    between = _clock(device)
    slopes = torch.autograd.grad(value, inputs, allow_unused=True, materialize_grads=True)
    ended = _clock(device)
    return torch.cat([slope.flatten().double() for slope in slopes]), between - begun, ended - between


def _leaf(x: Tensor) -> Tensor:
    return x.detach().clone().requires_grad_()


def _kept_bytes(layer: Equilibrium, x: State, loss: Loss, rewind: Callable[[], None]) -> int:
    """Bytes allocated by the forward pass that are alive before the backward pass."""
    rewind()
    x = map_state(_leaf, x)
    storages = _Storages([*blocks(x), *layer.parameters(), *layer.buffers()])
    with storages, torch.enable_grad():
        value = loss(layer(x))
    gc.collect()
    kept = storages.alive()
    del value  # until here it held on to its graph
    return kept


class _Storages(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the storages that operations allocate, without keeping them alive.

    Hooks on saved tensors would miss the linearisation that an adjoint solve keeps in a closure.
    """

    def __init__(self, known: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.known = {_storage_reference(tensor).cdata for tensor in known}
        self.made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                reference = _storage_reference(tensor)
                if reference.cdata not in self.known:
                    self.made[reference.cdata] = (reference, tensor.untyped_storage().nbytes())
        return result

    def alive(self) -> int:
        """Bytes of the storages that still exist."""
        return sum(size for seen, size in self.made.values() if not seen.expired())  # type: ignore[no-untyped-call, misc]


def _storage_reference(tensor: Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]


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


def _print(rows: list[GradientCost], console: Console) -> None:
    from rich.table import Table

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
            f"{row.kept_bytes / 2**20:.2f} MiB" if row.kept_bytes >= 2**20 else f"{row.kept_bytes / 2**10:.1f} KiB",
        )
    console.print(table)
