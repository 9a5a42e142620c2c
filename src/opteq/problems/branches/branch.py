"""A pair of maps: one to the features, one from the input."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from opteq.common.options import NamedOptions
from opteq.operators import Operator, is_hooked, unhooked


class Branch(nn.Module, metaclass=NamedOptions):
    """The maps of one branch or layer: ``W`` from its features to its state, ``U`` from the input to its state.

    Args:
        W: an operator; its adjoint goes back to the features.
        U: a module whose bias is the branch's bias; None where the problem allows a branch without input.
        scale: whole factor by which the branch sees a smaller picture.
    """

    def __init__(self, W: Operator, U: nn.Module | None = None, scale: int = 1) -> None:
        super().__init__()
        if isinstance(scale, bool) or not isinstance(scale, int) or scale < 1:
            raise ValueError(f"scale should be a whole number of at least 1; got {scale!r}")
        self.W = check_operator(W, "W")
        self.U = check_injection(U)
        self.scale = scale

    def extra_repr(self) -> str:
        """The scale."""
        return f"scale={self.scale}"


def check_operator(W: Any, name: str) -> Operator:
    """``W`` if it is an operator without hooks."""
    if not isinstance(W, Operator):
        raise TypeError(f"{name} should be one of opteq.operators, which have an exact adjoint; got {type(W).__name__}")
    return unhooked(W, name)


def check_injection(U: Any) -> nn.Module | None:
    """``U`` if it is a module or nothing."""
    if U is not None and not isinstance(U, nn.Module):
        raise TypeError(f"U should be a torch module that carries the input into the state's space; got {U!r}")
    return U


def unknown_norm(U: nn.Module | None, where: str = "") -> str:
    """Why the norm of ``U`` is not known."""
    why = ": it has hooks, which may change what it gives" if U is not None and is_hooked(U) else ""
    return f"the norm of U{where}, a {type(U).__name__}, is not known{why}"


def check_positive(name: str, value: float) -> float:
    """``value`` as a float if it is positive and finite."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not (0 < value < math.inf):
        raise ValueError(f"{name} should be a positive finite number; got {value!r}")
    return float(value)


def inject(U: nn.Module | None, x: Tensor, W: Operator | None = None) -> Tensor:
    """``U x + b``, with an error that shows the input's shape; as wide as the output of ``W`` where that is known."""
    try:
        injected = x if U is None else U(x)
    except RuntimeError as error:
        raise ValueError(f"U could not take an input of shape {tuple(x.shape)}: {error}") from error
    if not isinstance(injected, torch.Tensor):
        raise TypeError(f"U should return a tensor; got {type(injected).__name__}")
    if injected.ndim < 2:  # every entry would pass for a sample, and be solved by itself
        raise ValueError(
            f"the input has no batch dimension; its shape is {tuple(x.shape)}. Give x[None] for one sample"
        )
    if W is not None:
        _check_width(injected, W)
    return injected


def _check_width(injected: Tensor, W: Operator) -> None:
    for name, dim, kind in (("out_channels", 1, "channels"), ("out_features", -1, "entries")):
        wanted = getattr(W, name, None)
        if isinstance(wanted, int) and injected.shape[dim] != wanted:
            raise ValueError(
                f"U x + b should have {wanted} {kind}, as many as the output of W; it has {injected.shape[dim]} (shape "
                f"{tuple(injected.shape)})"
            )
