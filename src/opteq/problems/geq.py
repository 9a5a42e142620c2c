"""GEQ: the state maximises a kernel's similarity to the input."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from opteq import penalties
from opteq.common.validate import check_kind
from opteq.kernels import Gaussian, Kernel, Similarity
from opteq.kernels.inner_product import InnerProduct, InnerProductSimilarity
from opteq.operators import Operator
from opteq.penalties import Penalty
from opteq.problems.base import Problem, check_injection, check_operator, check_unhooked, inject, known_norm
from opteq.problems.certificate import Certificate, existence, for_finite_weights
from opteq.problems.hidden import Hidden, Structure
from opteq.states import State, inner, single

Number = float | Tensor
"""One number; under vmap over weights, one for each set of them."""


class GEQ(Problem):
    """``min sum f(y) + 1/2 |y|^2 - s(y)``, with a kernel's similarity ``s`` of ``W y`` or y and ``U x + b``.

    The step is ``y <- sigma(grad s(y))`` and the features are y itself. With the Gaussian kernel that is
    ``y <- sigma(e W'(U x + b - W y))``, where ``e = exp(-gamma |U x + b - W y|^2)``. For a large W
    such steps oscillate, so solvers damp them; K steps as printed are ``Picard(tol=0, max_steps=K, damping=1)``.

    Args:
        W: operator from the state to the space in which it is compared.
        U: module from the input to that space (its bias is b). With the Gaussian kernel it maps into the space of W's
            output, with the linear, polynomial and sigmoid kernels into that of the state; None takes the input as it
            is.
        kernel: one of :mod:`opteq.kernels`, or your own; ``Gaussian()`` by default.
        activation: name or :class:`~opteq.penalties.Penalty`.

    Give W a bound. The damping and the backward solver are chosen from it whenever an input is bound. Without one, the
    norm of W is computed each time, which for a convolution costs as much as many steps.

    >>> import torch, opteq
    >>> from opteq.kernels import Gaussian
    >>> problem = GEQ(opteq.operators.Dense(1, 1), kernel=Gaussian(gamma=0.5))
    >>> _ = problem.W.weight.data.fill_(0.5)
    >>> layer = opteq.Equilibrium(problem, opteq.Anderson(tol=1e-6))
    >>> round(layer(torch.ones(1, 1)).item(), 4)
    0.2963
    """

    def __init__(
        self,
        W: Operator,
        U: nn.Module | None = None,
        kernel: Kernel | None = None,
        activation: str | Penalty = "relu",
    ) -> None:
        super().__init__()
        self.W = check_operator(W, "W")
        self.U = check_injection(U)
        kernel = Gaussian() if kernel is None else kernel
        self.kernel = check_kind("kernel", kernel, Kernel, "one of opteq.kernels, such as kernels.Gaussian()")
        self.penalty = penalties.get(activation)

    def bind(self, x: Tensor) -> BoundGEQ:
        """``U x + b``, the bounded W, and the kernel with its parameters settled, computed once."""
        c = inject(self.U, x)
        W = check_unhooked(self.W, "W").prepare()
        if self.kernel.projection is not None:
            check_unhooked(self.kernel.projection, "kernel.projection")
        start = self.kernel.start(W, c)
        similarity = self.kernel.bind(W, c)
        # A declared bound costs nothing, where a norm costs a sweep over frequencies and makes a GPU wait.
        square = self._joint_norm(_bound_or_norm) ** 2
        always = self.kernel.curvature
        curvature = similarity.curvature_interval(square) if always is None else _scaled(always, square)
        return BoundGEQ(self.penalty, similarity, start, curvature)

    @for_finite_weights
    def certificate(self) -> Certificate:
        """Strong convexity where the kernel's curvature is bounded, coercivity where its growth is.

        An equilibrium is a stationary point of the objective, so a strongly convex one has exactly one, also where
        plain iteration, with a contraction factor above 1, would not find it.
        """
        kernel, slope, norm = self.kernel, self.penalty.lipschitz, float(self._joint_norm(_certified_norm))
        unknown = kernel.caveat or f"{type(kernel).__name__} declares no bound of its curvature"
        smooth = kernel.curvature is not None or isinstance(kernel, InnerProduct)  # no jumps of the gradient
        exists, unique, reasons = existence(None, self.penalty.bounded and smooth)
        if exists is None:
            reasons["exists"] = unknown
        if smooth and kernel.growth is not None and slope * kernel.growth * norm**2 < 1:
            exists, reasons["exists"] = True, "the objective grows like |y|^2, since s grows less: it has a minimiser"
        contraction = None
        if kernel.curvature is None:
            reasons |= {"unique": unknown, "contraction": unknown}
        else:
            low, high = (end * norm**2 for end in kernel.curvature)
            contraction = slope * max(abs(low), abs(high))
            reasons["contraction"] = f"L |hess s|, with L = {slope:.4g} and hess s in [{low:.4g}, {high:.4g}]"
            if slope * high < 1:
                exists = unique = True
                reasons["exists"] = reasons["unique"] = (
                    "the objective is strongly convex, so it has exactly one minimiser and no other stationary point: "
                    f"hess s <= {high:.4g} < 1 / L = {1 / slope:.4g}"
                )
            else:
                reasons["unique"] = f"the objective need not be convex: hess s <= {high:.4g}, not below 1 / L"
                if exists is None:
                    reasons["exists"] = f"{reasons['unique']}, and the activation is unbounded"
        lipschitz, reasons["lipschitz"] = self._lipschitz(norm)
        return Certificate(exists, unique, contraction, lipschitz, reasons)

    def _lipschitz(self, norm: float) -> tuple[float | None, str]:
        gain, reason = self.kernel.input_gain(norm, self.penalty.lipschitz)
        if gain is None:
            return None, reason
        carried, missing = known_norm(self.U)
        if carried is None:
            return None, missing
        projection = self.kernel.projection
        return carried * (1.0 if projection is None else _certified_norm(projection)) * gain, reason

    def _joint_norm(self, size: Callable[[Operator], Number]) -> Number:
        """``|W| |projection|``, each as ``size`` gives it."""
        projection = self.kernel.projection
        return size(self.W) * (1.0 if projection is None else size(projection))


class BoundGEQ(Hidden):
    """GEQ with its input bound, in closed form.

    The eigenvalues of ``hess s`` lie in the interval ``curvature``: two numbers, two per sample, or None.

    ``T(y)`` minimises ``F(v) - <grad s(y), v>`` with ``F = f + 1/2 |.|^2``, which is 1/L-strongly convex. So a step of
    damping t from y changes the objective by at most ``-t/2 (2/L - t (1/L - low)) |T(y) - y|^2``, where low is the
    least curvature of s: it decreases for ``t < 2 / (1 - L low)``. Hence the objective serves as merit, and iteration
    with the damping chosen here has residuals that go to zero wherever the objective is bounded below, convex or not.
    """

    def __init__(
        self,
        penalty: Penalty,
        similarity: Similarity,
        start: Tensor,
        curvature: tuple[Number, Number] | None,
    ) -> None:
        self.penalty = penalty
        self.similarity = similarity
        self.quadratic = isinstance(similarity, InnerProductSimilarity) and similarity.kernel.second_range == (0.0, 0.0)
        self._start = penalty.project(start)
        if curvature is None:
            return
        low, high = (penalty.lipschitz * end for end in curvature)
        self.has_merit = penalty.has_total
        # I - J has its spectrum in [1 - high, 1 - low]. Where that is positive there is a best damping for such an
        # interval; elsewhere the second one gives the largest decrease that is sure.
        if isinstance(high, Tensor):
            damping = torch.where(high < 1, 2 / (2 - low - high), 1 / (1 - low)).clamp(max=1.0)
            self.damping = damping.expand(start.shape[0])
        elif high < 1:
            self.damping = min(1.0, float(2 / (2 - low - high)))
            self.structure = Structure.POSITIVE
            # The objective is strongly convex, and falls by a share of |T(y) - y|^2 in a step.
            self.convex = self.contracts = True
        else:
            self.damping = min(1.0, float(1 / (1 - low)))

    def start(self) -> Tensor:
        return self._start

    def smooth(self, y: State) -> Tensor:
        return -self.similarity.value(single(y))

    def smooth_terms(self, y: State) -> dict[str, Tensor]:
        return {name: -term for name, term in self.similarity.terms(single(y)).items()}

    def preactivation(self, y: State) -> Tensor:
        return self.similarity.gradient(single(y))

    def negative_hessian_at(self, y: State) -> Callable[[State], State]:
        product = self.similarity.hessian_at(single(y))
        return lambda v: product(single(v))

    def step_and_merit(self, y: State) -> tuple[State, Tensor]:
        """The step, and the objective, which damped steps decrease."""
        y = single(y)
        gradient, value = self.similarity.gradient_and_value(y)
        return self.penalty.prox(gradient), self.penalty.total(y) + inner(y, y) / 2 - value


def _bound_or_norm(operator: Operator) -> Number:
    if operator.bound is not None:
        return operator.bound
    norm = operator.norm().detach()
    try:
        return float(norm)
    except RuntimeError:  # under vmap over weights there is no single number
        return norm


def _certified_norm(operator: Operator) -> float:
    return float(check_unhooked(operator, "W").norm())


def _scaled(interval: tuple[float, float], factor: Number) -> tuple[Number, Number]:
    return interval[0] * factor, interval[1] * factor
