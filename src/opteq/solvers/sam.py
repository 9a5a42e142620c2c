"""SAM: among several equilibria, the one at which a regulariser is least."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from opteq.common.validate import positive, share, whole
from opteq.solvers.base import Solver
from opteq.solvers.loop import Method, Process, RowTask, Rule, relative
from opteq.solvers.status import Status
from opteq.states import map_state, row_norms


class Prior(Protocol):
    """The interface of a regulariser R for SAM."""

    @property
    def couples_batch(self) -> bool:
        """Whether R ties the samples of a batch together."""

    @property
    def gradient_lipschitz(self) -> float | None:
        """Lipschitz constant of the gradient of R, None where unknown."""

    def gradient(self, z: Tensor) -> Tensor:
        """Gradient of R, shaped like ``z``."""


@dataclass(frozen=True, kw_only=True)
class SAM(Solver):
    """Sequential averaging: ``z <- b_k S(z) + (1 - b_k) T(z)`` with ``S(z) = z - gamma (grad R(z) + l_k z)``.

    For a convex regulariser R and a nonexpansive map T, the iterates approach the fixed point of T at which R is least
    (Theorem 5 of OptEq, with the corrected schedule ``b_k = eta / k^rho``, ``l_k = eta / k^c``). The distance shrinks
    only like ``b_k + l_k``, so a few dozen steps move towards that point and do not reach it. The reported residual is
    that of T. All ``max_steps`` are taken, since a start that is a fixed point need not be the selected one. SAM
    iterates on a problem's features, of which R is a function.

    ``sam.solve(T, z)`` returns the last iterate ``z_K`` after ``max_steps = K`` steps; the last ``polish`` steps are
    plain. A layer returns the state of ``z_K``, ``y = sigma(W z_K + c)`` for OptEq, and the features of that state:
    ``W' y = T(z_K)``, one plain step after ``z_K``. The reported residual is that of ``z_K``.

    Args:
        regularizer: R, from :mod:`opteq.regularizers` or anything with the ``gradient``, ``gradient_lipschitz`` and
            ``couples_batch`` that those have.
        gamma: step on R; None takes ``1 / (2 L)`` with L the Lipschitz constant of grad R.
        eta: scale of both schedules, at most 1; None takes ``min(sqrt(2 L), L / 2, 1 / 2)``.
        rho: decay of ``b_k``.
        c: decay of ``l_k``. ``rho + 2 c < 1`` makes the averaged maps contract faster than they drift.
        polish: how many of the last steps are plain, ``z <- T(z)``, and lead to the set of fixed points; 0 leaves a
            layer with the one plain step of its read-out.

    >>> import torch, opteq
    >>> sam = SAM(regularizer=opteq.regularizers.Ridge(), max_steps=1000, polish=10)
    >>> outcome = sam.solve(torch.relu, torch.tensor([[-1.0, 3.0]]))  # every z >= 0 is a fixed point
    >>> outcome.state.round(decimals=1)                               # and 0 is the smallest
    tensor([[0., 0.]])
    """

    regularizer: Prior
    gamma: float | None = None
    eta: float | None = None
    rho: float = 0.33
    c: float = 0.33
    polish: int = 0

    works_on_features: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.regularizer, type):
            name = self.regularizer.__name__
            raise TypeError(f"SAM.regularizer should be an object; got the class {name}; did you mean {name}()?")
        for name in ("gradient", "gradient_lipschitz", "couples_batch"):
            if not hasattr(self.regularizer, name):
                raise TypeError(
                    f"SAM.regularizer should have {name}, as those of opteq.regularizers do; got {self.regularizer!r}"
                )
        for field in ("rho", "c"):
            positive(self, field)
        if self.rho + 2 * self.c >= 1:
            raise ValueError(f"SAM needs rho + 2 c < 1; got rho={self.rho}, c={self.c}")
        whole(self, "polish", 0)
        if self.polish > self.max_steps:
            raise ValueError(f"SAM.polish should be at most max_steps={self.max_steps}; got {self.polish}")
        lipschitz = self.regularizer.gradient_lipschitz
        for field in ("gamma", "eta"):
            if getattr(self, field) is not None:
                # eta is the weight of the first step on R, in an average of two maps.
                (share if field == "eta" else positive)(self, field)
            elif lipschitz is None:
                raise ValueError(
                    f"give SAM.{field}: the gradient of {type(self.regularizer).__name__} has no known "
                    "Lipschitz constant to choose it by"
                )

    def schedule(self) -> tuple[float, float]:
        """``gamma`` and ``eta``, chosen by the regulariser's Lipschitz constant where they were not given."""
        lipschitz = self.regularizer.gradient_lipschitz or 1.0
        gamma = 1 / (2 * lipschitz) if self.gamma is None else self.gamma
        eta = min(math.sqrt(2 * lipschitz), lipschitz / 2, 0.5) if self.eta is None else self.eta
        return gamma, eta

    @property
    def couples_batch(self) -> bool:
        return self.regularizer.couples_batch

    def rule(self, device: torch.device, eps: float) -> Rule:
        """Every step is taken."""
        return replace(super().rule(device, eps), to_the_end=True)

    def _process(self, task: RowTask) -> tuple[Method | None, Process]:
        return None, _Averaging(self, task)


class _Averaging:
    """The process of SAM: no memory but the step number."""

    def __init__(self, options: SAM, task: RowTask) -> None:
        self.options = options
        self.gamma, self.eta = options.schedule()
        self.evaluate = task.evaluate
        self.layout = task.layout
        self.point, self.image = task.start, task.known[0]
        self.step = 0

    def first(self) -> tuple[Tensor, Tensor]:
        return self.point, self._residual()

    def advance(self, active: Tensor) -> tuple[Tensor, Tensor]:  # noqa: ARG002
        self.step += 1
        if self.step > self.options.max_steps - self.options.polish:
            self.point = self.image
        else:
            weight = self.eta / self.step**self.options.rho
            shrink = self.eta / self.step**self.options.c
            slope = self.layout.pack(map_state(self.options.regularizer.gradient, self.layout.unpack(self.point)))
            descended = self.point - self.gamma * (slope + shrink * self.point)
            self.point = torch.lerp(self.image, descended, weight)
        self.image, _ = self.evaluate(self.point)
        residual = self._residual()
        self.codes = torch.where(torch.isfinite(residual), 0, int(Status.NON_FINITE))
        return self.point, residual

    def _residual(self) -> Tensor:
        return relative(row_norms(self.image - self.point), row_norms(self.image), self.options.floor)
