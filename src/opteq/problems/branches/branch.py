"""Branches: their maps, their checks, and how each of them sees the input."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from opteq.common.options import NamedOptions
from opteq.common.validate import check_whole
from opteq.operators import Operator
from opteq.operators.resample import pool
from opteq.problems.base import check_injection, check_operator, known_norm
from opteq.states import State


class Branch(nn.Module, metaclass=NamedOptions):
    """The maps of one branch or layer: ``W`` from its features to its state, ``U`` from the input to its state.

    Args:
        W: an operator; its adjoint goes back to the features.
        U: a module whose bias is the branch's bias; None where the problem allows a branch without input.
        scale: integer factor by which the input of the branch is downsampled.
    """

    def __init__(self, W: Operator, U: nn.Module | None = None, scale: int = 1) -> None:
        super().__init__()
        self.W = check_operator(W, "W")
        self.U = check_injection(U)
        self.scale = check_whole("scale", scale)

    def extra_repr(self) -> str:
        return f"scale={self.scale}"


def views(x: State, scales: Sequence[int], who: str = "branch") -> list[Tensor]:
    """What each branch sees: ``x`` averaged over squares of its scale's pixels, or its own tensor where ``x`` has one.

    A tuple is a pyramid of one image: tensor i is to be smaller than the image by the scale of branch i, as the average
    would be. Convolutions, for instance, may compute it in place of averaging.

    ``scales`` are the factors by which branches see a smaller image; ``who`` is what errors call a branch.
    """
    if not isinstance(x, tuple):
        return [_pool_input(x, scale, f"{who} {index}") for index, scale in enumerate(scales)]
    if len(x) != len(scales):
        raise ValueError(f"the input should be one tensor, or a tuple with {len(scales)}, one per {who}; got {len(x)}")
    whole = [tuple(scale * side for side in part.shape[2:]) for part, scale in zip(x, scales, strict=True)]
    if len(set(whole)) > 1:
        raise ValueError(
            f"the tensors of an input should be views of one image, each smaller by its {who}'s scale; got sizes "
            f"{[tuple(part.shape[2:]) for part in x]} for scales {list(scales)}"
        )
    return list(x)


def _pool_input(x: Tensor, scale: int, who: str) -> Tensor:
    if scale == 1:
        return x
    if x.ndim != 4 or x.shape[2] % scale or x.shape[3] % scale:
        raise ValueError(
            f"{who} has scale={scale}, so it needs images (batch, channels, height, width) whose height and width "
            f"divide by {scale}; got an input of shape {tuple(x.shape)}. Pad or crop it"
        )
    return pool(x, scale)


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


def injection_norm(source: nn.Module | Sequence[Branch] | None) -> tuple[float | None, str]:
    """``|U|`` from one input to all states, or None and why.

    A branch at scale s sees the mean over ``s x s`` pixels, of norm ``1 / s``; with a tuple of inputs, it does not.
    """
    if source is None or isinstance(source, nn.Module):
        return known_norm(source)
    squares = most = 0.0
    for index, branch in enumerate(source):
        carried, missing = known_norm(branch.U, f" in branch {index}")
        if carried is None:
            return None, missing
        squares += (carried / branch.scale) ** 2
        most = max(most, carried)
    return max(math.sqrt(squares), most), ""
