"""OptEq against the mathematics: Theorem 1, the rows of Table 1, Theorem 4, each by an independent computation."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import opteq
from lazy import lazily
from opteq import operators as op
from opteq import penalties, regularizers
from opteq.penalties import Penalty
from opteq.problems.hidden import Structure
from opteq.problems.opteq import Block, BoundOptEq
from opteq.states import blocks
from oracles import SHARP, cp, dense_jacobian, feature_objective, relu_programme

EXACT = opteq.Anderson(tol=1e-14, max_steps=1000)
optimize = lazily("scipy.optimize")


def linear_activation() -> Penalty:
    torch.manual_seed(1)
    factor = torch.randn(4, 4, dtype=torch.float64)
    return penalties.LinearActivation(4, torch.linalg.cholesky(factor @ factor.T / 8 + 0.2 * torch.eye(4).double()))


PENALTIES: dict[str, Callable[[], Penalty]] = {
    **{name: lambda name=name: penalties.get(name) for name in penalties.names()},
    "leaky_relu(0.3)": lambda: penalties.LeakyReLU(0.3),
    "elu(2)": lambda: penalties.ELU(2.0),
    "soft_threshold(0.4)": lambda: penalties.SoftThreshold(0.4),
    "linear": linear_activation,
}
every_penalty = pytest.mark.parametrize("make", PENALTIES.values(), ids=PENALTIES)


def operator(W: Tensor) -> op.Dense:
    dense = op.Dense(W.shape[1], W.shape[0]).to(W)
    dense.weight.data.copy_(W)
    return dense


def random_matrix(n: int, m: int, norm: float, seed: int = 0) -> Tensor:
    W = torch.randn(n, m, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return W * norm / torch.linalg.matrix_norm(W, 2)


def random_vectors(*shape: int, seed: int = 5) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def assert_near(found: Tensor, wanted: object, tolerance: float = 1e-10) -> None:
    wanted = torch.as_tensor(wanted, dtype=torch.float64)
    torch.testing.assert_close(found.detach(), wanted.detach(), rtol=tolerance, atol=tolerance)


def solve(problem: opteq.problems.base.Problem, x: Tensor) -> opteq.Solution:
    with torch.no_grad():
        return opteq.Equilibrium(problem, EXACT, on_failure="raise").solve(x)


# ---------------------------------------------------------------------------------------------------- golden values


def test_golden_scalar() -> None:
    problem = opteq.OptEq(operator(torch.tensor([[0.5]], dtype=torch.float64)))
    x = torch.ones(1, 1, dtype=torch.float64)
    hidden, solution = problem(x), solve(problem, x)
    assert_near(solution.state, [[4 / 3]], 1e-12)
    assert_near(solution.features, [[2 / 3]], 1e-12)
    assert_near(hidden.objective(solution.state), [-2 / 3], 1e-12)
    assert_near(feature_objective(hidden, solution.state), [-2 / 3], 1e-12)


def test_golden_tanh() -> None:
    problem = opteq.OptEq(operator(torch.tensor([[0.6, 0.2], [-0.3, 0.5]], dtype=torch.float64)), activation="tanh")
    x = torch.tensor([[1.0, -0.5]], dtype=torch.float64)
    hidden, solution = problem(x), solve(problem, x)
    assert_near(solution.features, [[0.730741379095, -0.153484364879]], 1e-11)
    assert_near(feature_objective(hidden, solution.state), [-0.782060025526], 1e-11)
    assert_near(hidden.objective(solution.state), [-0.782060025526], 1e-11)


# -------------------------------------------------------------------------------------------------------- Theorem 1


def some_block(make: Callable[[], Penalty], mu: float | None, m: int = 3) -> Block:
    """A layer at ``mu``, or at the smallest mu that Theorem 1 allows."""
    penalty = make()
    W = random_matrix(4, m, 1.3)
    return Block(operator(W).prepare(), random_vectors(5, 4), penalty, mu or penalty.lipschitz * 1.3**2)


@pytest.mark.parametrize("mu", [None, 2.5])
@every_penalty
def test_the_layer_is_a_gradient(make: Callable[[], Penalty], mu: float | None) -> None:
    block = some_block(make, mu)
    u = random_vectors(5, 3, seed=6).requires_grad_()
    (slope,) = torch.autograd.grad(block.potential(u).sum(), u)
    assert_near(block(u), slope)
    (slope,) = torch.autograd.grad(block.merit(u).sum(), u)
    assert_near(u - block(u), slope)


@every_penalty
def test_the_merit_is_the_moreau_envelope(make: Callable[[], Penalty]) -> None:
    block = some_block(make, None)
    u = 2 * random_vectors(5, 3, seed=6)
    p = block(u)
    phi = block.envelope(u, 1.0)
    assert_near(block.merit(u), phi + (p - u).square().sum(1) / 2)
    # No other image of the layer makes phi(q) + |q - u|^2 / 2 smaller: p is the prox.
    for seed in range(20):
        v = 3 * random_vectors(5, 3, seed=seed)
        other = block.envelope(v, 1.0) + (block(v) - u).square().sum(1) / 2
        assert (other >= block.merit(u) - 1e-12).all()


@every_penalty
def test_the_layer_is_firmly_nonexpansive_at_the_smallest_mu(make: Callable[[], Penalty]) -> None:
    block = some_block(make, None)
    for size in (1e-3, 1.0, 30.0):
        u = size * random_vectors(5, 3, seed=6)
        v = size * random_vectors(5, 3, seed=7)
        gap, image = u - v, block(u) - block(v)
        assert ((image * gap).sum(1) >= image.square().sum(1) - 1e-12 * size**2).all()


@pytest.mark.parametrize("mu", [None, 2.5])
@every_penalty
def test_phi_without_an_inverse_equals_phi_with_one(make: Callable[[], Penalty], mu: float | None) -> None:
    """``phi(z) = sum sigma~*(mu W^-T z) / mu - <c, W^-T z> - |z|^2 / 2`` where W is invertible."""
    block = some_block(make, mu, m=4)
    u = random_vectors(5, 4, seed=8)
    z = block(u)
    W = block.W(torch.eye(4, dtype=torch.float64)).T
    y = block.mu * z @ torch.linalg.inv(W)
    penalty = block.penalty
    assert_near(y, block.activation(u))
    y = penalty.project(y)  # units at an edge of the domain come back with a rounding error of either sign
    conjugate = penalty.total(y) + y.square().sum(1) / 2 - 4 * penalty.offset
    dense = conjugate / block.mu - (block.c * y).sum(1) / block.mu - z.square().sum(1) / 2
    assert_near(block.envelope(u, 1.0), dense, 1e-9)


@pytest.mark.parametrize("mu", [1.0, 1.7])
@every_penalty
def test_three_ways_to_the_least_value(make: Callable[[], Penalty], mu: float) -> None:
    penalty = make()
    W = random_matrix(4, 3, 0.95 * (mu / penalty.lipschitz) ** 0.5)
    problem = opteq.OptEq(operator(W), activation=penalty, mu=mu)
    x = random_vectors(5, 4)
    hidden, solution = problem(x), solve(problem, x)
    z = solution.features
    assert isinstance(z, Tensor)
    assert_near(hidden.block(z), z)
    assert_near(feature_objective(hidden, solution.state), hidden.block.merit(z), 1e-9)
    assert_near(hidden.block.envelope(z, 1.0), hidden.block.merit(z), 1e-9)
    for seed in range(20):  # it is the least value of the merit, hence of phi
        assert (hidden.block.merit(random_vectors(5, 3, seed=seed)) >= hidden.block.merit(z) - 1e-12).all()


@pytest.mark.parametrize("mu", [1.0, 1.6])
@pytest.mark.parametrize("shape", [(6, 3), (3, 6), (4, 4)])
def test_an_interior_point_solver_finds_the_same_prox(shape: tuple[int, int], mu: float) -> None:
    """``T(u) = argmin phi(z) + |z - u|^2 / 2`` with phi as a minimum over the y that give z; W is rectangular."""
    n, m = shape
    W = random_matrix(n, m, mu**0.5)
    c, u = random_vectors(2, n), 2 * random_vectors(2, m, seed=6)
    block = Block(operator(W).prepare(), c, penalties.ReLU(), mu)
    for sample in range(2):
        y, z = cp.Variable(n), cp.Variable(m)
        bilinear = -z @ u[sample].numpy() + float(u[sample].square().sum()) / 2  # -|z|^2 / 2 + |z - u|^2 / 2
        objective = (cp.sum_squares(y) / 2 - y @ c[sample].numpy()) / mu + bilinear
        value = cp.Problem(cp.Minimize(objective), [y >= 0, z == W.T.numpy() @ y / mu]).solve(**SHARP)
        assert_near(block(u)[sample], z.value, 1e-6)
        assert_near(block.merit(u)[sample], value, 1e-8)


@pytest.mark.parametrize("mu", [0.7, 1.0, 2.0])
def test_an_interior_point_solver_finds_the_same_minimiser(mu: float) -> None:
    W = random_matrix(5, 3, 0.95 * mu**0.5)
    problem = opteq.OptEq(operator(W), mu=mu)
    x = random_vectors(3, 5)
    solution = solve(problem, x)
    for sample in range(3):
        y, value = relu_programme(W / mu**0.5, x[sample])
        assert_near(solution.features[sample], W.T @ torch.from_numpy(y) / mu, 1e-5)
        assert_near(feature_objective(problem(x), solution.state)[sample], value / mu, 1e-8)


# Not softplus with Anderson: far out e^-z meets any tolerance, which an extrapolating solver finds out.
@pytest.mark.parametrize(
    ("activation", "c", "solver"),
    [
        ("softplus", 0.0, opteq.Picard(tol=1e-8, max_steps=300)),
        ("relu", 1.0, opteq.Picard(tol=1e-8, max_steps=300)),
        ("relu", 1.0, opteq.Anderson(tol=1e-8, max_steps=300)),
    ],
)
def test_strict_convexity_does_not_give_an_equilibrium(activation: str, c: float, solver: opteq.solvers.Solver) -> None:
    """With W = 1, softplus has a strictly convex phi, ``Li2(e^-z)``, that falls for ever; so has relu with c = 1."""
    problem = opteq.OptEq(operator(torch.ones(1, 1, dtype=torch.float64)), activation=activation)
    x = torch.full((1, 1), c, dtype=torch.float64)
    with torch.no_grad():
        solution = opteq.Equilibrium(problem, solver, on_failure="ignore").solve(x)
        hidden = problem(x)
        values = [hidden.block.envelope(torch.full_like(x, z), 1.0) for z in np.linspace(0, 20, 60)]
    assert not solution.converged.any()
    slopes = torch.cat(values).diff()
    assert (slopes < 0).all()
    certificate = problem.certificate()
    assert certificate.exists is None
    assert certificate.unique is None
    assert "not below 1" in certificate.reasons["exists"]


def test_the_iteration_of_the_counterexample_runs_away() -> None:
    problem = opteq.OptEq(operator(torch.ones(1, 1, dtype=torch.float64)), activation="softplus")
    hidden = problem(torch.zeros(1, 1, dtype=torch.float64))
    y = hidden.start()
    seen = []
    with torch.no_grad():
        for _ in range(2000):
            y = hidden.step(y)
            seen.append(float(y))
    # y' = y + e^-y grows like log k: 7.6 at k = 2000, and 0.693 more each time k doubles.
    assert seen[-1] == pytest.approx(np.log(2000), abs=0.1)
    assert seen[-1] - seen[999] == pytest.approx(np.log(2), abs=1e-2)


# --------------------------------------------------------------------------------------------------------- Table 1


def relu_part(y: cp.Variable, c: Tensor, mu: float) -> cp.Expression:
    """``phi(z) + |z|^2 / 2`` at ``z = W'y / mu``, for the best y."""
    return (cp.sum_squares(y) / 2 - y @ c.numpy()) / mu


