"""torchdeq, for comparison, where it is installed."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import torch
from torch import Tensor

from opteq.states import State, blocks, like

SOLVERS = ("anderson", "fixed_point_iter", "broyden")


def version() -> str | None:
    """The version of torchdeq, None where it is not there."""
    if importlib.util.find_spec("torchdeq") is None:
        return None
    try:
        return metadata.version("torchdeq")
    except metadata.PackageNotFoundError:  # a folder on the path, not an installed package
        return "unknown"


@dataclass(frozen=True)
class Rival:
    """torchdeq with one solver forward, one backward, and relative tolerances.

    torchdeq flattens states in the order of their dimensions, which would transpose channels-last images at every step.
    Here its states are matrices in memory order, which avoids these copies.

    Args:
        forward: one of :data:`SOLVERS`.
        backward: one of :data:`SOLVERS`.
        max_steps: forward and backward.
        tol: forward and backward; 0 takes all steps.
    """

    forward: str
    backward: str = "fixed_point_iter"
    max_steps: int = 20
    tol: float = 0.0

    def build(self) -> Any:
        """Torchdeq's module."""
        from torchdeq import get_deq

        return get_deq(
            core="sliced",
            ift=True,
            f_solver=self.forward,
            b_solver=self.backward,
            f_max_iter=self.max_steps,
            b_max_iter=self.max_steps,
            f_tol=self.tol,
            b_tol=self.tol,
            f_stop_mode="rel",
            b_stop_mode="rel",
        )

    def search(self, step: Callable[[State], State], start: State) -> Callable[[], State]:
        """Work that finds the fixed point of ``step`` without a gradient."""
        deq = self.build().eval()
        rows = RowLayout(start)
        first = rows.flat(start)

        def work() -> State:
            with torch.no_grad():
                points, _ = deq(rows.as_row_map(step), first)
            return rows.state(points[-1])

        return work


class RowLayout:
    """States as matrices with one row per sample, in memory order."""

    def __init__(self, template: State) -> None:
        self.template = template
        self.shapes = [part.permute(0, 2, 3, 1).shape for part in blocks(template)]
        self.widths = [shape[1:].numel() for shape in self.shapes]

    def flat(self, state: State) -> Tensor:
        """A state as a matrix."""
        parts = [part.permute(0, 2, 3, 1).flatten(1) for part in blocks(state)]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def state(self, rows: Tensor) -> State:
        """A matrix as a state."""
        parts = [rows] if len(self.widths) == 1 else torch.split(rows, self.widths, dim=1)
        made = tuple(part.reshape(shape).permute(0, 3, 1, 2) for part, shape in zip(parts, self.shapes, strict=True))
        return like(self.template, made)

    def as_row_map(self, step: Callable[[State], State]) -> Callable[[Tensor], Tensor]:
        """A map of states as one of matrices, in the dtype of its argument."""
        return lambda rows: self.flat(step(self.state(rows))).to(rows.dtype)
