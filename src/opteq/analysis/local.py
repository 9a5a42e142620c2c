"""Certificates at a computed equilibrium, for problems whose weights alone prove nothing.

With ``D = diag sigma'(a)`` at the pre-activation a of a state, ``M = -hess g`` and ``S = D^1/2 M D^1/2``, the
eigenvalues of S decide (see :class:`LocalCertificate`). They are bounded by Lanczos steps from a random start, whose
bounds hold with a probability that is stated (Kuczynski and Wozniakowski 1992).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeGuard, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from opteq.common.validate import check_share, check_whole
from opteq.diagnostics.extremes import extreme_eigenvalues, missing_share
from opteq.diagnostics.strict import random_direction, same_beside, strict_minima
from opteq.equilibrium import Equilibrium
from opteq.kernels import Kernel
from opteq.operators import Operator
from opteq.penalties import Penalty
from opteq.problems.base import Problem, is_hooked
from opteq.problems.branches.branch import Branch
from opteq.problems.hidden import Hidden, SymmetricLinearisation
from opteq.solvers.base import Report
from opteq.states import Layout, State, blocks, like, map_state

Map = Callable[[State], State]
Kind = TypeVar("Kind", bound=nn.Module)

_AFFINE = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.AvgPool2d, nn.Flatten, nn.Unflatten, nn.Identity)

_FIXED_TOL = 1e-3
"""Relative residual up to which the state of a fixed number of steps counts as an equilibrium."""


@dataclass(frozen=True)
class LocalCertificate:
    """Guarantees at each of B equilibria; for a sample they hold jointly with at least ``probability``.

    Attributes:
        strict_minimum: whether the state is a strict local minimum of the objective, isolated, and the implicit
            gradient exists: ``lambda_max(S) < 1``, and neither sigma nor g has a kink within a few roundings.
            False where the solver did not reach its tolerance (with ``tol=0``, a residual of 1e-3): such a state is
            not known to be close to an equilibrium.
        contraction: a bound on ``max |lambda(S)|``: near the state plain steps converge at that rate where it is
            below 1. (Damped steps converge to every strict minimum.)
        lipschitz: a bound on the derivative of the features by the layer's input, ``|C D^1/2| |D^1/2 B| / (1 -
            lambda_max)`` with B and C the derivatives of the pre-activation by the input and of the features by the
            state; infinite where the state is not known to be a strict minimum, at a kink of U or of the features, and
            where a kernel chooses gamma by the input: derivatives hold it constant.
        radius: the equilibrium is an affine function of the input as long as that moves by less (Euclidean norm);
            None unless sigma is piecewise linear, g quadratic and U known to be affine: made of linear layers,
            convolutions and normalisations by running statistics. 0 where the state is not known to be a strict
            minimum.
        eigenvalues: bounds ``(lower, upper)`` on the eigenvalues of S.
        probability: that all of this holds for a given sample, over the random starts.
    """

    strict_minimum: Tensor
    contraction: Tensor
    lipschitz: Tensor
    radius: Tensor | None
    eigenvalues: tuple[Tensor, Tensor]
    probability: float


def local_certificate(
    layer: Equilibrium, x: State, steps: int = 60, failure: float = 1e-3, start: State | None = None
) -> LocalCertificate:
    """Guarantees at the equilibria of ``layer`` for ``x``, per sample, with the layer in its current mode.

    It holds at the states that the solver returns, so give the layer a tight tolerance, in float32 or better. Cost:
    four times ``steps`` products with derivatives of a step.

    Args:
        layer: with a problem that has an objective; its samples do not depend on each other.
        x: input, batch first.
        steps: Lanczos steps; more of them give tighter bounds.
        failure: probability that any of the bounds fails for a sample.
        start: the initial state of the solver.

    >>> import torch, opteq
    >>> problem = opteq.OptEq(opteq.operators.Dense(1, 1), activation="relu")
    >>> _ = problem.W.weight.data.fill_(0.5)
    >>> found = local_certificate(opteq.Equilibrium(problem, opteq.Anderson(tol=1e-6)), torch.ones(1, 1))
    >>> bool(found.strict_minimum), round(float(found.contraction), 3), round(float(found.lipschitz), 3)
    (True, 0.25, 0.667)
    """
    check_whole("steps", steps)
    check_share("failure", failure)
    with torch.inference_mode(False), torch.no_grad():  # in inference mode, derivatives would be zero
        x = map_state(Tensor.clone, x)
        hidden = layer.problem(x)
        if hidden.jumps:
            raise ValueError("a local certificate needs a smooth g; give diversity a smoothing above 0")
        if any(isinstance(part, _BatchNorm) and _uses_batch(part) for part in layer.problem.modules()):
            raise ValueError("a local certificate needs independent samples, and batch statistics tie them: use eval()")
        solution = layer.solve(x, start)
        state = map_state(Tensor.clone, solution.state)
        minima = strict_minima(hidden, state, steps, failure / 4)
        if minima is None or not isinstance(hidden, Hidden):
            why = "its samples depend on each other" if hidden.coupled else "its Jacobian has no symmetric form"
            raise ValueError(f"a local certificate needs an objective and independent samples; here {why}")
        strict, lower, upper = minima
        strict = strict & is_solved(layer, solution.report)
        local = hidden.linearise(state)
        assert isinstance(local, SymmetricLinearisation)
        gap = torch.where(strict, 1 - upper, torch.nan)

        def inside(given: State) -> State:
            bound = layer.problem(given)
            assert isinstance(bound, Hidden)
            return bound.preactivation(state)

        into, back = _jvp_and_vjp(inside, x)
        entered = _norm(lambda v: back(local.derivative(into(v))), x, steps, failure / 4)
        out, home = _jvp_and_vjp(hidden.features, state)
        left = _norm(lambda v: local.factor_adjoint(home(out(local.factor(v)))), state, steps, failure / 4)
        smooth = same_beside(lambda at: _jvp_and_vjp(inside, at)[0](random_direction(x)), x)
        smooth = smooth & same_beside(lambda at: _jvp_and_vjp(hidden.features, at)[0](random_direction(state)), state)
        if any(isinstance(part, Kernel) and part.follows_input for part in layer.problem.modules()):
            left = torch.full_like(left, torch.inf)
        lipschitz = torch.where(strict & smooth, entered * left / gap, torch.inf)
        radius = None
        apart = hidden.distance_to_kink(state)
        if apart is not None and hidden.quadratic and _affine(layer.problem):
            given = _norm(lambda v: back(into(v)), x, steps, failure / 8)
            M = _norm(lambda v: local.negative_hessian(local.negative_hessian(v)), state, steps, failure / 8)
            rows = Layout.of(state).pack(hidden.preactivation(state))
            slope = max(penalty.lipschitz for penalty in hidden.penalties(state))
            rounding = 8 * torch.finfo(rows.dtype).eps * rows.abs().amax(dim=1)
            # The pre-activation moves by |B d| + |M| |dy|, and |dy| <= |D| |B d| / (1 - lambda_max).
            radius = torch.where(strict, (apart - rounding).clamp_min(0) / (given * (1 + slope * M / gap)), 0.0)
        contraction = torch.maximum(upper.abs(), lower.abs())
        return LocalCertificate(strict, contraction, lipschitz, radius, (lower, upper), 1 - failure)


def is_solved(layer: Equilibrium, report: Report) -> Tensor:
    """Which samples are as close to an equilibrium as was asked for, ``(B,)``."""
    return report.residual <= _FIXED_TOL if layer.solver.tol == 0 else report.converged


def does_as(module: nn.Module, *kinds: type[Kind]) -> TypeGuard[Kind]:
    """Whether a call of ``module`` does what one of these classes does: no subclass overrides it, and no hook.

    A subclass that overrides nothing, a parametrised layer say, counts as its base class.
    """
    if is_hooked(module):
        return False
    own = [name for name in ("forward", "_conv_forward", "embed", "solve", "__call__") if hasattr(type(module), name)]
    return any(
        isinstance(module, kind) and all(getattr(type(module), name) is getattr(kind, name, None) for name in own)
        for kind in kinds
    )


def _uses_batch(norm: _BatchNorm) -> bool:
    return norm.training or norm.running_mean is None


def _affine(module: nn.Module) -> bool:
    """Whether everything that a problem applies to its input is known to be affine."""
    makers = [getattr(type(module), name) for name in ("forward", "bind") if hasattr(type(module), name)]
    known = all(getattr(maker, "__module__", "").partition(".")[0] in ("torch", "opteq") for maker in makers)
    if not known or is_hooked(module):
        return False
    if isinstance(module, Operator | Penalty):  # linear, and applied to the state
        return True
    if isinstance(module, _BatchNorm):
        return not _uses_batch(module)
    if isinstance(module, nn.Dropout):
        return not module.training
    if does_as(module, *_AFFINE):
        return True
    known = isinstance(module, Problem | Branch | nn.Sequential | nn.ModuleList)
    return known and all(map(_affine, module.children()))


def _jvp_and_vjp(function: Map, at: State) -> tuple[Map, Map]:
    """``v -> J v`` and ``u -> J'u`` of a function at a point.

    By autograd and not by torch.func, which loads all of torch's compiler at its first derivative: seconds.
    """
    with torch.enable_grad():
        given = map_state(lambda t: t.detach().requires_grad_(), at)
        value = function(given)
        weights = map_state(torch.zeros_like, value)
        for one in blocks(weights):
            one.requires_grad_()
        pulled = _derivative(value, given, weights, create_graph=True)
    # u -> J'u is linear, so its own transpose is J.
    return lambda v: _derivative(pulled, weights, v), lambda u: _derivative(value, given, u)


def _derivative(value: State, of: State, weights: State, create_graph: bool = False) -> State:
    """The gradient of ``<weights, value>`` by a state that the value was computed from; zeros where it was not."""
    outputs = [(one, weight) for one, weight in zip(blocks(value), blocks(weights), strict=True) if one.requires_grad]
    if not outputs:
        return map_state(torch.zeros_like, of)
    ends, along = zip(*outputs, strict=True)
    options = {"retain_graph": True, "create_graph": create_graph, "materialize_grads": True}
    return like(of, torch.autograd.grad(ends, blocks(of), along, **options))


def _norm(square: Map, shaped: State, steps: int, failure: float) -> Tensor:
    """The norm of an operator from above, ``(B,)``, given ``v -> A'A v``."""
    layout = Layout.of(shaped)
    rows = layout.pack(shaped)
    extremes = extreme_eigenvalues(lambda v: layout.pack(square(layout.unpack(v))), rows, steps, failure)
    # All eigenvalues are at least 0: no shift is needed, and the bound is on the largest one alone.
    share = missing_share(rows.shape[1], max(1, min(steps, rows.shape[1])), failure)
    largest = extremes.largest.clamp_min(0) / (1 - share) if share < 1 else torch.full_like(extremes.largest, torch.inf)
    return (largest * (1 + 100 * torch.finfo(rows.dtype).eps)).sqrt()
