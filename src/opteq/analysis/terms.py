"""The objective of each sample, term by term, at the initial state and at the equilibrium."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from opteq.common.errors import ConvergenceError
from opteq.equilibrium import Equilibrium
from opteq.states import State


@dataclass(frozen=True)
class LayerTerms:
    """The objective of one equilibrium layer, term by term, at the initial state and at the equilibrium.

    Attributes:
        layer: the layer's name in the model; empty where the model is the layer.
        start: the value of each term at the initial state, ``(B,)``. Names are those of the problem: ``penalty``,
            ``quadratic`` and the parts of the smooth term, with a branch's number before them where branches are
            separate problems (``0.coupling``); ``objective`` alone where a problem has only the sum.
        end: the same at the equilibrium.
        reason: why there are no terms, where there are none (more than two layers in a row minimise nothing).
    """

    layer: str
    start: dict[str, Tensor]
    end: dict[str, Tensor]
    reason: str | None = None

    def total_start(self) -> Tensor:
        """The objective at the initial state, ``(B,)``."""
        return _total(self.start)

    def total_end(self) -> Tensor:
        """The objective at the equilibrium, ``(B,)``."""
        return _total(self.end)

    def merged(self) -> LayerTerms:
        """Terms of the same name added up over branches: ``0.input`` and ``1.input`` become ``input``."""
        return LayerTerms(self.layer, _merge(self.start), _merge(self.end), self.reason)


def objective_terms(model: nn.Module, x: Tensor) -> list[LayerTerms]:
    """The terms of every equilibrium layer in ``model`` for the images ``x``, in the order in which they ran.

    The model runs in evaluation mode, without gradients; its mode is restored. A model without equilibria
    gives an empty list.

    Args:
        model: a classifier, or any module with :class:`~opteq.equilibrium.Equilibrium` layers inside.
        x: the model's input, batch first.

    >>> import torch, opteq
    >>> W = opteq.operators.Dense(4, 8, bound=0.9)
    >>> model = nn.Sequential(opteq.Equilibrium(opteq.OptEq(W, nn.Linear(3, 8))), nn.Linear(4, 2))
    >>> (terms,) = objective_terms(model, torch.randn(5, 3))
    >>> terms.layer, list(terms.end)
    ('0', ['penalty', 'quadratic', 'coupling', 'input'])
    >>> bool((terms.total_end() <= terms.total_start()).all())
    True
    """
    with evaluation_mode(model):
        return [_layer_terms(name, layer, given) for name, layer, given in equilibrium_inputs(model, x)]


@torch.no_grad()
def equilibrium_inputs(model: nn.Module, x: Tensor) -> list[tuple[str, Equilibrium, State]]:
    """Every equilibrium layer that ``model(x)`` runs, with its name and the input it was given, in running order."""
    calls: list[tuple[str, Equilibrium, State]] = []

    def remember(name: str, layer: Equilibrium) -> Any:
        return lambda _problem, arguments: calls.append((name, layer, arguments[0]))

    # A layer binds its problem however it is called, so a hook of the problem sees every input.
    handles = [
        layer.problem.register_forward_pre_hook(remember(name, layer))
        for name, layer in model.named_modules()
        if isinstance(layer, Equilibrium)
    ]
    try:
        model(x)
    finally:
        for handle in handles:
            handle.remove()
    return calls


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Evaluation mode inside the block; every module gets its own mode back."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


@torch.no_grad()
def _layer_terms(name: str, layer: Equilibrium, given: State) -> LayerTerms:
    hidden = layer.problem(given)
    state = layer.solve(given).state
    try:
        return LayerTerms(name, hidden.terms(hidden.start()), hidden.terms(state))
    except (ValueError, NotImplementedError, ConvergenceError) as error:  # there is no objective
        return LayerTerms(name, {}, {}, str(error))


def _merge(terms: dict[str, Tensor]) -> dict[str, Tensor]:
    merged: dict[str, Tensor] = {}
    for name, value in terms.items():
        short = name.rsplit(".", 1)[-1]
        merged[short] = merged[short] + value if short in merged else value
    return merged


def _total(terms: dict[str, Tensor]) -> Tensor:
    if not terms:
        raise ValueError("there are no terms; .reason says why")
    return torch.stack(list(terms.values())).sum(dim=0)
