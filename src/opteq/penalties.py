"""Penalties f and activations sigma = prox_f: two names of one object.

The prox of a penalty maps t to the minimiser of ``f(y) + (y - t)^2 / 2``. Read from the left it is an
activation; read from the right, every non-decreasing activation is the prox of a penalty,
``f'(y) = sigma^{-1}(y) - y``. A :class:`Penalty` therefore holds both, so that a layer and the objective that
it minimises cannot drift apart.

>>> relu = get("relu")                                          # f(y) = 0 for y >= 0, +inf for y < 0
>>> relu.prox(torch.tensor([-1.0, 2.0])), relu.value(torch.tensor([-1.0, 2.0]))
(tensor([0., 2.]), tensor([inf, 0.]))

Formulas are written so that autograd is right, and finite at kinks, at saturation and for large numbers: the
derivative of ``antiderivative`` is ``prox``, that of ``prox`` is ``derivative``, and that of ``value`` is
``sigma^{-1}(y) - y`` inside the domain. Where that is infinite (tanh at y = 1), it is the finite number of the
nearest float inside; outside the domain it is 0.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from opteq import _validate
from opteq._autocast import Autocast
from opteq._errors import unknown_name
from opteq.states import sum_over_sample, working_dtype


@dataclass(frozen=True)
class Linearised:
    """The derivative ``D = F F'`` of a prox at one point, as a factor ``F`` and its adjoint.

    A Jacobian ``D M`` with symmetric M has the spectrum of the symmetric ``F' M F``, which is what lets conjugate
    gradients solve the backward system; that is why the factor is kept and not D.
    """

    factor: Callable[[Tensor], Tensor]
    factor_adjoint: Callable[[Tensor], Tensor]


class Penalty(ABC):
    """A penalty f together with its activation ``sigma = prox_f``. Tensors have the batch first: ``(B, ...)``.

    Attributes:
        name: how the penalty is called in :func:`get` and in reports.
        lipschitz: the largest slope of sigma; above 1, f is only weakly convex (``f + y^2/2`` always is convex).
        bounded: whether sigma has a bounded range, in which case Brouwer's theorem gives an equilibrium.
        fixes_zero: whether ``sigma(0) = 0``.
        offset: the k in ``sigma~*(y) = f(y) + y^2/2 - k``, which ties f to the conjugate of the antiderivative
            sigma~; it is ``f(sigma(0)) + sigma(0)^2/2``, one per unit, and matters when values are compared.
    """

    name: str
    lipschitz: float
    bounded: bool
    fixes_zero: bool
    offset: float

    @abstractmethod
    def prox(self, t: Tensor) -> Tensor:
        """``sigma(t)``, in the shape and dtype of t."""

    @abstractmethod
    def total(self, y: Tensor) -> Tensor:
        """The penalty of each sample, ``(B,)``, +inf outside the domain; in float32 or better for every dtype."""

    @abstractmethod
    def potential(self, t: Tensor) -> Tensor:
        """The function whose gradient is sigma and that is 0 at 0, one number a sample; in float32 or better."""

    @abstractmethod
    def linearise(self, t: Tensor) -> Linearised:
        """The derivative of the prox at t, computed once for many products."""


class ElementwisePenalty(Penalty):
    """A penalty that is a sum over entries, ``sum_i f(y_i)``: its activation acts on each entry alone.

    Low precision: ``prox`` and ``derivative`` keep the dtype; ``value`` and ``antiderivative`` return float32 for
    bfloat16 and float16, whose squares and logarithms would overflow or vanish.

    To write one: ``prox``, ``derivative``, ``_antiderivative`` and ``_value``, the attributes of :class:`Penalty`, and
    ``_outside`` where f is infinite somewhere. For an activation without these formulas, see :class:`FromActivation`.
    """

    # True of most activations; sigmoid and softplus say otherwise.
    fixes_zero = True
    offset = 0.0

    @abstractmethod
    def derivative(self, t: Tensor) -> Tensor:
        """``sigma'(t)``; at a kink, what torch returns (0 for relu at 0)."""

    def antiderivative(self, t: Tensor) -> Tensor:
        """``sigma~(t)``, the integral of sigma from 0 to t, entry by entry."""
        return self._antiderivative(t.to(working_dtype(t.dtype)))

    def value(self, y: Tensor) -> Tensor:
        """``f(y)`` entry by entry, +inf outside the domain."""
        outside = self._outside(y)
        if outside is None:
            return self._value(y.to(working_dtype(y.dtype)))
        # 0 lies in every domain here: the formula is never evaluated, nor differentiated, where it is not real.
        inside = torch.where(outside, 0.0, y).to(working_dtype(y.dtype))
        return torch.where(outside, math.inf, self._value(inside))

    def total(self, y: Tensor) -> Tensor:
        """``sum_i f(y_i)`` of each sample."""
        return sum_over_sample(self.value(y))

    def potential(self, t: Tensor) -> Tensor:
        """``sum_i sigma~(t_i)`` of each sample."""
        return sum_over_sample(self.antiderivative(t))

    def linearise(self, t: Tensor) -> Linearised:
        """Multiplication by ``sqrt(sigma'(t))``, which is its own adjoint."""
        slope = self.derivative(t)
        # The square root has no derivative at a slope that underflowed to 0, and no value at one rounded below 0.
        positive = slope > 0
        root = torch.where(positive, torch.where(positive, slope, 1.0).sqrt(), 0.0)

        def scale(v: Tensor) -> Tensor:
            return root * v

        return Linearised(factor=scale, factor_adjoint=scale)

    @abstractmethod
    def _antiderivative(self, t: Tensor) -> Tensor:
        """``sigma~(t)`` for t in float32 or float64."""

    @abstractmethod
    def _value(self, y: Tensor) -> Tensor:
        """``f(y)`` for y of the domain, in float32 or float64."""

    def _outside(self, y: Tensor) -> Tensor | None:  # noqa: ARG002
        """Where y is outside the domain of f; None where f is finite everywhere. A NaN is not outside."""
        return None


