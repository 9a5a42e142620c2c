"""GEQ: golden values, an independent writing, damping beyond contraction, certificates, gradients, attention."""

from __future__ import annotations

import copy
import io
import math
import pickle
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

import opteq
from cases_geq import MORE_CASES
from opteq import kernels
from opteq import operators as op
from opteq.analysis.attention import attention_map, patch_weights
from opteq.kernels.gaussian import DIP
from opteq.models.blocks.fusion import AverageBranches
from opteq.operators import module_norm
from opteq.problems.branches.parallel import Parallel
from opteq.problems.geq import GEQ
from opteq.problems.hidden import Structure
from opteq.solvers import Status
from oracles import dense_jacobian, difference, gradients, probe_loss, unrolled_features

EXACT = opteq.Anderson(tol=1e-13, max_steps=500)
LIMIT = 1 / DIP  # 2.2408: squared norms below it make the objective strongly convex
SINGLE = [case for case in MORE_CASES if case.name != "geq-parallel"]
ids = [case.name for case in SINGLE]


def dense_geq(weight: list[list[float]], gamma: float) -> GEQ:
    """GEQ with a given matrix W from state to output, the input taken as it is."""
    matrix = torch.tensor(weight, dtype=torch.float64)
    W = op.Dense(matrix.shape[1], matrix.shape[0]).double()
    W.weight.data.copy_(matrix)
    return GEQ(W, kernel=kernels.Gaussian(gamma))


def random_geq(square: float, seed: int = 0, kernel: kernels.Kernel | None = None, activation: str = "relu") -> GEQ:
    """Eight inputs, twelve states, ten outputs; ``|W|^2`` as given, declared as a bound."""
    torch.manual_seed(seed)
    W = op.Dense(12, 10, bound=math.sqrt(square))
    W.weight.data.mul_(2)
    return GEQ(W, nn.Linear(8, 10), kernel or kernels.Gaussian(0.3), activation).double()


# Values


@pytest.mark.parametrize(
    ("weight", "c", "gamma", "state", "objective"),
    [
        ([[0.5]], [1.0], 0.5, [0.296318837866], -0.651811875703),
        ([[0.6, 0.2], [-0.3, 0.5]], [1.0, -0.5], 0.3, [0.448630574262, 0.0], -1.263524157544),
    ],
)
@pytest.mark.parametrize("solver", [opteq.Picard(tol=1e-14, max_steps=500), EXACT], ids=["picard", "anderson"])
def test_golden_values(weight, c, gamma: float, state, objective: float, solver: opteq.solvers.Solver) -> None:
    problem = dense_geq(weight, gamma)
    x = torch.tensor([c], dtype=torch.float64)
    with torch.no_grad():
        solution = opteq.Equilibrium(problem, solver, on_failure="raise").solve(x)
        torch.testing.assert_close(solution.state[0], torch.tensor(state, dtype=torch.float64), rtol=0, atol=1e-12)
        assert problem(x).objective(solution.state).item() == pytest.approx(objective, abs=1e-12)
        assert torch.equal(solution.features, solution.state)


def test_k_steps_as_printed_take_no_damping_and_others_the_one_with_which_they_converge() -> None:
    problem = random_geq(2.0)
    x, gamma = torch.randn(5, 8, dtype=torch.float64), 0.3
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        W, c = problem.W.prepare().weight, problem.U(x)
        for damping in (1, None):
            share = 1.0 if damping else 2 / (2 + (1 - 2 * math.exp(-1.5)) * 2.0)
            y = torch.zeros(5, 12, dtype=torch.float64)
            for _ in range(7):
                q = c - y @ W.T
                e = torch.exp(-gamma * q.square().sum(1, keepdim=True))
                y = (1 - share) * y + share * (e * q @ W).clamp_min(0)
            solver = opteq.Picard(tol=0, max_steps=7, damping=damping)
            solution = opteq.Equilibrium(problem, solver).solve(x)
            torch.testing.assert_close(solution.state, y, rtol=0, atol=1e-12)
            assert solution.steps.tolist() == [7] * 5
            assert set(solution.status) == {Status.FIXED_STEPS}


def test_golden_distance() -> None:
    problem = dense_geq([[0.6, 0.2], [-0.3, 0.5]], 0.3)
    x = torch.tensor([[1.0, -0.5]], dtype=torch.float64)
    with torch.no_grad():
        r = x - problem.W(opteq.Equilibrium(problem, EXACT)(x))
    assert r.square().sum().item() == pytest.approx(0.667625365080, abs=1e-12)