@pytest.mark.parametrize("alpha", [0.2, 0.6, 0.95])
@pytest.mark.parametrize("mu", [1.0, 1.5])
def test_skip_connection_is_the_prox_of_an_envelope(alpha: float, mu: float) -> None:
    W = random_matrix(4, 3, 0.95 * mu**0.5)
    problem = opteq.DeepOptEq([(operator(W), nn.Identity())], alpha=alpha, mu=mu)
    x, v = random_vectors(2, 4), random_vectors(2, 3, seed=9)
    hidden = problem(x)
    value, step = hidden.objective(v), hidden.step(v)
    for sample in range(2):
        c, at = x[sample], v[sample].numpy()
        # alpha M(v), M the envelope of parameter 1 - alpha, by its definition as a minimum over z = W'y / mu
        y, z, w = cp.Variable(4), cp.Variable(3), cp.Variable(3)
        z_of_y = z == W.T.numpy() @ y / mu
        spread = alpha / (2 * (1 - alpha)) * cp.sum_squares(z) - z @ at / (1 - alpha) + at @ at / (2 * (1 - alpha))
        least = cp.Problem(cp.Minimize(alpha * (relu_part(y, c, mu) + spread)), [y >= 0, z_of_y]).solve(**SHARP)
        assert_near(value[sample], least, 1e-8)
        # and its prox, the least alpha M(w) + |w - v|^2 / 2; the quadratic terms in z and w make one square
        quadratic = cp.sum_squares(alpha * z - w) / (2 * (1 - alpha)) - w @ at
        cp.Problem(cp.Minimize(alpha * relu_part(y, c, mu) + quadratic), [y >= 0, z_of_y]).solve(**SHARP)
        assert_near(step[sample], w.value, 1e-5)


