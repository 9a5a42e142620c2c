"""The size of a step's Jacobian at an equilibrium: as a term of the training loss, or kept within a limit."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from opteq import operators as op
from opteq.common.derivatives import pullback
from opteq.common.errors import UserError
from opteq.equilibrium import Equilibrium
from opteq.models import equilibria
from opteq.operators import Operator
from opteq.problems import DeepOptEq
from opteq.problems.hidden import BoundMap, Hidden, Product
from opteq.problems.inhibition import AcceleratedProblem
from opteq.states import State, blocks, inner, like, map_state, per_row, sample_rows
from opteq.training.devices import Accelerator


def squared_jacobian(hidden: BoundMap, state: State, probe: State | None = None) -> Tensor:
    """An unbiased estimate of ``|J|_F^2 / n`` per sample ``(B,)``, J the Jacobian of a step at ``state``, n its size.

    It is ``|v'J|^2 / n`` for one random vector v of signs (Hutchinson). The state is taken as a constant: the gradient
    is that of J's dependence on weights and input at this state (Bai, Koltun and Kolter 2021).

    Args:
        hidden: the problem with its input bound.
        state: an equilibrium of it.
        probe: v; None draws it.
    """
    at = map_state(Tensor.detach, state)
    if probe is None:
        probe = like(at, tuple(torch.randint_like(part, 2) * 2 - 1 for part in blocks(at)))
    pulled: State = pullback(hidden.step, at)[1](probe)
    return inner(pulled, pulled) / sum(part[0].numel() for part in blocks(at))


def squared_radius(hidden: BoundMap, state: State, iterations: int = 6) -> Tensor:
    """An estimate of the squared spectral radius of J per sample ``(B,)``, J the Jacobian of a step at ``state``.

    Power iteration on ``J'`` from the state itself: feedback that is close to diverging has led the state along that
    direction. The result is ``|J'w|^2`` for the unit vector w that it ends with; its gradient takes w as a constant.

    Args:
        hidden: the problem with its input bound.
        state: an equilibrium of it.
        iterations: products with ``J'`` before the last one.
    """
    at = map_state(Tensor.detach, state)
    still = inner(at, at) == 0  # a state of zeros has no direction: any one will do
    direction = map_state(lambda part: part + per_row(still, part), at)
    with torch.no_grad():
        adjoint = hidden.linearise(at).adjoint
        for _ in range(iterations):
            direction = adjoint(_divided_by_largest(direction))
    pulled = _taped_adjoint(hidden, at)(_unit(direction))
    return inner(pulled, pulled)


def _taped_adjoint(hidden: BoundMap, at: State) -> Product:
    """``v -> J'v``, which autograd differentiates by the weights."""
    # The Hessian of a quadratic and the slopes of a piecewise linear sigma do not move with the state: there the closed
    # form has the same derivative, and costs no derivative of a derivative.
    if (
        isinstance(hidden, Hidden)
        and hidden.quadratic
        and all(penalty.distance_to_kink(torch.zeros(1)) is not None for penalty in hidden.penalties(at))
    ):
        return hidden.linearise(at).adjoint
    return pullback(hidden.step, at)[1]


def _unit(v: State) -> State:
    """``v / |v|``, by way of its largest entry: squares of what float16 and float32 hold may not fit. Zero stays."""
    v = _divided_by_largest(v)
    return _divided(v, inner(v, v).sqrt().clamp_min(1))


def _divided_by_largest(v: State) -> State:
    largest = torch.stack([sample_rows(part.abs()).amax(dim=1) for part in blocks(v)]).amax(dim=0)
    return _divided(v, torch.where(largest > 0, largest, 1.0))


def _divided(v: State, numbers: Tensor) -> State:
    return map_state(lambda part: part / per_row(numbers, part), v)


