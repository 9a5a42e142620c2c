"""The base class of kernels, by which GEQ compares its state with its input."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from opteq.common.derivatives import gradient, pullback
from opteq.common.options import NamedOptions
from opteq.operators import LinearMap, Operator

HessianProduct = Callable[[Tensor], Tensor]


class Similarity(ABC):
    """A kernel with its input bound: the function ``s(y)`` of the state that GEQ rewards.

    A plain object that lives for one batch. Only :meth:`value` has to be written; :meth:`gradient` and
    :meth:`hessian_at` follow by autograd, and closed forms make them faster.

    ``W`` is the operator of the problem, with prepared weights, and ``c`` is ``U x + b``.
    """

    def __init__(self, W: LinearMap, c: Tensor) -> None:
        self.W = W
        self.c = c

    @abstractmethod
    def value(self, y: Tensor) -> Tensor:
        """``s(y)``, one value per sample."""

    def terms(self, y: Tensor) -> dict[str, Tensor]:
        """The parts whose sum is :meth:`value`, by name."""
        return {"similarity": self.value(y)}

    def gradient(self, y: Tensor) -> Tensor:
        """``grad s(y)``, shaped like the state: what the activation is applied to."""
        return gradient(self.value, y)

    def gradient_and_value(self, y: Tensor) -> tuple[Tensor, Tensor]:
        """Both at once, for kernels where they share work."""
        return self.gradient(y), self.value(y)

    def hessian_at(self, y: Tensor) -> HessianProduct:
        """``v -> hess s(y) v``; what can be computed once for all products is."""
        return pullback(self.gradient, y)[1]  # a Hessian is symmetric, so its transpose will do

    def curvature_interval(self, square: float | Tensor) -> tuple[Tensor, Tensor] | None:  # noqa: ARG002
        """Bounds of the eigenvalues of ``hess s`` over all states, for this input: two values per sample, or None.

        For kernels whose curvature has no bound that holds for every input, :attr:`Kernel.curvature`. ``square`` is a
        bound of ``|W|^2 |projection|^2``.
        """
        return None


class Kernel(nn.Module, metaclass=NamedOptions):
    """How a state is compared with an input. GEQ minimises ``sum f(y) + 1/2 |y|^2 - s(y)`` for the ``s`` it defines.

    A kernel is a module, so it may have parameters. :meth:`bind` reads them once per batch and returns ``s``.
    Guarantees are computed from the attributes below; keep the defaults where nothing is known.

    Attributes:
        input_space: the space of ``U x + b``: ``"state"`` for kernels that compare it with y, ``"output"`` for those
            that compare it with ``W y``.
        curvature: an interval ``(low, high)`` that contains the eigenvalues of ``hess s`` for every input and state, in
            units of ``(|W| |projection|)^2``; None where there is none.
        growth: a number a with ``s(y) <= a/2 |y|^2 + O(|y|)``, in the same units; None where there is none.
        caveat: a note on existence for the user, shown in the certificate.
        projection: an operator applied to ``U x + b - W y`` before it is compared, or None.
        follows_input: whether the kernel chooses a number by the input, which derivatives hold constant.

    A kernel of your own needs a ``value`` and a ``bind``:

    >>> import torch
    >>> from opteq.operators import Dense
    >>> from opteq.problems.geq import GEQ
    >>> class LorentzianSimilarity(Similarity):
    ...     def value(self, y):
    ...         r = self.c - self.W(y)
    ...         return -torch.log1p(r.square().sum(1)) / 2
    >>> class Lorentzian(Kernel):
    ...     input_space = "output"
    ...     curvature = (-1.0, 0.125)        # of W'(2 rr'/(1+|r|^2)^2 - I/(1+|r|^2))W
    ...     growth = 0.0                     # s is bounded above
    ...     def bind(self, W, c):
    ...         return LorentzianSimilarity(W, c)
    >>> problem = GEQ(Dense(3, 4, bound=0.9), torch.nn.Linear(2, 4), kernel=Lorentzian())
    >>> problem(torch.ones(1, 2)).step(torch.zeros(1, 3)).shape
    torch.Size([1, 3])
    >>> problem.certificate().unique
    True
    """

    input_space: ClassVar[Literal["state", "output"]] = "state"
    curvature: ClassVar[tuple[float, float] | None] = None
    growth: ClassVar[float | None] = None
    caveat: ClassVar[str] = ""
    follows_input: bool = False
    projection: Operator | None

    def __init__(self) -> None:
        super().__init__()
        self.projection = None

    @abstractmethod
    def bind(self, W: LinearMap, c: Tensor) -> Similarity:
        """The similarity for a batch with ``c = U x + b``."""

    def start(self, W: LinearMap, c: Tensor) -> Tensor:
        """Where solvers begin: zeros in the state's space."""
        return torch.zeros_like(self.state_like(W, c))

    def state_like(self, W: LinearMap, c: Tensor) -> Tensor:
        """A tensor with the shape of a state, and an error that explains where U should map to."""
        name = type(self).__name__
        try:
            with torch.no_grad():
                if self.input_space == "output":
                    return W.adjoint(c)
                W(c[:0])  # an empty batch is enough to see whether W takes c
                return c.detach()
        except (ValueError, RuntimeError) as error:
            other, place = ("state", "output") if self.input_space == "output" else ("output", "state")
            raise ValueError(
                f"with the {name} kernel U should map into the space of W's {place} (not into that of its {other}); "
                f"U x + b has shape {tuple(c.shape)}: {error}"
            ) from error

    def input_gain(self, norm: float, slope: float) -> tuple[float | None, str]:  # noqa: ARG002
        """A Lipschitz constant from the projected input to the equilibrium, and why; None where none is known.

        ``norm`` is a bound of ``|W| |projection|``, ``slope`` the largest slope of the activation.
        """
        return None, self.caveat or f"{type(self).__name__} declares nothing to conclude this from"
