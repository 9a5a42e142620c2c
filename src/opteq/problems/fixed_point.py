"""A user-written fixed-point layer, ``z = f(z, x)``, without an objective."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from opteq.common.returns import try_once
from opteq.problems.base import WrittenProblem, check_called
from opteq.problems.certificate import Certificate, for_finite_weights, unknown
from opteq.problems.written import WrittenMap
from opteq.states import Layout, State, blocks


class FixedPoint(WrittenProblem):
    """The state z with ``z = f(z, x)``, for any f: a general deep equilibrium model.

    f only has to keep the shape of z. So there are no guarantees: there is no objective, the Jacobian is not symmetric
    (GMRES solves the backward system), and a fixed point need not exist or be unique. On a CPU f runs as it is written
    in every step: what depends on the input alone is better computed before the layer.

    Args:
        f: a module or function of z and x. Samples should not depend on each other: normalise over groups or layers,
            not over the batch.
        start: a function of x that returns the initial z, and so its shape; None for zeros like x.
        features: a module or function from z to the output of the layer; None for z itself.

    >>> import torch, opteq
    >>> layer = opteq.Equilibrium(opteq.FixedPoint(lambda z, x: torch.cos(z) + x), opteq.Anderson(tol=1e-6))
    >>> round(layer(torch.zeros(1, 1)).item(), 4)
    0.7391
    """

    takes_tuples = True

    def __init__(
        self,
        f: Callable[[Any, Any], State],
        start: Callable[[Any], State] | None = None,
        features: Callable[[Any], State] | None = None,
    ) -> None:
        super().__init__()
        for name, given in (("f", f), ("start", start), ("features", features)):
            if not callable(given) and (given is not None or name == "f"):
                raise TypeError(f"FixedPoint.{name} should be a module or a function; got {given!r}")
        self.f = f
        self.first = start
        self.read = features

    def start(self, x: State) -> State:
        return torch.zeros_like(blocks(x)[0]) if self.first is None else self.first(x)

    def features(self, z: State) -> State:
        return z if self.read is None else self.read(z)

    def bind(self, x: State) -> BoundFixedPoint:
        check_called(self)
        return BoundFixedPoint(self, x)

    @for_finite_weights
    def certificate(self) -> Certificate:
        """Everything is unknown: there is no objective, and f may be any map."""
        return unknown("a map f(z, x) that is written freely has no hidden objective, and nothing is known about it")


class BoundFixedPoint(WrittenMap):
    """``z -> f(z, x)`` with its input bound."""

    def __init__(self, problem: FixedPoint, x: Any) -> None:
        super().__init__(problem, x)
        try_once(problem, self._images, self._start, "f(z, x)", differentiable=False)

    def step(self, y: State) -> State:
        image: State = self.bound.call("f", y, self.bound.x)
        return image

    def _images(self, z: State) -> dict[str, Tensor]:
        image, who = self.step(z), f"{type(self.bound.module).__name__}.f(z, x)"
        Layout.of(z).check(image, who)
        return {f"part {i}": part for i, part in enumerate(blocks(image))}
