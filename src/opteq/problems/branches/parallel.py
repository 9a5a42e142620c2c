"""Problems side by side: each sees the input at its own scale, and none sees the others."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterable, Sequence

from torch import nn

from opteq.common.validate import check_whole
from opteq.problems.base import Problem
from opteq.problems.branches.branch import views
from opteq.problems.branches.side_by_side import BoundParallel, HiddenParallel
from opteq.problems.certificate import Certificate, for_finite_weights
from opteq.problems.hidden import Hidden
from opteq.states import State


class SideBySide(Problem):
    """What :class:`Parallel` and :class:`POptEq` share: parts, each with a scale."""

    @abstractmethod
    def parts(self) -> list[tuple[Problem, int]]:
        """The problems, and the factor by which each sees a smaller image."""

    takes_tuples = True

    def bind(self, x: State) -> BoundParallel:
        """Every part with its own view of ``x``: at its scale, or its own tensor where ``x`` is a tuple."""
        parts = self.parts()
        seen = views(x, [scale for _, scale in parts], "part")
        bound = [part.bind(view) for (part, _), view in zip(parts, seen, strict=True)]
        hidden = [part for part in bound if isinstance(part, Hidden)]
        return HiddenParallel(hidden) if len(hidden) == len(bound) else BoundParallel(bound)

    @for_finite_weights
    def certificate(self) -> Certificate:
        """What holds for all parts, since none depends on another."""
        parts = self.parts()
        given = [part.certificate() for part, _ in parts]

        def why(name: str) -> str:
            return "; ".join(f"part {i}: {one.reasons.get(name, 'unknown')}" for i, one in enumerate(given))

        contractions = [one.contraction for one in given if one.contraction is not None]
        slopes = [one.lipschitz for one in given if one.lipschitz is not None]
        known = len(slopes) == len(given)
        return Certificate(
            exists=_all(one.exists for one in given),
            unique=_all(one.unique for one in given),
            contraction=max(contractions) if len(contractions) == len(given) else None,
            lipschitz=_carried(slopes, [scale for _, scale in parts]) if known else None,
            reasons={
                "exists": f"every part has an equilibrium. {why('exists')}",
                "unique": f"every part has only one. {why('unique')}",
                "contraction": f"the largest of the parts. {why('contraction')}",
                "lipschitz": "sqrt of the sum of squares, each divided by its scale, for one input that all parts see, "
                f"or the largest, for a tuple with an input each: whichever is larger. {why('lipschitz')}",
            },
        )


def _carried(slopes: Sequence[float], scales: Sequence[int]) -> float:
    """How far tuples of features move, at most, with one input that parts see averaged, or with an input each."""
    return max(math.hypot(*(slope / scale for slope, scale in zip(slopes, scales, strict=True))), *slopes)


class Parallel(SideBySide):
    """Any problems side by side on one input, or on a tuple with an input each (see :func:`~opteq.Parallel.bind`).

    State and features are tuples with the tensors of all parts in order; the objective is the sum of theirs. Every
    part keeps its closed forms, and the weakest of them decides how gradients are solved.

    Args:
        problems: the parts.
        scales: for each part, the whole factor by which it sees a smaller image; None means 1 for all.

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
        """The problems with their scales."""
        problems = [problem for problem in self.problems if isinstance(problem, Problem)]
        return list(zip(problems, self.scales, strict=True))


def _all(values: Iterable[bool | None]) -> bool | None:
    """True if all are, False if one is False, else unknown."""
    given = list(values)
    if False in given:
        return False
    return None if None in given else True