@dataclass(frozen=True)
class Identity(ElementwisePenalty):
    """``sigma(t) = t``; ``f(y) = 0``. No penalty at all: a linear layer.

    >>> Identity().prox(torch.tensor([-1.0, 2.0]))
    tensor([-1.,  2.])
    """

    name = "identity"
    lipschitz = 1.0
    bounded = False

    def prox(self, t: Tensor) -> Tensor:
        return t

    def derivative(self, t: Tensor) -> Tensor:
        return torch.ones_like(t)

    def _antiderivative(self, t: Tensor) -> Tensor:
        return t.square() / 2

    def _value(self, y: Tensor) -> Tensor:
        return _zero(y)


@dataclass(frozen=True)
class ReLU(ElementwisePenalty):
    """``sigma(t) = max(t, 0)``; ``f(y) = 0`` for y >= 0: the constraint that a state is not negative.

    >>> ReLU().value(torch.tensor([-1.0, 0.0, 1.0]))
    tensor([inf, 0., 0.])
    """

    name = "relu"
    lipschitz = 1.0
    bounded = False

    def prox(self, t: Tensor) -> Tensor:
        return F.relu(t)

    def derivative(self, t: Tensor) -> Tensor:
        return (t > 0).to(t.dtype)

    def _antiderivative(self, t: Tensor) -> Tensor:
        return F.relu(t).square() / 2

    def _value(self, y: Tensor) -> Tensor:
        return _zero(y)

    def _outside(self, y: Tensor) -> Tensor:
        return y < 0


@dataclass(frozen=True)
class LeakyReLU(ElementwisePenalty):
    """``sigma(t) = t (t > 0), slope t (t <= 0)``; ``f(y) = 0 (y >= 0), (1/slope - 1) y^2/2 (y < 0)``.

    The softened constraint of :class:`ReLU`. The default slope, 0.01, is that of torch.

    >>> LeakyReLU(slope=0.1).value(torch.tensor([-2.0, 1.0]))
    tensor([18.,  0.])
    """

    slope: float = 0.01

    name = "leaky_relu"
    lipschitz = 1.0
    bounded = False

    def __post_init__(self) -> None:
        _validate.share(self, "slope")

    def prox(self, t: Tensor) -> Tensor:
        return F.leaky_relu(t, self.slope)

    def derivative(self, t: Tensor) -> Tensor:
        return torch.where(t > 0, torch.ones_like(t), self.slope)

    def _antiderivative(self, t: Tensor) -> Tensor:
        return t * self.prox(t) / 2

    def _value(self, y: Tensor) -> Tensor:
        return (1 / self.slope - 1) / 2 * y.clamp(max=0).square()