class Written(opteq.HiddenProblem):
    """The same problems from their objective alone: everything by autograd, patches by ``unfold``."""

    def __init__(self, problem: GEQ, penalty: str) -> None:
        super().__init__()
        self.W, self.U, self.kernel = problem.W, problem.U, problem.kernel
        self.penalty = penalty
        self.like: Tensor | None = None

    def start(self, x: Tensor) -> Tensor:
        assert self.like is not None
        return self.like

    def smooth(self, y: Tensor, x: Tensor) -> Tensor:
        c, image, kernel = self.U(x), self.W(y), self.kernel
        if not isinstance(kernel, kernels.Gaussian):
            s = (c * y).flatten(1).sum(1)
            t = {kernels.Linear: lambda s: s, kernels.Polynomial: lambda s: s**2, kernels.Sigmoid: torch.tanh}
            return -image.flatten(1).square().sum(1) / 2 - t[type(kernel)](s)
        r = c - image
        if kernel.patches is None:
            rows = r.flatten(1)[:, None]
        else:
            split, p = kernel.patches.split, kernel.patches.patch
            groups = [nn.functional.unfold(r[:, i : i + split], p, stride=p).mT for i in range(0, r.shape[1], split)]
            rows = torch.cat(groups, dim=1)
        if kernel.projection is not None:
            rows = kernel.projection(rows)
        return -(torch.exp(-kernel.gamma * rows.square().sum(-1)) / (2 * kernel.gamma)).sum(1)


@pytest.mark.parametrize("case", SINGLE, ids=ids)
def test_agrees_with_an_independent_writing(case) -> None:
    problem, x = case.problem(), case.input()
    hidden = problem(x)
    written = Written(problem, problem.penalty.name)
    written.like = hidden.start()
    other = written(x)
    y = hidden.project(torch.randn_like(hidden.start()))
    torch.testing.assert_close(hidden.step(y), other.step(y), rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(hidden.objective(y), other.objective(y), rtol=1e-11, atol=1e-12)
    found = opteq.Equilibrium(problem, EXACT, on_failure="raise")(x)
    expected = opteq.Equilibrium(written, EXACT, on_failure="raise")(x)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-10)


def test_linear_kernel_is_opteq_for_its_activations() -> None:
    torch.manual_seed(0)
    W, U = op.Dense(5, 4, bound=0.8).double(), nn.Linear(3, 4).double()
    x = torch.randn(6, 3, dtype=torch.float64)
    state = opteq.Equilibrium(opteq.OptEq(W, U), EXACT).solve(x).state

    class Adjoint(op.Operator):
        def __init__(self) -> None:
            super().__init__()
            self.inner = W

        def prepare(self) -> op.LinearMap:
            linear = self.inner.prepare()

            class Map(op.LinearMap):
                __call__ = staticmethod(linear.adjoint)
                adjoint = staticmethod(linear.__call__)

            return Map()

        def norm(self) -> Tensor:
            return self.inner.norm()

    found = opteq.Equilibrium(GEQ(Adjoint(), U, kernels.Linear()), EXACT)(x)
    torch.testing.assert_close(found, state, rtol=1e-9, atol=1e-10)


# Beyond contraction


# The activation does not enter the kernel: each of both occurs.
@pytest.mark.parametrize(("gamma", "activation"), [(0.05, "relu"), (2.0, "tanh"), ("auto", "elu")])
def test_default_solvers_reach_the_equilibrium_up_to_the_edge_of_convexity(gamma: float | str, activation: str) -> None:
    """At ``|W|^2 = 2.1`` plain iteration cycles on some of these; the damping from the bound makes it converge."""
    undamped = opteq.Picard(tol=1e-9, max_steps=300, damping=1.0)
    failures = 0
    for seed in range(2):
        problem = random_geq(2.1, seed, kernels.Gaussian(gamma), activation)
        x = 3 * torch.randn(32, 8, dtype=torch.float64)
        with torch.no_grad():
            states = [
                opteq.Equilibrium(problem, solver, on_failure="raise").solve(x).state
                for solver in (
                    opteq.Picard(tol=1e-9, max_steps=3000),
                    opteq.Anderson(tol=1e-9),
                    opteq.Broyden(tol=1e-9),
                )
            ]
            plain = opteq.Equilibrium(problem, undamped, on_failure="ignore").solve(x)
        failures += int((~plain.converged).sum())
        for state in states[1:]:
            torch.testing.assert_close(state, states[0], rtol=1e-6, atol=1e-7)
    if gamma == 0.05:
        assert failures > 0  # or this test would show nothing


def test_patches_too() -> None:
    torch.manual_seed(0)
    W = op.Conv2d(3, 4, 3, bound=1.2)
    W.weight.data.mul_(3)
    kernel = kernels.Gaussian(0.05, patch=2, split=2, hidden=6, bound=math.sqrt(2.1) / 1.2)
    kernel.projection.weight.data.mul_(3)
    problem = GEQ(W, nn.Conv2d(2, 4, 3, padding=1), kernel).double()
    x = 2 * torch.randn(16, 2, 6, 6, dtype=torch.float64)
    assert problem(x).damping == pytest.approx(2 / (2 + 2.1 * (1 - DIP)))
    with torch.no_grad():
        a = opteq.Equilibrium(problem, opteq.Picard(tol=1e-9, max_steps=3000), on_failure="raise")(x)
        b = opteq.Equilibrium(problem, opteq.Anderson(tol=1e-9), on_failure="raise")(x)
    torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