@pytest.mark.parametrize("activation", ["relu", "tanh", "softplus"])
def test_skip_connection_keeps_the_fixed_points(activation: str) -> None:
    W = random_matrix(4, 3, 0.9)
    plain = opteq.OptEq(operator(W), activation=activation)
    skip = opteq.DeepOptEq([(operator(W), nn.Identity())], alpha=0.35, activation=activation)
    x = random_vectors(3, 4)
    assert_near(solve(skip, x).features, solve(plain, x).features, 1e-11)
    # (1 - alpha)-strongly monotone and symmetric: a gradient
    jacobian = dense_jacobian(skip(x[:1]).step, random_vectors(1, 3))
    assert_near(jacobian, jacobian.T)
    assert float(torch.linalg.eigvalsh(jacobian)[0]) >= 0.65 - 1e-12


def test_affine_change_of_variable_finds_the_minimiser_of_phi_of_a() -> None:
    """By BFGS on ``phi(A u)`` with a dense inverse of W."""
    W, slope = random_matrix(3, 3, 0.9), 0.3
    matrix = torch.eye(3, dtype=torch.float64) + 0.7 * random_vectors(3, 3, seed=2)
    shift = random_vectors(3, seed=3)
    inner = opteq.OptEq(operator(W), activation=penalties.LeakyReLU(slope))
    problem = opteq.AffineOptEq(inner, matrix, shift)
    x = random_vectors(1, 3)
    solution = solve(problem, x)
    penalty, inverse = penalties.LeakyReLU(slope), torch.linalg.inv(W)

    def phi_of_a(u: np.ndarray) -> tuple[float, np.ndarray]:
        point = torch.tensor(u, requires_grad=True)
        z = matrix @ point + shift
        y = z @ inverse
        value = penalty.value(y).sum() + y.square().sum() / 2 - x[0] @ y - z.square().sum() / 2
        (slope,) = torch.autograd.grad(value, point)
        return value.item(), slope.numpy()

    found = optimize.minimize(phi_of_a, np.zeros(3), jac=True, tol=1e-12)
    assert_near(solution.features[0], found.x, 1e-6)
    assert_near(problem(x).objective(solution.state)[0], found.fun, 1e-10)
    assert_near(solution.features @ matrix.T + shift, solve(inner, x).features, 1e-11)