@dataclass(frozen=True)
class Tanh(ElementwisePenalty):
    """``sigma(t) = tanh t``; ``f(y) = ((1+y) ln(1+y) + (1-y) ln(1-y) - y^2)/2`` for ``|y| <= 1``.

    >>> Tanh().value(torch.tensor([0.5, 1.0, 1.5]))
    tensor([0.0058, 0.1931,    inf])
    """

    name = "tanh"
    lipschitz = 1.0
    bounded = True

    def prox(self, t: Tensor) -> Tensor:
        return torch.tanh(t)

    def derivative(self, t: Tensor) -> Tensor:
        return 1 - torch.tanh(t).square()

    def _antiderivative(self, t: Tensor) -> Tensor:
        # ln cosh t
        size = _magnitude(t)
        return size + torch.log1p(torch.expm1(-2 * size) / 2)

    def _value(self, y: Tensor) -> Tensor:
        return (_negative_entropy(y) + _negative_entropy(-y) - y.square()) / 2

    def _outside(self, y: Tensor) -> Tensor:
        return y.abs() > 1


@dataclass(frozen=True)
class Sigmoid(ElementwisePenalty):
    """``sigma(t) = 1/(1 + e^-t)``; ``f(y) = y ln y + (1-y) ln(1-y) - y^2/2`` for 0 <= y <= 1.

    >>> Sigmoid().value(torch.tensor([0.5, 1.5]))
    tensor([-0.8181,     inf])
    """

    name = "sigmoid"
    lipschitz = 0.25
    bounded = True
    fixes_zero = False
    offset = -math.log(2)

    def prox(self, t: Tensor) -> Tensor:
        return torch.sigmoid(t)

    def derivative(self, t: Tensor) -> Tensor:
        # sigma(t) (1 - sigma(t)) without the subtraction, which loses every digit for large t.
        return torch.sigmoid(t) * torch.sigmoid(-t)

    def _antiderivative(self, t: Tensor) -> Tensor:
        # softplus(t) - ln 2, without the error of ln 2 near 0
        return F.relu(t) + torch.log1p(torch.expm1(-_magnitude(t)) / 2)

    def _value(self, y: Tensor) -> Tensor:
        y_log_y = y * y.clamp(min=torch.finfo(y.dtype).tiny).log()
        return y_log_y + _negative_entropy(-y) - y.square() / 2

    def _outside(self, y: Tensor) -> Tensor:
        return (y < 0) | (y > 1)


@dataclass(frozen=True)
class Softplus(ElementwisePenalty):
    """``sigma(t) = ln(1 + e^t)``; ``f(y) = Li2(e^-y)`` for y >= 0, with the dilogarithm Li2.

    >>> Softplus().value(torch.tensor([1.0], dtype=torch.float64))
    tensor([0.4088], dtype=torch.float64)
    """

    name = "softplus"
    lipschitz = 1.0
    bounded = False
    fixes_zero = False
    offset = math.pi**2 / 12

    def prox(self, t: Tensor) -> Tensor:
        # torch replaces softplus by t above a threshold. At its default of 20 that is a step down of 2e-9, which
        # float64 sees; at 40 it is below rounding.
        return F.softplus(t, threshold=40.0)

    def derivative(self, t: Tensor) -> Tensor:
        return torch.sigmoid(t)

    def _antiderivative(self, t: Tensor) -> Tensor:
        # -Li2(-e^t) - pi^2/12. For t > 0 its inversion formula, since e^t overflows.
        tail = math.pi**2 / 12 + _dilogarithm(-torch.exp(-_magnitude(t)))
        return F.relu(t).square() / 2 + torch.where(t > 0, tail, -tail)

    def _value(self, y: Tensor) -> Tensor:
        return _dilogarithm(torch.exp(-y), complement=-torch.expm1(-y))

    def _outside(self, y: Tensor) -> Tensor:
        return y < 0


