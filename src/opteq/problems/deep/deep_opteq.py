"""Deep OptEq: the fixed point of several layers in a row, each with a skip connection."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from opteq import penalties
from opteq.common.validate import check_choice, check_positive, check_share
from opteq.operators import Operator, module_norm
from opteq.penalties import Penalty
from opteq.problems.base import Problem, check_unhooked, inject, known_norm
from opteq.problems.branches.branch import Branch
from opteq.problems.certificate import Certificate, existence, for_finite_weights, unknown
from opteq.problems.deep.feedforward import by_gram, by_slots, read_network
from opteq.problems.hidden import BoundMap, Linearisation
from opteq.problems.opteq import Block, half_square
from opteq.problems.opteq_certificate import check_prior, prior_factors
from opteq.regularizers import Regularizer
from opteq.states import State, single


class DeepOptEq(Problem):
    """The fixed point of ``T = f_L o ... o f_1`` with ``f(z) = alpha W' sigma(W z + U x + b) / mu + (1 - alpha) z``.

    Each layer is the prox of alpha times a Moreau envelope, ``M_l`` below with parameter ``1 - alpha``, so
    the states between layers satisfy ``alpha grad M_l(z_l) + z_l - z_{l-1} = 0`` on a ring (Theorem 2). One layer is
    OptEq with a skip connection; two minimise a joint objective (Corollary 1); more minimise nothing in general.

    Args:
        layers: pairs ``(W, U)`` or :class:`Branch` objects, all with features of one shape. A layer with ``U=None``
            gets no input; at least one layer needs one.
        alpha: weight of the new value, in (0, 1]; one number, or one per layer.
        activation: name or :class:`~opteq.penalties.Penalty`, the same in all layers.
        mu: divides every ``W'``.
        learn_alpha: make the alphas parameters, kept inside (0, 1).
        readout: module from the fixed point to the features; None for the fixed point itself.
        regularizer: a smooth R on the features, as in :class:`~opteq.problems.opteq.OptEq`: the first layer is given
            ``z - gamma grad R(z)``. Then ``gamma grad R(z_0)`` joins the first row of Theorem 2's inclusions; for one
            layer the fixed point minimises ``alpha M + gamma R``, for more there is no such sum.
        gamma: weight of the regulariser.
        start: the initial state: ``"zeros"``, or ``"input"``, ``z_0 = x`` as in the paper, for inputs of the features'
            shape. It matters where the number of steps is fixed or there are several equilibria.

    >>> import torch, opteq
    >>> from opteq import operators as op
    >>> layers = [(op.Dense(4, n, bound=0.9), torch.nn.Linear(3, n)) for n in (6, 5)]
    >>> problem = opteq.DeepOptEq(layers, alpha=0.7)
    >>> problem.certificate().unique
    True
    >>> opteq.Equilibrium(problem)(torch.randn(2, 3)).shape
    torch.Size([2, 4])
    """

    def __init__(
        self,
        layers: Sequence[tuple[Operator, nn.Module | None] | Branch],
        alpha: float | Sequence[float] = 0.8,
        activation: str | Penalty = "relu",
        mu: float = 1.0,
        learn_alpha: bool = False,
        readout: nn.Module | None = None,
        regularizer: Regularizer | None = None,
        gamma: float = 1.0,
        start: str = "zeros",
    ) -> None:
        super().__init__()
        self.regularizer, self.gamma = check_prior(regularizer, gamma)
        self.first = check_choice("start", start, ("zeros", "input"))
        branches = [_branch(layer, index) for index, layer in enumerate(layers)]
        if not branches or all(branch.U is None for branch in branches):
            raise ValueError("DeepOptEq needs at least one layer with U, since the input enters through U")
        self.layers = nn.ModuleList(branches)
        self.penalty = penalties.get(activation)
        self.mu = check_positive("mu", mu)
        self.readout = readout
        given = _alphas(alpha, len(branches))
        self.learn_alpha = learn_alpha
        if learn_alpha:
            if max(given) >= 1:
                raise ValueError(f"a learnable alpha starts strictly inside (0, 1); got {max(given)}")
            beside = next(iter(self.layers.parameters()), torch.empty(0))  # in the layers' dtype, where they are
            self.alpha_logit = nn.Parameter(torch.logit(beside.new_tensor(given)))
        self._fixed_alphas = given

    @property
    def branches(self) -> list[Branch]:
        """All layers."""
        return [layer for layer in self.layers if isinstance(layer, Branch)]

    @property
    def alphas(self) -> Sequence[float | Tensor]:
        """The weight of each layer's new value."""
        return list(torch.sigmoid(self.alpha_logit).unbind()) if self.learn_alpha else list(self._fixed_alphas)

    def bind(self, x: Tensor) -> BoundDeepOptEq:
        """Every ``U x + b`` and bounded W, computed once."""
        blocks = []
        for branch in self.branches:
            c = inject(branch.U, x, branch.W) if branch.U is not None else x.new_zeros(())
            blocks.append(Block(check_unhooked(branch.W, "W of a layer").prepare(), c, self.penalty, self.mu))
        bound = BoundDeepOptEq(blocks, self.alphas, self.readout, self.regularizer, self.gamma)
        if self.first == "input":
            wanted = bound.start().shape
            if x.shape != wanted:
                raise ValueError(
                    f'start="input" needs an input of the shape of the features, {tuple(wanted)}; got {tuple(x.shape)}'
                )
            bound.first = x
        return bound

    @for_finite_weights
    def certificate(self) -> Certificate:
        """The product of the layers' factors ``1 - alpha + alpha L |W|^2 / mu``, and of the regulariser's."""
        slope = self.penalty.lipschitz
        norms = [float(check_unhooked(branch.W, "W of a layer").norm()) for branch in self.branches]
        alphas = [_number(alpha) for alpha in self.alphas]
        factors = [1 - a + a * slope * norm**2 / self.mu for a, norm in zip(alphas, norms, strict=True)]
        stretch, _ = prior_factors(self.regularizer, self.gamma)
        if stretch is None:
            return unknown(f"the gradient of {type(self.regularizer).__name__} has no known Lipschitz constant")
        contraction = math.prod(factors) * stretch
        exists, unique, reasons = self._existence(contraction, math.prod(1 - a for a in alphas) * stretch)
        reasons["contraction"] = "product over layers of 1 - alpha + alpha L |W|^2 / mu"
        if self.regularizer is not None:
            reasons["contraction"] += f", times |I - gamma hess R| <= {stretch:.4g}"
        lipschitz, why = self._lipschitz(contraction, factors, alphas, norms)
        return Certificate(exists, unique, contraction, lipschitz, {**reasons, "lipschitz": why})

    def _existence(self, contraction: float, skipped: float) -> tuple[bool | None, bool | None, dict[str, str]]:
        # With a bounded activation a sweep is q v plus something bounded, for q the product of all 1 - alpha and
        # v = z - gamma grad R(z). Brouwer's ball is there where |q v| grows less than |z|. For convex R it need not:
        # z - q v is then strongly monotone, and its inverse takes what is bounded into a ball.
        R = self.regularizer
        if self.penalty.bounded and R is not None and not R.convex and skipped >= 1:
            return existence(contraction, False, f"{type(R).__name__} may outgrow what a bounded activation holds")
        return existence(contraction, self.penalty.bounded)

    def _lipschitz(
        self, contraction: float, factors: list[float], alphas: list[float], norms: list[float]
    ) -> tuple[float | None, str]:
        if contraction >= 1:
            return None, "needs a contraction"
        outer = 1.0 if self.readout is None else module_norm(self.readout)
        if outer is None:
            return None, "the norm of the read-out is not known"
        total = 0.0
        for index, branch in enumerate(self.branches):
            carried, missing = (0.0, "") if branch.U is None else known_norm(branch.U, f" in layer {index}")
            if carried is None:
                return None, missing
            later = math.prod(factors[index + 1 :])
            total += later * alphas[index] * self.penalty.lipschitz * norms[index] / self.mu * carried
        return float(outer) * total / (1 - contraction), "what layers add, carried through the later ones, / (1 - k)"

    @classmethod
    def from_feedforward(cls, mlp: nn.Sequential, alpha: float = 1.0, nonexpansive: bool = False) -> DeepOptEq:
        """A Deep OptEq whose features equal the outputs of a feed-forward network.

        Args:
            mlp: linear layers with one activation between them, e.g. Linear, ReLU, Linear; or convolutions of stride 1
                that keep the size of images, e.g. Conv2d, ReLU, Conv2d, with alpha 1.
            alpha: 1 gives a chain with a leading zero layer that cuts the loop; one sweep reaches the equilibrium
                (Lemmas 1 and 2, corrected). Below 1 the hidden layers appear twice, so that their feedback cancels
                exactly. Zero layers before each make a sweep contract: the smaller alpha, the more of them. Either way
                there is one equilibrium, which the certificate confirms; every solver finds it, to the precision of its
                ``tol``.
            nonexpansive: with alpha 1 and a positively homogeneous activation (ReLU and the like), scale every W to
                norm 1 at most, so that each layer is a prox.

        >>> import torch, opteq
        >>> mlp = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Tanh(), torch.nn.Linear(5, 2)).double()
        >>> layer = opteq.Equilibrium(opteq.DeepOptEq.from_feedforward(mlp, alpha=0.6), opteq.Anderson(tol=1e-12))
        >>> x = torch.randn(4, 3, dtype=torch.float64)
        >>> torch.allclose(layer(x), mlp(x), rtol=0, atol=1e-9)
        True
        """
        (alpha_value,) = _alphas(alpha, 1)
        network = read_network(mlp)
        if alpha_value == 1:
            layers, readout = by_slots(network, nonexpansive)
        elif network.out_weight.ndim > 2:
            raise ValueError(f"convolutions are written as Deep OptEq with alpha=1; got alpha={alpha}")
        elif nonexpansive:
            raise ValueError(f"nonexpansive=True needs alpha=1; got alpha={alpha}")
        else:
            layers, readout = by_gram(network, alpha_value)
        return cls(layers, alpha_value, network.activation, readout=readout)