# Between both ends there is nothing new.
@pytest.mark.parametrize("square", [3.0, pytest.param(8.0, marks=pytest.mark.slow), 30.0])
def test_damping_finds_an_equilibrium_where_nothing_is_convex(square: float) -> None:
    problem = random_geq(square)
    x = 3 * torch.randn(32, 8, dtype=torch.float64)
    with torch.no_grad():
        hidden = problem(x)
        assert hidden.damping == pytest.approx(1 / (1 + square))
        # Descent can be slow past flat places, so that the tolerance is a loose one.
        for solver in (opteq.Picard(tol=1e-3, max_steps=2000), opteq.Anderson(tol=1e-3, max_steps=2000)):
            state = opteq.Equilibrium(problem, solver, on_failure="raise").solve(x).state
            torch.testing.assert_close(hidden.step(state), state, rtol=0, atol=10 * solver.tol)


@pytest.mark.parametrize("activation", ["relu", "tanh", "sigmoid", "elu", "softplus"])
@pytest.mark.parametrize("square", [0.5, 2.1, 6.0])
def test_damped_steps_decrease_the_objective_by_what_is_promised(square: float, activation: str) -> None:
    activation = opteq.penalties.ELU(alpha=1.5) if activation == "elu" else activation
    for seed in range(5):
        problem = random_geq(square, seed, activation=activation)
        x = 3 * torch.randn(200, 8, dtype=torch.float64)
        with torch.no_grad():
            hidden = problem(x)
            y = hidden.project(2 * torch.randn(200, 12, dtype=torch.float64))
            image, merit = hidden.step_and_merit(y)
            torch.testing.assert_close(image, hidden.step(y))
            torch.testing.assert_close(merit, hidden.objective(y))
            t, slope = hidden.damping, problem.penalty.lipschitz
            after = hidden.objective(y + t * (image - y))
            promised = t / 2 * (2 / slope - t * (1 / slope + square)) * (image - y).square().sum(1)
            assert (promised >= 0).all()
            assert (after <= merit - promised + 1e-9).all()


def test_damping_and_structure_follow_the_declared_bound() -> None:
    x = torch.zeros(1, 8, dtype=torch.float64)
    for square in (0.5, 1.5, 2.2):
        hidden = random_geq(square)(x)
        assert hidden.damping == pytest.approx(2 / (2 + square * (1 - DIP)))
        assert hidden.structure is Structure.POSITIVE
    assert random_geq(2.3)(x).structure is Structure.SYMMETRIC
    # A smaller slope of the activation leaves more room: sigmoid has slopes up to a quarter.
    assert random_geq(8.0, activation="sigmoid")(x).structure is Structure.POSITIVE
    linear = GEQ(op.Dense(3, 4, bound=0.9), None, kernels.Linear())
    assert linear(torch.zeros(1, 3)).structure is Structure.POSITIVE
    assert linear(torch.zeros(1, 3)).damping == 1.0
    wide = GEQ(op.Dense(3, 4, bound=1.1), None, kernels.Linear())
    assert wide(torch.zeros(1, 3)).structure is Structure.SYMMETRIC


def test_the_sigmoid_kernel_is_damped_sample_by_sample() -> None:
    """Its curvature grows with ``|c|^2``: large inputs make plain iteration jump, and damping finds them all."""
    torch.manual_seed(0)
    problem = GEQ(op.Dense(5, 6, bound=0.8), nn.Linear(4, 5), kernels.Sigmoid(), "relu").double()
    x = torch.randn(50, 4, dtype=torch.float64) * 10 ** torch.linspace(-2, 0.6, 50, dtype=torch.float64)[:, None]
    with torch.no_grad():
        hidden = problem(x)
        c = problem.U(x)
        spread = 4 / math.sqrt(27) * c.square().sum(1)
        best, safe = 2 / (2 - 0.64), 1 / (1 + spread)
        expected = torch.where(0.64 + spread < 1, torch.full_like(safe, best), safe).clamp(max=1)
        torch.testing.assert_close(hidden.damping, expected)
        y = torch.rand(50, 5, dtype=torch.float64)
        after = hidden.objective(y + hidden.damping[:, None] * (hidden.step(y) - y))
        assert (after <= hidden.objective(y) + 1e-10).all()
        plain = opteq.Equilibrium(problem, opteq.Picard(max_steps=500, damping=1.0), on_failure="ignore").solve(x)
        assert not plain.converged.all()
        for solver in (opteq.Picard(tol=1e-6, max_steps=20_000), opteq.Anderson(tol=1e-6, max_steps=500)):
            assert opteq.Equilibrium(problem, solver, on_failure="ignore").solve(x).converged.all()