@dataclass(frozen=True)
class ELU(ElementwisePenalty):
    """``sigma(t) = t (t > 0), a(e^t - 1) (t <= 0)``; ``f(y) = 0 (y >= 0), (a+y) ln(1+y/a) - y - y^2/2 (y < 0)``.

    The domain is y >= -a. With alpha = a = 1, the default, sigma has no kink; above 1 its slope nears a below 0.

    >>> ELU(alpha=0.7).value(torch.tensor([-0.3])), ELU(alpha=2.0).lipschitz
    (tensor([0.0312]), 2.0)
    """

    alpha: float = 1.0

    name = "elu"
    bounded = False

    def __post_init__(self) -> None:
        _validate.positive(self, "alpha")

    @property
    def lipschitz(self) -> float:  # type: ignore[override]  # computed, and never assigned
        """``max(1, alpha)``."""
        return max(1.0, float(self.alpha))

    def prox(self, t: Tensor) -> Tensor:
        return F.elu(t, self.alpha)

    def derivative(self, t: Tensor) -> Tensor:
        return torch.where(t > 0, 1.0, self.alpha * torch.exp(t.clamp(max=0)))

    def _antiderivative(self, t: Tensor) -> Tensor:
        below = t.clamp(max=0)
        return F.relu(t).square() / 2 + self.alpha * (torch.expm1(below) - below)

    def _value(self, y: Tensor) -> Tensor:
        below = y.clamp(max=0)
        return self.alpha * _negative_entropy(below / self.alpha) - below - below.square() / 2

    def _outside(self, y: Tensor) -> Tensor:
        # The edge as rounded in y's own dtype, for that is what sigma(-inf) gives: -0.8 is -0.80078 in bfloat16.
        return y < torch.full((), -self.alpha, dtype=y.dtype, device=y.device)


@dataclass(frozen=True)
class SoftThreshold(ElementwisePenalty):
    """``sigma(t) = sign(t) max(|t| - threshold, 0)``; ``f(y) = threshold |y|``: a sparse state.

    The default, 0.1, silences a unit whose pre-activation is a tenth of the usual scale of 1.

    >>> SoftThreshold(threshold=1.0).prox(torch.tensor([-3.0, 0.5]))
    tensor([-2.,  0.])
    """

    threshold: float = 0.1

    name = "soft_threshold"
    lipschitz = 1.0
    bounded = False

    def __post_init__(self) -> None:
        if isinstance(self.threshold, bool) or not isinstance(self.threshold, int | float):
            raise TypeError(f"SoftThreshold.threshold should be a number; got {self.threshold!r}")
        if not 0 <= self.threshold < math.inf:
            raise ValueError(f"SoftThreshold.threshold should be finite and at least 0; got {self.threshold!r}")

    def prox(self, t: Tensor) -> Tensor:
        # Not F.softshrink: on Apple's devices it turned a NaN into 0 until 2026 (pytorch pull request 183710).
        return t - t.clamp(-self.threshold, self.threshold)

    def derivative(self, t: Tensor) -> Tensor:
        return (t.abs() > self.threshold).to(t.dtype)

    def _antiderivative(self, t: Tensor) -> Tensor:
        return self.prox(t).square() / 2

    def _value(self, y: Tensor) -> Tensor:
        return self.threshold * y.abs()


@dataclass(frozen=True)
class HardTanh(ElementwisePenalty):
    """``sigma(t) = min(max(t, -1), 1)``; ``f(y) = 0`` for ``|y| <= 1``: the constraint to a box.

    >>> HardTanh().prox(torch.tensor([-3.0, 0.5]))
    tensor([-1.0000,  0.5000])
    """

    name = "hardtanh"
    lipschitz = 1.0
    bounded = True

    def prox(self, t: Tensor) -> Tensor:
        return F.hardtanh(t)

    def derivative(self, t: Tensor) -> Tensor:
        return (t.abs() < 1).to(t.dtype)

    def _antiderivative(self, t: Tensor) -> Tensor:
        clipped = F.hardtanh(t)
        return clipped * (t - clipped / 2)

    def _value(self, y: Tensor) -> Tensor:
        return _zero(y)

    def _outside(self, y: Tensor) -> Tensor:
        return y.abs() > 1


