"""A penalty for a user's own activation."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from opteq.common import validate as _validate
from opteq.common.derivatives import pullback
from opteq.penalties.base import ElementwisePenalty


class FromActivation(ElementwisePenalty):
    """The penalty of your own elementwise activation; ``f'(y) = sigma^{-1}(y) - y`` defines it up to a constant.

    At construction the function is evaluated on a float64 grid over [-100, 100]: it should be finite, elementwise,
    non-decreasing and nowhere steeper than ``lipschitz``. That is a check and not a proof, and certificates depend on
    ``lipschitz``, so you have to state it. The function may not have trainable parameters.

    This is enough for a network. Values of its objective need formulas, which are checked on the same grid:

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
        self.bounded = _validate.check_flag("FromActivation.bounded", bounded)
        self._given_antiderivative = antiderivative
        self._given_value = value
        self.has_total = value is not None
        self.has_potential = antiderivative is not None
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
        alone = self._function(t[::7].flip(0)).flip(0)  # fewer entries in another order, which a sort would notice
        self._refuse((alone - y[::7]).abs() > 1e-9 * (1 + alone.abs()), t[::7], y[::7], "should be elementwise")
        rise = y.diff()
        rounding = 1e-12 * (1 + y[1:].abs())
        self._refuse(
            rise < -rounding, t, y, "decreases, and is thus the prox of no penalty; choose a non-decreasing one"
        )
        steeper = rise > self.lipschitz * t.diff() * (1 + 1e-9) + rounding
        self._refuse(steeper, t, y, f"is steeper than lipschitz={self.lipschitz}; give its largest slope")
        with torch.enable_grad():
            constant = not self._function(t.detach().requires_grad_()).requires_grad
        untaped = (rise > rounding) & constant
        self._refuse(untaped, t, y, "rises without a gradient: write it without detach, no_grad, data or numpy")

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


def _derivative(function: Callable[[Tensor], Tensor], t: Tensor) -> Tensor:
    """The derivative of an elementwise function, by autograd; it can be differentiated again."""
    value, vjp = pullback(function, t)
    return vjp(torch.ones_like(value))


def _check_grid() -> Tensor:
    """Points of [-100, 100], a thousandth apart near 0 and further apart outwards."""
    return torch.linspace(-math.asinh(100), math.asinh(100), 8001, dtype=torch.float64).sinh()
