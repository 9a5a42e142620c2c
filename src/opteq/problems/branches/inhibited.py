"""Inhibition as a further term of a hidden problem, beside its own couplings."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from opteq.common.validate import check_share
from opteq.operators import Operator
from opteq.problems.base import Problem, check_operator, check_unhooked
from opteq.problems.branches.branch import injection_norm
from opteq.problems.branches.common_space import OVERESTIMATE, measured_square, prepare_common, squared_norm
from opteq.problems.branches.mopteq import BoundMOptEq, MOptEq
from opteq.problems.certificate import Certificate, for_finite_weights, unknown
from opteq.problems.hidden import Hidden
from opteq.problems.inhibition import (
    AcceleratedProblem,
    BoundInhibition,
    in_working_precision,
    strong_convexity,
)
from opteq.problems.opteq import BoundOptEq, OptEq
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
        if isinstance(rest, BoundMOptEq):
            rest.injections = tuple(blocks(in_working_precision(rest.injections)))
        elif isinstance(rest, BoundOptEq):
            rest.block.c = blocks(in_working_precision(rest.block.c))[0]
        start, operators = rest.start(), self.operators()
        if len(blocks(start)) != len(operators):
            raise ValueError(
                f"the state has {len(blocks(start))} tensors, so A should be as many; got {len(operators)}"
            )
        penalty, *others = rest.penalties(start)
        if any(other != penalty for other in others):
            raise ValueError(f"Inhibited needs the same penalty in all parts; got {[penalty, *others]}")
        common = prepare_common(operators, start)
        curvature = self.m + measured_square(common, start) + self._steepest(rest)
        return BoundInhibition(penalty, start, common, self.m, curvature, rest, self._known_convexity())

    @for_finite_weights
    def certificate(self) -> Certificate:
        """From m, ``|A|`` and the most negative curvature of the other terms."""
        inner = self.problem
        if isinstance(inner, OptEq) and inner.regularizer is None:
            norm = float(check_unhooked(inner.W, "W").norm())
            carried, missing = injection_norm(inner.U)
            return self._certificate(norm**2 / inner.mu, 0.0, norm / inner.mu, carried, missing)
        if isinstance(inner, MOptEq):
            channels = inner.channels() if inner.coupling.diversity else 1
            if channels is None:
                return unknown("the operators do not say how many channels there are")
            norms = [float(check_unhooked(branch.W, "W of a branch").norm()) for branch in inner.branch_list()]
            norm = float(np.max(norms))  # a NaN stays
            pull = norm**2 * inner.coupling.curvature_bound(channels)
            carried, missing = injection_norm(inner.branch_list())
            steepest = float("inf") if inner.coupling.diversity else pull
            return self._certificate(pull, steepest, norm, carried, missing)
        return unknown(f"the curvature of {type(inner).__name__} is not known here")

    def _certificate(
        self, pull: float, steepest: float, out: float, carried: float | None, missing: str
    ) -> Certificate:
        """The Hessian of the other terms lies in ``[-pull, steepest]``; ``out`` is the norm from state to features."""
        squared = sum(float(check_unhooked(A, "A").norm()) ** 2 for A in self.operators())
        strong, shown = strong_convexity(self.m, self.problem.penalty)  # type: ignore[arg-type]
        if not strong > pull:
            no = f"the couplings pull by up to {pull:.4g}, not less than the strong convexity {shown} of the rest"
            return unknown(no)
        strong -= pull
        why = f"the objective is {strong:.4g}-strongly convex for every A, so it has exactly one minimiser"
        reasons = {"exists": why, "unique": why}
        contraction = None
        if self.m > pull and steepest < float("inf"):
            contraction = 1 - (self.m - pull) / (self.m + OVERESTIMATE * squared + steepest)
            step = f"1 / (m + {OVERESTIMATE:g} |A|^2 + {steepest:.4g})"
            reasons["contraction"] = f"a proximal gradient step of length at least {step}"
        else:
            reasons["contraction"] = "the curvature of the smooth part is not known to lie between positive numbers"
        reasons["lipschitz"] = missing or f"|U| |W| / {strong:.4g}"
        return Certificate(True, True, contraction, None if carried is None else carried * out / strong, reasons)

    def _known_convexity(self) -> bool:
        """Whether the bounds of the W make the smooth part strongly convex, for all weights within them."""
        inner = self.problem
        if isinstance(inner, OptEq) and inner.regularizer is None:
            return inner.W.bound is not None and inner.W.bound**2 / inner.mu < self.m
        if isinstance(inner, MOptEq) and not inner.coupling.diversity:
            bounds = [branch.W.bound for branch in inner.branch_list()]
            return all(bound is not None and bound**2 < self.m for bound in bounds)
        return False

    @torch.no_grad()
    def _steepest(self, rest: Hidden) -> Tensor | float:
        """The largest eigenvalue of ``hess g``, from the weights where they tell, else measured at the start."""
        inner = self.problem
        if isinstance(inner, OptEq) and inner.regularizer is None:
            return 0.0
        start = map_state(Tensor.detach, rest.start())
        if isinstance(inner, MOptEq) and not inner.coupling.diversity:
            squares = [squared_norm([branch.W], blocks(start)[0]) for branch in inner.branch_list()]
            return torch.stack(squares).amax()
        return 1.1 * largest_curvature(rest.negative_hessian_at(start), start)
