"""The polynomial kernel."""

from __future__ import annotations

from torch import Tensor

from opteq.kernels.inner_product import InnerProduct
from opteq.operators import LinearMap


class Polynomial(InnerProduct):
    """``s(y) = 1/2 |W y|^2 + <c, y>^degree`` with ``c = U x + b`` in the state's space.

    The power outgrows ``1/2 |y|^2``, so with an unbounded activation the objective may have no minimiser: over
    ``y >= 0`` it is unbounded below for degree 3 and more as soon as c has a positive entry, and for degree 2 if
    ``2 |c+|^2 + |W c+|^2 / |c+|^2 > 1``, where c+ is the positive part of c. Iteration may then blow up. With a
    bounded activation, tanh for instance, there is an equilibrium for every input.

    Solvers begin at c and not at zero: where ``sigma(0) = 0``, zero is an equilibrium for every input, and it is not
    what one is looking for.

    Args:
        degree: a whole number of at least 2; degree 1 is :class:`~opteq.kernels.linear.Linear`.

    >>> import torch
    >>> Polynomial(3).slope(torch.tensor([2.0]))
    tensor([12.])
    """

    caveat = (
        "the objective of a polynomial kernel may have no minimiser: over y >= 0 it is unbounded below for degree 3 "
        "and more if c = U x + b has a positive entry, and for degree 2 if 2 |c+|^2 + |W c+|^2 / |c+|^2 > 1. "
        "Zero is a fixed point where sigma(0) = 0, but not one that depends on the input"
    )

    def __init__(self, degree: int) -> None:
        super().__init__()
        if isinstance(degree, bool) or not isinstance(degree, int):
            raise TypeError(f"Polynomial.degree should be a whole number of at least 2; got {degree!r}")
        if degree < 2:
            raise ValueError(
                f"Polynomial.degree should be at least 2; got {degree}. Degree 1 is opteq.kernels.Linear()"
            )
        self.degree = degree

    def start(self, W: LinearMap, c: Tensor) -> Tensor:
        """``c``, since zero may be an equilibrium."""
        return self.state_like(W, c)

    def height(self, t: Tensor) -> Tensor:
        """``t^d``."""
        return t**self.degree

    def slope(self, t: Tensor) -> Tensor:
        """``d t^(d-1)``."""
        return self.degree * t ** (self.degree - 1)

    def bend(self, t: Tensor) -> Tensor:
        """``d (d-1) t^(d-2)``."""
        return self.degree * (self.degree - 1) * t ** (self.degree - 2)

    def extra_repr(self) -> str:
        """The degree."""
        return f"degree={self.degree}"
