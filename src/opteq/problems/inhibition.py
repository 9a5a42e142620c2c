"""Inhibition: feedback that makes units compete, strongly convex for every weight."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from opteq import penalties
from opteq.common.validate import check_share
from opteq.operators import Operator
from opteq.penalties import Penalty
from opteq.penalties.scaled import ScaledPenalty
from opteq.problems.base import Problem, check_injection, check_operator, check_unhooked, inject
from opteq.problems.branches.branch import Branch, check_branches, injection_norm, views
from opteq.problems.branches.common_space import OVERESTIMATE, CommonSpaceMap, measured_square, prepare_common
from opteq.problems.certificate import Certificate, for_finite_weights
from opteq.problems.hidden import Hidden
from opteq.problems.proximal import ProximalGradient
from opteq.solvers.fista import FISTA
from opteq.states import Autocast, State, blocks, inner, map_state, per_row, sum_over_sample, working_dtype


class AcceleratedProblem(Problem):
    """A problem whose steps are proximal gradient steps, and which is badly conditioned where A is large."""

    def default_solver(self) -> FISTA:
        return FISTA(measure="error", max_steps=400)

    def default_gradient_steps(self) -> int:
        """Enough for conjugate gradients where ``|A|^2 / m`` is in the hundreds."""
        return 300


class Inhibition(AcceleratedProblem):
    """``min sum f(y) + m/2 |y|^2 + 1/2 |A'y|^2 - <U x + b, y>``, with features y.

    Units that share a filter of A inhibit each other: an input that one of them explains is subtracted from the others,
    as in sparse coding. The objective is m-strongly convex for *every* A, so no weight needs a bound. There is one
    equilibrium, its Jacobian is symmetric, and conjugate gradients solve the backward system. As a hidden problem it
    has ``g = 1/2 |A'y|^2 - (1 - m)/2 |y|^2 - <U x + b, y>``.

    The step is the proximal gradient step of the whole objective, of length ``t = 1 / (m + |A|^2)``. A few Lanczos
    steps measure ``|A|`` when an input is bound. The default solver is :class:`~opteq.FISTA`. The features are y, and
    not ``A'y``, which the objective suppresses.

    With branches, ``A'y = sum_i S_i' A_i' y_i``: they share one common space, of the size of the largest state (see
    :class:`~opteq.problems.branches.common_space.CommonSpaceMap`), and inhibit each other across scales.

    Args:
        A: operator from the common space to the state, with a bound or without; or a list of
            :class:`~opteq.Branch`, whose ``W`` are the ``A_i``. State and features are then tuples.
        U: module from the input to the space of the state (its bias is b); None for the input itself. Branches have
            their own.
        m: strong convexity, in (0, 1]. The equilibrium moves by at most ``|U| / m`` times as much as the input.
        activation: name or elementwise convex :class:`~opteq.penalties.Penalty`.

    >>> import torch, opteq
    >>> problem = opteq.Inhibition(opteq.operators.Dense(1, 2), m=0.5)
    >>> _ = problem.A.weight.data.fill_(1.0)  # 1/4 |y|^2 + 1/2 (y_1 + y_2)^2 - <x, y>
    >>> opteq.Equilibrium(problem)(torch.tensor([[2.0, 1.0]])).detach().round(decimals=3)
    tensor([[1.3330, 0.0000]])
    """

    takes_tuples = True

    def __init__(
        self,
        A: Operator | Sequence[Branch],
        U: nn.Module | None = None,
        m: float = 0.1,
        activation: str | Penalty = "relu",
    ) -> None:
        super().__init__()
        if isinstance(A, Operator):
            self.A = check_operator(A, "A")
            self.U = check_injection(U)
            self.branches: nn.ModuleList | None = None
        else:
            if U is not None:
                raise ValueError("U has no effect with branches, which have their own: Branch(A, U, scale)")
            self.branches = nn.ModuleList(check_branches(A))
        self.m = check_share("m", m)
        self.penalty = penalties.get(activation)
        ScaledPenalty(self.penalty, torch.ones(1))  # refuses penalties that are not convex or not elementwise

    def branch_list(self) -> list[Branch]:
        """The branches, with their type; none where the state is one tensor."""
        return [branch for branch in self.branches or () if isinstance(branch, Branch)]

    def operators(self) -> list[Operator]:
        """``A``, or the ``A_i`` of all branches."""
        return [branch.W for branch in self.branch_list()] if self.branches is not None else [self.A]

    def bind(self, x: State) -> BoundInhibition:
        """Every ``U x + b``, the weights of A and the step length, computed once."""
        if self.branches is None:
            if isinstance(x, tuple):
                raise TypeError(f"Inhibition without branches takes one tensor; got a tuple of {len(x)}")
            injections: State = inject(self.U, x)
        else:
            branches = self.branch_list()
            inputs = views(x, [branch.scale for branch in branches])
            injections = tuple(inject(branch.U, part) for branch, part in zip(branches, inputs, strict=True))
        operators = self.operators()
        injections = in_working_precision(injections)
        common = prepare_common(operators, injections)
        curvature = self.m + measured_square(common, injections)
        return BoundInhibition(self.penalty, injections, common, self.m, curvature)

    @for_finite_weights
    def certificate(self) -> Certificate:
        """One equilibrium for every A; the rate from ``|A|``, the Lipschitz constant from ``|U| / m``."""
        squared = sum(float(check_unhooked(A, "A").norm()) ** 2 for A in self.operators())
        strong, shown = strong_convexity(self.m, self.penalty)
        why = f"the objective is {shown}-strongly convex for every A, so it has exactly one minimiser"
        step = (
            f"a proximal gradient step of length t >= 1 / (m + {OVERESTIMATE:g} |A|^2), with |A|^2 <= {squared:.4g}: "
            "its rate is 1 - m t"
        )
        carried, missing = injection_norm(self.branch_list() if self.branches is not None else self.U)
        lipschitz = None if carried is None else carried / strong
        reasons = {"exists": why, "unique": why, "contraction": step}
        reasons["lipschitz"] = missing or f"|U| / ({shown}), from x to the state"
        return Certificate(True, True, 1 - self.m / (self.m + OVERESTIMATE * squared), lipschitz, reasons)


class BoundInhibition(ProximalGradient):
    """``F(y) = m/2 |y|^2 + 1/2 |A'y|^2 - <c, y>`` with its input bound, and closed forms of its derivatives.

    ``injections`` are ``c = U x + b``; g of the hidden problem ``rest``, where there is one, takes the place of
    ``-<c, y>``; ``length`` is the step length t, ``(B,)``.
    """

    penalised = True

    def __init__(
        self,
        penalty: Penalty,
        injections: State,
        A: CommonSpaceMap,
        m: float,
        curvature: Tensor,
        rest: Hidden | None = None,
        convex: bool = True,
    ) -> None:
        self.injections, self.A, self.m, self.rest = injections, A, m, rest
        first = blocks(injections)[0]
        self.length = (1 / curvature).detach().to(working_dtype(first.dtype)).expand(first.shape[0])
        self.penalty = ScaledPenalty(penalty, self.length)
        self.convex = self.contracts = convex  # a gradient step on a strongly convex function contracts
        self.has_merit = not convex and penalty.has_total
        self.quadratic = rest is None or rest.quadratic

    def start(self) -> State:
        return map_state(torch.zeros_like, self.injections) if self.rest is None else self.rest.start()

    def features(self, y: State) -> State:
        return y if self.rest is None else self.rest.features(y)

    def gradient(self, y: State) -> State:
        """``m y + A A'y - c``."""
        return map_state(lambda part, drive: self.m * part - drive, y, self._drive(y))

    def value_and_gradient(self, y: State) -> tuple[Tensor, State]:
        return self.value(y), self.gradient(y)

    def preactivation(self, y: State) -> State:
        """``(1 - t m) y + t (c - A A'y)``."""

        def one(part: Tensor, drive: Tensor) -> Tensor:
            length = per_row(self.length, part)
            return torch.addcmul(part * (1 - self.m * length), length, drive.to(part.dtype))

        return map_state(one, y, self._drive(y))

    def hessian_at(self, y: State) -> Callable[[State], State]:
        """``v -> m v + A A'v``, and what the other terms add."""
        other = None if self.rest is None else self.rest.negative_hessian_at(y)

        def product(v: State) -> State:
            image = map_state(lambda part, back: torch.add(back, part, alpha=self.m), v, self.A(self.A.adjoint(v)))
            return image if other is None else map_state(torch.sub, image, other(v))

        return product

    def _drive(self, y: State) -> State:
        """``c - A A'y``: what pushes a unit up, less what inhibits it."""
        pushed = self.injections if self.rest is None else self.rest.preactivation(y)
        return map_state(torch.sub, pushed, self.A(self.A.adjoint(y)))

    def smooth_parts(self, y: State) -> dict[str, Tensor]:
        image = self.A.adjoint(y)
        terms = {
            "quadratic": self.m / 2 * inner(y, y),
            "inhibition": sum_over_sample(image.to(working_dtype(image.dtype)).square()) / 2,
        }
        return terms | ({"input": -inner(self.injections, y)} if self.rest is None else self.rest.smooth_terms(y))


def in_working_precision(injections: State) -> State:
    """``injections`` in float32 under autocast: many short steps would be lost in the rounding of a 16-bit state."""
    if not Autocast.current(blocks(injections)[0].device).enabled:
        return injections
    return map_state(lambda c: c.to(working_dtype(c.dtype)), injections)


def strong_convexity(m: float, penalty: Penalty) -> tuple[float, str]:
    """How strongly convex ``sum f + m/2 |y|^2`` is: f has at least ``1/L - 1``, for slopes of sigma up to L."""
    extra = 1 / penalty.lipschitz - 1
    return m + extra, f"{m:.4g}" if not extra else f"(m + 1/L - 1 = {m + extra:.4g})"
