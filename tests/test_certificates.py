"""Certificates: never exceeded, nearly attained where that can be arranged, and "unknown" always with a reason."""

from __future__ import annotations

import math
import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import opteq
from all_cases import CASES as ALL_CASES
from cases import CASES, Case, combined
from opteq import kernels, penalties, potentials, regularizers
from opteq import operators as op
from opteq.models.restoration.energy import FilterPrior, Restoration
from opteq.models.restoration.noise_levels import NoiseLevels
from opteq.problems.base import Problem
from opteq.states import State, blocks, map_state

FIELDS = ("exists", "unique", "contraction", "lipschitz")
EXACT = opteq.Anderson(tol=1e-13, max_steps=1000)


def norms(state: State) -> Tensor:
    return torch.cat([part.flatten(1) for part in blocks(state)], dim=1).norm(dim=1)


def pairs(count: int, shape: tuple[int, ...], seed: int = 0) -> tuple[Tensor, Tensor]:
    """Pairs of points at many scales and distances."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.logspace(-2, 1.5, count, dtype=torch.float64)[torch.randperm(count, generator=generator)]
    gaps = torch.logspace(-4, 1, count, dtype=torch.float64)[torch.randperm(count, generator=generator)]
    a, b = torch.randn(2, count, *shape, generator=generator, dtype=torch.float64)
    ones = (1,) * len(shape)
    a = sizes.view(-1, *ones) * a
    return a, a + gaps.view(-1, *ones) * b


def step_ratio(problem: Problem, x: Tensor, y: State, other: State) -> Tensor:
    with torch.no_grad():
        hidden = problem(x)
        return norms(map_state(torch.sub, hidden.step(y), hidden.step(other))) / norms(map_state(torch.sub, y, other))


def feature_ratio(problem: Problem, x: Tensor, other: Tensor) -> Tensor:
    with torch.no_grad():
        layer = opteq.Equilibrium(problem, EXACT, on_failure="raise")
        return norms(map_state(torch.sub, layer(x), layer(other))) / norms(x - other)


def dense(activation: str | penalties.Penalty = "relu", norm: float = 0.9, **options: object) -> opteq.OptEq:
    W = op.Dense(5, 6, bound=norm)
    W.weight.data.mul_(3)  # well above the bound, which then decides
    return opteq.OptEq(W, nn.Linear(4, 6), activation, **options)


def deep(activation: str = "relu", **options: object) -> opteq.DeepOptEq:
    layers = [(op.Dense(5, n, bound=0.9), nn.Linear(4, n)) for n in (6, 3)]
    return opteq.DeepOptEq([*layers, (op.Dense(5, 4, bound=0.9), None)], activation=activation, **options)


PROBLEMS: dict[str, Callable[[], Problem]] = {
    "relu": dense,
    "mu": lambda: dense("tanh", norm=1.3, mu=2.0),
    "flat": lambda: dense("sigmoid", norm=1.9),
    "steep": lambda: dense(penalties.ELU(2.0), norm=0.65),
    "learned slope": lambda: dense(penalties.LinearActivation(6, 0.8 * torch.eye(6))),
    "no U": lambda: opteq.OptEq(op.Dense(3, 4, bound=0.9), activation="softplus"),
    "conv": lambda: opteq.OptEq(op.Conv2d(2, 3, 3, bound=0.9), nn.Conv2d(2, 3, 3, padding=1)),
    "ridge": lambda: dense(regularizer=regularizers.Ridge(), gamma=0.5),
    "strong ridge": lambda: dense(norm=0.6, regularizer=regularizers.Ridge(), gamma=3.0),
    "incay": lambda: dense("softplus", norm=0.7, regularizer=regularizers.Incay(), gamma=0.5),
    "huber": lambda: dense(regularizer=regularizers.Envelope(regularizers.L1(), 0.3)),
    "deep": lambda: deep(alpha=(0.3, 1.0, 0.7)),
    "deep tanh mu": lambda: deep("tanh", mu=0.9),
    "deep readout": lambda: deep(readout=nn.Linear(5, 2)),
    "splitting": lambda: opteq.Splitting(dense(), regularizers.L1(), gamma=0.2),
    "affine": lambda: opteq.AffineOptEq(dense("tanh"), torch.eye(5) + 0.3 * torch.randn(5, 5)),
}


@pytest.mark.parametrize("make", PROBLEMS.values(), ids=PROBLEMS)
def test_bounds_are_never_exceeded(make: Callable[[], Problem]) -> None:
    torch.manual_seed(2)
    problem = make().double()
    certificate = problem.certificate()
    shape = (2, 4, 4) if "Conv" in repr(problem) else (4,)
    count = 300
    x, other = pairs(count, shape)
    with torch.no_grad():
        state = problem(x).start()
    assert isinstance(state, Tensor)
    y, moved = pairs(count, tuple(state.shape[1:]), seed=1)
    if certificate.contraction is not None:
        assert float(step_ratio(problem, x, y, moved).max()) <= certificate.contraction * (1 + 1e-9)
    assert certificate.lipschitz is not None
    assert float(feature_ratio(problem, x, other).max()) <= certificate.lipschitz * (1 + 1e-9)
    assert certificate.exists
    assert certificate.unique


# ------------------------------------------------------------------------------------------- how tight the bounds are


def positive(n: int, m: int, norm: float, seed: int = 0) -> Tensor:
    """A matrix of positive entries: with positive data no ReLU switches off, and the layer is linear."""
    W = torch.rand(n, m, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) + 0.2
    return W * norm / torch.linalg.matrix_norm(W, 2)


def operator(W: Tensor) -> op.Dense:
    dense = op.Dense(W.shape[1], W.shape[0]).to(W)
    dense.weight.data.copy_(W)
    return dense


def worst_pair(W: Tensor) -> tuple[Tensor, Tensor]:
    """A positive input, and one moved along the left singular vector that W stretches most (positive as well)."""
    direction = torch.linalg.svd(W)[0][:, 0].abs()
    x = torch.ones(1, W.shape[0], dtype=torch.float64)
    return x, x + 1e-3 * direction


W = positive(6, 4, 0.9)
TIGHT: dict[str, tuple[Callable[[], Problem], float]] = {
    "relu": (lambda: opteq.OptEq(operator(W)), 1.02),
    "mu": (lambda: opteq.OptEq(operator(W), mu=1.5), 1.02),
    "small slopes": (
        lambda: opteq.OptEq(operator(2 * W), activation=penalties.LinearActivation(6, 0.5 * torch.eye(6))),
        1.05,
    ),
    "skip": (lambda: opteq.DeepOptEq([(operator(W), nn.Identity())], alpha=0.4), 1.02),
    "deep": (lambda: opteq.DeepOptEq([(operator(W), nn.Identity())] * 3, alpha=(0.3, 1.0, 0.7)), 1.02),
    "ridge": (lambda: opteq.OptEq(operator(W), regularizer=regularizers.Ridge(), gamma=0.1), 2.0),
    "affine": (lambda: opteq.AffineOptEq(opteq.OptEq(operator(W)), 3 * torch.eye(4, dtype=torch.float64)), 1.02),
}


@pytest.mark.parametrize(("make", "slack"), TIGHT.values(), ids=TIGHT)
def test_bounds_are_nearly_attained(make: Callable[[], Problem], slack: float) -> None:
    problem = make().double()
    certificate = problem.certificate()
    x, other = worst_pair(W)
    assert certificate.lipschitz is not None
    assert 1 <= certificate.lipschitz / float(feature_ratio(problem, x, other)) < slack
    if certificate.contraction is not None:
        with torch.no_grad():
            start = problem(x).start()
        kind = W.shape[0] if isinstance(problem, opteq.OptEq) else W.shape[1]
        left, _, right = torch.linalg.svd(W)
        direction = left[:, 0].abs() if kind == W.shape[0] else right[0].abs()
        y = torch.ones_like(start)
        assert 1 <= certificate.contraction / float(step_ratio(problem, x, y, y + 1e-3 * direction)) < slack


def test_the_bound_for_a_prior_that_expands_is_nearly_attained() -> None:
    """Incay stretches most at zero features, by ``1 + gamma / eps^2``."""
    problem = opteq.OptEq(operator(positive(6, 4, 0.7)), regularizer=regularizers.Incay(), gamma=0.3)
    certificate = problem.certificate()
    direction = torch.linalg.svd(positive(6, 4, 0.7))[0][:, :1].T.abs()
    y, x = 1e-4 * direction, 1e-4 * torch.ones(1, 6, dtype=torch.float64)
    assert certificate.contraction is not None
    assert certificate.lipschitz is not None
    assert 1 <= certificate.contraction / float(step_ratio(problem, x, y, 2 * y)) < 1.02
    assert 1 <= certificate.lipschitz / float(feature_ratio(problem, 1e-4 * direction, 2e-4 * direction)) < 1.05


# ------------------------------------------------------------------------------------------- existence and uniqueness


@pytest.mark.parametrize(
    "make", [lambda: dense("tanh", norm=3.0), lambda: deep("hardtanh", mu=0.1)], ids=["one", "deep"]
)
def test_a_bounded_activation_has_an_equilibrium(make: Callable[[], Problem]) -> None:
    """Brouwer, and found by a solver; that it is unique is unknown, and false here for some inputs or not."""
    torch.manual_seed(0)
    problem = make().double()
    certificate = problem.certificate()
    assert certificate.exists is True
    assert certificate.unique is None
    assert certificate.lipschitz is None
    assert "Brouwer" in certificate.reasons["exists"]
    x = torch.randn(4, 4, dtype=torch.float64)
    with torch.no_grad():
        layer = opteq.Equilibrium(problem, opteq.Picard(tol=1e-9, max_steps=5000), on_failure="raise")
        layer(x)


def test_a_bounded_activation_can_have_several() -> None:
    problem = opteq.OptEq(operator(torch.full((1, 1), 2.0, dtype=torch.float64)), activation="tanh")
    x = torch.zeros(1, 1, dtype=torch.float64)
    layer = opteq.Equilibrium(problem, EXACT, on_failure="raise")
    found = {round(layer(x, start=torch.full_like(x, s)).item(), 6) for s in (-0.5, 0.0, 0.5)}
    assert len(found) == 3
    assert problem.certificate().unique is None


def test_a_convex_prior_keeps_uniqueness_where_steps_expand() -> None:
    """With ``gamma = 6`` a step stretches by 4; phi + gamma R has one minimiser all the same, from every start."""
    torch.manual_seed(0)
    problem = dense(regularizer=regularizers.Ridge(), gamma=6.0).double()
    certificate = problem.certificate()
    assert certificate.contraction is not None
    assert certificate.contraction > 1
    assert certificate.exists
    assert certificate.unique
    assert "strongly convex" in certificate.reasons["unique"]
    assert certificate.lipschitz is not None
    x, other = pairs(100, (4,))
    assert float(feature_ratio(problem, x, other).max()) <= certificate.lipschitz
    layer = opteq.Equilibrium(problem, EXACT, on_failure="raise")
    starts = [3 * torch.rand(100, 6, dtype=torch.float64) for _ in range(3)]
    answers = torch.stack([layer(x, start=start).detach() for start in starts])
    assert float((answers - answers[0]).abs().max()) < 1e-9


class Quartic(regularizers.Regularizer):
    """Convex, with a gradient that has no Lipschitz constant."""

    name, convex, smooth, couples_batch = "quartic", True, True, False

    def value(self, z: Tensor) -> Tensor:
        return z.pow(4).sum(1) / 4


def test_a_convex_prior_of_unbounded_curvature() -> None:
    torch.manual_seed(0)
    problem = dense(norm=0.8, regularizer=Quartic(), gamma=0.1).double()
    certificate = problem.certificate()
    assert certificate.contraction is None
    assert certificate.unique
    assert certificate.lipschitz is not None
    x, other = pairs(100, (4,))
    keep = norms(x) < 3
    assert float(feature_ratio(problem, x[keep], other[keep]).max()) <= certificate.lipschitz


class Concave(regularizers.Regularizer):
    """``-1/2 |z|^2``: what a layer is given is stretched to ``(1 + gamma) z``, however large z is."""

    name, convex, smooth, couples_batch = "concave", False, True, False
    gradient_lipschitz = 1.0

    def value(self, z: Tensor) -> Tensor:
        return -z.square().sum(1) / 2


def concave(alpha: float) -> opteq.DeepOptEq:
    W = operator(torch.ones(1, 1, dtype=torch.float64))
    return opteq.DeepOptEq([(W, nn.Linear(4, 1).double())], alpha, "sigmoid", regularizer=Concave(), gamma=1.0)


def test_a_prior_that_outgrows_the_skip_leaves_no_ball_for_brouwer() -> None:
    """With alpha a half the step is ``sigmoid(...) / 2 + z``, which is above z for every z."""
    z = torch.linspace(-8, 8, 61, dtype=torch.float64)[:, None]
    hidden = concave(0.5)(torch.zeros(61, 4, dtype=torch.float64))
    assert (hidden.step(z) > z).all()
    assert concave(0.5).certificate().exists is None
    assert concave(0.6).certificate().exists is True


UNKNOWN: dict[str, tuple[Callable[[], Problem], dict[str, str]]] = {
    "expanding": (
        lambda: opteq.OptEq(operator(torch.full((1, 1), 1.5, dtype=torch.float64)), nn.Linear(4, 1)),
        {
            "exists": "bounded only by 2.25, not below 1, and the activation is unbounded",
            "unique": "bounded only by 2.25, not below 1",
            "lipschitz": "needs L |W|^2 / mu below 1; it is bounded by 2.25",
        },
    ),
    "U": (
        lambda: opteq.OptEq(op.Dense(5, 6, bound=0.9), nn.Sequential(nn.Linear(4, 6), nn.ReLU())),
        {"lipschitz": "the norm of U, a Sequential, is not known"},
    ),
    "decorrelation": (
        lambda: dense("sigmoid", regularizer=regularizers.Decorrelation()),
        {
            "exists": "is unknown, and the gradient of Decorrelation is not known to be continuous",
            "unique": "the Lipschitz constant of a step is unknown",
            "contraction": "the gradient of Decorrelation has no known Lipschitz constant",
            "lipschitz": "the gradient of Decorrelation has no known Lipschitz constant",
        },
    ),
    "incay": (
        lambda: dense(regularizer=regularizers.Incay(), gamma=2.0),
        {"exists": "unbounded", "unique": "not below 1", "lipschitz": "needs L |W|^2 / mu below 0.3333"},
    ),
    "deep expanding": (
        lambda: deep(mu=0.5),
        {"exists": "the activation is unbounded", "unique": "not below 1", "lipschitz": "needs a contraction"},
    ),
    "deep concave": (
        lambda: concave(0.5),
        {"exists": "Concave may outgrow", "unique": "not below 1", "lipschitz": "needs a contraction"},
    ),
    "deep U": (
        lambda: opteq.DeepOptEq([(op.Dense(5, 6, bound=0.9), nn.Sequential(nn.Linear(4, 6), nn.ReLU()))]),
        {"lipschitz": "the norm of U in layer 0, a "},
    ),
    "deep readout": (lambda: deep(readout=nn.ReLU()), {"lipschitz": "the norm of the read-out is not known"}),
    "affine": (
        lambda: opteq.AffineOptEq(dense(), torch.eye(5)),
        {"contraction": "a step contracts in the norm |matrix u|, not in |u|"},
    ),
    "splitting": (
        lambda: opteq.Splitting(dense(norm=1.5), regularizers.L1()),
        dict.fromkeys(FIELDS, "T is not known to contract"),
    ),
}


@pytest.mark.parametrize(("make", "reasons"), UNKNOWN.values(), ids=UNKNOWN)
def test_what_is_unknown_and_why(make: Callable[[], Problem], reasons: dict[str, str]) -> None:
    certificate = make().certificate()
    assert {name for name in FIELDS if getattr(certificate, name) is None} == set(reasons)
    for name, reason in reasons.items():
        assert reason in certificate.reasons[name]


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_every_answer_has_a_reason(case: Case) -> None:
    certificate = case.problem().certificate()
    assert set(certificate.reasons) == set(FIELDS)
    assert all(len(reason) > 5 for reason in certificate.reasons.values())
    assert "unknown" in str(certificate) or None not in [getattr(certificate, name) for name in FIELDS]


GREEK = "alpha|beta|epsilon|gamma|lambda|mu|phi|psi|rho|sigma|tau|zeta"
EXPLAINED_IN_PLACE = {"a", "c", "f", "r", "t", "u", "z"}  # "c = U x + b", "a map f(z, x)"; the first is an article


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_symbols_in_reasons_are_defined(case: Case) -> None:
    certificate = case.problem().certificate()
    reasons = " ".join(certificate.reasons.values()).replace('gamma="auto"', "")
    used = set(re.findall(rf"(?<!')\b(?:[A-Za-z]|{GREEK})\b", reasons))
    assert used - EXPLAINED_IN_PLACE == set(certificate.symbols())


def test_it_reads_well() -> None:
    certificate = opteq.OptEq(operator(torch.full((1, 1), 0.5, dtype=torch.float64)), mu=0.5).certificate()
    lines = str(certificate).splitlines()
    assert lines == [
        "exists       True     a contraction of a complete space has exactly one fixed point (Banach)",
        "unique       True     a contraction of a complete space has exactly one fixed point (Banach)",
        "contraction  0.5      L |W|^2 / mu with |W| <= 0.5 and L = 1, the activation's slope",
        "lipschitz    2        |U| L |W| / mu / (1 - L |W|^2 / mu), since sigma is a convex function's gradient",
        "where L: the largest slope of the activation; W: the linear map of the features; U: the map of the input; "
        "mu: the number that divides the coupling; sigma: the activation",
    ]
    unknown = opteq.OptEq(operator(torch.full((1, 1), 2.0, dtype=torch.float64))).certificate()
    assert str(unknown).splitlines()[1] == (
        "unique       unknown  the Lipschitz constant of a step is bounded only by 4, not below 1"
    )
    with pytest.raises(AttributeError):
        certificate.exists = False  # frozen


def test_it_follows_the_weights() -> None:
    problem = opteq.OptEq(operator(torch.full((1, 1), 0.5, dtype=torch.float64)))
    before = problem.certificate()
    problem.W.weight.data.mul_(3)
    after = problem.certificate()
    assert before.unique
    assert after.unique is None
    assert after.contraction == pytest.approx(2.25, rel=0.02)


@pytest.mark.parametrize("scales", [(4, 4), (1, 4)], ids=str)
@pytest.mark.parametrize("kind", ["mopteq", "none", "sum", "conv", "parallel"])
def test_lipschitz_bound_holds_for_a_tuple_with_an_input_each(kind: str, scales: tuple[int, ...]) -> None:
    """Where branches have inputs of their own nothing is averaged, and averaging made the bound smaller."""
    torch.manual_seed(0)
    pairs = [(opteq.operators.Conv2d(2, 3, 1, bound=0.5), nn.Conv2d(2, 3, 1)) for _ in scales]
    branches = [opteq.Branch(W, U, scale) for (W, U), scale in zip(pairs, scales, strict=True)]
    if kind == "mopteq":
        problem: opteq.Problem = opteq.MOptEq(branches, activation="identity")
    elif kind == "parallel":
        problem = opteq.Parallel([opteq.OptEq(W, U, "identity") for W, U in pairs], scales)
    else:
        problem = opteq.POptEq(branches, "identity", kind)
    layer = opteq.Equilibrium(problem.double(), opteq.Anderson(tol=1e-12, max_steps=300))
    shapes = [(1, 2, 4 // scale, 4 // scale) for scale in scales]
    sizes = [math.prod(shape) for shape in shapes]

    def features(flat: Tensor) -> Tensor:
        given = tuple(part.reshape(shape) for part, shape in zip(flat.split(sizes), shapes, strict=True))
        return torch.cat([part.flatten() for part in blocks(layer(given))])

    jacobian = torch.autograd.functional.jacobian(features, torch.randn(sum(sizes), dtype=torch.float64))
    bound = problem.certificate().lipschitz
    assert bound is not None
    assert float(torch.linalg.matrix_norm(jacobian, 2)) <= bound


@pytest.mark.parametrize(("case", "bad"), combined(ALL_CASES, {str(bad): bad for bad in (math.nan, math.inf, 1e200)}))
def test_weights_that_are_not_finite_have_no_certificate(case: Case, bad: float) -> None:
    """A NaN compares as if it were small: the second of two branches with it was certified."""
    problem = case.problem()
    for name, weight in problem.named_parameters():
        before = weight.detach().clone()
        weight.data.view(-1)[-1] = bad
        certificate = problem.certificate()
        weight.data.copy_(before)
        known = {field: getattr(certificate, field) for field in FIELDS}
        assert all(value is None or math.isfinite(value) for value in known.values())
        assert set(certificate.reasons) == set(FIELDS)
        if bad != 1e200:
            assert set(known.values()) == {None}
            assert f"{name} has entries that are not finite" in certificate.reasons["exists"]


class Steep(opteq.Objective):
    """A constant times squares, whose Hessian overflows where the constant does not."""

    def __init__(self, weight: float) -> None:
        super().__init__()
        self.weight = weight

    def terms(self, y: Tensor, x: Tensor) -> dict[str, Tensor]:
        return {"data": self.weight * (10 * y - x).square().sum(1)}


def overflowing_restoration() -> Problem:
    prior = FilterPrior(op.ConvChain((1, 2, 3), 3), potentials.Student(), NoiseLevels(3), margin=0.1)
    for weight in prior.filters.weights:
        weight.data.mul_(1e10)
    return Restoration(prior, sigma=0.1)


def overflowing_branches() -> list[opteq.Branch]:
    chain = op.ConvChain((2, 3, 3), 3)
    chain.weights[0].data.fill_(3e38)  # the mean over its entries is infinite
    return [opteq.Branch(W, nn.Conv2d(2, 3, 1)) for W in (op.Conv2d(2, 3, 3), chain)]


@pytest.mark.parametrize(
    "make",
    [
        lambda: Steep(1e308),
        lambda: Steep(math.inf),
        lambda: Steep(math.nan),
        overflowing_restoration,
        lambda: opteq.MOptEq(overflowing_branches()),
        lambda: opteq.Inhibited(opteq.MOptEq(overflowing_branches()), [op.Conv2d(2, 3, 3) for _ in range(2)]),
        lambda: opteq.OptEq(op.Dense(2, 2), regularizer=regularizers.Incay(1e-200)),
    ],
    ids=["product", "infinite", "nan", "restoration", "mopteq", "inhibited", "prior"],
)
def test_nothing_is_certified_where_bounds_overflow(make: Callable[[], Problem]) -> None:
    """A NaN compares as if it were small, and an infinite bound from below as if it were a proof."""
    certificate = make().certificate()
    assert {getattr(certificate, field) for field in FIELDS} == {None}
    assert set(certificate.reasons) == set(FIELDS)


class JumpingStep(opteq.HiddenProblem):
    penalty = "tanh"

    def smooth(self, y: Tensor, x: Tensor) -> Tensor:
        return 5 * (y - 0.1 - x).abs().sum(1)


class JumpingSimilarity(kernels.Similarity):
    def value(self, y: Tensor) -> Tensor:
        return -5 * (y - 0.1).abs().sum(1)


class JumpingKernel(kernels.Kernel):
    growth = 0.0

    def bind(self, W: op.LinearMap, c: Tensor) -> kernels.Similarity:
        return JumpingSimilarity(W, c)


@pytest.mark.parametrize(
    "make", [JumpingStep, lambda: opteq.GEQ(op.Dense(1, 1), kernel=JumpingKernel(), activation="tanh")]
)
def test_a_step_that_jumps_has_no_equilibrium_by_brouwer(make: Callable[[], Problem]) -> None:
    problem, y = make(), torch.linspace(-1, 1, 2001)[:, None]
    assert (problem(torch.zeros_like(y)).step(y) - y).abs().min() > 0.8
    assert problem.certificate().exists is None


class Sparse(opteq.Objective):
    """A known map of few entries."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("map", torch.eye(4).to_sparse())

    def terms(self, y: Tensor, x: Tensor) -> dict[str, Tensor]:
        return {"data": (torch.sparse.mm(self.map, y.T).T - x).square().sum(1)}


def test_sparse_weights_are_unknown() -> None:
    certificate = Sparse().certificate()
    assert (certificate.exists, certificate.lipschitz) == (None, None)
    assert "nothing is known about terms" in certificate.reasons["exists"]
