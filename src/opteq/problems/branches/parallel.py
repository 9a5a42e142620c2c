"""Independent problems solved together, each with the input at its own scale."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn

from opteq.common.validate import check_whole
from opteq.penalties import Penalty
from opteq.problems.base import Problem
from opteq.problems.branches.branch import views
from opteq.problems.certificate import Certificate, for_finite_weights
from opteq.problems.hidden import (
    BoundMap,
    Formulation,
    Hidden,
    Linearisation,
    Product,
    Reduction,
    Structure,
    SymmetricLinearisation,
)
from opteq.solvers import Anderson, Solver
from opteq.solvers.base import FixedPointTask
from opteq.states import State, blocks, like

_WEAKEST_FIRST = (Structure.GENERAL, Structure.SYMMETRIC, Structure.POSITIVE)


class _Tuple:
    """States of several parts as one tuple with all their tensors, in order."""

    def __init__(self, states: Sequence[State]) -> None:
        self.states = list(states)
        ends = [0, *accumulate(len(blocks(state)) for state in states)]
        self._slices = [slice(first, last) for first, last in pairwise(ends)]

    def split(self, y: State) -> list[State]:
        """The state of each part, in the form that the part has it in."""
        tensors = blocks(y)
        return [like(state, tensors[cut]) for state, cut in zip(self.states, self._slices, strict=True)]

    def each(self, functions: Iterable[Product]) -> Product:
        """The function that applies to every part its own one of ``functions``."""
        kept = list(functions)
        return lambda y: _join(function(piece) for function, piece in zip(kept, self.split(y), strict=True))


def _join(pieces: Iterable[State]) -> tuple[Tensor, ...]:
    return tuple(tensor for piece in pieces for tensor in blocks(piece))


class BoundParallel(BoundMap):
    """Bound problems side by side. The state is a tuple with all tensors of all parts, in order."""

    fusion: Callable[[tuple[Tensor, ...]], Tensor] | None = None
    """Combines the features of all parts; None returns the tuple."""

    alike: bool = False
    """Whether parts differ in their operators alone. Where each may be solved in its features, so may then all."""

    def __init__(self, parts: Sequence[BoundMap]) -> None:
        self.parts = list(parts)
        self._tuple = _Tuple([part.start() for part in parts])
        self.structure = min((part.structure for part in parts), key=_WEAKEST_FIRST.index)
        self.coupled = any(part.coupled for part in parts)
        self.contracts = all(part.contracts for part in parts)
        self.jumps = any(part.jumps for part in parts)
        self.has_merit = all(part.has_merit for part in parts)

    @cached_property
    def damping(self) -> float | Tensor:  # type: ignore[override]
        """The least of the parts'."""
        dampings = [part.damping for part in self.parts]
        tensors = [damping for damping in dampings if isinstance(damping, Tensor)]
        least = min((damping for damping in dampings if not isinstance(damping, Tensor)), default=math.inf)
        return torch.stack(tensors).amin(dim=0).clamp(max=least) if tensors else least

    def start(self) -> State:
        return _join(self._tuple.states)

    def step(self, y: State) -> State:
        return _join(part.step(piece) for part, piece in self.pairs(y))

    def features(self, y: State) -> State:
        """The features of all parts in order, or what the fusion makes of them."""
        features = _join(part.features(piece) for part, piece in self.pairs(y))
        return features if self.fusion is None else self.fusion(blocks(features))

    def project(self, y: State) -> State:
        return _join(part.project(piece) for part, piece in self.pairs(y))

    def terms(self, y: State) -> dict[str, Tensor]:
        """The terms of all parts, with the part's number before the name."""
        terms: dict[str, Tensor] = {}
        for index, (part, piece) in enumerate(self.pairs(y)):
            terms |= {f"{index}.{name}": value for name, value in part.terms(piece).items()}
        return terms

    def objective(self, y: State) -> Tensor:
        return torch.stack(list(self.terms(y).values())).sum(dim=0)

    def linearise(self, y: State, inside: State | None = None) -> Linearisation | SymmetricLinearisation:
        """Block by block, symmetric if every block is."""
        known = [None] * len(self.parts) if inside is None else self._tuple.split(inside)
        pairs = zip(self.pairs(y), known, strict=True)
        local = [part.linearise(piece, within) for (part, piece), within in pairs]
        symmetric = [one for one in local if isinstance(one, SymmetricLinearisation)]
        each = self._tuple.each
        if len(symmetric) < len(local):
            return Linearisation(each(one.product for one in local), each(one.adjoint for one in local))
        reduced = [one.reduction for one in symmetric if one.reduction is not None]
        return SymmetricLinearisation(
            each(one.negative_hessian for one in symmetric),
            each(one.factor for one in symmetric),
            each(one.factor_adjoint for one in symmetric),
            each(one.derivative for one in symmetric),
            self._reduction(reduced) if len(reduced) == len(local) else None,
        )

    def diagnose(self, y: State, codes: Tensor) -> Tensor:
        """The diagnoses of the parts, combined."""
        combined = codes
        for part, piece in self.pairs(y):
            diagnosed = part.diagnose(piece, codes)
            combined = torch.where(diagnosed != codes, diagnosed, combined)
        return combined

    def feature_form(self) -> Formulation:
        if self.fusion is not None:
            raise ValueError('a solver that works on features needs those of every branch: use fuse="none"')
        return self._joint_form([part.feature_form() for part in self.parts])

    def compact_form(self) -> Formulation | None:
        """Every part in its own, where all have one and are alike.

        The residual of all states is then at most that of all features, as for each part; where ``mu`` differs, a part
        with small features and a large state may hide behind one with large features.
        """
        forms = [form for part in self.parts if self.alike and (form := part.compact_form()) is not None]
        return self._joint_form(forms) if len(forms) == len(self.parts) else None

    def _joint_form(self, forms: Sequence[Formulation]) -> Formulation:
        variables = _Tuple([form.task.start for form in forms])
        step = variables.each(form.task.step for form in forms)
        task = FixedPointTask(step, _join(variables.states), damping=self.damping, coupled=self.coupled)
        state, of_state = (form.state for form in forms), (form.of_state for form in forms)
        return Formulation(task, variables.each(state), self._tuple.each(of_state))

    def _reduction(self, parts: Sequence[Reduction]) -> Reduction:
        known = self.fusion is None and all(one.of_features for one in parts)
        return Reduction(
            self._tuple.each(one.restrict for one in parts), self._tuple.each(one.expand for one in parts), known
        )

    def step_and_merit(self, y: State) -> tuple[State, Tensor]:
        pairs = [part.step_and_merit(piece) for part, piece in self.pairs(y)]
        merits = torch.stack([merit for _, merit in pairs]).sum(dim=0)
        return _join(image for image, _ in pairs), merits

    @property
    def seeks_minimum(self) -> bool:
        return any(part.seeks_minimum for part in self.parts)

    def pairs(self, y: State) -> list[tuple[Any, State]]:
        """Every part with its own tensors of a state."""
        return list(zip(self.parts, self._tuple.split(y), strict=True))