@dataclass(eq=False, repr=False)
class BoundDeepOptEq(BoundMap):
    """Deep OptEq with its input bound. The state is ``z_0 = z_L``, the features that close the ring."""

    layers: list[Block]
    alphas: Sequence[float | Tensor]
    readout: nn.Module | None = None
    regularizer: Regularizer | None = None
    gamma: float = 1.0
    first: Tensor | None = None

    def __post_init__(self) -> None:
        self.coupled = self.regularizer is not None and self.regularizer.couples_batch

    def start(self) -> Tensor:
        if self.first is not None:
            return self.first
        block = next(block for block in self.layers if block.c.ndim > 0)
        return torch.zeros_like(block.back(block.c))

    def features(self, y: State) -> State:
        if self.readout is None:
            return y
        features: Tensor = self.readout(y)
        return features

    def trajectory(self, z: State) -> list[Tensor]:
        """``z_0, z_1, ..., z_L``: what the first layer is given, and what each layer makes of it.

        The first is the state, without ``gamma grad R`` of it where there is a regulariser.
        """
        z = single(z)
        points = [z if self.regularizer is None else z - self.gamma * self.regularizer.gradient(z)]
        for block, alpha in zip(self.layers, self.alphas, strict=True):
            points.append(_interpolate(points[-1], block(points[-1]), alpha))
        return points

    def step(self, y: State) -> Tensor:
        return self.trajectory(y)[-1]

    def linearise(self, y: State, inside: State | None = None) -> Linearisation:  # noqa: ARG002
        """``J`` is the product of the layers' symmetric Jacobians ``(1 - alpha) I + alpha W' D W / mu``."""
        parts = [
            (block.jacobian_at(point), alpha)
            for block, point, alpha in zip(self.layers, self.trajectory(y)[:-1], self.alphas, strict=True)
        ]

        z, R, gamma = single(y).detach(), self.regularizer, self.gamma

        def prior(v: Tensor) -> Tensor:
            return v if R is None else v - gamma * R.curvature(z, v)

        def through(v: Tensor, order: list[Any]) -> Tensor:
            for jacobian, alpha in order:
                v = _interpolate(v, jacobian(v), alpha)
            return v

        return Linearisation(
            lambda v: through(prior(single(v)), parts), lambda v: prior(through(single(v), parts[::-1]))
        )

    def inclusion_residual(self, z: State) -> Tensor:
        """How far each layer is from ``alpha grad M_l(z_l) + z_l - z_{l-1} = 0`` (Theorem 2), shape ``(L, B)``.

        The points are those of :meth:`trajectory` with the ring closed, ``z_L := z_0``. The envelope's gradient is
        found by its own solve, not read off the layer; for alpha = 1 the envelope is phi and the inclusion says
        ``z_l = T(z_{l-1})``.
        """
        points = self.trajectory(z)
        points[-1] = single(z)
        rows = []
        for index, (block, alpha) in enumerate(zip(self.layers, self.alphas, strict=True)):
            before, after = points[index], points[index + 1]
            weight = _number(alpha)
            if weight == 1:
                gap = after - block(before)
            else:
                u = block.preimage(after, weight)
                gap = weight * (u - block(u)) + after - before
            rows.append((2 * half_square(gap)).sqrt())
        return torch.stack(rows)

    def objective(self, z: State) -> Tensor:
        """The joint objective of Corollary 1 at ``z_0 = z`` and ``z_1 = f_1(z_0)``, one value per sample.

        For two layers ``alpha M_1(z_1) + alpha M_2(z_0) + 1/2 |z_1 - z_0|^2``, for one ``alpha M(z)``.
        """
        count = len(self.layers)
        if self.regularizer is not None:
            raise ValueError(
                "the joint objective is that of the layers alone; with a regulariser see inclusion_residual"
            )
        if count > 2:
            raise ValueError(f"only one or two layers have a joint objective; this has {count}: see inclusion_residual")
        points = self.trajectory(z)
        last, weight = self.layers[-1], _number(self.alphas[-1])
        if weight == 1:  # the envelope is phi, known at images: equal to the value at z where z is a fixed point
            total = last.envelope(points[-2], 1.0)
        else:
            total = weight * last.envelope(last.preimage(points[0], weight), weight)
        if count == 2:
            first = _number(self.alphas[0])
            total = total + first * self.layers[0].envelope(points[0], first)
            total = total + half_square(points[1] - points[0])
        return total


def _number(alpha: float | Tensor) -> float:
    return float(alpha.detach()) if isinstance(alpha, Tensor) else alpha


def _interpolate(old: Tensor, new: Tensor, alpha: float | Tensor) -> Tensor:
    return new if isinstance(alpha, float) and alpha == 1 else alpha * new + (1 - alpha) * old


def _branch(layer: Any, index: int) -> Branch:
    if isinstance(layer, Branch):
        if layer.scale != 1:
            raise ValueError(f"the layers of DeepOptEq share one resolution; layer {index} has scale={layer.scale}")
        return layer
    if not isinstance(layer, tuple) or len(layer) != 2:
        raise TypeError(f"layer {index} should be a pair (W, U) or a Branch; got {layer!r}")
    return Branch(*layer)


def _alphas(alpha: float | Sequence[float], count: int) -> list[float]:
    values = list(alpha) if isinstance(alpha, Sequence) else [alpha] * count
    if len(values) != count:
        raise ValueError(f"alpha should be one number or one per layer ({count}); got {len(values)}")
    return [check_share("alpha", value) for value in values]