def test_without_a_bound_the_norm_is_computed() -> None:
    problem = random_geq(1.0)
    problem.W.bound = None
    with torch.no_grad():
        problem.W.weight.mul_(math.sqrt(1.7) / torch.linalg.matrix_norm(problem.W.weight, 2))
    hidden = problem(torch.zeros(1, 8, dtype=torch.float64))
    assert hidden.damping == pytest.approx(2 / (2 + 1.7 * (1 - DIP)), rel=2e-3)
    assert hidden.structure is Structure.POSITIVE


# Certificates


def test_gaussian_certificate() -> None:
    small, middle, large = (random_geq(square).certificate() for square in (0.81, 2.1, 2.5))
    assert small.exists is small.unique is True
    assert 0.80 < small.contraction < 0.811
    assert middle.exists is middle.unique is True
    assert middle.contraction > 2
    assert "strongly convex" in middle.reasons["unique"]
    assert middle.lipschitz is not None
    assert large.exists is True  # the kernel is bounded, so the objective has a minimiser
    assert large.unique is large.lipschitz is None
    assert "2.2408" in large.reasons["lipschitz"]


def test_certificate_counts_projection_and_slope() -> None:
    kernel = kernels.Gaussian(0.3, 2, 2, 6, bound=0.5)
    problem = GEQ(op.Conv2d(3, 4, 3, bound=0.9), nn.Conv2d(2, 4, 3, padding=1), kernel, "sigmoid").double()
    certificate = problem.certificate()
    norm = float(problem.W.norm()) * float(kernel.projection.norm())
    assert certificate.contraction == pytest.approx(0.25 * norm**2)
    assert GEQ(op.Dense(3, 4, bound=0.9), nn.Sequential(nn.Linear(2, 4), nn.ReLU())).certificate().lipschitz is None


def test_inner_product_certificates() -> None:
    def certificate(kernel: kernels.Kernel, activation: str = "relu", bound: float = 0.9) -> opteq.Certificate:
        return GEQ(op.Dense(3, 4, bound=bound), nn.Linear(2, 3), kernel, activation).double().certificate()

    linear = certificate(kernels.Linear())
    assert linear.exists is linear.unique is True
    assert linear.contraction == pytest.approx((0.98 * 0.9) ** 2, rel=3e-3)  # operators begin just within their bound
    assert certificate(kernels.Linear(), bound=1.2).exists is None
    polynomial = certificate(kernels.Polynomial(3))
    assert polynomial.exists is polynomial.unique is polynomial.contraction is polynomial.lipschitz is None
    assert "may have no minimiser" in polynomial.reasons["exists"]
    assert certificate(kernels.Polynomial(3), "tanh").exists is True
    sigmoid = certificate(kernels.Sigmoid())
    assert sigmoid.exists is True
    assert sigmoid.unique is None
    assert "|c|^2" in sigmoid.reasons["unique"]
    unbounded = certificate(kernels.Sigmoid(), bound=1.2)
    assert unbounded.exists is None
    assert "may have none" in unbounded.reasons["exists"]


class Exponential(kernels.InnerProduct):
    """A kernel of one's own that outgrows ``1/2 |y|^2``, and declares nothing."""

    def value(self, t: Tensor) -> Tensor:
        return t.exp()

    def derivative(self, t: Tensor) -> Tensor:
        return t.exp()

    def second(self, t: Tensor) -> Tensor:
        return t.exp()


def test_nothing_is_certified_of_a_kernel_that_declares_nothing() -> None:
    problem = GEQ(op.Dense(1, 1, bound=0.5), None, Exponential()).double()
    ray = torch.linspace(0, 20, 5, dtype=torch.float64)[:, None]
    objective = problem(torch.ones_like(ray)).objective(ray)
    assert objective[-1] < -1e8  # unbounded below: there is no minimiser
    assert problem.certificate().exists is None
    assert GEQ(op.Dense(1, 1, bound=0.5), None, Exponential(), "tanh").certificate().exists is True


def test_automatic_gamma_has_a_constant_for_one_patch_only() -> None:
    assert random_geq(0.8, kernel=kernels.Gaussian()).certificate().lipschitz is not None
    patches = GEQ(op.Conv2d(3, 4, 3, bound=0.9), None, kernels.Gaussian(patch=2, split=2)).certificate()
    assert patches.lipschitz is None
    assert 'gamma="auto" is itself a function of the input' in patches.reasons["lipschitz"]
    assert patches.unique is True