class HiddenParallel(BoundParallel, Hidden):  # type: ignore[misc]
    """Parts that all have the form ``sum f(y) + 1/2 |y|^2 + g(y)``: so has their sum."""

    def __init__(self, parts: Sequence[Hidden]) -> None:
        super().__init__(parts)
        self.quadratic = all(part.quadratic for part in parts)

    def penalties(self, y: State) -> list[Penalty]:
        return [penalty for part, piece in self.pairs(y) for penalty in part.penalties(piece)]

    def smooth_terms(self, y: State) -> dict[str, Tensor]:
        """The terms of g, with the part's number before the name."""
        return {
            f"{index}.{name}": value
            for index, (part, piece) in enumerate(self.pairs(y))
            for name, value in part.smooth_terms(piece).items()
        }

    def preactivation(self, y: State) -> State:
        return _join(part.preactivation(piece) for part, piece in self.pairs(y))

    def negative_hessian_at(self, y: State) -> Callable[[State], State]:
        return self._tuple.each(part.negative_hessian_at(piece) for part, piece in self.pairs(y))


class SeparableProblem(Problem):
    """A sum of objectives without common variables, each at its own scale: :class:`Parallel` and :class:`POptEq`."""

    @abstractmethod
    def parts(self) -> list[tuple[Problem, int]]:
        """The problems, and the factor by which the input of each is downsampled."""

    takes_tuples = True

    def default_solver(self) -> Solver | None:
        """That of the part that may need most steps; Anderson's method with as many where a part has none."""
        given = [part.default_solver() for part, _ in self.parts()]
        known = [solver for solver in given if solver is not None]
        if not known:
            return None
        longest = max(known, key=lambda solver: solver.max_steps)
        return longest if len(known) == len(given) else Anderson(max_steps=longest.max_steps)

    def default_gradient_steps(self) -> int | None:
        return max((steps for part, _ in self.parts() if (steps := part.default_gradient_steps())), default=None)

    def bind(self, x: State) -> BoundParallel:
        """Every part with its own view of ``x``: at its scale, or its own tensor where ``x`` is a tuple."""
        parts = self.parts()
        seen = views(x, [scale for _, scale in parts], "part")
        bound = [part.bind(view) for (part, _), view in zip(parts, seen, strict=True)]
        hidden = [part for part in bound if isinstance(part, Hidden)]
        return HiddenParallel(hidden) if len(hidden) == len(bound) else BoundParallel(bound)

    @for_finite_weights
    def certificate(self) -> Certificate:
        """Guarantees that hold for all parts, which are independent."""
        parts = self.parts()
        given = [part.certificate() for part, _ in parts]

        def why(name: str) -> str:
            return "; ".join(f"part {i}: {one.reasons.get(name, 'unknown')}" for i, one in enumerate(given))

        contractions = [one.contraction for one in given if one.contraction is not None]
        slopes = [one.lipschitz for one in given if one.lipschitz is not None]
        lipschitz = None
        if len(slopes) == len(given):  # of tuples of features, for one input that parts see averaged, or an input each
            averaged = math.hypot(*(slope / scale for slope, (_, scale) in zip(slopes, parts, strict=True)))
            lipschitz = max(averaged, *slopes)
        return Certificate(
            exists=_all(one.exists for one in given),
            unique=_all(one.unique for one in given),
            contraction=max(contractions) if len(contractions) == len(given) else None,
            lipschitz=lipschitz,
            reasons={
                "exists": f"every part has an equilibrium. {why('exists')}",
                "unique": f"every part has only one. {why('unique')}",
                "contraction": f"the largest of the parts. {why('contraction')}",
                "lipschitz": "sqrt of the sum of squares, each divided by its scale, for one input that all parts see, "
                f"or the largest, for a tuple with an input each: whichever is larger. {why('lipschitz')}",
            },
        )