def test_affine_step_is_a_gradient_only_for_orthogonal_matrices() -> None:
    inner = opteq.OptEq(operator(random_matrix(4, 3, 0.9)), activation="tanh")
    x, u = random_vectors(1, 4), random_vectors(1, 3, seed=4)
    matrix = random_vectors(3, 3, seed=2)
    jacobian = dense_jacobian(opteq.AffineOptEq(inner, matrix)(x).step, u)
    assert float((jacobian - jacobian.T).abs().max()) > 0.05
    orthogonal = torch.linalg.qr(matrix)[0]
    jacobian = dense_jacobian(opteq.AffineOptEq(inner, orthogonal)(x).step, u)
    assert_near(jacobian, jacobian.T, 1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_affine_change_of_variable_in_half_precision(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    inner = opteq.OptEq(op.Dense(3, 4, bound=0.7), nn.Linear(2, 4), "tanh")
    problem = opteq.AffineOptEq(inner, torch.eye(3) + 0.3 * torch.randn(3, 3), torch.randn(3))
    x = torch.randn(5, 2)
    expected = opteq.Equilibrium(problem)(x).detach()
    certified = problem.certificate().lipschitz
    half = problem.to(dtype)
    features = opteq.Equilibrium(half, on_failure="ignore")(x.to(dtype))
    torch.testing.assert_close(features.detach().float(), expected, rtol=0.05, atol=0.05)
    features.sum().backward()
    assert torch.isfinite(half.matrix.grad).all()
    assert half.certificate().lipschitz == pytest.approx(certified, rel=0.05)


def test_linear_activation_has_a_closed_form() -> None:
    W, sigma = random_matrix(4, 4, 0.8, seed=3), linear_activation()
    S = sigma.prox(torch.eye(4, dtype=torch.float64)).detach()
    W = W / torch.linalg.matrix_norm(W.T @ S @ W, 2) ** 0.5 * 0.95
    problem = opteq.OptEq(operator(W), activation=sigma)
    x = random_vectors(3, 4)
    hidden, solution = problem(x), solve(problem, x)
    exact = torch.linalg.solve(torch.eye(4, dtype=torch.float64) - W.T @ S @ W, (x @ S @ W).T).T
    assert_near(solution.features, exact)
    z = exact.clone().requires_grad_()
    y = z @ torch.linalg.inv(W)
    quadratic = ((y @ torch.linalg.inv(S)) * y).sum(1) / 2 - (x * y).sum(1) - z.square().sum(1) / 2
    assert_near(feature_objective(hidden, solution.state), quadratic, 1e-9)
    (slope,) = torch.autograd.grad(quadratic.sum(), z)
    assert_near(slope, torch.zeros_like(slope), 1e-9)


# ------------------------------------------------------------------------------------------------------- Theorem 4


def regularised_programme(
    W: Tensor, c: Tensor, mu: float, prior: Callable[[cp.Variable], cp.Expression]
) -> tuple[np.ndarray, float]:
    """``min phi(z) + prior(z)`` for relu and one sample, by Clarabel: its minimiser and value."""
    n, m = W.shape
    y, z = cp.Variable(n), cp.Variable(m)
    quadratic = np.eye(n) / mu - (W @ W.T).numpy() / mu**2
    phi = cp.quad_form(y, cp.psd_wrap(quadratic)) / 2 - y @ c.numpy() / mu
    constraints = [y >= 0, z == W.T.numpy() @ y / mu]
    value = cp.Problem(cp.Minimize(phi + prior(z)), constraints).solve(**SHARP)
    return z.value, float(value)


@pytest.mark.parametrize("mu", [1.0, 1.5])
@pytest.mark.parametrize("gamma", [0.3, 1.5])
def test_ridge_inside_the_objective(gamma: float, mu: float) -> None:
    W = random_matrix(5, 3, 0.9 * mu**0.5)
    problem = opteq.OptEq(operator(W), mu=mu, regularizer=regularizers.Ridge(), gamma=gamma)
    x = 2 * random_vectors(3, 5)
    hidden, solution = problem(x), solve(problem, x)
    for sample in range(3):
        z, value = regularised_programme(W, x[sample], mu, lambda z: gamma / 2 * cp.sum_squares(z))
        assert_near(solution.features[sample], z, 1e-6)
        assert_near(feature_objective(hidden, solution.state)[sample], value, 1e-8)


@pytest.mark.parametrize("mu", [1.0, 1.5])
def test_the_layer_of_a_prox_minimises_the_envelope_and_not_the_regulariser(mu: float) -> None:
    """``T o prox`` for ridge and l1: Table 2 of the paper claims ``phi + weight R``, which is another point."""
    weight = 0.4
    W = random_matrix(5, 4, 0.95 * mu**0.5)
    x = 2 * random_vectors(3, 5)
    cases = {
        regularizers.Ridge(): (
            lambda z: weight / (1 + weight) / 2 * cp.sum_squares(z),
            lambda z: weight / 2 * cp.sum_squares(z),
        ),
        regularizers.L1(): (lambda z: cp.sum(cp.huber(z, weight)) / 2, lambda z: weight * cp.norm1(z)),
    }
    for R, (envelope, claimed) in cases.items():
        problem = opteq.OptEq(operator(W), mu=mu, regularizer=regularizers.Envelope(R, weight))
        hidden, solution = problem(x), solve(problem, x)
        z = solution.features
        assert isinstance(z, Tensor)
        assert_near(hidden.block(R.prox(z, weight)), z)  # it is T o prox indeed
        distances = []
        for sample in range(3):
            point, value = regularised_programme(W, x[sample], mu, envelope)
            assert_near(z[sample], point, 1e-5)
            assert_near(feature_objective(hidden, solution.state)[sample], value, 1e-8)
            distances.append(np.linalg.norm(regularised_programme(W, x[sample], mu, claimed)[0] - z[sample].numpy()))
        assert min(distances) > 0.02


@pytest.mark.parametrize("solver", [opteq.Picard(tol=1e-13, max_steps=3000), EXACT], ids=["picard", "anderson"])
@pytest.mark.parametrize("mu", [1.0, 1.5])
def test_splitting_minimises_what_it_says(mu: float, solver: opteq.solvers.Solver) -> None:
    W = random_matrix(5, 4, 0.95 * mu**0.5)
    x = 2 * random_vectors(3, 5)
    problem = opteq.Splitting(opteq.OptEq(operator(W), mu=mu), regularizers.L1(), gamma=0.4)
    with torch.no_grad():
        solution = opteq.Equilibrium(problem, solver, on_failure="raise").solve(x)
        values = problem(x).objective(solution.state)
    exact_zeros = 0
    for sample in range(3):
        z, value = regularised_programme(W, x[sample], mu, lambda z: 0.4 * cp.norm1(z))
        assert_near(solution.features[sample], z, 1e-6)
        assert_near(values[sample], value, 1e-8)
        exact_zeros += int((solution.features[sample] == 0).sum())
    assert exact_zeros > 0  # what the envelope never gives


def test_splitting_where_several_states_have_the_same_features() -> None:
    """All units off, so T is constant near 0 and every u of a box is a fixed point; features and gradient are right."""
    W = random_matrix(4, 3, 0.9)
    problem = opteq.Splitting(opteq.OptEq(operator(W), nn.Linear(2, 4).double()), regularizers.L1(), gamma=5.0)
    problem.problem.U.bias.data.fill_(-5)
    x = 0.1 * random_vectors(2, 2).requires_grad_()
    layer = opteq.Equilibrium(problem, EXACT, on_failure="raise")
    features = layer(x)
    (slope,) = torch.autograd.grad(features.sum(), x)
    assert_near(features, torch.zeros(2, 3))
    assert_near(slope, torch.zeros(2, 2))


# ------------------------------------------------------------------------------------------------- the merit guard


@every_penalty
def test_plain_steps_decrease_the_merit(make: Callable[[], Penalty]) -> None:
    """Also where mu is too small for a contraction: the merit is 1-smooth whatever W."""
    for norm in (0.9, 1.0, 2.0):
        penalty = make()
        problem = opteq.OptEq(operator(random_matrix(4, 3, norm)), activation=penalty)
        hidden = problem(random_vectors(5, 4))
        assert isinstance(hidden, BoundOptEq)
        assert hidden.has_merit
        y = hidden.step(random_vectors(5, 4, seed=2))
        with torch.no_grad():
            image, merit = hidden.step_and_merit(y)
            for _ in range(10):
                assert_near(image, hidden.step(y), 1e-12)
                assert_near(merit, hidden.block.merit(hidden.features(y)), 1e-12)
                z, y = hidden.features(y), image
                image, after = hidden.step_and_merit(y)
                if penalty.lipschitz <= 1:  # the descent lemma promises half the squared step
                    assert (after <= merit - (hidden.features(y) - z).square().sum(1) / 2 + 1e-11).all()
                merit = after


@pytest.mark.parametrize("steps", [5, 60])
@pytest.mark.parametrize("activation", ["relu", "tanh", "softplus", "elu"])
def test_acceleration_under_the_guard_ends_no_worse(activation: str, steps: int) -> None:
    """Twenty hard problems, ``|W|`` within a thousandth of 1: the merit is no higher than plain iteration's."""
    for seed in range(2):
        problem = opteq.OptEq(operator(random_matrix(12, 10, 0.999, seed)), activation=activation)
        x = random_vectors(10, 12, seed=seed) - 0.3
        hidden = problem(x)
        merits = []
        for solver in (opteq.Picard(tol=1e-13, max_steps=steps), opteq.Anderson(tol=1e-13, max_steps=steps)):
            with torch.no_grad():
                state = opteq.Equilibrium(problem, solver, on_failure="ignore").solve(x).state
                merits.append(hidden.block.merit(hidden.features(state)))
        plain, accelerated = merits
        assert (accelerated <= plain + 1e-9 * plain.abs()).all()


def test_the_guard_brings_acceleration_home_where_nothing_contracts() -> None:
    """Hardtanh with ``|W| = 3``: Anderson alone wanders, under the merit it ends at low equilibria every time."""
    solver = opteq.Anderson(tol=1e-10, max_steps=100)
    converged, merits = {}, {}
    for guard in (True, False):
        outcomes = []
        for seed in range(2):
            problem = opteq.OptEq(operator(random_matrix(12, 10, 3.0, seed)), activation="hardtanh")
            hidden = problem(0.3 * random_vectors(10, 12, seed=seed) - 0.1)
            with torch.no_grad():
                measured = hidden.step_and_merit if guard else None
                found = solver.solve(hidden.step, hidden.start(), step_and_merit=measured, project=hidden.project)
                outcomes.append((found.codes == 0, hidden.block.merit(hidden.features(found.state))))
        converged[guard] = torch.cat([done for done, _ in outcomes])
        merits[guard] = torch.cat([merit for _, merit in outcomes])
    assert converged[True].all()
    assert not converged[False].all()
    assert merits[True].mean() < merits[False].mean() - 1


# --------------------------------------------------------------------------------------------------- the interface


def test_the_linear_solver_is_chosen_by_what_the_bound_promises() -> None:
    def structure(W: op.Operator, **options: object) -> Structure:
        return opteq.OptEq(W, **options)(torch.zeros(1, 4)).structure

    assert structure(op.Dense(3, 4, bound=0.9)) is Structure.POSITIVE
    assert structure(op.Dense(3, 4, bound=1.9), activation="sigmoid") is Structure.POSITIVE
    assert structure(op.Dense(3, 4, bound=1.1)) is Structure.SYMMETRIC
    assert structure(op.Dense(3, 4, bound=1.1), mu=1.5) is Structure.POSITIVE
    assert structure(op.Dense(3, 4)) is Structure.SYMMETRIC
    learned = penalties.LinearActivation(4)  # no promise can be made about a slope that is learned
    assert structure(op.Dense(3, 4, bound=0.9), activation=learned) is Structure.SYMMETRIC


def test_terms_are_named() -> None:
    problem = opteq.OptEq(op.Dense(3, 4), regularizer=regularizers.Ridge(), gamma=0.2).double()
    hidden = problem(random_vectors(2, 4))
    assert list(hidden.terms(hidden.start())) == ["penalty", "quadratic", "coupling", "input", "regularizer"]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"W": nn.Linear(3, 4)}, TypeError, "W should be one of opteq.operators.*got Linear"),
        ({"U": torch.relu}, TypeError, "U should be a torch module"),
        ({"activation": "rellu"}, ValueError, "unknown activation 'rellu'; did you mean 'relu'"),
        ({"activation": "gelu"}, ValueError, "'gelu' is not monotone"),
        ({"mu": 0.0}, ValueError, "mu should be a positive finite number; got 0.0"),
        ({"gamma": -1.0}, ValueError, "gamma should be a positive finite number; got -1.0"),
        ({"regularizer": "ridge"}, TypeError, "regularizer should be one of opteq.regularizers; got 'ridge'"),
        ({"regularizer": regularizers.L1()}, ValueError, "L1 is not smooth.*Envelope.*Splitting"),
    ],
)
def test_wrong_options(options: dict[str, object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        opteq.OptEq(**{"W": op.Dense(3, 4), **options})


def test_wrong_options_of_the_variants() -> None:
    plain = opteq.OptEq(op.Dense(3, 4))
    ridge = opteq.OptEq(op.Dense(3, 4), regularizer=regularizers.Ridge())
    with pytest.raises(TypeError, match="AffineOptEq wraps an OptEq without a regulariser"):
        opteq.AffineOptEq(ridge, torch.eye(3))
    with pytest.raises(ValueError, match=r"matrix should be square; got shape \(3, 2\)"):
        opteq.AffineOptEq(plain, torch.ones(3, 2))
    with pytest.raises(ValueError, match="matrix should be invertible"):
        opteq.AffineOptEq(plain, torch.ones(3, 3))
    with pytest.raises(ValueError, match="matrix should have entries, all of them finite"):
        opteq.AffineOptEq(plain, torch.full((3, 3), torch.nan))
    with pytest.raises(TypeError, match=r"matrix should be a matrix of floating-point numbers; got torch\.int64"):
        opteq.AffineOptEq(plain, torch.ones(3, 3).long())
    with pytest.raises(TypeError, match="shift should be a tensor of real numbers; got 3"):
        opteq.AffineOptEq(plain, torch.eye(3), 3)
    with pytest.raises(ValueError, match=r"shift should have length 3; got shape \(2,\)"):
        opteq.AffineOptEq(plain, torch.eye(3), torch.ones(2))
    with pytest.raises(TypeError, match="Splitting wraps an OptEq without a regulariser"):
        opteq.Splitting(ridge, regularizers.L1())
    with pytest.raises(TypeError, match="convex regulariser with a prox; got Incay"):
        opteq.Splitting(plain, regularizers.Incay())
    with pytest.raises(TypeError, match="convex regulariser with a prox"):
        opteq.Splitting(plain, Quartic())
    with pytest.raises(ValueError, match="gamma should be a positive finite number"):
        opteq.Splitting(plain, regularizers.L1(), gamma=0.0)


class Quartic(regularizers.Regularizer):
    """Convex, without a prox."""

    name, convex, smooth, couples_batch = "quartic", True, True, False

    def value(self, z: Tensor) -> Tensor:
        return z.pow(4).sum(1) / 4


def test_a_solver_on_features_is_refused_where_there_are_none_to_work_on() -> None:
    sam = opteq.SAM(regularizer=regularizers.Ridge())
    x = torch.zeros(1, 4)
    ridge = opteq.OptEq(op.Dense(3, 4), regularizer=regularizers.Ridge())
    with pytest.raises(ValueError, match="needs OptEq without a regulariser of its own"):
        opteq.Equilibrium(ridge, sam)(x)
    with pytest.raises(ValueError, match="can't solve Splitting"):
        opteq.Equilibrium(opteq.Splitting(opteq.OptEq(op.Dense(3, 4)), regularizers.L1()), sam)(x)


@pytest.mark.parametrize(
    "problem",
    [
        opteq.OptEq(opteq.operators.Dense(4, 6, bound=0.9), torch.nn.Linear(6, 6)),
        opteq.OptEq(opteq.operators.Dense(4, 6, bound=0.9)),
        opteq.DeepOptEq([(opteq.operators.Dense(4, 6, bound=0.9), torch.nn.Linear(6, 6))]),
        opteq.POptEq([opteq.Branch(opteq.operators.Dense(4, 6, bound=0.9), torch.nn.Linear(6, 6))]),
    ],
    ids=lambda problem: type(problem).__name__,
)
def test_an_input_without_a_batch_is_refused(problem: opteq.problems.Problem) -> None:
    """Its entries would pass for samples, and each be frozen where it alone has converged."""
    with pytest.raises(ValueError, match=r"no batch dimension; its shape is \(6,\). Give x\[None\]"):
        opteq.Equilibrium(problem)(torch.randn(6))
    opteq.Equilibrium(problem)(torch.randn(1, 6))


def test_a_sparse_input_is_refused() -> None:
    problem = opteq.OptEq(op.Dense(4, 6, bound=0.9), torch.nn.Linear(6, 6))
    with pytest.raises(TypeError, match=r"should be dense; got the layout torch\.sparse_coo\. .*x\.to_dense\(\)"):
        opteq.Equilibrium(problem)(torch.eye(6).to_sparse())


class Softer(opteq.penalties.ReLU):
    """A ReLU by name, with another slope."""

    lipschitz = 0.5

    def prox(self, t: Tensor) -> Tensor:
        return t.clamp_min(0) / 2

    def derivative(self, t: Tensor) -> Tensor:
        return (t > 0).to(t.dtype) / 2


@pytest.mark.parametrize("channels", [3, 16])
def test_an_activation_derived_from_relu_is_asked_itself(channels: int) -> None:
    torch.manual_seed(0)
    W, U = op.Conv2d(channels, channels, 3, bound=0.8), nn.Conv2d(2, channels, 1)
    x = torch.randn(2, 2, 6, 6)
    for problem in (opteq.OptEq(W, U, Softer()), opteq.MOptEq([opteq.Branch(W, U)], activation=Softer())):
        solution = opteq.Equilibrium(problem, opteq.Anderson(tol=1e-6)).solve(x)
        inside = blocks(problem(x).preactivation(solution.state))[0]
        torch.testing.assert_close(blocks(solution.state)[0], inside.clamp_min(0) / 2, rtol=1e-3, atol=1e-4)
        unrolled = opteq.Equilibrium(problem, opteq.Picard(tol=1e-6), opteq.Unrolled(steps=40)).solve(x)
        found, wanted = (
            torch.autograd.grad(blocks(each.features)[0].square().sum(), U.weight)[0] for each in (solution, unrolled)
        )
        torch.testing.assert_close(found, wanted, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("gradient", [opteq.Implicit(), opteq.Unrolled(1), opteq.Phantom(1), opteq.OneStep()])
def test_a_fixed_number_of_steps_is_that_of_the_paper(steps: int, gradient: opteq.gradients.Gradient) -> None:
    """``z <- W' sigma(W z + U x + b)`` from zero, where the bound lets solvers work on either variable."""
    torch.manual_seed(0)
    problem = opteq.OptEq(op.Dense(4, 6, bound=0.9), nn.Linear(5, 6)).double()
    x = torch.randn(3, 5, dtype=torch.float64)
    W, z = problem.W.prepare().weight.detach(), torch.zeros(3, 4, dtype=torch.float64)
    for _ in range(steps):
        z = torch.relu(z @ W.T + problem.U(x).detach()) @ W
    gradient = opteq.Unrolled(steps) if isinstance(gradient, opteq.Unrolled) else gradient
    layer = opteq.Equilibrium(problem, opteq.Picard(tol=0, max_steps=steps), gradient)
    torch.testing.assert_close(layer.solve(x).features.detach(), z, rtol=0, atol=1e-12)
    with torch.no_grad():
        torch.testing.assert_close(layer(x), z, rtol=0, atol=1e-12)