class JacobianPenalty:
    """Sums :func:`squared_jacobian` over the equilibria that a model finds in training mode.

    Args:
        model: with at least one equilibrium layer.
        limit: None, or the spectral radius up to which nothing is added: the penalty is then how far
            :func:`squared_radius` exceeds its square.
    """

    def __init__(self, model: nn.Module, limit: float | None = None) -> None:
        self.limit = limit
        self.layers = solved_layers(model, "train.jacobian")
        self.found: list[Tensor] = []
        self._handles = [layer.register_observer(self._observe) for layer in self.layers]

    def close(self) -> None:
        """Stop looking at the layers."""
        for handle in self._handles:
            handle.remove()

    def take(self) -> Tensor:
        """The sum over the batch of the latest forward pass."""
        total = torch.stack([values.sum() for values in self.found[-len(self.layers) :]]).sum()
        self.found.clear()
        return total

    def _observe(self, hidden: BoundMap, state: State) -> None:
        # Tests and attacks want none: an attack's solves come before the one that is trained on.
        if torch.is_grad_enabled() and self.layers[0].training:
            del self.found[: -len(self.layers)]
            if self.limit is None:
                self.found.append(squared_jacobian(hidden, state))
            else:
                self.found.append((squared_radius(hidden, state) - self.limit * self.limit).clamp_min(0))


class RadiusLimit:
    """Keeps the spectral radius r of a step's Jacobian within a limit, for all samples of a batch.

    Where r exceeds the limit, the weights of the equilibrium's W are multiplied by a power of ``limit / r``. Steps
    apply every W twice, as itself and as its adjoint, so that the square root of it brings r back to the limit; in a
    Deep OptEq of L layers, where W's are multiplied by each other, the 2L-th root. The next batch measures again.

    Where a solve found no equilibrium, r counts as at least 1. A sample with an r of 1 or more is lost, also where the
    solver found its equilibrium: its gradient is far larger than those of others. If more than ``SHARE`` of a batch are
    lost, its optimiser step is to be skipped.

    Args:
        model: with at least one equilibrium layer that has a W, which is trained and has no parametrization. Problems
            with inhibition are refused: their steps are shortened, not weakened.
        limit: of r, below 1.
        residual: relative residual above which a state is no equilibrium.

    >>> import torch, opteq
    >>> from opteq import operators as op
    >>> layer = opteq.Equilibrium(opteq.OptEq(op.Dense(8, 8, bound=None), torch.nn.Linear(4, 8)))
    >>> optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    >>> limit = RadiusLimit(layer, 0.9)
    >>> layer(torch.randn(5, 4)).square().sum().backward()
    >>> if not limit.apply():
    ...     _ = optimizer.step()
    """

    SHARE = 0.02

    def __init__(self, model: nn.Module, limit: float, residual: float = 0.1) -> None:
        if not 0 < limit < 1:
            raise UserError(f"the limit of the spectral radius should lie between 0 and 1; got {limit!r}")
        self.limit, self.residual = limit, residual
        self.layers = solved_layers(model, "train.radius")
        for layer in self.layers:
            _check_scalable(layer)
        # Of each micro-batch: the largest r^2, how many samples are lost, and how many there are.
        self.found: list[list[Tensor]] = [[] for _ in self.layers]
        self._handles = [layer.register_observer(partial(self._observe, i)) for i, layer in enumerate(self.layers)]

    def close(self) -> None:
        """Stop looking at the layers."""
        for handle in self._handles:
            handle.remove()

    @torch.no_grad()
    def apply(self, accelerator: Accelerator | None = None) -> Tensor:
        """Scale the weights by what was found in training mode since the last call.

        Args:
            accelerator: joins what several processes found.

        Returns:
            Whether the optimiser step is to be skipped.
        """
        skip = []
        factors: dict[nn.Parameter, Tensor] = {}
        for layer, found in zip(self.layers, self.found, strict=True):
            if not found:
                continue
            joined = torch.stack(found)
            largest, lost, count = (joined if accelerator is None else accelerator.gather(joined)).unbind(dim=1)
            found.clear()
            radius = largest.amax().sqrt()
            # A radius that is not finite says nothing; one step at most halves the feedback.
            ratio = torch.where(radius.isfinite(), self.limit / radius, 1.0).clamp(0.5, 1.0)
            acting = dict(map(_bounded_share, _bounded(layer)))
            for weight, degree in _feedback_weights(layer):
                # What several W or layers share is scaled once, for the one that needs it most.
                factor = ratio ** (1 / degree)
                if weight in acting:  # a bound hides what is scaled beyond it
                    factor = torch.where(ratio < 1, factor * acting[weight], factor)
                factors[weight] = torch.minimum(factors.get(weight, factor), factor)
            skip.append(lost.sum() > self.SHARE * count.sum())
        for weight, factor in factors.items():
            weight.mul_(factor)
        return torch.stack(skip).any() if skip else torch.tensor(False)

    def _observe(self, index: int, hidden: BoundMap, state: State) -> None:
        layer = self.layers[index]
        if not (torch.is_grad_enabled() and layer.training) or not len(blocks(state)[0]):
            return
        assert layer.last is not None
        with torch.no_grad():
            squares = squared_radius(hidden, state).float()
            lost = ~(layer.last[0].residual <= self.residual)
            largest = torch.where(lost, squares.clamp_min(1), squares).amax()
            lost |= squares >= 1
            self.found[index].append(torch.stack([largest, lost.float().sum(), torch.ones_like(squares).sum()]))


