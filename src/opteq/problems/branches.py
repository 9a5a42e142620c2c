"""What problems with several branches share: their checks, and how each branch sees the input."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from opteq.operators import AveragePool, Operator
from opteq.problems.branch import Branch


def shrunk(x: Tensor, scale: int, who: str) -> Tensor:
    """``x`` averaged over squares of ``scale`` pixels; an error names ``who`` where that does not come out even."""
    if scale == 1:
        return x
    if x.ndim != 4 or x.shape[2] % scale or x.shape[3] % scale:
        raise ValueError(
            f"{who} has scale={scale}, so it needs pictures (batch, channels, height, width) whose height and width "
            f"divide by {scale}; got an input of shape {tuple(x.shape)}. Pad or crop it"
        )
    return AveragePool(scale).prepare()(x)


def check_branches(branches: Sequence[Any]) -> list[Branch]:
    """``branches`` as a list, if there are any and all are branches."""
    if not isinstance(branches, Sequence | nn.ModuleList) or not branches:
        raise ValueError(f"branches should be a list with at least one opteq.Branch; got {branches!r}")
    for index, branch in enumerate(branches):
        if not isinstance(branch, Branch):
            raise TypeError(f"branch {index} should be an opteq.Branch(W, U, scale); got {branch!r}")
    return list(branches)


def feature_channels(W: Operator) -> int | None:
    """How many channels (or entries) the features of ``W`` have, where it says so."""
    for name in ("in_channels", "in_features"):
        count = getattr(W, name, None)
        if isinstance(count, int):
            return count
    return None
