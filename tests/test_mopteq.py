"""MOptEq against numbers worked out by hand, the paper's algorithms written out, and what is known of its objective."""

from __future__ import annotations

import dataclasses
import re

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import opteq
from cases import SOLVERS
from opteq import operators as op
from opteq.analysis.branches import reconstructed_perturbation
from opteq.couplings import Coupling, diversity, heritage, products
from opteq.problems.branches.mopteq import BoundMOptEq, MOptEq
from opteq.problems.branches.popteq import POptEq
from opteq.problems.hidden import Structure
from opteq.solvers import Solver, Status

DOUBLE = torch.float64
ALL_SOLVERS = {
    **SOLVERS,
    "default": opteq.Anderson(),
    "loose": opteq.Broyden(tol=1e-3),
    "damped": opteq.Picard(damping=0.5),
    "damped-anderson": opteq.Anderson(damping=0.3, max_steps=200),
    "sam": opteq.SAM(regularizer=opteq.regularizers.Ridge(), max_steps=30),
}


class Pick(nn.Module):
    """Hands a branch its own row of the input, so that a test can choose every c."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index

    def forward(self, x: Tensor) -> Tensor:
        return x[:, self.index]


def toy(rows: list[list[float]], gain: float, **options: object) -> tuple[MOptEq, Tensor]:
    """Branches with ``W = gain I`` and the given c, one pixel, two channels."""
    branches = []
    for index in range(len(rows)):
        W = op.Dense(2, 2, bound=gain + 0.01)
        W.weight.data = gain * torch.eye(2, dtype=DOUBLE)
        branches.append(opteq.Branch(W, Pick(index)))
    return MOptEq(branches, **options).double(), torch.tensor([rows], dtype=DOUBLE)


def chattering(**options: object) -> tuple[MOptEq, Tensor]:
    """The smallest example without an equilibrium: slopes stay below 0.686, and yet no y equals its image."""
    return toy([[0.05, 1.0], [0.0, 1.0]], 0.7, diversity=0.4, **options)


MINIMISER = (torch.tensor([[0.0, 1 / 0.51]], dtype=DOUBLE),) * 2


def vectors(count: int, channels: int = 3, bound: float | None = 0.7, seed: int = 0) -> list[opteq.Branch]:
    torch.manual_seed(seed)
    return [
        opteq.Branch(op.Dense(channels, channels + 1 + i, bound=bound), nn.Linear(4, channels + 1 + i))
        for i in range(count)
    ]


def pictures(*scales: int, bound: float | None = 0.7, seed: int = 0) -> list[opteq.Branch]:
    torch.manual_seed(seed)
    return [opteq.Branch(op.Conv2d(3, 4, 3, bound=bound), nn.Conv2d(2, 4, 3, padding=1), scale) for scale in scales]


def gaussian(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=DOUBLE)


def exact(problem: MOptEq, x: Tensor) -> tuple[BoundMOptEq, tuple[Tensor, ...]]:
    with torch.no_grad():
        hidden = problem(x)
        solution = opteq.Equilibrium(problem, opteq.Anderson(tol=1e-13, max_steps=500), on_failure="raise").solve(x)
    return hidden, solution.state


def algorithm_2(problem: MOptEq, x: Tensor, z: list[Tensor], eps: float) -> tuple[list[Tensor], list[Tensor]]:
    """One pass of the paper's algorithm with sign(0) = 0, written out: the z in, the z out, and the deltas."""

    def at_size(z: Tensor, like: Tensor) -> Tensor:
        if z.ndim == 2 or z.shape == like.shape:
            return z
        if z.shape[2] > like.shape[2]:
            return F.avg_pool2d(z, z.shape[2] // like.shape[2])
        k = like.shape[2] // z.shape[2]
        return F.interpolate(z, scale_factor=k, mode="nearest") / k**2

    def matrix(z: Tensor) -> Tensor:
        return z.reshape(*z.shape[:2], -1).mT  # a column a channel

    count, weight = len(z), problem.coupling.diversity
    new, deltas = [], []
    delta: Tensor | None = None
    for i, branch in enumerate(problem.branches):
        N, V, Z = (matrix(at_size(z[j % count], z[i])) for j in (i + 1, i - 1, i))
        off = 1 - torch.eye(Z.shape[2], dtype=Z.dtype)
        h = (N + V) / 2 - weight / 2 * (N @ torch.sign(off * (N.mT @ Z)) + V @ torch.sign(off * (V.mT @ Z)))
        seen = F.avg_pool2d(x, branch.scale) if branch.scale > 1 else x
        if delta is not None:
            if delta.ndim == 4 and delta.shape[2] > seen.shape[2]:
                delta = F.avg_pool2d(delta, delta.shape[2] // seen.shape[2])
            elif delta.ndim == 4:
                delta = F.interpolate(delta, size=seen.shape[2:], mode="nearest")
            seen = seen - delta
        y = torch.relu(branch.W(h.mT.reshape(z[i].shape)) + branch.U(seen))
        if isinstance(branch.U, nn.Linear):
            back = y @ branch.U.weight
        else:
            back = F.conv_transpose2d(y, branch.U.weight, padding=1)
        delta = eps * torch.sign(back) if eps else None
        deltas.append(delta)
        new.append(branch.W.adjoint(y))
    return new, deltas


# What it computes


def test_golden_value() -> None:
    problem, x = toy([[1, 0.4], [0.5, 0.8], [0.3, 1.2]], 0.6, diversity=0.1)
    hidden, y = exact(problem, x)
    expected = [
        [1.203829861033, 0.867176056127],
        [0.785174557731, 1.199772839636],
        [0.620815715254, 1.536248721699],
    ]
    torch.testing.assert_close(torch.cat(y), torch.tensor(expected, dtype=DOUBLE), rtol=0, atol=1e-11)
    assert float(hidden.objective(y)) == pytest.approx(-2.466424507337, abs=1e-11)
    z = hidden.features(y)
    assert float(diversity(z).sum()) == pytest.approx(2.327042448018, abs=1e-11)
    assert float(heritage(z).sum()) == pytest.approx(2.302482116827, abs=1e-11)
    assert float(hidden.terms(y)["diversity"]) == pytest.approx(0.05 * 2.327042448018, abs=1e-11)
    assert float(hidden.inclusion_residual(y)) < 1e-12


def test_terms_are_those_of_equation_5() -> None:
    problem = MOptEq(pictures(1, 2, 4), diversity=0.3, activation="tanh").double()
    hidden = problem(gaussian(3, 2, 8, 8))
    y = tuple(0.5 * torch.tanh(gaussian(*part.shape, seed=5)) for part in hidden.start())
    terms = hidden.terms(y)
    assert list(terms) == ["penalty", "quadratic", "input", "heritage", "diversity"]
    assert all(value.shape == (3,) for value in terms.values())
    z = hidden.features(y)
    by_hand = {
        "penalty": sum(opteq.penalties.get("tanh").value(part).sum((1, 2, 3)) for part in y),
        "quadratic": sum(part.square().sum((1, 2, 3)) / 2 for part in y),
        "input": -sum((c * part).sum((1, 2, 3)) for c, part in zip(hidden.injections, y, strict=True)),
        "heritage": -heritage(z).sum(0) / 2,
        "diversity": 0.3 * diversity(z).sum(0) / 2,
    }
    for name, value in by_hand.items():
        torch.testing.assert_close(terms[name], value, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("eps", [0.0, 0.2])
@pytest.mark.parametrize(
    ("branches", "shape"),
    [
        (lambda: vectors(1), (4,)),
        (lambda: vectors(2), (4,)),
        (lambda: vectors(4), (4,)),
        (lambda: pictures(1, 1), (2, 4, 4)),
        (lambda: pictures(1, 2, 4), (2, 4, 8)),
        (lambda: pictures(4, 1, 2), (2, 8, 4)),
    ],
)
def test_fixed_points_satisfy_algorithm_2(branches: object, shape: tuple[int, ...], eps: float) -> None:
    made = branches()
    eps = eps if len(made) > 1 else 0.0
    problem = MOptEq(made, diversity=0.002, perturbation=eps, settle=60 if eps else None).double()
    x = gaussian(2, *shape)
    with torch.no_grad():
        hidden, y = exact(problem, x)
        z = hidden.features(y)
        agreement = hidden.perturbation_agreement(y)
        again, _ = algorithm_2(problem, x, list(z), eps)
    consistent = agreement == 1
    assert consistent.any()
    for found, wanted in zip(again, z, strict=True):
        torch.testing.assert_close(found[consistent], wanted[consistent], rtol=0, atol=1e-10)
    if eps and len(y) > 1:
        assert not torch.equal(hidden.injections[1], problem.eval()(x).injections[1])


@pytest.mark.parametrize("activation", ["relu", "tanh"])
def test_one_branch_without_diversity_is_opteq(activation: str) -> None:
    (branch,) = pictures(1)
    problem = MOptEq([branch], activation=activation).double()
    single = opteq.OptEq(branch.W, branch.U, activation)
    x = gaussian(2, 2, 4, 4)
    layers = [opteq.Equilibrium(one, SOLVERS["anderson"]) for one in (problem, single)]
    ((found,), wanted) = (layer(x) for layer in layers)
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-11)
    hidden, plain = problem(x), single(x)
    y = plain.step(plain.start())
    torch.testing.assert_close(hidden.objective((y,)), plain.objective(y), rtol=1e-12, atol=1e-12)
    slopes = [torch.autograd.grad(one.square().sum(), branch.W.weight)[0] for one in (found, wanted)]
    torch.testing.assert_close(*slopes, rtol=1e-8, atol=1e-9)


def test_without_both_terms_it_is_popteq() -> None:
    branches = pictures(1, 2)
    x = gaussian(2, 2, 4, 4)
    problem = MOptEq(branches, heritage=False).double()
    found = opteq.Equilibrium(problem, SOLVERS["anderson"])(x)
    wanted = opteq.Equilibrium(POptEq(branches), SOLVERS["anderson"])(x)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-11)
    assert list(problem(x).smooth_terms(problem(x).start())) == ["input", "self"]
    # Nothing ties these branches, so their channels may differ and their scales need not divide each other.
    odd = [opteq.Branch(op.Conv2d(c, 4, 3, bound=0.7), nn.Conv2d(2, 4, 3, padding=1), s) for c, s in ((3, 2), (5, 3))]
    shapes = [tuple(z.shape) for z in opteq.Equilibrium(MOptEq(odd, heritage=False))(torch.randn(1, 2, 6, 6))]
    assert shapes == [(1, 3, 3, 3), (1, 5, 2, 2)]


def test_updates_one_after_the_other_have_the_same_equilibria() -> None:
    problem = MOptEq(vectors(3), diversity=0.002).double()
    x = gaussian(2, 4)
    with torch.no_grad():
        hidden, y = exact(problem, x)
        z = [torch.zeros_like(part) for part in hidden.features(y)]
        for _ in range(40):
            for i in range(3):  # Gauss-Seidel: each branch sees what was just computed
                z[i] = algorithm_2(problem, x, z, 0.0)[0][i]
        for found, wanted in zip(z, hidden.features(y), strict=True):
            torch.testing.assert_close(found, wanted, rtol=0, atol=1e-10)


def test_one_channel_is_not_damped_for_products_that_it_does_not_have() -> None:
    branch = opteq.Branch(op.Dense(1, 3, bound=0.8), nn.Linear(2, 3))
    layer = opteq.Equilibrium(MOptEq([branch], diversity=0.1, smoothing=0.5), opteq.Picard(tol=1e-3, max_steps=40))
    assert layer.solve(1e5 * torch.ones(1, 2)).status == (Status.CONVERGED,)


def test_features_have_a_form_of_their_own() -> None:
    problem = MOptEq(pictures(1, 2), diversity=0.05, smoothing=0.5).double()
    with torch.no_grad():
        hidden, y = exact(problem, gaussian(2, 2, 4, 4))
        form = hidden.feature_form()
        z = hidden.features(y)
        for parts, wanted in ((form.task.step(z), z), (form.state(z), y)):
            for found, other in zip(parts, wanted, strict=True):
                torch.testing.assert_close(found, other, rtol=0, atol=1e-11)
        assert [part.shape for part in form.task.start] == [part.shape for part in z]


def test_gradients_equal_finite_differences_with_signs_and_perturbations() -> None:
    problem = MOptEq(vectors(2), diversity=0.01, perturbation=0.1).double()
    layer = opteq.Equilibrium(problem, SOLVERS["anderson"], on_failure="raise")
    x = gaussian(1, 4).requires_grad_()
    weights = dict(layer.named_parameters())

    def features(x: Tensor, *values: Tensor) -> tuple[Tensor, ...]:
        return torch.func.functional_call(layer, dict(zip(weights, values, strict=True)), (x,))

    values = [weight.detach().clone().requires_grad_() for weight in weights.values()]
    assert torch.autograd.gradcheck(features, (x, *values), atol=1e-6, rtol=1e-4, fast_mode=True)


# Where it jumps


@pytest.mark.parametrize("solver", ALL_SOLVERS.values(), ids=ALL_SOLVERS)
def test_where_there_is_no_equilibrium_the_status_is_cycling(solver: Solver) -> None:
    problem, x = chattering()
    x = x.requires_grad_()
    layer = opteq.Equilibrium(problem, dataclasses.replace(solver, max_steps=min(solver.max_steps, 100)))
    with pytest.warns(opteq.ConvergenceWarning, match=r"1x CYCLING.*smoothing=.*inclusion_residual"):
        solution = layer.solve(x)
    assert solution.status == (Status.CYCLING,)
    assert not solution.converged.any()
    loss = sum(part.square().sum() for part in solution.features)
    (slope,) = torch.autograd.grad(loss, x)
    assert torch.isfinite(loss)
    assert torch.isfinite(slope).all()


def test_no_state_equals_its_image_in_the_chattering_example() -> None:
    """Over a fine grid of the two entries in question, with the others at their best for them."""
    problem, x = chattering()
    line = torch.cat([torch.zeros(1, dtype=DOUBLE), torch.logspace(-5, 0, 60, dtype=DOUBLE)])
    first = torch.cartesian_prod(line, line).unbind(1)
    with torch.no_grad():
        hidden = problem(x.expand(len(first[0]), -1, -1))
        second = [torch.full_like(first[0], 1.96)] * 2
        for _ in range(80):
            image = hidden.step(tuple(torch.stack(pair, 1) for pair in zip(first, second, strict=True)))
            second = [part[:, 1] for part in image]
    gaps = torch.stack([part[:, 0] - entry for part, entry in zip(image, first, strict=True)]).abs().amax(0)
    assert (gaps >= 1e-5 - 1e-12).all()


def test_the_minimiser_of_the_chattering_example_is_an_equilibrium_with_set_valued_signs() -> None:
    problem, x = chattering()
    with torch.no_grad():
        hidden = problem(x)
        assert float(hidden.inclusion_residual(MINIMISER)) < 1e-12
        image = hidden.step(MINIMISER)
        assert float((image[0] - MINIMISER[0]).norm()) > 0.01
        least = hidden.objective(MINIMISER)
        generator = torch.Generator().manual_seed(0)
        for size in (1e-1, 1e-3):
            for _ in range(50):
                moved = tuple(
                    (part + size * torch.randn(part.shape, generator=generator, dtype=DOUBLE)).clamp(min=0)
                    for part in MINIMISER
                )
                assert hidden.objective(moved) >= least
        away = tuple(part + 0.1 for part in MINIMISER)
        assert float(hidden.inclusion_residual(away)) > 0.01
        # What a solver returns is not an equilibrium, and is told from one.
        best = opteq.Equilibrium(problem, opteq.Picard(), on_failure="ignore").solve(x).state
        assert float(hidden.inclusion_residual(best)) > 1e-3


# The minimiser that is approached does not depend on the solver.
@pytest.mark.parametrize(
    ("solver", "tau"), [*((solver, 1e-1) for solver in SOLVERS.values()), (SOLVERS["anderson"], 1e-2)], ids=str
)
def test_smoothing_brings_the_chattering_example_to_its_minimiser(solver: Solver, tau: float) -> None:
    problem, x = chattering(smoothing=tau)
    with torch.no_grad():
        solution = opteq.Equilibrium(problem, solver).solve(x)
    assert solution.converged.all()
    distance = sum((a - b).square().sum() for a, b in zip(solution.state, MINIMISER, strict=True)).sqrt()
    assert float(distance) < 0.2 * tau
    assert float(problem(x).inclusion_residual(solution.state)) < 1e-11  # smooth: the ordinary residual


def test_inclusion_residual_finds_signs_strictly_inside() -> None:
    """The minimiser of a larger problem, approached by smoothing, where several products are zero and units active."""
    branches = vectors(3, channels=6, bound=0.7)
    x = gaussian(4, 4, seed=3)
    smoothed = MOptEq(branches, diversity=0.15, smoothing=1e-5, activation="tanh").double()
    sharp = MOptEq(branches, diversity=0.15, activation="tanh").double()
    with torch.no_grad():
        solver = opteq.Anderson(tol=1e-8, max_steps=20000, damping=0.05)
        solution = opteq.Equilibrium(smoothed, solver, on_failure="raise").solve(x)
        hidden = sharp(x)
        image = hidden.step(solution.state)
        plain = sum((a - b).square().sum(1) for a, b in zip(image, solution.state, strict=True)).sqrt()
        inclusion = hidden.inclusion_residual(solution.state, zero=1e-4, steps=1000)
    assert (plain > 1e-2).any()
    assert (inclusion < 1e-4).all()


def test_slow_convergence_is_not_called_cycling() -> None:
    problem, x = toy([[1, 0.4], [0.5, 0.8], [0.3, 1.2]], 0.95, diversity=0.01)
    solution = opteq.Equilibrium(problem, opteq.Picard(tol=1e-12, max_steps=5), on_failure="ignore").solve(x)
    assert solution.status == (Status.MAX_STEPS,)
    negative, x = toy([[1, 0.4], [-0.5, 0.8]], 0.99, diversity=0.01, activation="identity")
    solution = opteq.Equilibrium(negative, opteq.Picard(tol=1e-12, max_steps=5), on_failure="ignore").solve(x)
    assert solution.status == (Status.MAX_STEPS,)


def test_statuses_are_told_sample_by_sample() -> None:
    problem, bad = chattering()
    good = torch.tensor([[[1.0, 0.5], [0.5, 1.0]]], dtype=DOUBLE)
    nan = torch.full_like(good, torch.nan)
    solution = opteq.Equilibrium(problem, SOLVERS["anderson"], on_failure="ignore").solve(torch.cat([bad, good, nan]))
    assert solution.status == (Status.CYCLING, Status.CONVERGED, Status.NON_FINITE)


# Perturbations


def test_perturbations_are_the_worst_within_their_size_and_never_larger() -> None:
    problem = MOptEq(pictures(2, 1, 4), perturbation=0.3).double()
    x = gaussian(3, 2, 8, 8)
    hidden = problem(x)
    chain, directions = hidden.perturbation
    for direction, branch, part, seen in zip(directions, problem.branches, hidden.start(), chain.inputs, strict=False):
        assert direction.shape == seen.shape
        assert set(direction.unique().tolist()) <= {-1.0, 0.0, 1.0}
        assert part.shape[1] == branch.U.out_channels
    moves = [before - after for before, after in zip(chain.inputs, chain.perturbed_inputs(directions), strict=True)]
    assert (moves[0] == 0).all()
    assert all(0 < float(move.abs().max()) <= 0.3 + 1e-12 for move in moves[1:])
    # delta = eps sign(U'y) maximises -<U (x - delta) + b, y> over the cube
    y = tuple(torch.rand(part.shape, dtype=DOUBLE) for part in hidden.start())
    with torch.no_grad():
        for branch, part, seen, direction in zip(problem.branches, y, chain.inputs, chain.directions(y), strict=False):

            def raised(delta: Tensor, branch=branch, part=part, seen=seen) -> float:
                return -float((branch.U(seen - delta) * part).sum())

            best = raised(0.3 * direction)
            for seed in range(5):
                assert raised(0.3 * torch.sign(gaussian(*seen.shape, seed=seed))) <= best


def test_perturbations_are_for_training_only_and_carry_no_gradient() -> None:
    problem = MOptEq(pictures(1, 2), perturbation=0.3).double()
    x = gaussian(2, 2, 4, 4).requires_grad_()
    perturbed = problem(x)
    assert perturbed.perturbation is not None
    assert not any(direction.requires_grad for direction in perturbed.perturbation[1])
    plain = problem.eval()(x)
    assert plain.perturbation is None
    torch.testing.assert_close(plain.perturbation_agreement(plain.start()), torch.ones(2, dtype=DOUBLE))
    torch.testing.assert_close(perturbed.injections[0], plain.injections[0], rtol=0, atol=0)
    assert (perturbed.injections[1] - plain.injections[1]).abs().max() > 0.01
    slopes = [torch.autograd.grad(hidden.injections[1].sum(), x)[0] for hidden in (perturbed, plain)]
    torch.testing.assert_close(*slopes, rtol=1e-12, atol=1e-12)  # U is affine: delta adds nothing
    with pytest.raises(ValueError, match="no effect on a single branch"):  # which sees the input as it is
        MOptEq(pictures(1), perturbation=0.3)


@pytest.mark.parametrize("scales", [(1, 1, 1), (1, 2, 4), (4, 2, 1)])
def test_frozen_perturbations_are_those_of_the_equilibrium(scales: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    branches = [opteq.Branch(op.Conv2d(8, 12, 3, bound=0.9), nn.Conv2d(4, 12, 3, padding=1), scale) for scale in scales]
    problem = MOptEq(branches, perturbation=0.1)
    x = torch.randn(4, 4, 8, 8)
    with torch.no_grad():
        hidden = problem(x)
        state = opteq.Equilibrium(problem, opteq.Anderson(tol=1e-5)).solve(x).state
        assert (hidden.perturbation_agreement(state) > 0.97).all()
        chain, frozen = hidden.perturbation
        for pull, kept, part in zip(chain._vjps, frozen, state, strict=False):
            value = pull(part)
            clear = value.abs() > 0.1 * value.abs().amax()  # where U'y is not tiny
            assert (torch.sign(value) == kept)[clear].float().mean() > 0.99


def test_perturbation_refuses_a_map_without_adjoint() -> None:
    branches = pictures(1, 1)
    branches[0].U = nn.Sequential(branches[0].U, nn.BatchNorm2d(4))
    with pytest.raises(ValueError, match=r"adjoint of U, and Sequential has none.*batch normalisation"):
        MOptEq(branches, perturbation=0.1)(torch.randn(2, 2, 4, 4))
    # One channel would go with three by broadcasting, which no branch asked for.
    apart = [opteq.Branch(op.Conv2d(2, 3, 3, bound=0.5), nn.Conv2d(c, 3, 3, padding=1)) for c in (1, 3)]
    with pytest.raises(ValueError, match=r"same number of channels; got shapes \[\(2, 1, 4, 4\), \(2, 3, 4, 4\)\]"):
        MOptEq(apart, perturbation=0.1)((torch.randn(2, 1, 4, 4), torch.randn(2, 3, 4, 4)))
    # Without a U the input itself is the injection, and its adjoint the identity.
    plain = MOptEq([opteq.Branch(op.Dense(3, 3, bound=0.7)) for _ in range(2)], perturbation=0.1)
    x = torch.randn(2, 3)
    hidden = plain(x)
    torch.testing.assert_close(hidden.injections[1], x - 0.1 * hidden.perturbation[1][0])


@pytest.mark.parametrize(("seed", "diversity"), [(0, None), (1, 0.05)])
def test_proposition_2(seed: int, diversity: float | None) -> None:
    """For a minimiser and norms of at most 1: a reconstructed perturbation moves the objective or the features."""
    torch.manual_seed(seed)
    W, U = op.Dense(3, 8, bound=0.8), nn.Linear(6, 8)
    U.weight.data /= torch.linalg.matrix_norm(U.weight.data, 2)
    problem: MOptEq | opteq.OptEq = opteq.OptEq(W, U)
    if diversity is not None:
        problem = MOptEq([opteq.Branch(W, U)], diversity=diversity)
        assert problem.certificate().unique
    problem = problem.double()
    solver = opteq.Anderson(tol=1e-12, max_steps=80)
    x = gaussian(60, 6, seed=seed)
    for eps in (0.01, 0.2):
        with torch.no_grad():
            here = opteq.Equilibrium(problem, solver, on_failure="ignore").solve(x)
            delta = reconstructed_perturbation(opteq.Equilibrium(problem, solver, on_failure="ignore"), x, eps)
            there = opteq.Equilibrium(problem, solver, on_failure="ignore").solve(x - delta)
            kept = here.converged & there.converged  # a minimiser is needed
            assert kept.float().mean() > 0.7
            rise = problem(x - delta).objective(there.state) - problem(x).objective(here.state)
            state, (z, moved) = here.state, (here.features, there.features)
            if diversity is not None:
                (state,), (z,), (moved,) = state, z, moved
            distance = (moved - z).norm(dim=1)
            reach = (state @ U.weight.double()).abs().sum(1)
            left = torch.maximum(rise, 6**0.5 * eps * distance)
            assert (left >= (eps * reach - 6 * eps**2) / 2 - 1e-10)[kept].all()


# What is guaranteed


def scaled(gain: float, channels: int, count: int = 3) -> list[opteq.Branch]:
    branches = []
    for _ in range(count):
        W = op.Dense(channels, channels, bound=gain)
        nn.init.orthogonal_(W.weight, gain)
        branches.append(opteq.Branch(W, nn.Linear(4, channels)))
    return branches


def test_certificate_without_diversity() -> None:
    torch.manual_seed(0)
    problem = MOptEq(scaled(0.8, 4)).double()
    certificate = problem.certificate()
    assert certificate.exists is True
    assert certificate.unique is True
    assert certificate.contraction == pytest.approx(0.64, rel=5e-3)
    assert "L zeta^2" in certificate.reasons["contraction"]
    assert problem(gaussian(1, 4)).structure is Structure.POSITIVE
    wide = MOptEq(scaled(1.2, 4)).double()
    assert wide.certificate().exists is None
    assert wide(gaussian(1, 4)).structure is Structure.SYMMETRIC
    assert MOptEq(scaled(1.2, 4), activation="tanh").certificate().exists is True
    assert MOptEq(scaled(1.2, 4), activation="sigmoid").certificate().unique is True  # slopes of at most 1/4


def test_certificate_with_diversity_speaks_of_set_valued_signs() -> None:
    torch.manual_seed(0)
    certificate = MOptEq(scaled(0.7, 4), diversity=0.25).certificate()
    assert certificate.exists is True
    assert certificate.unique is True
    assert certificate.contraction is None
    assert "discontinuous" in certificate.reasons["contraction"]
    assert "set-valued" in certificate.reasons["exists"]
    assert "may have no fixed point" in certificate.reasons["exists"]
    smooth = MOptEq(scaled(0.7, 4), diversity=0.25, smoothing=0.1).certificate()
    assert smooth.exists is True
    assert smooth.contraction is None
    assert "only fixed point" in smooth.reasons["exists"]
    assert "lambda |channel|^2 / tau" in smooth.reasons["contraction"]
    # lambda = 1/C is not enough for norms near 1, whatever the paper says: 0.95^2 (1 + 3/4) = 1.58
    close = MOptEq(scaled(0.95, 4), diversity=0.25).certificate()
    assert close.exists is None
    assert "1.57" in close.reasons["exists"] or "1.58" in close.reasons["exists"]
    bounded = MOptEq(scaled(0.95, 4), diversity=0.25, activation="tanh").certificate()
    assert bounded.exists is True
    assert bounded.unique is None
    # one channel has nothing to differ from
    assert MOptEq(scaled(0.7, 1), diversity=5.0).certificate().contraction == pytest.approx(0.49, rel=5e-3)


def test_expansion_beyond_one_is_real() -> None:
    """At zeta = 0.95, C = 4, lambda = 1/4 the derivative of a step has norm 1.58 where products are negative."""
    corners = torch.eye(4, dtype=DOUBLE) - 0.25
    coupling = Coupling(0.25)
    product = coupling.jacobian_at((corners.view(1, 4, 1, 4),) * 3)
    columns = []
    for unit in torch.eye(48, dtype=DOUBLE):
        parts = tuple(part.view(1, 4, 1, 4) for part in unit.split(16))
        columns.append(torch.cat([part.flatten() for part in product(parts)]))
    norm = 0.95**2 * torch.linalg.matrix_norm(torch.stack(columns), 2)
    assert float(norm) == pytest.approx(1.579, abs=1e-3)


@pytest.mark.parametrize("smoothing", [0.0, 0.05])
def test_the_objective_is_convex_where_the_certificate_says_so(smoothing: float) -> None:
    torch.manual_seed(1)
    C, gain = 4, 0.8
    weight = (gain**-2 - 1) / (C - 1) * 0.99
    problem = MOptEq(scaled(gain, C), diversity=weight, smoothing=smoothing, activation="identity").double()
    assert problem.certificate().unique is True
    beyond = MOptEq(scaled(2.0, C), diversity=weight, smoothing=smoothing, activation="identity").double()
    x = gaussian(200, 4)
    violated = {problem: 0, beyond: 0}
    for model in violated:
        hidden = model(x)
        for seed in range(10):
            a = tuple(gaussian(200, C, seed=seed + 10 * i) for i in range(3))
            b = tuple(gaussian(200, C, seed=seed + 10 * i + 100) for i in range(3))
            middle = tuple((u + v) / 2 for u, v in zip(a, b, strict=True))
            gap = (hidden.objective(a) + hidden.objective(b)) / 2 - hidden.objective(middle)
            violated[model] += int((gap < -1e-10).sum())
    assert violated[problem] == 0
    assert violated[beyond] > 0


@pytest.mark.parametrize(("diversity", "smoothing"), [(0.0, 0.0), (0.05, 0.1)])
def test_lipschitz_bound_holds(diversity: float, smoothing: float) -> None:
    torch.manual_seed(0)
    problem = MOptEq(pictures(1, 2), diversity=diversity, smoothing=smoothing).double()
    bound = problem.certificate().lipschitz
    assert bound is not None
    layer = opteq.Equilibrium(problem, opteq.Anderson(tol=1e-11, max_steps=300))
    a, b = gaussian(30, 2, 4, 4), gaussian(30, 2, 4, 4, seed=1)
    with torch.no_grad():
        for other in (b, a + 0.01 * b):
            pairs = zip(layer(a), layer(other), strict=True)
            moved = sum((u - v).flatten(1).square().sum(1) for u, v in pairs).sqrt()
            assert (moved <= bound * (other - a).flatten(1).norm(dim=1)).all()


def test_unknown_norms_and_channels_are_said_to_be() -> None:
    class Half(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x / 2

    opaque = MOptEq([opteq.Branch(op.Dense(3, 3, bound=0.7), Half())]).certificate()
    assert opaque.lipschitz is None
    assert "Half" in opaque.reasons["lipschitz"]
    nameless = MOptEq([opteq.Branch(op.Identity())], diversity=0.1)
    assert nameless.certificate().exists is None
    assert "channels" in nameless.certificate().reasons["exists"]
    assert not nameless.known_convexity()


@pytest.mark.parametrize(("bound", "method"), [(0.7, "CG"), (None, "MINRES")])
def test_backward_system_is_symmetric(bound: float | None, method: str) -> None:
    problem = MOptEq(vectors(3, bound=bound), diversity=0.05, smoothing=0.3).double()
    x = gaussian(2, 4)
    solution = opteq.Equilibrium(problem, SOLVERS["anderson"]).solve(x)
    sum(part.sum() for part in solution.features).backward()
    assert solution.backward.method == f"adjoint by {method}"
    assert solution.backward.converged.all()


# Errors


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"diversity": -0.1}, "diversity should be at least 0 and finite; got -0.1"),
        ({"perturbation": -1}, "perturbation should be at least 0 and finite; got -1"),
        ({"settle": 9}, "settle=9 has no effect with perturbation=0"),
        ({"smoothing": float("nan")}, "smoothing should be at least 0 and finite; got nan"),
        ({"settle": 0}, "settle should be at least 1; got 0"),
        ({"activation": "rellu"}, "did you mean 'relu'"),
    ],
)
def test_wrong_options(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        MOptEq(vectors(2), **options)


def test_wrong_branches_and_inputs() -> None:
    with pytest.raises(ValueError, match=r"at least one opteq\.Branch; got \[\]"):
        MOptEq([])
    with pytest.raises(TypeError, match=r"branch 1 should be an opteq\.Branch"):
        MOptEq([vectors(1)[0], nn.Linear(2, 2)])
    mixed = [vectors(1, channels=3)[0], vectors(1, channels=4)[0]]
    with pytest.raises(ValueError, match=r"same number of channels.*got \[3, 4\]"):
        MOptEq(mixed)
    with pytest.raises(ValueError, match=r"branch 1 has scale=2.*divide by 2; got an input of shape \(1, 2, 5, 5\)"):
        MOptEq(pictures(1, 2))(torch.randn(1, 2, 5, 5))
    with pytest.raises(ValueError, match="branch 0 has scale=2"):
        MOptEq([opteq.Branch(op.Dense(3, 4), nn.Linear(4, 4), scale=2)])(torch.randn(2, 4))
    hidden = MOptEq(pictures(2, 3))(torch.randn(1, 2, 6, 6))
    with pytest.raises(ValueError, match="integer multiple"):
        hidden.step(hidden.start())
    flat = [opteq.Branch(op.Conv2d(2, 3, 3, bound=0.5), nn.Linear(2, 3)) for _ in range(2)]
    with pytest.raises(ValueError, match=r"expects an input of shape \(batch, 3, height, width\); got \(2, 3\)"):
        opteq.Equilibrium(MOptEq(flat))(torch.randn(2, 2))
    # Operators that do not say how many channels they have are found out when they meet.
    nameless = MOptEq([opteq.Branch(op.Identity(), nn.Linear(4, n)) for n in (3, 5)])
    hidden = nameless(torch.randn(2, 4))
    with pytest.raises(ValueError, match="same number of channels"):
        hidden.step(hidden.start())


def test_a_perturbation_is_reconstructed_for_one_input() -> None:
    branch = opteq.Branch(op.Conv2d(2, 3, 1, bound=0.9), nn.Conv2d(1, 3, 1))
    with pytest.raises(TypeError, match="one input that all branches see; got a tuple"):
        reconstructed_perturbation(opteq.MOptEq([branch]), (torch.ones(1, 1, 2, 2),), 0.1)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["mopteq-193k", "mopteq-0.48m"])
def test_diversity_acts_in_the_named_models(name: str) -> None:
    """The smoothed signs of channel products are of the size of signs, not of zero."""
    torch.manual_seed(0)
    model = opteq.models.create(name).eval()
    with torch.no_grad():
        features = model.equilibrium(model.stem(torch.nn.functional.avg_pool2d(torch.randn(1, 3, 34, 34), 3, 1) * 3))
    coupling = model.equilibrium.problem.coupling
    signs = torch.cat([coupling.signs(matrix).abs().flatten() for matrix in products(features)])
    assert float(signs.mean()) > 0.5