class Parallel(SeparableProblem):
    """Independent problems on one input, or on a tuple with one input each (see :func:`~opteq.Parallel.bind`).

    State and features are tuples with the tensors of all parts in order; the objective is the sum of the parts'
    objectives. Every part keeps its closed forms. The part with the weakest structure decides which linear solver
    computes gradients.

    Args:
        problems: the parts.
        scales: per part, the integer factor by which its input is downsampled; None means 1 for all.

    >>> import torch, opteq
    >>> parts = [opteq.OptEq(opteq.operators.Conv2d(2, 3, 3, bound=0.9), torch.nn.Conv2d(1, 3, 1)) for _ in range(2)]
    >>> layer = opteq.Equilibrium(opteq.Parallel(parts, scales=[1, 2]))
    >>> [tuple(z.shape) for z in layer(torch.randn(5, 1, 8, 8))]
    [(5, 2, 8, 8), (5, 2, 4, 4)]
    """

    def __init__(self, problems: Sequence[Problem], scales: Sequence[int] | None = None) -> None:
        super().__init__()
        if not problems:
            raise ValueError("Parallel needs at least one problem; got none")
        for index, problem in enumerate(problems):
            if not isinstance(problem, Problem):
                raise TypeError(f"problem {index} should be a hidden problem such as opteq.OptEq; got {problem!r}")
        scales = [1] * len(problems) if scales is None else list(scales)
        if len(scales) != len(problems):
            raise ValueError(f"scales should have one number per problem ({len(problems)}); got {len(scales)}")
        self.problems = nn.ModuleList(problems)
        self.scales = [check_whole("scales", scale) for scale in scales]

    def parts(self) -> list[tuple[Problem, int]]:
        problems = [problem for problem in self.problems if isinstance(problem, Problem)]
        return list(zip(problems, self.scales, strict=True))


def _all(values: Iterable[bool | None]) -> bool | None:
    """True if all are, False if one is False, else unknown."""
    given = list(values)
    return None if None in given and False not in given else all(given)
