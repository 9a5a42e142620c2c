"""Heritage and diversity of branches, and the effect of perturbations of the input.

The figures of the MOptEq paper: averages of heritage and diversity and channel correlations (Figure 2), and the effect
of reconstructed perturbations compared with random ones (Figure 3a).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from opteq.analysis.terms import evaluation_mode
from opteq.common.errors import needs_extra
from opteq.common.validate import check_not_negative
from opteq.couplings import Features, diversity, heritage, products
from opteq.equilibrium import Equilibrium
from opteq.problems.base import Problem
from opteq.problems.hidden import BoundMap, Hidden
from opteq.states import State, map_state

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Score = Callable[[State], float | Tensor]


@dataclass(frozen=True)
class BranchMeasures:
    """Heritage, diversity and channel correlations of branches, per sample.

    Attributes:
        heritage: H summed over every branch's two neighbours, divided by ``L C``, ``(B,)``.
        diversity: D summed likewise, divided by ``L (C^2 - C)``, ``(B,)``; lower means more diverse.
        correlations: for each branch and the next, ``|M|`` with the products of their channels, ``(B, C, C)``.
    """

    heritage: Tensor
    diversity: Tensor
    correlations: tuple[Tensor, ...]


@torch.no_grad()
def measure_branches(features: Features) -> BranchMeasures:
    """Measure the features of all branches, as :class:`~opteq.problems.branches.mopteq.MOptEq` returns them.

    >>> features = (torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, -4.0]]))
    >>> measured = measure_branches(features)
    >>> measured.heritage, measured.diversity
    (tensor([-5.]), tensor([10.]))
    """
    matrices = products(features)
    count, channels = len(features), features[0].shape[1]
    # Each pair of neighbours counts twice.
    alike = 2 * heritage(features).sum(dim=0) / (count * channels)
    apart = 2 * diversity(features).sum(dim=0) / max(count * (channels**2 - channels), 1)
    return BranchMeasures(alike, apart, tuple(matrix.abs() for matrix in matrices))


def reconstructed_perturbation(model: Equilibrium | Problem, x: Tensor, size: float) -> Tensor:
    """The delta with entries of at most ``size`` for which ``x - delta`` raises the objective most at a fixed state.

    ``G(y; x - delta) = G(y; x) + <U'y, delta>`` for a problem with one branch, so ``delta = size * sign(U'y)`` at its
    equilibrium y; for several branches the ``U'y`` of all add up, each at its own scale. It is computed from the
    objective, so it works for every problem that has one.

    Args:
        model: a layer, or a problem (solved with the default solver); used in evaluation mode.
        x: its input.
        size: largest entry of delta.
    """
    check_not_negative("size", size)
    if not isinstance(x, Tensor):
        raise TypeError(
            f"a perturbation is reconstructed for one input that all branches see; got a {type(x).__name__}"
        )
    layer = model if isinstance(model, Equilibrium) else Equilibrium(model)
    with evaluation_mode(layer):
        with torch.no_grad():
            state = map_state(torch.detach, layer.solve(x).state)
        with torch.enable_grad():
            point = x.detach().requires_grad_()
            hidden = layer.problem(point)
            objective = hidden.smooth if isinstance(hidden, Hidden) else hidden.objective
            if type(hidden).objective is BoundMap.objective:
                raise TypeError(f"{type(layer.problem).__name__} has no objective that a perturbation could raise")
            (slope,) = torch.autograd.grad(objective(state).sum(), point)
    return -size * torch.sign(slope)


@dataclass(frozen=True)
class PerturbationEffect:
    """Scores under perturbations of one size; random ones are averaged over trials.

    Attributes:
        size: largest entry.
        reconstructed: see :func:`reconstructed_perturbation`.
        signs: entries ``+size`` or ``-size`` with equal chance.
        uniform: entries uniform between them.
    """

    size: float
    reconstructed: float
    signs: float
    uniform: float


def compare_perturbations(
    model: Equilibrium | Problem,
    x: Tensor,
    score: Score,
    sizes: Sequence[float],
    trials: int = 5,
    generator: torch.Generator | None = None,
) -> list[PerturbationEffect]:
    """The reconstructed perturbation against random ones of the same size.

    Args:
        model: a layer or a problem.
        x: the input of the equilibrium, which is not the image where a stem comes before it.
        score: from features to a number, the accuracy of a classifier for instance.
        sizes: of the perturbations.
        trials: random ones to average over; the paper has five.
        generator: of the random ones, on the device of ``x``.
    """
    layer = model if isinstance(model, Equilibrium) else Equilibrium(model)
    direction = reconstructed_perturbation(layer, x, 1.0)

    @torch.no_grad()
    def scored(delta: Tensor) -> float:
        with evaluation_mode(layer):
            return float(score(layer(x - delta)))

    def mean(draw: Callable[[Tensor], Tensor], size: float) -> float:
        noise = [torch.rand(x.shape, generator=generator, device=x.device).to(x.dtype) for _ in range(trials)]
        return sum(scored(size * draw(2 * one - 1)) for one in noise) / trials

    return [
        PerturbationEffect(size, scored(size * direction), mean(torch.sign, size), mean(torch.clone, size))
        for size in sizes
    ]


def plot_averages(measures: Mapping[str, BranchMeasures], axes: Axes | None = None) -> Axes:
    """Average diversity against average heritage: one point per sample, one color per network."""
    axes = _axes(axes)
    for name, one in measures.items():
        axes.scatter(one.heritage.cpu().numpy(), one.diversity.cpu().numpy(), label=name, s=12)
    axes.set_xlabel("average heritage H")
    axes.set_ylabel("average diversity term D")
    axes.legend()
    return axes


def plot_correlation(measures: BranchMeasures, sample: int = 0, pair: int = 0, axes: Axes | None = None) -> Axes:
    """The channel products of branch ``pair`` (rows) and the next (columns) for one sample, as a heat map."""
    axes = _axes(axes)
    from matplotlib.ticker import MaxNLocator

    image = axes.imshow(measures.correlations[pair][sample].float().cpu().numpy(), cmap="viridis")
    axes.figure.colorbar(image, ax=axes, label="absolute product of two channels")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(integer=True))
    axes.set_ylabel(f"channels of branch {pair}")
    axes.set_xlabel(f"channels of branch {(pair + 1) % len(measures.correlations)}")
    return axes


def plot_perturbations(effects: Sequence[PerturbationEffect], axes: Axes | None = None) -> Axes:
    """Scores against the size of the perturbation, one line per kind of perturbation."""
    axes = _axes(axes)
    sizes = [effect.size for effect in effects]
    for kind in ("reconstructed", "signs", "uniform"):
        axes.plot(sizes, [getattr(effect, kind) for effect in effects], marker="o", label=kind)
    axes.set_xlabel("size of the perturbation")
    axes.set_ylabel("score")
    axes.legend()
    return axes


def _axes(axes: Axes | None) -> Axes:
    if axes is not None:
        return axes
    with needs_extra("report"):
        from matplotlib.figure import Figure

    return Figure(layout="constrained").subplots()