def solved_layers(model: nn.Module, key: str) -> list[Equilibrium]:
    """The model's equilibria, each of them a solution."""
    layers = [layer for _, layer in equilibria(model)]
    if not layers:
        raise UserError(f"{key} needs a model with an equilibrium; this one has none")
    for layer in layers:
        # Of a fixed number of steps the state is no equilibrium, and its gradient does not pass through I - J.
        if layer.solver.tol == 0:
            raise UserError(f"{key} has no effect on a fixed number of steps; it needs an equilibrium")
    return layers


def _feedback(layer: Equilibrium) -> list[Operator]:
    """Every W."""
    parts = layer.problem.named_modules()
    return [part for name, part in parts if name.rpartition(".")[2] == "W" and isinstance(part, Operator)]


def _bounded(layer: Equilibrium) -> list[Operator]:
    """Every W whose bound may act."""
    known = op.Dense, op.Conv2d, op.SeparableConv2d
    return [W for W in _feedback(layer) if isinstance(W, known) and W.bound is not None]


def _bounded_share(W: Operator) -> tuple[nn.Parameter, Tensor]:
    """The weight that a bound scales, and the factor by which it does."""
    name = "pointwise" if isinstance(W, op.SeparableConv2d) else "weight"
    weight: nn.Parameter = getattr(W, name)
    used: Tensor = getattr(W.prepare(), name)
    largest = weight.abs().amax()
    return weight, torch.where(largest > 0, used.abs().amax() / largest, 1.0)


def _check_scalable(layer: Equilibrium) -> None:
    """Raise where multiplying the weights of W would not weaken feedback, or is not to happen."""
    if isinstance(layer.problem, AcceleratedProblem):
        raise UserError(
            f"train.radius has no use for {type(layer.problem).__name__}: the length of its steps follows from A, and "
            "a smaller W does not make them contract"
        )
    weights = [weight for W in _feedback(layer) for weight in W.parameters()]
    if not weights:
        raise UserError(
            "train.radius scales W down, and an equilibrium of this model has no W with weights that is one of "
            "opteq.operators"
        )
    if any(is_parametrized(part) for W in _feedback(layer) for part in W.modules()):
        raise UserError("train.radius scales the weights of W, and a parametrization of W may undo that; remove it")
    if not all(weight.requires_grad for weight in weights):
        raise UserError("train.radius scales the weights of W, and some of them are frozen (requires_grad is False)")


def _feedback_weights(layer: Equilibrium) -> list[tuple[nn.Parameter, int]]:
    """The weights of every W, and the power of them that a step's Jacobian grows with."""
    problem = layer.problem
    depth = len(problem.layers) if isinstance(problem, DeepOptEq) else 1
    found = []
    for W in _feedback(layer):
        weights = list(W.parameters())  # a separable convolution has two, which are multiplied by each other
        found += [(weight, 2 * depth * len(weights)) for weight in weights]
    return found
