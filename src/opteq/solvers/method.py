"""The part of a fixed-point solver that differs from one to the next: how it proposes the next point."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from opteq.states import Layout

Map = Callable[[Tensor], tuple[Tensor, Tensor | None]]
"""A map on matrices with one row per sample: its image, and a merit per row where the problem has one."""


@dataclass(frozen=True)
class Task:
    """A fixed-point problem as solvers see it: matrices with one row per sample.

    Attributes:
        evaluate: the map.
        admissible: brings proposals to where the problem makes sense.
        start: the first point.
        known: the map at ``start``, which had to be evaluated to learn its dtype.
        layout: how rows are states.
        damping: what the problem recommends: a number, or a column with one per row.
        eps: rounding of the map.
    """

    evaluate: Map
    admissible: Callable[[Tensor], Tensor]
    start: Tensor
    known: tuple[Tensor, Tensor | None]
    layout: Layout
    damping: float | Tensor
    eps: float


class InverseEstimate(ABC):
    """An estimate of ``(I - J)^-1`` gathered on the way to the fixed point."""

    @abstractmethod
    def adjoint(self, rows: Tensor) -> Tensor:
        """The transposed estimate applied to a matrix with one row per sample."""


class Method(ABC):
    """The part of a solver that differs: how the next point is proposed from what was seen."""

    growth: float = 2.0
    """How far ``|T(y) - y|`` may rise above its least value where the problem has no merit to accept proposals by."""

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