@dataclass(frozen=True)
class Softsign(ElementwisePenalty):
    """``sigma(t) = t/(1 + |t|)``; ``f(y) = -|y| - ln(1 - |y|) - y^2/2`` for ``|y| < 1``.

    >>> Softsign().prox(torch.tensor([-1.0, 3.0]))
    tensor([-0.5000,  0.7500])
    """

    name = "softsign"
    lipschitz = 1.0
    bounded = True

    def prox(self, t: Tensor) -> Tensor:
        # f is infinite at 1, which the quotient reaches by rounding: a saturated unit stays one float below.
        edge = 1 - torch.finfo(t.dtype).eps / 2
        return F.softsign(t).clamp(-edge, edge)

    def derivative(self, t: Tensor) -> Tensor:
        return (1 + t.abs()).reciprocal().square()

    def _antiderivative(self, t: Tensor) -> Tensor:
        size = _magnitude(t)
        return size - torch.log1p(size)

    def _value(self, y: Tensor) -> Tensor:
        size = _magnitude(y)
        return -size - torch.log1p(-size) - y.square() / 2

    def _outside(self, y: Tensor) -> Tensor:
        return y.abs() >= 1


class LinearActivation(nn.Module, Penalty):
    """``sigma(t) = S t``; ``f(y) = (<y, S^-1 y> - |y|^2)/2``, S symmetric positive definite: a learnt quadratic.

    The one penalty here that mixes entries, so that it has ``total`` and no ``value``: S acts on dim 1 of t
    (features or channels, ``(B, n, ...)``), the same at every position. ``S = F F'`` is kept as its square factor F,
    a parameter of the module, and is thus symmetric and positive semi-definite whatever an optimiser does to it;
    f is finite as long as F is invertible.

    Args:
        n: the size of dim 1.
        init: the factor F to start from, ``(n, n)``; by default the identity, for which f = 0.

    >>> sigma = LinearActivation.from_matrix(torch.tensor([[2.0, 0.0], [0.0, 0.5]]))
    >>> y = torch.tensor([[1.0, 1.0]])
    >>> sigma.prox(y).detach(), sigma.total(y).detach(), round(sigma.lipschitz, 6)
    (tensor([[2.0000, 0.5000]]), tensor([0.2500]), 2.0)
    """

    name = "linear"
    bounded = False
    fixes_zero = True
    offset = 0.0

    def __init__(self, n: int, init: Tensor | None = None) -> None:
        super().__init__()
        self.n = n
        _validate.whole(self, "n")
        if init is None:
            init = torch.eye(n)
        if init.shape != (n, n) or not init.is_floating_point():
            raise ValueError(
                f"LinearActivation: init should be a real ({n}, {n}) factor F of S = F F'; "
                f"got shape {tuple(init.shape)}, {init.dtype}"
            )
        self.factor = nn.Parameter(init.detach().clone())

    @classmethod
    def from_matrix(cls, S: Tensor) -> LinearActivation:
        """The activation with this matrix S, which must be symmetric and positive definite."""
        if S.ndim != 2 or S.shape[0] != S.shape[1] or not S.is_floating_point():
            raise ValueError(
                f"LinearActivation.from_matrix: S should be a real square matrix; got shape {tuple(S.shape)}, {S.dtype}"
            )
        exact = S.detach().double()
        asymmetry = float((exact - exact.mT).abs().max())
        # A product F F' in the dtype of S is symmetric up to its rounding, and no more is asked of S.
        if not asymmetry <= 8 * torch.finfo(S.dtype).eps * float(exact.abs().max()):
            raise ValueError(
                "LinearActivation.from_matrix: S should be symmetric and finite, for only a symmetric S is the prox "
                f"of a function; got max |S - S'| = {asymmetry:.3g}"
            )
        factor, failed = torch.linalg.cholesky_ex((exact + exact.mT) / 2)
        if bool(failed):
            smallest = float(torch.linalg.eigvalsh(exact)[0])
            raise ValueError(
                "LinearActivation.from_matrix: S should be positive definite, so that its inverse gives a penalty; "
                f"got smallest eigenvalue {smallest:.3g}"
            )
        return cls(S.shape[0], init=factor.to(S.dtype))

    @property
    def lipschitz(self) -> float:  # type: ignore[override]  # computed, and never assigned
        """``|S| = |F|^2``. Waits for the device: for certificates, not for solver steps."""
        return float(torch.linalg.matrix_norm(self.factor.detach().double(), ord=2)) ** 2

    def forward(self, t: Tensor) -> Tensor:
        """The same as :meth:`prox`."""
        return self.prox(t)

    def prox(self, t: Tensor) -> Tensor:
        """``F F' t``."""
        at_t = self.linearise(t)
        return at_t.factor(at_t.factor_adjoint(t))

    def total(self, y: Tensor) -> Tensor:
        """``(|F^-1 y|^2 - |y|^2)/2`` of each sample; solving with F, for S has the square of its condition number."""
        self._check(y)
        wide = y.to(working_dtype(y.dtype)).movedim(1, 0)
        solved = torch.linalg.solve(self.factor.to(wide.dtype), wide.flatten(1)).reshape(wide.shape)
        return sum_over_sample((solved.square() - wide.square()).movedim(1, 0)) / 2

    def potential(self, t: Tensor) -> Tensor:
        """``<t, S t>/2 = |F' t|^2/2`` of each sample."""
        with Autocast.current(t.device).off():
            wide = t.to(working_dtype(t.dtype))
            return sum_over_sample(self.linearise(wide).factor_adjoint(wide).square()) / 2

    def linearise(self, t: Tensor) -> Linearised:
        """The products with F and F', the same at every t."""
        self._check(t)
        matrix = self.factor.to(t.dtype)

        def factor(v: Tensor) -> Tensor:
            return torch.einsum("ij,bj...->bi...", matrix, v)

        def factor_adjoint(u: Tensor) -> Tensor:
            return torch.einsum("ji,bj...->bi...", matrix, u)

        return Linearised(factor, factor_adjoint)

    def extra_repr(self) -> str:
        """The size, for ``print(module)``."""
        return f"n={self.n}"

    def _check(self, t: Tensor) -> None:
        if t.ndim < 2 or t.shape[1] != self.n:
            raise ValueError(
                f"LinearActivation acts on dim 1, of size {self.n}; got a tensor of shape {tuple(t.shape)}"
            )


