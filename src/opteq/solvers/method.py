"""The part of a fixed-point solver that differs from one to the next: how it proposes the next point."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from opteq.states import Layout, State

Map = Callable[[Tensor], tuple[Tensor, Tensor | None]]
"""A map on matrices with a row a sample: its image, and a merit a row where the problem has one."""


@dataclass(frozen=True)
class Task:
    """A fixed-point problem as solvers see it: matrices with a row a sample.

    Attributes:
        evaluate: the map.
        admissible: brings proposals to where the problem makes sense.
        start: the first point.
        known: the map at ``start``, which had to be evaluated to learn its dtype.
        layout: how rows are states.
        damping: what the problem recommends: a number, or a column with one a row.
        eps: rounding of the map.
    """

    evaluate: Map
    admissible: Callable[[Tensor], Tensor]
    start: Tensor
    known: tuple[Tensor, Tensor | None]
    layout: Layout
    damping: float | Tensor
    eps: float


@dataclass(frozen=True)
class StateTask:
    """The same problem with states as they are, for runs that read them in place.

    Attributes:
        evaluate: the map and, where the problem has one, its merit a row.
        project: brings a state to where the problem makes sense; None where every state does.
        interval: the same where it is a clamp of every entry.
        start, known, layout, damping, eps: as in :class:`Task`; ``damping`` is a number, or one a sample.
        keep_image: whether the image of the answer is of use.
    """

    evaluate: Callable[[State], tuple[State, Tensor | None]]
    project: Callable[[State], State] | None
    interval: tuple[float, float] | None
    start: State
    known: tuple[State, Tensor | None]
    layout: Layout
    damping: float | Tensor
    eps: float
    keep_image: bool = False

    @property
    def wide(self) -> torch.dtype:
        """The dtype of sums and differences."""
        return self.layout.dtype

    def damping_by_row(self) -> Tensor | None:
        """The damping of every row; None where it is 1."""
        if isinstance(self.damping, Tensor):
            return self.damping.amin().reshape(1) if self.layout.coupled else self.damping
        if self.damping == 1:
            return None
        return torch.full((self.layout.rows,), float(self.damping), dtype=self.wide, device=self.layout.device)


class InverseEstimate(ABC):
    """An estimate of ``(I - J)^-1`` gathered on the way to the fixed point."""

    @abstractmethod
    def adjoint(self, rows: Tensor) -> Tensor:
        """The transposed estimate applied to a matrix with a row a sample."""


class Method(ABC):
    """The part of a solver that differs: how the next point is proposed from what was seen."""

    growth: float = 2.0
    """How far ``|T(y) - y|`` may rise above its least value where the problem has no merit to judge proposals by."""

    shortens: bool = False
    """Whether :meth:`shorten` does anything."""

    @abstractmethod
    def propose(self, point: Tensor, image: Tensor, change: Tensor, active: Tensor) -> Tensor:
        """The next point, from a point, ``image = T(point)`` and their difference ``change = image - point``.

        Rows outside ``active`` are finished.
        """

    def plain(self) -> Tensor | None:
        """Rows whose last proposal was a plain step (None: all)."""
        return None

    def restart(self, rows: Tensor) -> None:  # noqa: B027 - a method without memory has nothing to forget
        """Forget what was seen in these rows."""

    def shorten(self, rows: Tensor) -> None:  # noqa: B027 - see shortens
        """Take steps of half the length in these rows from now on."""

    def inverse(self) -> InverseEstimate | None:
        """The estimate of ``(I - J)^-1``, where the method has one."""
        return None
