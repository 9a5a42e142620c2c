"""Deep OptEq: the inclusion of Theorem 2, the objective of Corollary 1, the limit of Theorem 3, Lemma 3 put right."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import opteq
from opteq import operators as op
from opteq import penalties
from opteq.problems.deep.deep_opteq import BoundDeepOptEq
from oracles import SHARP, cp

EXACT = opteq.Anderson(tol=1e-14, max_steps=2000)


def operator(W: Tensor) -> op.Dense:
    dense = op.Dense(W.shape[1], W.shape[0]).to(W)
    dense.weight.data.copy_(W)
    return dense


def constant(c: Tensor) -> nn.Linear:
    """An injection that hears nothing of the input: ``U x + b = c``."""
    layer = nn.Linear(1, len(c)).to(c)
    layer.weight.data.zero_()
    layer.bias.data.copy_(c)
    return layer


def network(
    widths: tuple[int, ...], m: int = 5, seed: int = 3, bound: float = 0.9, **options: object
) -> opteq.DeepOptEq:
    torch.manual_seed(seed)
    layers = [(op.Dense(m, n, bound=bound), nn.Linear(4, n)) for n in widths]
    return opteq.DeepOptEq(layers, **options).double()


def inputs(batch: int = 3, *shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, *(shape or (4,)), generator=generator, dtype=torch.float64)


def solved(problem: opteq.DeepOptEq, x: Tensor) -> tuple[BoundDeepOptEq, Tensor]:
    with torch.no_grad():
        state = opteq.Equilibrium(problem, EXACT, on_failure="raise").solve(x).state
        assert isinstance(state, Tensor)
        return problem(x), state


def assert_near(found: Tensor, wanted: object, tolerance: float = 1e-10) -> None:
    wanted = torch.as_tensor(wanted, dtype=torch.float64)
    torch.testing.assert_close(found.detach(), wanted.detach(), rtol=tolerance, atol=tolerance)


def test_golden_two_layers() -> None:
    layers = [
        (operator(torch.tensor([[w]], dtype=torch.float64)), constant(torch.tensor([c], dtype=torch.float64)))
        for w, c in ((0.5, 1.0), (0.8, -0.2))
    ]
    hidden, z = solved(opteq.DeepOptEq(layers, alpha=0.6), torch.zeros(1, 1, dtype=torch.float64))
    assert_near(z, [[0.244725738397]], 1e-11)
    assert_near(hidden.trajectory(z)[1], [[0.434599156118]], 1e-11)
    assert_near(hidden.objective(z), [-0.327848101266], 1e-11)


# -------------------------------------------------------------------------------------------------------- Theorem 2


CONV_LAYERS = [
    lambda: (op.Conv2d(2, 3, 3, bound=0.9), nn.Conv2d(2, 3, 3, padding=1)),
    lambda: (op.Conv2d(2, 4, 3, bound=0.9), None),
    lambda: (op.Conv2d(2, 2, 3, bound=0.9), nn.Conv2d(2, 2, 3, padding=1)),
]


def conv_network(**options: object) -> opteq.DeepOptEq:
    torch.manual_seed(0)
    return opteq.DeepOptEq([make() for make in CONV_LAYERS], **options).double()


NETWORKS = {
    "one": lambda: (network((6,)), inputs()),
    "two": lambda: (network((6, 3), alpha=(0.3, 0.9)), inputs()),
    "four": lambda: (network((6, 3, 5, 8), alpha=0.7, activation="tanh"), inputs()),
    "no skip": lambda: (network((6, 3, 5), alpha=1.0), inputs()),
    "some skip": lambda: (network((6, 3, 5), alpha=(1.0, 0.4, 1.0), activation="softplus"), inputs()),
    "mu": lambda: (network((6, 3), bound=1.2, mu=1.5, alpha=0.8, activation="elu"), inputs()),
    "learned": lambda: (network((6, 3), learn_alpha=True), inputs()),
    "conv": lambda: (conv_network(alpha=0.8), inputs(2, 2, 4, 5)),
}


@pytest.mark.parametrize("make", NETWORKS.values(), ids=NETWORKS)
def test_the_inclusion_holds_at_the_equilibrium_only(make: Callable[[], tuple[opteq.DeepOptEq, Tensor]]) -> None:
    problem, x = make()
    hidden, z = solved(problem, x)
    with torch.no_grad():
        residual = hidden.inclusion_residual(z)
        assert residual.shape == (len(problem.layers), len(x))
        assert float(residual.max()) < 1e-10
        off = hidden.inclusion_residual(z + 0.1)
        assert (off.amax(dim=0) > 1e-3).all()
        # The ring is closed by force, so the last layer alone shows how far its image is from where it should be.
        assert_near(off[:-1], torch.zeros_like(off[:-1]), 1e-9)


@pytest.mark.parametrize("alpha", [0.3, 0.8])
def test_the_inclusion_residual_against_finite_differences_of_envelopes(alpha: float) -> None:
    """``alpha grad M_l`` from values of ``alpha M_l``, which a quadratic programme checks in the tests of OptEq."""
    problem = network((6, 3), alpha=alpha, activation="tanh")
    x = inputs(2)
    hidden = problem(x)
    z = inputs(2, 5, seed=4)
    with torch.no_grad():
        points = hidden.trajectory(z)
        points[-1] = points[0]
        for index in range(2):
            alone = BoundDeepOptEq([hidden.layers[index]], [alpha])
            after, size = points[index + 1], 1e-5
            slope = torch.zeros_like(after)
            for j, e in enumerate(torch.eye(5, dtype=torch.float64) * size):
                slope[:, j] = (alone.objective(after + e) - alone.objective(after - e)) / (2 * size)
            gap = (slope + after - points[index]).norm(dim=1)
            torch.testing.assert_close(hidden.inclusion_residual(z)[index], gap, rtol=1e-6, atol=1e-7)


def test_a_preimage_that_is_not_found_is_an_error() -> None:
    problem = network((6,), alpha=0.9, bound=5.0)
    for branch in problem.branches:
        branch.W.weight.data.mul_(10)  # up to its bound
    with pytest.raises(RuntimeError, match=r"preimage was not found .*after 2 steps.*alpha=0.9"):
        problem(inputs()).layers[0].preimage(inputs(3, 5), 0.9, max_steps=2)


# ------------------------------------------------------------------------------------------------------ Corollary 1


@pytest.mark.parametrize("mu", [1.0, 1.4])
@pytest.mark.parametrize("alphas", [(0.6, 0.6), (0.25, 0.9)])
def test_an_interior_point_solver_agrees_on_two_layers(alphas: tuple[float, float], mu: float) -> None:
    """The joint problem in ``z_1, z_0`` and the states ``y_1, y_2 >= 0`` behind the envelopes."""
    problem = network((6, 3), alpha=alphas, mu=mu, bound=0.9 * mu**0.5)
    x = 2 * inputs()
    hidden, state = solved(problem, x)
    points, values = hidden.trajectory(state), hidden.objective(state)
    for sample in range(len(x)):
        z = [cp.Variable(5), cp.Variable(5)]  # z_1 and z_0 = z_2
        total, constraints = cp.sum_squares(z[0] - z[1]) / 2, []
        for block, alpha, after in zip(hidden.layers, alphas, z, strict=True):
            W = block.W(torch.eye(5, dtype=torch.float64)).T.detach().numpy()
            c = block.c[sample].detach().numpy()
            y, p = cp.Variable(len(c)), cp.Variable(5)
            constraints += [y >= 0, p == W.T @ y / mu]
            # phi(p) in y: |y|^2 / mu outweighs the -|p|^2 in it where W'W <= mu.
            phi = cp.quad_form(y, cp.psd_wrap(np.eye(len(c)) / mu - W @ W.T / mu**2)) / 2 - c @ y / mu
            total += alpha * (phi + cp.sum_squares(p - after) / (2 * (1 - alpha)))
        value = cp.Problem(cp.Minimize(total), constraints).solve(**SHARP)
        assert_near(points[1][sample], z[0].value, 1e-5)
        assert_near(points[0][sample], z[1].value, 1e-5)
        assert_near(values[sample], value, 1e-8)


@pytest.mark.parametrize("alpha", [(0.5,), (0.8, 0.4), (1.0, 0.6)])
def test_no_other_point_has_a_smaller_joint_objective(alpha: tuple[float, ...]) -> None:
    problem = network((6, 3)[: len(alpha)], alpha=alpha, activation="softplus")
    x = inputs()
    hidden, state = solved(problem, x)
    with torch.no_grad():
        least = hidden.objective(state)
        for seed in range(10):
            assert (hidden.objective(state + 0.2 * inputs(3, 5, seed=seed)) >= least - 1e-11).all()


def test_more_layers_have_no_joint_objective() -> None:
    with pytest.raises(ValueError, match="only one or two layers have a joint objective; this has 3: see inclusion"):
        network((6, 3, 2))(inputs()).objective(inputs(3, 5))


# ------------------------------------------------------------------------------------- Theorem 3 and the wide limit


def wide_point(hidden: BoundDeepOptEq, steps: int = 3000) -> Tensor:
    """``L y = sum T_l(y)`` by plain averaging, which is gradient descent on the sum of the envelopes."""
    y = hidden.start()
    for _ in range(steps):
        y = torch.stack([block(y) for block in hidden.layers]).mean(dim=0)
    return y


@pytest.mark.parametrize("activation", ["relu", "tanh"])
def test_small_alphas_tend_to_the_wide_limit(activation: str) -> None:
    x = inputs()
    errors = []
    for alpha in (0.1, 0.01, 0.001):
        problem = network((6, 3, 4), alpha=alpha, activation=activation)
        with torch.no_grad():
            # A step moves by a multiple of alpha only, and so must the tolerance.
            solver = opteq.Anderson(tol=1e-10 * alpha, max_steps=500)
            z = opteq.Equilibrium(problem, solver, on_failure="raise").solve(x).state
            errors.append(float((z - wide_point(problem(x), 300)).norm()))
    assert errors[0] < 0.5
    assert errors[0] / errors[1] == pytest.approx(10, rel=0.15)
    assert errors[1] / errors[2] == pytest.approx(10, rel=0.05)


class Joined(nn.Module):
    """Several injections of one input, joined along the dimension along which a Stack joins its operators."""

    def __init__(self, parts: list[nn.Module], dim: int) -> None:
        super().__init__()
        self.parts, self.dim = nn.ModuleList(parts), dim

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([part(x) for part in self.parts], dim=self.dim)


@pytest.mark.parametrize(("kind", "mu"), [("vectors", 1.0), ("sequences", 1.3), ("images", 1.3)])
def test_wide_limit_is_an_opteq_with_the_same_weights(kind: str, mu: float) -> None:
    if kind == "images":
        layers = [(op.Conv2d(2, n, 3, bound=0.9), nn.Conv2d(2, n, 3, padding=1)) for n in (3, 4)]
        problem, x = opteq.DeepOptEq(layers, mu=mu).double(), inputs(2, 2, 4, 5)
    else:
        problem = network((6, 3, 4), mu=mu)
        x = inputs() if kind == "vectors" else inputs(3, 7, 4)
    branches = problem.branches
    stack = op.Stack([branch.W for branch in branches])
    wide = opteq.OptEq(stack, Joined([branch.U for branch in branches], stack.dim), problem.penalty, mu * len(branches))
    with torch.no_grad():
        features = opteq.Equilibrium(wide, EXACT, on_failure="raise")(x)
        torch.testing.assert_close(features, wide_point(problem(x)), rtol=1e-9, atol=1e-10)
        # It minimises the sum of the envelopes (1/2 |z|^2 - psi_l), divided by their number.
        hidden, blocks = wide(x), problem(x).layers
        mean = torch.stack([block.merit(features) for block in blocks]).mean(dim=0)
        torch.testing.assert_close(hidden.block.merit(features), mean, rtol=1e-9, atol=1e-10)
    assert {id(p) for p in wide.parameters()} == {id(p) for p in problem.parameters()}


# ---------------------------------------------------------------------------------------------------------- Lemma 3


@pytest.mark.parametrize("activation", ["relu", "tanh"])
def test_the_layers_stacked_are_one_equation(activation: str) -> None:
    """``z~ = alpha W~' sigma(W~ P z~ + c~) + (1 - alpha) P z~`` with the cyclic shift P, inside sigma as well."""
    alpha, m = 0.6, 5
    problem = network((6, 3, 4), alpha=alpha, activation=activation)
    hidden, z = solved(problem, inputs())
    with torch.no_grad():
        points = hidden.trajectory(z)
        stacked = torch.cat([*points[1:3], points[0]], dim=1)
        matrices = [block.W(torch.eye(m, dtype=torch.float64)).T for block in hidden.layers]
        W = torch.block_diag(*matrices)
        c = torch.cat([block.c for block in hidden.layers], dim=1)
        shift = torch.roll(torch.eye(3 * m, dtype=torch.float64), m, dims=0)
        shifted = stacked @ shift.T
        assert_near(shifted, torch.cat(points[:3], dim=1), 0)
        sigma = hidden.layers[0].penalty.prox
        assert_near(alpha * sigma(shifted @ W.T + c) @ W + (1 - alpha) * shifted, stacked, 1e-12)
        as_printed = alpha * sigma(stacked @ W.T + c) @ W + (1 - alpha) * shifted
        assert float((as_printed - stacked).norm()) > 0.01


