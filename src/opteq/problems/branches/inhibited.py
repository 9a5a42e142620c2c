"""Inhibition as a further term of a hidden problem, beside its own couplings."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from opteq.common.validate import check_share
from opteq.operators import Operator
from opteq.problems.base import Problem, check_operator, check_unhooked
from opteq.problems.branches.branch import injection_norm
from opteq.problems.branches.common_space import OVERESTIMATE, measured_square, prepare_common
from opteq.problems.branches.mopteq import MOptEq
from opteq.problems.certificate import Certificate, for_finite_weights, unknown
from opteq.problems.hidden import Hidden
from opteq.problems.inhibition import (
    AcceleratedProblem,
    BoundInhibition,
    in_working_precision,
    strong_convexity,
)
from opteq.problems.proximal import ProximalGradient
from opteq.solvers.linear.lanczos import largest_curvature
from opteq.states import State, blocks, map_state


class Inhibited(AcceleratedProblem):
    """A hidden problem with inhibition: ``sum f + m/2 |y|^2 + g(y; x) + 1/2 |A'y|^2``, with the problem's g.

    With OptEq's or MOptEq's g, feedback that excites (``-1/2 |W'y|^2``, heritage) and feedback that inhibits act
    together. The objective is strongly convex for every A while the first stays below m: ``|W|^2 < m`` for OptEq. The
    features are those of the problem. The step is the proximal gradient step, accelerated by default.

    Args:
        problem: a hidden problem: :class:`~opteq.OptEq`, :class:`~opteq.MOptEq` (diversity with a smoothing),
            :class:`~opteq.GEQ`, :class:`~opteq.POptEq`, or one that a user has written.
        A: operator from the common space to the state; for a tuple state, a list with one per tensor.
        m: factor of ``1/2 |y|^2``, in (0, 1].

    >>> import torch, opteq
    >>> inner = opteq.OptEq(opteq.operators.Dense(1, 1))
    >>> problem = opteq.Inhibited(inner, opteq.operators.Dense(1, 1))
    >>> _ = inner.W.weight.data.fill_(0.5), problem.operators()[0].weight.data.fill_(2.0)
    >>> state = opteq.Equilibrium(problem).solve(torch.ones(1, 1)).state  # 1/2 y^2 - 1/8 y^2 + 2 y^2 - y
    >>> round(state.item(), 4) == round(1 / (1 - 0.25 + 4), 4)
    True
    """

    takes_tuples = True

    def __init__(self, problem: Problem, A: Operator | Sequence[Operator], m: float = 1.0) -> None:
        super().__init__()
        if not isinstance(problem, Problem):
            raise TypeError(f"Inhibited wraps a hidden problem such as opteq.OptEq; got {problem!r}")
        if isinstance(problem, MOptEq):
            if problem.coupling.diversity and not problem.coupling.smoothing:
                raise ValueError("Inhibited needs a smooth problem; give MOptEq's diversity a smoothing above 0")
            if problem.perturbation:
                raise ValueError("MOptEq's perturbation is found by plain steps, which need not converge here; use 0")
        self.problem = problem
        given = [A] if isinstance(A, Operator) else list(A)
        self.A = nn.ModuleList(check_operator(one, "A") for one in given)
        self.m = check_share("m", m)

    def operators(self) -> list[Operator]:
        """The ``A_i``."""
        return [A for A in self.A if isinstance(A, Operator)]

    def bind(self, x: State) -> BoundInhibition:
        """The problem with its input bound, the weights of A and the step length, computed once."""
        rest = self.problem.bind(x)
        if not isinstance(rest, Hidden) or isinstance(rest, ProximalGradient) or rest.coupled:
            raise TypeError(
                f"Inhibited wraps problems of the form sum f + 1/2 |y|^2 + g with independent samples; "
                f"{type(self.problem).__name__} is none"
            )
        start, operators = in_working_precision(rest.start()), self.operators()
        if len(blocks(start)) != len(operators):
            raise ValueError(
                f"the state has {len(blocks(start))} tensors, so A should be as many; got {len(operators)}"
            )
        penalty, *others = rest.penalties(start)
        if any(other != penalty for other in others):
            raise ValueError(f"Inhibited needs the same penalty in all parts; got {[penalty, *others]}")
        common = prepare_common(operators, start)
        low, high = self._within_bounds()
        steepest = high if high < math.inf else _measured_steepest(rest, start)
        curvature = self.m + measured_square(common, start) + steepest
        convex = -low < self.m and high < math.inf
        return BoundInhibition(penalty, start, common, self.m, curvature, rest, convex)

    def _within_bounds(self) -> tuple[float, float]:
        """Where the Hessian of g lies for all weights within their bounds."""
        part = self.problem.smooth_part(lambda W: math.inf if W.bound is None else W.bound)
        return (-math.inf, math.inf) if part is None else (part.low, part.high)

    @for_finite_weights
    def certificate(self) -> Certificate:
        """From m, ``|A|`` and the most negative curvature of the other terms."""
        part = self.problem.smooth_part(lambda W: float(check_unhooked(W, "W").norm()))
        if part is None:
            return unknown(f"the curvature of {type(self.problem).__name__} is not known here")
        pull, most = -part.low, self._within_bounds()[1]
        steepest = most if most < math.inf else OVERESTIMATE * part.high  # as in the step
        squared = sum(float(check_unhooked(A, "A").norm()) ** 2 for A in self.operators())
        strong, shown = strong_convexity(self.m, self.problem.penalty)  # type: ignore[arg-type]
        if not strong > pull:
            no = f"the couplings pull by up to {pull:.4g}, not less than the strong convexity {shown} of the rest"
            return unknown(no)
        strong -= pull
        why = f"the objective is {strong:.4g}-strongly convex for every A, so it has exactly one minimiser"
        reasons = {"exists": why, "unique": why}
        contraction = None
        if self.m > pull and steepest < math.inf:
            contraction = 1 - (self.m - pull) / (self.m + OVERESTIMATE * squared + steepest)
            step = f"1 / (m + {OVERESTIMATE:g} |A|^2 + {steepest:.4g})"
            reasons["contraction"] = f"a proximal gradient step of length at least {step}"
        else:
            reasons["contraction"] = "the curvature of the smooth part is not known to lie between positive numbers"
        carried, missing = injection_norm(part.injection)
        reasons["lipschitz"] = missing or f"|U| |W| / {strong:.4g}"
        lipschitz = None if carried is None else carried * part.features / strong
        return Certificate(True, True, contraction, lipschitz, reasons)


@torch.no_grad()
def _measured_steepest(rest: Hidden, start: State) -> Tensor:
    """The largest eigenvalue of ``hess g`` at the start, and a little more."""
    start = map_state(Tensor.detach, start)
    return 1.1 * largest_curvature(rest.negative_hessian_at(start), start)