def pairs(near: float, count: int, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    a = 2 * torch.randn(count, *shape, dtype=torch.float64)
    return a, a + near * torch.randn(count, *shape, dtype=torch.float64)


def patch_geq(seed: int = 0) -> GEQ:
    torch.manual_seed(seed)
    kernel = kernels.Gaussian(0.4, patch=2, split=2, hidden=6)
    return GEQ(op.Conv2d(3, 4, 3, bound=0.95), nn.Conv2d(2, 4, 3, padding=1), kernel).double()


PROBLEMS: list[tuple[Callable[[int], GEQ], tuple[int, ...]]] = [
    (lambda seed: random_geq(0.9, seed), (8,)),
    (lambda seed: random_geq(2.1, seed, kernels.Gaussian(0.05), "tanh"), (8,)),
    (lambda seed: random_geq(1.5, seed, kernels.Gaussian()), (8,)),
    (patch_geq, (2, 4, 4)),
]


@pytest.mark.parametrize("near", [1e-3, 3.0])
@pytest.mark.parametrize("which", range(len(PROBLEMS)), ids=["whole", "wide", "auto", "patches"])
def test_certified_constants_are_never_exceeded(which: int, near: float) -> None:
    build, shape = PROBLEMS[which]
    problem = build(int(near > 1))  # another one for far pairs
    certificate = problem.certificate()
    a, b = pairs(near, 300, shape)
    with torch.no_grad():
        hidden = problem(a)
        y = 2 * torch.randn_like(hidden.start())
        z = y + near * torch.randn_like(y)
        moved = (hidden.step(y) - hidden.step(z)).flatten(1).norm(dim=1)
        assert (moved <= certificate.contraction * (y - z).flatten(1).norm(dim=1) * (1 + 1e-9)).all()
        layer = opteq.Equilibrium(problem, opteq.Anderson(tol=1e-11, max_steps=500), on_failure="raise")
        apart = (layer(a) - layer(b)).flatten(1).norm(dim=1)
        if certificate.lipschitz is not None:
            assert (apart <= certificate.lipschitz * (a - b).flatten(1).norm(dim=1) * (1 + 1e-6)).all()


@pytest.mark.parametrize("square", [0.25, 0.9, 2.1])
def test_certified_constants_are_within_a_factor_two_of_the_worst_case(square: float) -> None:
    """One unit, searched over the input: the worst step is at ``r = 0``, the worst slope near ``gamma r^2 = 3/2``."""
    gamma = 0.3
    problem = dense_geq([[math.sqrt(square)]], gamma)
    certificate = problem.certificate()
    x = torch.linspace(0.0, 8.0, 1001, dtype=torch.float64)[:, None]
    with torch.no_grad():
        layer = opteq.Equilibrium(problem, opteq.Anderson(tol=1e-13, max_steps=500), on_failure="ignore")
        state = layer(x)
        slopes = (state[1:] - state[:-1]).abs() / (x[1:] - x[:-1])
        y = torch.linspace(0.0, 8.0, 401, dtype=torch.float64)[:, None]
        hidden = problem(x[:1] + 2.0)
        jacobian = torch.stack([hidden.negative_hessian_at(one[None])(torch.ones(1, 1).double()) for one in y]).abs()
    assert certificate.lipschitz / 2 <= slopes.max() <= certificate.lipschitz * (1 + 1e-6)
    assert certificate.contraction / 2 <= jacobian.max() <= certificate.contraction * (1 + 1e-9)


# Gradients


@pytest.mark.parametrize("square", [0.8, 2.1])
def test_gradients_of_projection_and_gamma_by_finite_differences(square: float) -> None:
    torch.manual_seed(3)
    kernel = kernels.Gaussian(0.4, patch=2, split=2, hidden=3, learn_gamma=True, bound=1.2)
    problem = GEQ(op.Conv2d(2, 2, (1, 3), bound=math.sqrt(square) / 1.2), nn.Conv2d(1, 2, 1), kernel, "tanh").double()
    for operator in (problem.W, kernel.projection):
        operator.weight.data.mul_(1.3)  # off the kink of min(1, bound / norm)
    layer = opteq.Equilibrium(problem, EXACT)
    x = torch.randn(2, 1, 2, 4, dtype=torch.float64, requires_grad=True)
    weights = dict(layer.named_parameters())
    assert {"problem.kernel.log_gamma", "problem.kernel.projection.weight"} <= set(weights)

    def loss(x: Tensor, *values: Tensor) -> Tensor:
        return probe_loss(functional_call(layer, dict(zip(weights, values, strict=True)), (x,)))

    values = [w.detach().clone().requires_grad_() for w in weights.values()]
    assert torch.autograd.gradcheck(loss, (x, *values), atol=1e-6, rtol=1e-5, fast_mode=True)
    solution = layer.solve(x)
    probe_loss(solution.features).backward()
    assert solution.backward.method == "adjoint by CG"
    assert solution.backward.converged.all()


def test_phantom_of_five_steps_against_the_exact_gradient_by_conjugate_gradients() -> None:
    """The paper's gradient is the series it claims, and close; conjugate gradients give the exact one."""
    problem = patch_geq()
    x = torch.randn(2, 2, 4, 4, dtype=torch.float64)
    state = opteq.Equilibrium(problem, EXACT).solve(x).state.detach()
    jacobian = dense_jacobian(problem(x).step, state)
    identity = torch.eye(len(jacobian), dtype=torch.float64)
    cotangent = torch.linspace(-1, 2, len(jacobian), dtype=torch.float64).cos()
    truncated = sum(0.8 * torch.linalg.matrix_power(0.2 * identity + 0.8 * jacobian, j).T @ cotangent for j in range(5))
    exact = torch.linalg.solve((identity - jacobian).T, cotangent)
    found = {}
    for name, gradient in {
        "phantom": opteq.Phantom(steps=5, damping=0.8),
        "cg": opteq.Implicit(linear=opteq.CG(tol=1e-12)),
    }.items():
        leaf = x.clone().requires_grad_()
        output = opteq.Equilibrium(problem, EXACT, gradient)(leaf)
        (found[name],) = torch.autograd.grad(output, leaf, cotangent.view_as(output))
    for name, vector in {"phantom": truncated, "cg": exact}.items():
        leaf = x.clone().requires_grad_()
        (expected,) = torch.autograd.grad(problem(leaf).step(state), leaf, vector.view_as(state))
        torch.testing.assert_close(found[name], expected, rtol=1e-8, atol=1e-10)
    assert 1e-6 < difference([found["phantom"]], [found["cg"]]) < 0.05


@pytest.mark.parametrize(
    "kernel", [kernels.Gaussian(), kernels.Gaussian(patch=2, split=2, hidden=3)], ids=["one", "many"]
)
def test_automatic_gamma_keeps_the_laws(kernel: kernels.Gaussian) -> None:
    """It is frozen, so that the step is a gradient step and unrolling agrees; samples are independent."""
    torch.manual_seed(0)
    problem = GEQ(op.Conv2d(3, 4, 3, bound=0.9), nn.Conv2d(2, 4, 3, padding=1), kernel).double()
    x = torch.randn(3, 2, 4, 4, dtype=torch.float64).requires_grad_()
    hidden = problem(x)
    y = torch.rand_like(hidden.start()).requires_grad_()
    (slope,) = torch.autograd.grad(hidden.smooth(y).sum(), y)
    torch.testing.assert_close(hidden.step(y), torch.relu(-slope), rtol=1e-11, atol=1e-12)
    matrix = dense_jacobian(hidden.preactivation, y.detach())
    torch.testing.assert_close(matrix, matrix.T, rtol=1e-9, atol=1e-12)
    layer = opteq.Equilibrium(problem, EXACT)
    inputs = [x, *problem.parameters()]
    assert difference(gradients(layer(x), inputs), gradients(unrolled_features(problem, x), inputs)) < 1e-8
    with torch.no_grad():
        together = layer(x)
        for index in range(3):
            torch.testing.assert_close(layer(x[index : index + 1])[0], together[index], rtol=1e-9, atol=1e-11)
    # A warm start changes the way, not the problem.
    again = layer.solve(x, start=together + 0.1).features
    torch.testing.assert_close(again, together, rtol=1e-9, atol=1e-10)


# Shapes, options, module


@pytest.mark.parametrize(
    ("kernel", "place"),
    [
        (kernels.Linear(), "the space of W's state"),
        (kernels.Polynomial(2), "the space of W's state"),
        (kernels.Sigmoid(), "the space of W's state"),
        (kernels.Gaussian(), "the space of W's output"),
    ],
    ids=["linear", "polynomial", "sigmoid", "gaussian"],
)
def test_u_into_the_wrong_space(kernel: kernels.Kernel, place: str) -> None:
    wrong = 5 if kernel.input_space == "output" else 6
    problem = GEQ(op.Dense(5, 6), nn.Linear(4, wrong), kernel)
    with pytest.raises(ValueError, match=f"{place}.*shape \\(2, {wrong}\\)"):
        problem(torch.zeros(2, 4))
    pictures = GEQ(op.Conv2d(5, 6, 3), nn.Conv2d(4, wrong, 3, padding=1), kernel)
    with pytest.raises(ValueError, match=f"{place}.*shape \\(2, {wrong}, 4, 4\\)"):
        pictures(torch.zeros(2, 4, 4, 4))


def test_wrong_arguments() -> None:
    with pytest.raises(TypeError, match=r"kernels.Gaussian\(\); got .*did you mean Gaussian\(\)"):
        GEQ(op.Dense(2, 2), kernel=kernels.Gaussian)
    with pytest.raises(TypeError, match=r"W should be one of opteq\.operators"):
        GEQ(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="did you mean 'relu'"):
        GEQ(op.Dense(2, 2), activation="rellu")
    with pytest.raises(ValueError, match="cannot be split into groups of split=4"):
        GEQ(op.Conv2d(3, 6, 3), None, kernels.Gaussian(patch=2, split=4))(torch.zeros(1, 6, 4, 4))


def test_polynomial_does_not_begin_at_its_trivial_equilibrium() -> None:
    problem = GEQ(op.Dense(3, 4, bound=0.5), None, kernels.Polynomial(3))
    x = torch.tensor([[1.0, -1.0, 0.5]])
    hidden = problem(x)
    torch.testing.assert_close(hidden.step(torch.zeros(1, 3)), torch.zeros(1, 3))
    torch.testing.assert_close(hidden.start(), torch.tensor([[1.0, 0.0, 0.5]]))


def test_a_polynomial_without_minimiser_is_reported() -> None:
    problem = GEQ(op.Dense(3, 4, bound=0.5), None, kernels.Polynomial(3)).double()
    x = torch.tensor([[3.0, 1.0, 0.5], [1e-3, 0.0, 0.0]], dtype=torch.float64)
    hidden = problem(x)
    away = torch.tensor([[1.0, 10.0, 100.0]], dtype=torch.float64).T * x[:1]
    with torch.no_grad():
        values = problem(x[:1].expand(3, -1)).objective(away)
        assert values[0] > values[1] > values[2]  # towards minus infinity
        solution = opteq.Equilibrium(problem, opteq.Picard(max_steps=30), on_failure="ignore").solve(x)
    assert solution.status[0] is Status.NON_FINITE
    assert solution.status[1] is Status.CONVERGED
    assert torch.isfinite(solution.state).all()
    assert hidden.structure is Structure.SYMMETRIC


@pytest.mark.parametrize("case", SINGLE, ids=ids)
def test_an_ordinary_module(case) -> None:
    layer = opteq.Equilibrium(case.problem(), EXACT)
    x = case.input()
    with torch.no_grad():
        expected = layer(x)
        for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
            assert torch.equal(twin(x), expected)
        file = io.BytesIO()
        torch.save(layer.state_dict(), file)
        file.seek(0)
        other = opteq.Equilibrium(case.build().double(), EXACT)
        other.load_state_dict(torch.load(file))
        assert torch.equal(other(x), expected)


def test_terms_have_names() -> None:
    linear = GEQ(op.Dense(3, 4), None, kernels.Linear())(torch.ones(2, 3))
    gaussian = GEQ(op.Dense(3, 4), None, kernels.Gaussian())(torch.ones(2, 4))
    assert list(linear.terms(torch.ones(2, 3))) == ["penalty", "quadratic", "coupling", "input"]
    assert list(gaussian.terms(torch.ones(2, 3))) == ["penalty", "quadratic", "gaussian"]


# Attention


def test_attention_map_shows_the_weight_of_the_patch_over_every_pixel() -> None:
    problem = patch_geq()
    layer = opteq.Equilibrium(problem, EXACT)
    x = torch.randn(2, 2, 4, 6, dtype=torch.float64)
    picture = attention_map(layer, x)
    with torch.no_grad():
        (weights,) = patch_weights(problem(x), layer.solve(x).state)
        q = problem.U(x) - problem.W(layer(x))
    assert weights.shape == (2, 2, 2, 3)
    assert picture.shape == (2, 4, 6)
    assert not picture.requires_grad
    for row, column in ((0, 0), (3, 5), (2, 1)):
        pixel = [q[1, g : g + 2, row // 2 * 2 :, column // 2 * 2 :][:, :2, :2].reshape(-1) for g in (0, 2)]
        expected = torch.stack(
            [torch.exp(-0.4 * problem.kernel.projection(one).square().sum()) for one in pixel]
        ).mean()
        assert picture[1, row, column].item() == pytest.approx(expected.item(), rel=1e-9)
    assert attention_map(layer, x, size=(8, 12)).shape == (2, 8, 12)


def branches() -> Parallel:
    """Three branches at scales 1, 2 and 4, as in the paper's experiments."""
    torch.manual_seed(0)
    parts = [
        GEQ(op.Conv2d(3, mid, 3, bound=0.9), nn.Conv2d(2, mid, 3, padding=1), kernels.Gaussian(0.3, 2, 4, 6))
        for mid in (4, 8, 8)
    ]
    return Parallel(parts, scales=[1, 2, 4]).double()


def test_branches_at_several_scales_and_their_average() -> None:
    problem = branches()
    x = torch.randn(2, 2, 8, 16, dtype=torch.float64)
    layer = opteq.Equilibrium(problem, EXACT, opteq.Phantom(steps=5, damping=0.8), on_failure="raise")
    features = layer(x)
    assert [tuple(z.shape) for z in features] == [(2, 3, 8, 16), (2, 3, 4, 8), (2, 3, 2, 4)]
    for part, z, scale in zip(problem.problems, features, (1, 2, 4), strict=True):
        alone = opteq.Equilibrium(part, EXACT)(nn.functional.avg_pool2d(x, scale))
        torch.testing.assert_close(z, alone, rtol=1e-9, atol=1e-10)
    fused = AverageBranches()(features)
    assert fused.shape == (2, 3, 8, 16)
    expected = sum(float(z.detach()[1, 2, 5 // s, 9 // s]) for z, s in zip(features, (1, 2, 4), strict=True)) / 3
    assert fused.detach()[1, 2, 5, 9].item() == pytest.approx(expected)
    small = AverageBranches((2, 4))(features).detach()
    pooled = [nn.functional.avg_pool2d(z.detach(), k) for z, k in zip(features, (4, 2, 1), strict=True)]
    torch.testing.assert_close(small, torch.stack(pooled).mean(0))
    certificate = problem.certificate()
    assert certificate.unique is True
    assert certificate.contraction < 0.82
    fused.sum().backward()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in problem.parameters())
    assert attention_map(layer, x).shape == (2, 8, 16)
    weights = patch_weights(problem(x), layer.solve(x).state)
    assert [tuple(one.shape) for one in weights] == [(2, 1, 4, 8), (2, 2, 2, 4), (2, 2, 1, 2)]
    views = tuple(nn.functional.avg_pool2d(x, k) for k in (1, 2, 4))
    torch.testing.assert_close(attention_map(layer, views), attention_map(layer, x))


def test_averages_that_make_no_sense() -> None:
    with pytest.raises(ValueError, match=r"size should be a positive whole number.*got 0"):
        AverageBranches(0)
    with pytest.raises(ValueError, match="same batch and number of channels"):
        AverageBranches()((torch.zeros(1, 2, 4, 4), torch.zeros(1, 3, 4, 4)))
    with pytest.raises(ValueError, match="4 x 4 does not become 6 x 6"):
        AverageBranches(6)((torch.zeros(1, 2, 4, 4),))


def test_attention_is_low_where_a_patch_does_not_fit() -> None:
    """States are not negative and W is the identity: a negative patch cannot be explained."""
    problem = GEQ(op.Identity(), None, kernels.Gaussian(1.0, patch=2, split=1))
    x = torch.full((1, 1, 4, 4), 0.5)
    x[:, :, 2:, 2:] = -2.0
    picture = attention_map(opteq.Equilibrium(problem, EXACT), x)[0]
    assert picture[:2, :2].min() > 0.7
    assert picture[2:, 2:].max() < 1e-5


def test_attention_needs_a_gaussian_kernel_and_pictures() -> None:
    linear = opteq.Equilibrium(GEQ(op.Conv2d(2, 2, 3, bound=0.5), None, kernels.Linear()))
    with pytest.raises(TypeError, match="only GEQ with a Gaussian kernel has patch weights"):
        attention_map(linear, torch.zeros(1, 2, 4, 4))
    with pytest.raises(ValueError, match=r"needs images.*got \(1, 8\)"):
        attention_map(opteq.Equilibrium(random_geq(0.5)), torch.zeros(1, 8, dtype=torch.float64))


def test_u_may_be_anything_whose_norm_is_known() -> None:
    problem = random_geq(0.8)
    expected = float(module_norm(problem.U))
    scaled = random_geq(0.8)
    scaled.U.weight.data.mul_(2)
    assert scaled.certificate().lipschitz == pytest.approx(2 * problem.certificate().lipschitz)
    assert problem.certificate().lipschitz < expected / (1 - DIP * 0.8)


def test_weights_without_a_bound_are_batched_by_vmap() -> None:
    """The norm, from which the damping comes, is then one number per set of weights."""
    torch.manual_seed(0)
    layer = opteq.Equilibrium(GEQ(op.Dense(5, 6), nn.Linear(4, 6), kernels.Gaussian(0.2)).double(), EXACT)
    x = torch.randn(3, 4, dtype=torch.float64)
    sets = [{name: scale * weight.detach() for name, weight in layer.named_parameters()} for scale in (1.0, 1.4)]
    stacked = {name: torch.stack([weights[name] for weights in sets]) for name in sets[0]}
    together = torch.func.vmap(lambda weights: functional_call(layer, weights, (x,)))(stacked)
    for weights, found in zip(sets, together, strict=True):
        torch.testing.assert_close(found, functional_call(layer, weights, (x,)), rtol=1e-9, atol=1e-11)
