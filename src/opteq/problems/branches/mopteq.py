"""MOptEq: branches that inherit from their neighbours and differ from them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cached_property

import numpy as np
import torch
from torch import Tensor, nn

from opteq import penalties
from opteq.common.validate import check_not_negative, check_whole
from opteq.couplings import Coupling, Features, largest_neighbours
from opteq.operators import Conv2d, LinearMap, Operator
from opteq.penalties import Penalty
from opteq.problems.base import Problem, check_unhooked, inject
from opteq.problems.branches.branch import Branch, check_branches, feature_channels, views
from opteq.problems.branches.chattering import Tensors, inclusion_residual, is_periodic, signs_change
from opteq.problems.branches.mopteq_certificate import certify
from opteq.problems.branches.perturbation import PerturbationChain
from opteq.problems.certificate import Certificate, SmoothPart, for_finite_weights
from opteq.problems.hidden import Formulation, Hidden, Structure
from opteq.solvers import Anderson, Status
from opteq.solvers.base import FixedPointTask
from opteq.states import State, any_row, blocks, inner

_SETTLED = 1e-3
"""Residual at which signs count as settled; nearly all entries have theirs after four steps."""


class MOptEq(Problem):
    """Several branches whose states minimise one objective (Equation 5 of the paper):

        sum_i [ sum f(y_i) + 1/2 |y_i|^2 - <U_i x_i + b_i, y_i> + 1/2 (lambda D(z_i, z_{i+1}) - H(z_i, z_{i+1})) ]

    with features ``z_i = W_i' y_i`` on a ring (the last branch is a neighbour of the first) and ``x_i`` the input
    averaged over squares of ``scale`` pixels. Heritage H is the inner product of neighbours, diversity D the sum of
    products of different channels (see :mod:`opteq.couplings`). The step is ``y_i <- sigma(W_i h_i + U_i x_i + b_i)``
    in all branches at once, with ``h`` of :class:`~opteq.couplings.Coupling`. One branch with lambda 0 is OptEq.

    D has kinks. With ``smoothing=0`` the step is discontinuous where a product of channels changes sign, and a fixed
    point need not exist. For usual values of lambda many samples end in small cycles: their status is ``CYCLING``,
    never converged. ``smoothing`` > 0 makes the step continuous and avoids such cycles.

    Args:
        branches: :class:`Branch` objects, whose features all have the same number of channels.
        diversity: lambda, the weight of D.
        perturbation: largest entry of the perturbations that branches pass on in training mode, see
            :class:`~opteq.problems.branches.perturbation.PerturbationChain`; 0 for none.
        activation: name or :class:`~opteq.penalties.Penalty`, the same in all branches.
        smoothing: tau in ``D = sum sqrt(M^2 + tau^2)``. The step's slope grows with ``lambda |channel|^2 / tau``.
        heritage: False puts ``-1/2 |z_i|^2`` in the place of H, as in OptEq; with lambda 0 that is POptEq.
        settle: steps of a first solve after which perturbations are frozen, 8 by default. They depend on signs, so a
            joint solve for them and the state may never converge. After eight steps less than 1 % of the entries differ
            from those at the equilibrium (measured by ``problem(x).perturbation_agreement(state)``).

    >>> import torch, opteq
    >>> branches = [opteq.Branch(opteq.operators.Dense(4, 6, bound=0.7), torch.nn.Linear(3, 6)) for _ in range(3)]
    >>> layer = opteq.Equilibrium(opteq.MOptEq(branches, diversity=0.1, smoothing=0.1))
    >>> [tuple(z.shape) for z in layer(torch.randn(2, 3))]
    [(2, 4), (2, 4), (2, 4)]
    """

    def __init__(
        self,
        branches: Sequence[Branch],
        diversity: float = 0.0,
        perturbation: float = 0.0,
        activation: str | Penalty = "relu",
        smoothing: float = 0.0,
        heritage: bool = True,
        settle: int | None = None,
    ) -> None:
        super().__init__()
        self.branches = nn.ModuleList(check_branches(branches))
        self.penalty = penalties.get(activation)
        self.coupling = Coupling(diversity, smoothing, heritage)
        self.perturbation = check_not_negative("perturbation", perturbation)
        self.settle = 8 if settle is None else check_whole("settle", settle)
        if perturbation and len(self.branches) == 1:
            raise ValueError(f"{perturbation=} has no effect on a single branch; it passes from branch to branch")
        if settle is not None and not perturbation:
            raise ValueError(f"{settle=} has no effect with perturbation=0, which it would freeze")
        channels = [feature_channels(branch.W) for branch in self.branch_list()]
        known = {count for count in channels if count is not None}
        if self.coupling.ties_branches and len(known) > 1:
            raise ValueError(
                f"the features of all branches should have the same number of channels, since channels are compared "
                f"one by one; got {channels}"
            )

    def branch_list(self) -> list[Branch]:
        """The branches, with their type."""
        return [branch for branch in self.branches if isinstance(branch, Branch)]

    takes_tuples = True

    def bind(self, x: State) -> BoundMOptEq:
        """Every ``U_i x_i + b_i`` and bounded W, and in training the perturbations, computed once.

        ``x`` is an image that every branch sees at its scale, or a tuple with every branch's own ``x_i``.
        """
        branches = self.branch_list()
        inputs = views(x, [branch.scale for branch in branches])
        maps = [check_unhooked(branch.W, "W of a branch").prepare() for branch in branches]
        if not (self.perturbation and self.training and len(branches) > 1):
            injections = tuple(inject(branch.U, part, branch.W) for branch, part in zip(branches, inputs, strict=True))
            return BoundMOptEq(self, maps, injections)
        chain = PerturbationChain(branches, inputs, self.perturbation)
        directions = chain.directions(self._perturbation_state(maps, chain))
        # The autocast of torch 2.10 hands on weights that it cast without a tape: U would get no gradient.
        torch.clear_autocast_cache()
        return BoundMOptEq(self, maps, chain.injections(directions), (chain, directions))

    @torch.no_grad()
    def _perturbation_state(self, maps: list[LinearMap], chain: PerturbationChain) -> Tensors:
        """A state close to one that agrees with the perturbations it gives rise to."""
        free = tuple(inject(branch.U, x) for branch, x in zip(chain.branches, chain.inputs, strict=True))
        bound = BoundMOptEq(self, maps, free)

        def live(y: State) -> State:
            bound.injections = chain.injections(chain.directions(blocks(y)))
            return bound.step(y)

        solver = Anderson(tol=_SETTLED, max_steps=self.settle)
        outcome = solver.solve(live, bound.start(), project=bound.project, damping=bound.damping)
        return blocks(outcome.state)

    def channels(self) -> int | None:
        """Number of channels of the features; None where the operators do not define it."""
        return next((count for branch in self.branch_list() if (count := feature_channels(branch.W)) is not None), None)

    def known_convexity(self, sizes: Sequence[int] | None = None) -> bool:
        """Whether the bounds of the W make the objective strongly convex, for all weights within them.

        ``sizes`` are the heights of the features, which determine how much resampling damps; None if unknown.
        """
        bounds = [branch.W.bound for branch in self.branch_list()]
        channels = self.channels() if self.coupling.diversity else 1
        if channels is None or any(bound is None for bound in bounds):
            return False
        largest = max(bound for bound in bounds if bound is not None)
        return self.penalty.lipschitz * largest**2 * self.coupling.curvature_bound(channels, sizes) < 1

    def smooth_part(self, norm: Callable[[Operator], float]) -> SmoothPart | None:
        channels = self.channels() if self.coupling.diversity else 1
        if channels is None:
            return None
        largest = float(np.max([norm(branch.W) for branch in self.branch_list()]))  # a NaN stays
        pull = largest**2 * self.coupling.curvature_bound(channels)
        return SmoothPart(-pull, math.inf if self.coupling.diversity else pull, largest, self.branch_list())

    @for_finite_weights
    def certificate(self) -> Certificate:
        """Guarantees from the norms of the W, lambda and the number of channels."""
        return certify(self.penalty, self.coupling, self.branch_list(), self.channels())


class BoundMOptEq(Hidden):
    """MOptEq with its input bound. State and features are tuples with one tensor per branch.

    ``injections`` are ``c_i = U_i x_i + b_i``, with perturbations where there are any; ``perturbation`` is their chain
    and their frozen directions, or None.
    """

    def __init__(
        self,
        problem: MOptEq,
        maps: list[LinearMap],
        injections: Tensors,
        perturbation: tuple[PerturbationChain, Tensors] | None = None,
    ) -> None:
        self.problem = problem
        self.penalty = problem.penalty
        self.coupling = problem.coupling
        self.maps = maps
        self.injections = injections
        self.convex = problem.known_convexity(self._sizes())
        self.structure = Structure.POSITIVE if self.convex else Structure.SYMMETRIC
        self.perturbation = perturbation
        if self.coupling.diversity and self.coupling.smoothing:
            self.has_merit = self.penalty.has_total
        self.quadratic = not self.coupling.diversity
        self.jumps = self.coupling.diversity > 0 and not self.coupling.smoothing

    def __getstate__(self) -> dict[str, object]:
        # What a step needs: a copy for a captured solve does without the module.
        return {name: value for name, value in vars(self).items() if name not in ("problem", "perturbation", "damping")}

    def start(self) -> Tensors:
        return tuple(torch.zeros_like(c) for c in self.injections)

    def features(self, y: State) -> Features:
        return tuple(W.adjoint(part) for W, part in zip(self.maps, blocks(y), strict=True))

    def smooth_terms(self, y: State) -> dict[str, Tensor]:
        """Input, heritage (or self, without it) and, where lambda is not 0, diversity."""
        return {"input": -inner(self.injections, y), **self.coupling.terms(self.features(y))}

    def preactivation(self, y: State, signs: Tensors | None = None) -> Tensors:
        """``W_i h_i + c_i``; ``signs`` take the place of the signs in D."""
        h = self.coupling.negative_gradient(self.features(y), signs)
        return self._carry(h, self.injections)

    def negative_hessian_at(self, y: State) -> Callable[[State], State]:
        """``v -> W_i [h'(z) W'v]_i``, with the signs of D fixed where it is not smoothed."""
        jacobian = self.coupling.jacobian_at(tuple(z.detach() for z in self.features(y)))
        return lambda v: self._carry(jacobian(self.features(v)))

    def feature_form(self) -> Formulation:
        """``z_i <- W_i' sigma(W_i h_i(z) + c_i)``, Algorithm 2 of the paper in all branches at once."""
        start = tuple(torch.zeros_like(z) for z in self.features(self.start()))

        def state(z: State) -> State:
            return self._activate(self.coupling.negative_gradient(blocks(z)))

        task = FixedPointTask(lambda z: self.features(state(z)), start, damping=self.damping, coupled=self.coupled)
        return Formulation(task, state, self.features)

    def diagnose(self, y: State, codes: Tensor) -> Tensor:
        """``CYCLING`` where signs jump for ever.

        That is looked for where the step limit was reached, and where a small residual comes with a change of signs
        from ``y`` to its image: such a state lies beside a jump, not at a fixed point.
        """
        if not self.jumps:
            return codes
        parts = blocks(y)
        beside = (codes == int(Status.CONVERGED)) & signs_change(self, parts)
        doubtful = beside | (codes == int(Status.MAX_STEPS))
        if not any_row(doubtful):
            return codes
        return torch.where(is_periodic(self, parts, doubtful), int(Status.CYCLING), codes)

    @torch.no_grad()
    def inclusion_residual(self, y: State, zero: float = 1e-6, steps: int = 300) -> Tensor:
        """How far ``y`` is from an equilibrium in the set-valued sense, ``(B,)``, in the measure that solvers use.

        Where a product of channels is zero, its sign may be any number of [-1, 1], and the best one is taken. At
        the minimiser this is 0, though the step may lead away from it. Products below the share ``zero`` of the two
        branches' norms count as zero; ``steps`` are those of the search for the best signs.
        """
        return inclusion_residual(self, blocks(y), zero, steps)

    def perturbation_agreement(self, y: State) -> Tensor:
        """The share of entries whose frozen perturbation has the direction that ``y`` itself gives, ``(B,)``.

        1 where there is no perturbation.
        """
        if self.perturbation is None:
            return torch.ones_like(inner(y, y))
        chain, frozen = self.perturbation
        pairs = zip(chain.directions(blocks(y)), frozen, strict=True)
        agree = torch.cat([(own == kept).flatten(1) for own, kept in pairs], dim=1)
        return agree.to(torch.float32).mean(dim=1)

    def _sizes(self) -> list[int] | None:
        """Heights of the features, where convolutions make them as large as the state."""
        if not all(isinstance(branch.W, Conv2d) for branch in self.problem.branch_list()):
            return None
        if any(c.ndim != 4 for c in self.injections):  # the operators say what is wrong with them
            return None
        return [c.shape[2] for c in self.injections]

    def _carry(self, h: Features, injections: Tensors | None = None) -> Tensors:
        carried = tuple(W(h) for W, h in zip(self.maps, h, strict=True))
        return carried if injections is None else tuple(a + c for a, c in zip(carried, injections, strict=True))

    def _activate(self, h: Features) -> Tensors:
        """``sigma(W_i h_i + c_i)``."""
        return tuple(self.penalty.prox(part) for part in self._carry(h, self.injections))

    @cached_property
    @torch.no_grad()
    def damping(self) -> float | Tensor:  # type: ignore[override]
        """``2 / (2 + s)``, best where slopes of a step reach down to -s.

        A product inside its kink, of width tau, adds a slope of ``lambda / tau`` times the squared norm of a channel as
        W carries it: s is that for the largest channels that are met after a step without D. An estimate, and no
        bound: it follows the scale of the input, sample by sample. (More steps change it by hundredths.) With one or
        two branches both neighbours are the same, so every product counts twice.
        """
        if not (self.coupling.diversity and self.coupling.smoothing):
            return 1.0
        y = tuple(self.penalty.prox(c) for c in self.injections)
        features = self.features(y)
        if features[0].shape[1] == 1:  # one channel has no products with others
            return 1.0
        y = self._activate(Coupling(heritage=self.coupling.heritage).negative_gradient(features))
        images = self._carry(largest_neighbours(self.features(y)))
        reach = torch.stack([inner(part, part) for part in images]).amax(dim=0) * (2 if len(y) <= 2 else 1)
        slope = self.penalty.lipschitz * self.coupling.diversity / self.coupling.smoothing * reach
        return 2 / (2 + slope)

    def step_and_merit(self, y: State) -> tuple[State, Tensor]:
        """The step and the objective, which damped steps decrease, from the same channel products."""
        h, energy = self.coupling.negative_gradient_and_energy(self.features(y))
        image = self._activate(h)
        merit = self._penalty_of(y) + inner(y, y) / 2 - inner(self.injections, y) + energy
        return image, merit
