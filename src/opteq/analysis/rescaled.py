"""Counterfactuals: the equilibrium of the same objective with one of its terms scaled or switched off."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from opteq import engine
from opteq.analysis.terms import equilibrium_inputs, evaluation_mode
from opteq.common.errors import ConvergenceWarning, UserError, unknown_name
from opteq.equilibrium import Equilibrium
from opteq.problems import Problem
from opteq.problems.branches.parallel import BoundParallel
from opteq.problems.hidden import BoundMap, Hidden
from opteq.problems.proximal import ProximalGradient
from opteq.states import State, inner

_LEAST_STEPS = 100
"""Solver steps allowed at least: another objective may need more than the one that the solver was chosen for."""


class Rescaled(Problem):
    """A problem with the terms of its objective multiplied by factors; 0 switches a term off.

    The terms are those that ``problem(x).terms(y)`` names, except ``penalty``, which defines the activation. For
    parallel problems, a name without a number stands for the term of all parts.

    Args:
        problem: with an objective made of named terms.
        factors: by the name of the term.

    >>> import opteq
    >>> W = opteq.operators.Dense(4, 8, bound=0.9)
    >>> problem = Rescaled(opteq.OptEq(W, nn.Linear(3, 8)), {"coupling": 0.0})
    >>> state = opteq.Equilibrium(problem).solve(torch.ones(1, 3)).state
    >>> torch.allclose(state, torch.relu(problem.problem.U(torch.ones(1, 3))), atol=1e-6)
    True
    """

    def __init__(self, problem: Problem, factors: Mapping[str, float]) -> None:
        super().__init__()
        self.problem = problem
        self.takes_tuples = problem.takes_tuples  # type: ignore[misc]
        for name, factor in factors.items():
            if not math.isfinite(factor):
                raise UserError(f"the factor of {name} should be a finite number; got {factor!r}")
        self.factors = dict(factors)

    def bind(self, x: State) -> BoundMap:
        """The problem with ``x`` bound and its terms scaled."""
        hidden = self.problem.bind(x)
        known = scalable_terms(hidden)
        for name in self.factors:
            if name not in known:
                raise unknown_name("term", name, known)
        return _rescaled(hidden, self.factors)


class RescaledHidden(Hidden):
    """``sum f(y) + q/2 |y|^2 + sum_k s_k g_k(y)``; everything else follows by autograd."""

    def __init__(self, hidden: Hidden, factors: Mapping[str, float]) -> None:
        self.hidden = hidden
        self.factors = factors
        self.penalty = hidden.penalty
        self.coupled, self.jumps, self.quadratic = hidden.coupled, hidden.jumps, hidden.quadratic
        # q/2 |y|^2 adds the slope 1 - q to a step, so that plain steps overshoot for q above 1.
        self.damping = hidden.damping / max(1.0, factors.get("quadratic", 1.0))

    def start(self) -> State:
        """Where the problem itself begins."""
        return self.hidden.start()

    def features(self, y: State) -> State:
        """Those of the problem itself."""
        return self.hidden.features(y)

    def smooth(self, y: State) -> Tensor:
        """The scaled terms, and what ``q/2 |y|^2`` differs from ``1/2 |y|^2`` by."""
        extra = (self.factors.get("quadratic", 1.0) - 1) / 2 * inner(y, y)
        return torch.stack([extra, *self.smooth_terms(y).values()]).sum(dim=0)

    def smooth_terms(self, y: State) -> dict[str, Tensor]:
        """The scaled terms."""
        return {name: self.factors.get(name, 1.0) * term for name, term in self.hidden.smooth_terms(y).items()}

    def terms(self, y: State) -> dict[str, Tensor]:
        """The scaled objective, term by term."""
        terms = super().terms(y)
        return {**terms, "quadratic": self.factors.get("quadratic", 1.0) * terms["quadratic"]}


def scalable_terms(hidden: BoundMap) -> list[str]:
    """The names of the terms that can be scaled; none where the problem is no sum of terms."""
    if isinstance(hidden, BoundParallel):
        return list(dict.fromkeys(name for part in hidden.parts for name in scalable_terms(part)))
    if isinstance(hidden, Hidden) and not isinstance(hidden, ProximalGradient):
        with torch.no_grad():
            return ["quadratic", *hidden.smooth_terms(hidden.start())]
    return []


def _rescaled(hidden: BoundMap, factors: Mapping[str, float]) -> BoundMap:
    if isinstance(hidden, BoundParallel):
        joined = BoundParallel([_rescaled(part, factors) for part in hidden.parts])
        joined.fusion = hidden.fusion
        return joined
    return RescaledHidden(hidden, factors) if isinstance(hidden, Hidden) else hidden


@dataclass(frozen=True)
class Counterfactual:
    """The model's prediction with one term of one layer scaled.

    Attributes:
        layer: its name in the model.
        term: the term's name.
        factor: the factor of the term.
        logits: ``(B, classes)``, the model's output.
        converged: whether an equilibrium was found, ``(B,)``; there may be none.
    """

    layer: str
    term: str
    factor: float
    logits: Tensor
    converged: Tensor


@torch.no_grad()
def counterfactuals(
    model: nn.Module, x: Tensor, factors: Sequence[float] = (0.0, 0.5, 2.0), seconds: float = math.inf
) -> list[Counterfactual]:
    """The model's predictions with every term of every equilibrium layer multiplied by each of ``factors``, one at a
    time.

    Layers whose problem has no terms are left out. The model runs in evaluation mode; its mode is restored. After
    ``seconds`` no further term is started.
    """
    results: list[Counterfactual] = []
    deadline = time.monotonic() + seconds
    with evaluation_mode(model):
        layers = {name: (layer, given) for name, layer, given in equilibrium_inputs(model, x)}
        for name, (layer, given) in layers.items():
            for term in scalable_terms(layer.problem(given)):
                if time.monotonic() >= deadline:
                    return results
                for factor in factors:
                    with rescaled_terms(layer, {term: factor}):
                        logits = model(x)
                        assert layer.last is not None
                        results.append(Counterfactual(name, term, factor, logits, layer.last[0].converged))
    return results


@contextmanager
def rescaled_terms(layer: Equilibrium, factors: Mapping[str, float]) -> Iterator[None]:
    """Inside, the terms of a layer's objective are scaled, and it may take more steps."""
    problem, solver = layer.problem, layer.solver
    try:
        layer.problem = Rescaled(problem, factors)
        layer.solver = replace(solver, max_steps=max(solver.max_steps, _LEAST_STEPS))
        with engine.off(), warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)
            yield
    finally:
        layer.problem, layer.solver = problem, solver