class FromActivation(ElementwisePenalty):
    """The penalty of your own elementwise activation; ``f'(y) = sigma^{-1}(y) - y`` defines it up to a constant.

    At construction the function is looked at on a float64 grid over [-100, 100]: it must be finite, elementwise,
    non-decreasing and nowhere steeper than ``lipschitz``. That is a check and not a proof, hence ``lipschitz`` is
    asked for and not guessed: certificates rest on it. The function must have no trainable parameters.

    A network needs nothing more. Values of its objective need formulas, which are checked on the same grid:

    Args:
        function: sigma, from a tensor to a tensor of the same shape and dtype.
        lipschitz: the largest slope of sigma.
        name: for reports.
        bounded: whether the range of sigma is bounded.
        antiderivative: the integral of sigma from 0; needed by ``antiderivative`` and ``potential``.
        value: f, +inf outside its domain; needed by ``value`` and ``total``.

    >>> penalty = FromActivation(torch.asinh, lipschitz=1.0, name="asinh", value=lambda y: y.cosh() - y.square() / 2)
    >>> penalty.derivative(torch.tensor([0.0])), penalty.offset
    (tensor([1.]), 1.0)
    """

    def __init__(
        self,
        function: Callable[[Tensor], Tensor],
        lipschitz: float,
        name: str = "custom",
        *,
        bounded: bool = False,
        antiderivative: Callable[[Tensor], Tensor] | None = None,
        value: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self._function = function
        self.lipschitz = lipschitz
        self.name = name
        self.bounded = bounded
        self._given_antiderivative = antiderivative
        self._given_value = value
        if not callable(function):
            raise TypeError(f"FromActivation.function should be callable; got {function!r}")
        if isinstance(function, nn.Module) and any(p.requires_grad for p in function.parameters()):
            raise ValueError(
                f"FromActivation {name!r}: the function has trainable parameters, and training could make it decrease; "
                "freeze them, or write a Penalty that is an nn.Module"
            )
        _validate.positive(self, "lipschitz")
        self._check_activation()
        self._check_formulas()
        at_zero = function(torch.zeros(1, dtype=torch.float64))
        self.fixes_zero = float(at_zero) == 0.0
        # Without a formula, f is the one whose constant makes this 0.
        self.offset = 0.0 if value is None else float(value(at_zero) + at_zero.square() / 2)

    def __repr__(self) -> str:
        return f"FromActivation({self.name!r}, lipschitz={self.lipschitz})"

    def prox(self, t: Tensor) -> Tensor:
        return self._function(t)

    def derivative(self, t: Tensor) -> Tensor:
        return _derivative(self._function, t)

    def _antiderivative(self, t: Tensor) -> Tensor:
        if self._given_antiderivative is None:
            raise self._missing("antiderivative")
        return self._given_antiderivative(t)

    def _value(self, y: Tensor) -> Tensor:
        if self._given_value is None:
            raise self._missing("value")
        return self._given_value(y)

    def _missing(self, formula: str) -> NotImplementedError:
        return NotImplementedError(
            f"penalty {self.name!r} was given no formula for its {formula}, which objective values need; "
            f"pass {formula}=... to FromActivation"
        )

    def _check_activation(self) -> None:
        t = _check_grid()
        y = self._function(t)
        if not isinstance(y, Tensor) or y.shape != t.shape or y.dtype != t.dtype:
            got = f"{y.dtype} of shape {tuple(y.shape)}" if isinstance(y, Tensor) else type(y).__name__
            raise ValueError(
                f"activation {self.name!r} should keep shape and dtype; a {t.dtype} tensor of shape "
                f"{tuple(t.shape)} became {got}"
            )
        self._refuse(~y.isfinite(), t, y, "should be finite")
        alone = self._function(t[::7])
        self._refuse((alone - y[::7]).abs() > 1e-9 * (1 + alone.abs()), t[::7], y[::7], "should be elementwise")
        rise = y.diff()
        rounding = 1e-12 * (1 + y[1:].abs())
        self._refuse(
            rise < -rounding, t, y, "decreases, and is thus the prox of no penalty; choose a non-decreasing one"
        )
        self._refuse(
            rise > self.lipschitz * t.diff() * (1 + 1e-9) + rounding,
            t,
            y,
            f"is steeper than lipschitz={self.lipschitz}; give its largest slope",
        )

    def _check_formulas(self) -> None:
        t = _check_grid()
        y = self._function(t)
        if self._given_antiderivative is not None:
            slope = _derivative(self._given_antiderivative, t)
            wrong = ~((slope - y).abs() <= 1e-6 * (1 + y.abs()))
            self._refuse(wrong, t, y, "is not the derivative of the given antiderivative")
            start = float(self._given_antiderivative(torch.zeros(1, dtype=t.dtype)))
            if not abs(start) <= 1e-9:
                raise ValueError(f"the antiderivative of {self.name!r} should be 0 at 0; got {start:.6g}")
        if self._given_value is not None:
            # Where sigma is flat, one y belongs to many t and f has a kink or an edge: nothing to compare there.
            rising = _derivative(self._function, t) > 1e-3
            t, y = t[rising], y[rising]
            wrong = ~((_derivative(self._given_value, y) - (t - y)).abs() <= 1e-6 * (1 + t.abs()))
            self._refuse(wrong, t, y, "is not the prox of the given value: f'(sigma(t)) should be t - sigma(t)")

    def _refuse(self, wrong: Tensor, t: Tensor, y: Tensor, why: str) -> None:
        """Raise if ``wrong`` is true anywhere, with the first place."""
        if bool(wrong.any()):
            at = int(wrong.nonzero()[0])
            around = ", ".join(f"sigma({float(t[i]):.6g}) = {float(y[i]):.6g}" for i in range(at, min(at + 2, len(t))))
            raise ValueError(f"activation {self.name!r} {why}; {around}")


_BY_NAME: dict[str, Callable[[], Penalty]] = {
    "identity": Identity,
    "relu": ReLU,
    "leaky_relu": LeakyReLU,
    "tanh": Tanh,
    "sigmoid": Sigmoid,
    "softplus": Softplus,
    "elu": ELU,
    "soft_threshold": SoftThreshold,
    "hardtanh": HardTanh,
    "softsign": Softsign,
}

_NOT_MONOTONE = frozenset({"gelu", "quick_gelu", "silu", "swish", "hardswish", "mish", "sine", "sin", "cosine", "cos"})


def names() -> list[str]:
    """The names that :func:`get` knows.

    >>> names()[:3]
    ['identity', 'relu', 'leaky_relu']
    """
    return list(_BY_NAME)


def get(activation: str | Penalty) -> Penalty:
    """The penalty of a name, with its defaults; a penalty passes through.

    >>> get("leaky_relu"), get(LeakyReLU(slope=0.2))
    (LeakyReLU(slope=0.01), LeakyReLU(slope=0.2))
    """
    if isinstance(activation, Penalty):
        return activation
    if not isinstance(activation, str):
        raise TypeError(
            f"an activation is a name or a Penalty, such as 'relu' or LeakyReLU(slope=0.1); got {activation!r}. "
            "A function of your own becomes a penalty with FromActivation(function, lipschitz=...)"
        )
    if activation.lower() in _NOT_MONOTONE:
        raise ValueError(
            f"activation {activation!r} is not monotone, so it is the prox of no penalty and a network with it "
            "minimises nothing; near to it and monotone are 'softplus', 'elu' and 'relu'"
        )
    if activation not in _BY_NAME:
        raise unknown_name("activation", activation, _BY_NAME)
    return _BY_NAME[activation]()


def _zero(y: Tensor) -> Tensor:
    """0 with y in its graph, so that the derivative of a constant can be asked for; a NaN stays one."""
    return torch.where(y.isnan(), y, 0.0)


def _magnitude(t: Tensor) -> Tensor:
    """``|t|`` with derivative -1 at 0. torch's is 0 there, and second derivatives of even functions vanish with it."""
    return torch.where(t > 0, t, -t)


def _negative_entropy(u: Tensor) -> Tensor:
    """``(1+u) ln(1+u)`` for u >= -1, with 0 ln 0 = 0; the logarithm at -1 is that of the next float above."""
    logarithm = torch.log1p(u.clamp(min=torch.finfo(u.dtype).eps / 2 - 1))
    return (1 + u).clamp(min=0) * logarithm


_BERNOULLI = (1 / 6, -1 / 30, 1 / 42, -1 / 30, 5 / 66, -691 / 2730, 7 / 6, -3617 / 510)
_SERIES = tuple(b / math.factorial(2 * k + 3) for k, b in enumerate(_BERNOULLI))


def _dilogarithm(x: Tensor, complement: Tensor | None = None) -> Tensor:
    """``Li2(x) = sum_k x^k / k^2`` for x in [-1, 1]; ``complement`` is 1 - x, where it is known to more digits than x.

    With ``u = -ln(1-x)``, ``Li2(x) = u - u^2/4 + sum_k B_2k u^(2k+1)/(2k+1)!``, whose terms fall by a factor
    (u/2 pi)^2: eight of them reach float64 rounding for x in [-1, 1/2], where |u| <= ln 2. Above 1/2 the reflection
    ``Li2(x) = pi^2/6 - ln(x) ln(1-x) - Li2(1-x)`` leads there. Near x = 1 the derivative is -ln(1-x), which needs
    1 - x and not x.
    """
    rest = 1 - x if complement is None else complement
    reflected = x > 0.5
    u = -torch.log1p(-torch.where(reflected, rest, x))
    squared = u.square()
    series = torch.zeros_like(u)
    for coefficient in reversed(_SERIES):
        series = (series + coefficient) * squared
    small = u * (1 + series) - squared / 4
    # In the reflection u is -ln(x).
    return torch.where(reflected, math.pi**2 / 6 + u * rest.clamp(min=torch.finfo(x.dtype).tiny).log() - small, small)


def _derivative(function: Callable[[Tensor], Tensor], t: Tensor) -> Tensor:
    """The derivative of an elementwise function, by autograd; it can be differentiated again."""
    pulled = torch.func.vjp(function, t)
    slope: Tensor = pulled[1](torch.ones_like(pulled[0]))[0]
    return slope


def _check_grid() -> Tensor:
    """Points of [-100, 100], a thousandth apart near 0 and further apart outwards."""
    return torch.linspace(-math.asinh(100), math.asinh(100), 8001, dtype=torch.float64).sinh()