# ------------------------------------------------------------------------------------------------------------ alpha


def test_a_learned_alpha_stays_inside_and_moves() -> None:
    problem = network((6, 3), alpha=(0.3, 0.7), learn_alpha=True)
    torch.testing.assert_close(torch.stack(list(problem.alphas)), torch.tensor([0.3, 0.7], dtype=torch.float64))
    layer = opteq.Equilibrium(problem, EXACT)
    optimiser = torch.optim.SGD(layer.parameters(), lr=1.0)
    before = [float(alpha.detach()) for alpha in problem.alphas]
    for _ in range(20):
        optimiser.zero_grad()
        (-layer(inputs())[:, 0].sum()).backward()
        assert problem.alpha_logit.grad is not None
        assert (problem.alpha_logit.grad != 0).all()
        optimiser.step()
    after = [float(alpha.detach()) for alpha in problem.alphas]
    assert all(0 < alpha < 1 for alpha in after)
    assert all(abs(a - b) > 1e-3 for a, b in zip(after, before, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_learned_alpha_has_the_layers_dtype(dtype: torch.dtype) -> None:
    layers = [(op.Dense(4, n, bound=0.9).to(dtype), nn.Linear(3, n).to(dtype)) for n in (6, 5)]
    problem = opteq.DeepOptEq(layers, alpha=0.7, learn_alpha=True)
    assert problem.alpha_logit.dtype == dtype
    assert opteq.Equilibrium(problem)(torch.randn(2, 3, dtype=dtype)).dtype == dtype


def test_the_gradient_of_alpha_against_finite_differences() -> None:
    problem = network((6, 3), alpha=(0.3, 0.7), learn_alpha=True, activation="tanh")
    layer = opteq.Equilibrium(problem, EXACT)
    (slope,) = torch.autograd.grad(layer(inputs()).pow(2).sum(), problem.alpha_logit)
    for index in range(2):
        values = []
        for move in (1e-5, -1e-5):
            with torch.no_grad():
                problem.alpha_logit[index] += move
                values.append(layer(inputs()).pow(2).sum())
                problem.alpha_logit[index] -= move
        assert float(slope[index]) == pytest.approx(float(values[0] - values[1]) / 2e-5, rel=1e-6)


def test_one_alpha_or_one_a_layer() -> None:
    assert network((6, 3)).alphas == [0.8, 0.8]
    assert network((6, 3), alpha=(1, 0.5)).alphas == [1.0, 0.5]


# ---------------------------------------------------------------------------------------------------- the interface


def test_a_layer_without_input_hears_the_others_only() -> None:
    torch.manual_seed(0)
    first, second = op.Dense(5, 6, bound=0.9), op.Dense(5, 3, bound=0.9)
    problem = opteq.DeepOptEq([(first, None), opteq.Branch(second, nn.Linear(4, 3))], alpha=0.7).double()
    silent = nn.Linear(4, 6).double()
    for parameter in silent.parameters():
        parameter.data.zero_()
    twin = opteq.DeepOptEq([(first, silent), (second, problem.branches[1].U)], alpha=0.7)
    assert_near(solved(problem, inputs())[1], solved(twin, inputs())[1], 1e-12)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"layers": []}, ValueError, "needs at least one layer with U"),
        ({"layers": [(op.Dense(5, 6), None)]}, ValueError, "needs at least one layer with U"),
        ({"layers": [op.Dense(5, 6)]}, TypeError, r"layer 0 should be a pair \(W, U\) or a Branch"),
        ({"layers": [(nn.Linear(5, 6), None)]}, TypeError, "W should be one of opteq.operators.*got Linear"),
        (
            {"layers": [opteq.Branch(op.Dense(5, 6), nn.Linear(4, 6), scale=2)]},
            ValueError,
            "share one resolution; layer 0 has scale=2",
        ),
        ({"alpha": 0.0}, ValueError, "alpha should be a positive finite number; got 0.0"),
        ({"alpha": 1.5}, ValueError, r"alpha should lie in \(0, 1\]; got 1.5"),
        ({"alpha": (0.5, 0.5)}, ValueError, r"one number or one per layer \(1\); got 2"),
        ({"alpha": 1.0, "learn_alpha": True}, ValueError, r"starts strictly inside \(0, 1\); got 1.0"),
        ({"mu": -1.0}, ValueError, "mu should be a positive finite number"),
        ({"activation": "mish"}, ValueError, "'mish' is not monotone"),
    ],
)
def test_wrong_options(options: dict[str, object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        opteq.DeepOptEq(**{"layers": [(op.Dense(5, 6), nn.Linear(4, 6))], **options})


def test_a_regulariser_joins_the_first_inclusion() -> None:
    torch.manual_seed(0)
    gamma, alphas = 0.3, (0.7, 0.9)
    layers = [(op.Dense(5, n, bound=0.8), nn.Linear(4, n)) for n in (6, 3)]
    problem = opteq.DeepOptEq(layers, alphas, "tanh", regularizer=opteq.regularizers.Ridge(), gamma=gamma).double()
    x = torch.randn(3, 4, dtype=torch.float64)
    z = opteq.Equilibrium(problem, opteq.Anderson(tol=1e-13, max_steps=300))(x).detach()
    image = z - gamma * z  # the gradient of |z|^2 / 2 is z
    for (W, U), alpha in zip(layers, alphas, strict=True):
        image = alpha * W.adjoint(torch.tanh(W(image) + U(x))) + (1 - alpha) * image
    torch.testing.assert_close(image.detach(), z, rtol=0, atol=1e-11)
    assert (problem(x).inclusion_residual(z) < 1e-8).all()
    plain = opteq.Equilibrium(opteq.DeepOptEq(layers, alphas, "tanh").double())(x)
    assert (plain - z).norm() > 1e-2  # it has an effect
    jacobian = torch.stack(
        [
            torch.autograd.functional.jacobian(problem(row[None]).step, z[i : i + 1]).reshape(5, 5)
            for i, row in enumerate(x)
        ]
    )
    assert torch.linalg.matrix_norm(jacobian, 2).max() <= problem.certificate().contraction
    with pytest.raises(ValueError, match="with a regulariser see inclusion_residual"):
        problem(x).objective(z)
    with pytest.raises(ValueError, match="L1 is not smooth"):
        opteq.DeepOptEq(layers, regularizer=opteq.regularizers.L1())
    unknown = opteq.DeepOptEq(layers, regularizer=opteq.regularizers.Decorrelation()).certificate()
    assert unknown.contraction is None
    assert "Decorrelation" in unknown.reasons["unique"]


def test_gradient_descent_reaches_a_global_optimum_at_a_linear_rate() -> None:
    """Theorem 6: wide layers, a smooth and strongly monotone activation, full-batch gradient descent.

    The labels are random, so only a global optimum has loss 0. The loss falls at least by a constant factor per step,
    and the distance of the weights to their limit by its square root.
    """
    activation = penalties.FromActivation(lambda v: 0.5 * v + 0.5 * torch.tanh(v), lipschitz=1.0)  # slopes in [0.5, 1]
    torch.manual_seed(3)
    layers = [(op.Dense(24, 60), nn.Linear(4, 60)) for _ in range(2)]
    for W, _ in layers:
        W.weight.data *= 0.5
    problem = opteq.DeepOptEq(layers, activation=activation).double()
    layer = opteq.Equilibrium(problem, opteq.Anderson(tol=1e-8, max_steps=100), opteq.Implicit(tol=1e-8))
    last = nn.Linear(24, 2, bias=False).double()
    x, labels = torch.randn(4, 4).double(), torch.randn(4, 2).double()
    weights = [*layer.parameters(), *last.parameters()]
    losses, path = [], []
    for _ in range(80):
        loss = 0.5 * (last(layer(x)) - labels).square().sum()
        slopes = torch.autograd.grad(loss, weights)
        losses.append(float(loss.detach()))
        path.append(torch.cat([weight.detach().flatten() for weight in weights]))
        with torch.no_grad():
            for weight, slope in zip(weights, slopes, strict=True):
                weight -= 0.02 * slope
    assert losses == sorted(losses, reverse=True)
    rate = max(later / sooner for sooner, later in zip(losses, losses[10:], strict=False)) ** 0.1  # per step
    assert rate < 0.985
    assert losses[-1] < 1e-2 * losses[0]
    distances = [float((point - path[-1]).norm()) for point in path]
    assert all(distance <= 1.1 * distances[0] * rate ** (step / 2) for step, distance in enumerate(distances))
    assert distances[0] < 0.5 * float(path[0].norm())  # the weights stay near their start, as the proof needs
