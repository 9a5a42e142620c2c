"""SAM: the schedule put right, the point that it leans to, and that it chooses among equilibria."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import opteq
from opteq import data, regularizers
from opteq import operators as op
from opteq.regularizers import Regularizer
from opteq.solvers import Status
from oracles import SHARP, assert_slopes, cp, feature_objective


@dataclass(frozen=True, eq=False)
class LeastSquares(Regularizer):
    """``R(z) = 1/2 |B z - d|^2``: convex, and strongly so only where B has full rank."""

    B: Tensor
    d: Tensor

    name: ClassVar[str] = "least squares"
    convex: ClassVar[bool] = True
    smooth: ClassVar[bool] = True
    couples_batch: ClassVar[bool] = False

    def value(self, z: Tensor) -> Tensor:
        return (z @ self.B.T - self.d).square().sum(1) / 2

    def gradient(self, z: Tensor) -> Tensor:
        return (z @ self.B.T - self.d) @ self.B

    @property
    def gradient_lipschitz(self) -> float:
        return float(torch.linalg.matrix_norm(self.B, 2)) ** 2


def reference(
    T: Callable[[Tensor], Tensor],
    R: Regularizer,
    z: Tensor,
    steps: int,
    gamma: float,
    eta: float,
    rho: float = 0.33,
    c: float = 0.33,
) -> Tensor:
    """The iteration written down a second time, with autograd's gradient."""
    for k in range(1, steps + 1):
        point = z.detach().requires_grad_()
        (slope,) = torch.autograd.grad(R.value(point).sum(), point)
        beta, shrink = eta / k**rho, eta / k**c
        z = beta * (z - gamma * (slope + shrink * z)) + (1 - beta) * T(z)
    return z


def test_golden_third_iterate() -> None:
    R = LeastSquares(torch.ones(1, 1, dtype=torch.float64), torch.full((1,), -1.0, dtype=torch.float64))
    sam = opteq.SAM(regularizer=R, gamma=0.5, eta=0.5, rho=0.3, c=0.3, max_steps=3)
    outcome = sam.solve(torch.relu, torch.full((1, 1), 2.0, dtype=torch.float64))
    assert float(outcome.state) == pytest.approx(0.206577754686, abs=1e-12)
    assert int(outcome.steps) == 3


# ------------------------------------------------------------------------------------------------------ the schedule


@pytest.mark.parametrize(("scale", "gamma", "eta"), [(0.2, 12.5, 0.02), (1.0, 0.5, 0.5), (3.0, 1 / 18, 0.5)])
def test_default_step_sizes_come_from_the_curvature(scale: float, gamma: float, eta: float) -> None:
    """``gamma = 1 / (2 L)`` and ``eta = min(sqrt(2 L), L / 2, 1 / 2)`` with ``L = scale^2``."""
    R = LeastSquares(scale * torch.eye(2, dtype=torch.float64), torch.zeros(2, dtype=torch.float64))
    assert opteq.SAM(regularizer=R).schedule() == pytest.approx((gamma, eta))
    assert opteq.SAM(regularizer=R, gamma=0.1, eta=0.3).schedule() == (0.1, 0.3)


@pytest.mark.parametrize(("rho", "c"), [(0.33, 0.33), (0.5, 0.2), (0.2, 0.35)])
def test_iterates_are_those_of_the_theorem(rho: float, c: float) -> None:
    T, R, z = corner_problem()
    gamma, eta = opteq.SAM(regularizer=R).schedule()
    for steps in (1, 2, 17):
        found = opteq.SAM(regularizer=R, rho=rho, c=c, max_steps=steps).solve(T, z)
        wanted = reference(T, R, z, steps, gamma, eta, rho, c)
        torch.testing.assert_close(found.state, wanted, rtol=1e-12, atol=1e-13)
        assert (found.steps == steps).all()
        assert found.trace.shape == (steps + 1, len(z))


def test_all_steps_are_taken_even_from_a_fixed_point() -> None:
    """Every ``z >= 0`` is a fixed point of relu; the start is one, and not the smallest."""
    z = torch.tensor([[1.0, 2.0]], dtype=torch.float64)
    outcome = opteq.SAM(regularizer=regularizers.Ridge(), max_steps=50).solve(torch.relu, z)
    assert int(outcome.steps) == 50
    assert float(outcome.trace[0]) == 0
    assert float(outcome.state.norm()) < 0.5 * float(z.norm())


# ------------------------------------------------------------------------------------ a problem with many equilibria


@dataclass(frozen=True, eq=False)
class Corner:
    """``T(z) = Q' relu(Q z + b)`` with Q orthogonal."""

    Q: Tensor
    b: Tensor

    def __call__(self, z: Tensor) -> Tensor:
        return torch.relu(z @ self.Q.T + self.b) @ self.Q


def corner_problem(batch: int = 3) -> tuple[Corner, LeastSquares, Tensor]:
    """With ``b = (0, 0, 0, -.7)`` the fixed points are ``(Q z)_{1..3} >= 0, (Q z)_4 = 0``; R has rank 3 of 4."""
    generator = torch.Generator().manual_seed(6)
    Q = torch.linalg.qr(torch.randn(4, 4, generator=generator, dtype=torch.float64))[0]
    b = torch.tensor([0.0, 0.0, 0.0, -0.7], dtype=torch.float64)
    R = LeastSquares(
        torch.randn(3, 4, generator=generator, dtype=torch.float64),
        4 * torch.randn(3, generator=generator, dtype=torch.float64),
    )
    start = 4 * torch.randn(batch, 4, generator=generator, dtype=torch.float64)
    return Corner(Q, b), R, start


def selected_point(T: Corner, R: LeastSquares) -> Tensor:
    """The fixed point at which R is least, by a quadratic programme; it is unique, for R has no other direction."""
    z = cp.Variable(4)
    image = T.Q.numpy() @ z
    programme = cp.Problem(
        cp.Minimize(cp.sum_squares(R.B.numpy() @ z - R.d.numpy()) / 2), [image[:3] >= 0, image[3] == 0]
    )
    programme.solve(**SHARP)
    return torch.from_numpy(z.value)


def frozen_point(T: Corner, R: LeastSquares, beta: float, shrink: float, gamma: float) -> Tensor:
    """``argmin R + shrink/2 |z|^2 + (1 - beta)/(beta gamma) M(z)``, M the Moreau envelope of phi.

    As a quadratic programme: for orthogonal Q, ``M(z) = min_{y >= 0} -<b, y> + 1/2 |Q'y - z|^2``.
    """
    z, y = cp.Variable(4), cp.Variable(4)
    envelope = -y @ T.b.numpy() + cp.sum_squares(T.Q.T.numpy() @ y - z) / 2
    prior = cp.sum_squares(R.B.numpy() @ z - R.d.numpy()) / 2 + shrink / 2 * cp.sum_squares(z)
    cp.Problem(cp.Minimize(prior + (1 - beta) / (beta * gamma) * envelope), [y >= 0]).solve(**SHARP)
    return torch.from_numpy(z.value)


@pytest.mark.parametrize("eta", [0.5, 0.3])
def test_a_frozen_schedule_ends_at_the_point_of_the_theory(eta: float) -> None:
    T, R, start = corner_problem()
    gamma = 1 / (2 * R.gradient_lipschitz)
    # Exponents that change nothing over these steps: beta = lambda = eta throughout.
    sam = opteq.SAM(regularizer=R, eta=eta, rho=1e-13, c=1e-13, max_steps=1500)
    found = sam.solve(T, start).state
    wanted = frozen_point(T, R, eta, eta, gamma)
    assert float((found - wanted).norm(dim=1).max() / wanted.norm()) < 1e-3
    assert float((found - selected_point(T, R)).norm(dim=1).min()) > 0.01  # biased by beta and lambda, as it must be


def test_the_schedule_follows_the_frozen_points() -> None:
    """After k steps the iterate is near the fixed point of the map frozen at step k, far nearer than to the limit."""
    T, R, start = corner_problem()
    gamma, eta = opteq.SAM(regularizer=R).schedule()
    steps = 1000
    found = opteq.SAM(regularizer=R, max_steps=steps).solve(T, start).state
    frozen = frozen_point(T, R, eta / steps**0.33, eta / steps**0.33, gamma)
    to_frozen = (found - frozen).norm(dim=1).max()
    to_limit = (found - selected_point(T, R)).norm(dim=1).min()
    assert float(to_frozen) < 0.25 * float(to_limit)


def test_errors_fall_as_slowly_as_the_theory_says() -> None:
    """Like ``b_k + l_k``: 2.9, 1.5 and 0.75 after 100, 500 and 2000 steps. A few dozen get nowhere near."""
    T, R, start = corner_problem(1)
    limit = selected_point(T, R)

    def error(rho: float, c: float, steps: int) -> float:
        return float((opteq.SAM(regularizer=R, rho=rho, c=c, max_steps=steps).solve(T, start).state - limit).norm())

    errors = [error(0.33, 0.33, steps) for steps in (100, 500, 2000)]
    exponents = [np.log(errors[0] / errors[1]) / np.log(5), np.log(errors[1] / errors[2]) / np.log(4)]
    assert all(0.25 < exponent < 0.55 for exponent in exponents)
    assert errors[2] < 0.1 * float((start - limit).norm())
    assert error(0.2, 0.35, 500) < errors[1] < error(0.5, 0.2, 500)


def test_it_chooses_among_equilibria() -> None:
    """Plain iteration ends at whichever equilibrium is near; SAM at one that R likes better, from every start."""
    T, R, start = corner_problem()
    plain = opteq.Picard(tol=1e-12, max_steps=2000).solve(T, start).state
    chosen = opteq.SAM(regularizer=R, max_steps=1000, polish=100).solve(T, start)
    assert float(chosen.residual.max()) < 1e-6
    assert (R.value(chosen.state) < R.value(plain)).all()
    spread = (chosen.state - chosen.state.mean(dim=0)).norm()
    assert float(spread) < 0.1 * float((plain - plain.mean(dim=0)).norm())
    least = R.value(selected_point(T, R)[None])
    assert (R.value(chosen.state) >= least - 1e-9).all()
    assert (R.value(chosen.state) - least < 0.1 * (R.value(plain) - least)).all()


def test_polish_takes_plain_steps_at_the_end() -> None:
    T, R, start = corner_problem()
    rough = opteq.SAM(regularizer=R, max_steps=60).solve(T, start)
    polished = opteq.SAM(regularizer=R, max_steps=100, polish=40).solve(T, start)
    z = rough.state
    for _ in range(40):
        z = T(z)
    torch.testing.assert_close(polished.state, z, rtol=1e-12, atol=1e-13)
    assert (polished.residual < 0.01 * rough.residual).all()
    assert (rough.codes == int(Status.MAX_STEPS)).all()  # an unfinished answer is never called converged


# --------------------------------------------------------------------------------------------------- in a layer


def orthogonal_opteq() -> opteq.OptEq:
    """``|W| = 1`` and inputs of which some are negative: many equilibria."""
    generator = torch.Generator().manual_seed(1)
    Q = torch.linalg.qr(torch.randn(4, 4, generator=generator, dtype=torch.float64))[0]
    W = op.Dense(4, 4).double()
    W.weight.data.copy_(Q)
    return opteq.OptEq(W)


def test_in_an_opteq_layer() -> None:
    problem = orthogonal_opteq()
    x = torch.tensor([[0.0, 0.0, -0.5, -1.0], [0.0, -0.2, 0.0, 0.0]], dtype=torch.float64)
    R = LeastSquares(torch.eye(4, dtype=torch.float64), problem.W.weight.detach()[0] + problem.W.weight.detach()[1])
    layer = opteq.Equilibrium(problem, opteq.SAM(regularizer=R, max_steps=600, polish=100, tol=1e-8))
    with torch.no_grad():
        solution = layer.solve(x)
        hidden = problem(x)
        assert solution.converged.all()
        torch.testing.assert_close(hidden.step(solution.state), solution.state, rtol=0, atol=1e-7)
        assert (feature_objective(hidden, solution.state).abs() < 1e-7).all()  # the least value of phi here is 0
        # The wish d is an equilibrium in the first sample; in the second its coordinate 1 has to give way.
        wishes = torch.stack([R.d, problem.W.weight[0]])
        assert float((solution.features - wishes).norm(dim=1).max()) < 0.15
        plain = opteq.Equilibrium(problem, opteq.Picard(tol=1e-10)).solve(x)
        assert plain.converged.all()
        assert float(plain.features.abs().max()) == 0  # plain iteration stays at its start
    warm = layer.solve(x, start=solution.state)
    torch.testing.assert_close(warm.features, solution.features, rtol=0, atol=0.05)


def test_in_a_deep_opteq_layer() -> None:
    torch.manual_seed(0)
    layers = [(op.Dense(5, n, bound=0.9), nn.Linear(3, n)) for n in (6, 4)]
    problem = opteq.DeepOptEq(layers, alpha=0.8).double()
    x = torch.randn(3, 3, dtype=torch.float64)
    # The equilibrium is unique, so SAM with a few plain steps at the end must find the same one.
    sam = opteq.SAM(regularizer=regularizers.Ridge(), max_steps=200, polish=120, tol=1e-9)
    with torch.no_grad():
        found = opteq.Equilibrium(problem, sam, on_failure="raise")(x)
        wanted = opteq.Equilibrium(problem, opteq.Anderson(tol=1e-13, max_steps=200))(x)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-8)


@pytest.mark.parametrize("deep", [False, True], ids=["opteq", "deep"])
@pytest.mark.parametrize(
    "R", [regularizers.Ridge(), regularizers.Incay(), regularizers.Decorrelation(eps=0.1)], ids=str
)
def test_unrolled_steps_have_the_right_gradient(R: Regularizer, deep: bool) -> None:
    """As the paper trains it: the derivative of the twenty steps, for the input and the weights."""
    torch.manual_seed(0)
    if deep:
        layers = [(op.Dense(3, n, bound=0.9), nn.Linear(2, n)) for n in (4, 3)]
        problem = opteq.DeepOptEq(layers, alpha=0.7, activation="tanh").double()
    else:
        problem = opteq.OptEq(op.Dense(3, 4, bound=0.9), nn.Linear(2, 4), "tanh").double()
    sam = opteq.SAM(regularizer=R, gamma=0.2, eta=0.4)
    layer = opteq.Equilibrium(problem, sam, opteq.Unrolled(steps=20), on_failure="ignore")
    weights = dict(layer.named_parameters())
    x = torch.randn(2, 2, dtype=torch.float64, requires_grad=True)

    def features(x: Tensor, *values: Tensor) -> Tensor:
        return torch.func.functional_call(layer, dict(zip(weights, values, strict=True)), (x,))

    # Off the bound, at which min(1, bound / norm) has a kink.
    assert_slopes(features, [x, *(1.2 * w for w in weights.values())])
    # And the value is that of the iteration on the features.
    with torch.no_grad():
        hidden = problem(x)
        form = hidden.feature_form()
    z = reference(lambda z: form.task.step(z).detach(), R, form.task.start, 20, 0.2, 0.4)
    torch.testing.assert_close(layer(x).detach(), hidden.features(form.state(z)).detach(), rtol=1e-9, atol=1e-10)


def test_a_regulariser_that_couples_the_batch_is_solved_as_one() -> None:
    R = regularizers.Decorrelation(eps=0.01)
    start = torch.rand(5, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 0.5
    sam = opteq.SAM(regularizer=R, gamma=0.3, eta=0.5, max_steps=200)
    outcome = sam.solve(torch.relu, start)
    torch.testing.assert_close(outcome.state, reference(torch.relu, R, start, 200, 0.3, 0.5), rtol=1e-10, atol=1e-12)
    assert len(set(outcome.residual.tolist())) == 1  # one system, one residual
    assert float(R.value(outcome.state).sum()) < 0.5 * float(R.value(start).sum())
    apart = torch.cat([sam.solve(torch.relu, row[None]).state for row in start])
    assert float((apart - outcome.state).norm()) > 0.1


def test_a_row_that_overflows_keeps_its_last_finite_point() -> None:
    def T(z: Tensor) -> Tensor:
        return torch.where(z > 10, torch.inf, 0.5 * z)

    start = torch.tensor([[20.0], [1.0]], dtype=torch.float64)
    outcome = opteq.SAM(regularizer=regularizers.Ridge(), max_steps=10).solve(T, start)
    assert outcome.codes.tolist() == [int(Status.NON_FINITE), int(Status.MAX_STEPS)]
    assert torch.isfinite(outcome.state).all()


# ---------------------------------------------------------------------------------------------------------- options


class GradientOnly:
    """A regulariser that forgot to say what it knows."""

    def gradient(self, z: Tensor) -> Tensor:
        return z


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"regularizer": "ridge"}, TypeError, "SAM.regularizer should have gradient, as those of .*; got 'ridge'"),
        ({"regularizer": GradientOnly()}, TypeError, "SAM.regularizer should have gradient_lipschitz"),
        ({"regularizer": regularizers.L1()}, ValueError, "give SAM.gamma: the gradient of L1 has no known"),
        ({"regularizer": regularizers.L1(), "gamma": 0.1}, ValueError, "give SAM.eta"),
        ({"gamma": 0.0}, ValueError, "SAM.gamma should be a positive finite number; got 0.0"),
        ({"eta": 1.5}, ValueError, r"SAM.eta should lie in \(0, 1\]; got 1.5"),
        ({"rho": 0.0}, ValueError, "SAM.rho should be a positive finite number"),
        ({"c": "fast"}, TypeError, "SAM.c should be a positive number; got 'fast'"),
        ({"rho": 0.5, "c": 0.25}, ValueError, r"SAM needs rho \+ 2 c < 1; got rho=0.5, c=0.25"),
        ({"polish": -1}, ValueError, "SAM.polish should be at least 0; got -1"),
        ({"polish": 51}, ValueError, "SAM.polish should be at most max_steps=50; got 51"),
        ({"max_steps": 0}, ValueError, "SAM.max_steps should be at least 1; got 0"),
    ],
)
def test_wrong_options(options: dict[str, object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        opteq.SAM(**{"regularizer": regularizers.Ridge(), **options})


def test_unknown_option() -> None:
    with pytest.raises(TypeError, match="SAM has no option 'beta'; did you mean 'eta'"):
        opteq.SAM(regularizer=regularizers.Ridge(), beta=0.1)


@pytest.mark.parametrize("polish", [0, 1, 4])
@pytest.mark.parametrize("gradient", [opteq.Implicit(), opteq.Unrolled(10)], ids=["implicit", "unrolled"])
def test_a_layer_returns_one_plain_step_beyond_the_last_iterate(gradient: object, polish: int) -> None:
    torch.manual_seed(0)
    problem = opteq.OptEq(op.Dense(3, 5, bound=0.9), nn.Linear(4, 5)).double()
    sam = opteq.SAM(regularizer=regularizers.Ridge(), max_steps=10, polish=polish)
    layer = opteq.Equilibrium(problem, sam, gradient, on_failure="ignore")
    x = torch.randn(2, 4, dtype=torch.float64)
    W, c = problem.W.prepare().weight, problem.U(x)

    def plain(z: Tensor) -> Tensor:
        return torch.relu(z @ W.mT + c) @ W

    last = sam.solve(plain, torch.zeros(2, 3, dtype=torch.float64)).state
    for solution in (layer.solve(x), torch.no_grad()(layer.solve)(x)):
        torch.testing.assert_close(solution.state, torch.relu(last @ W.mT + c))
        torch.testing.assert_close(solution.features, plain(last))
        gap = (plain(last) - last).norm(dim=1) / plain(last).norm(dim=1)
        torch.testing.assert_close(solution.residual, gap.detach())


@pytest.mark.slow
def test_sam_chooses_among_the_equilibria_of_a_trained_network() -> None:
    """Digits, tanh and ``|W| <= 2.2``: most test images have several equilibria. Two opposite priors, one start."""
    torch.manual_seed(0)
    digits = data.load("digits")
    (x, labels), (tested, _) = [
        (split.images.float().flatten(1) / 255, torch.as_tensor(split.labels).long())
        for split in (digits.train, digits.test)
    ]
    shift, scale = x.mean(), x.std()
    x, tested = (x - shift) / scale, ((tested - shift) / scale)[:100]
    problem = opteq.OptEq(op.Dense(16, 32, bound=2.2), U=nn.Linear(64, 32), activation="tanh")
    layer = opteq.Equilibrium(problem, opteq.Picard(tol=1e-3, max_steps=25), opteq.OneStep(), on_failure="ignore")
    read = nn.Linear(16, 10)
    adam = torch.optim.Adam([*layer.parameters(), *read.parameters()], lr=1e-2)
    for _ in range(150):
        chosen = torch.randint(len(x), (64,))
        loss = nn.functional.cross_entropy(read(layer(x[chosen])), labels[chosen])
        adam.zero_grad()
        loss.backward()
        adam.step()
    assert float(loss.detach()) < 0.5

    plain = opteq.Equilibrium(problem, opteq.Picard(tol=1e-5, max_steps=1000), on_failure="ignore")
    with torch.no_grad():
        starts = [(2 * torch.randn(100, 32)).clamp(-0.99, 0.99) for _ in range(10)]
        ends = torch.stack([plain.solve(tested, start).features for start in starts])
        several = (ends - ends[0]).norm(dim=-1).amax(dim=0) > 0.05 * ends[0].norm(dim=-1)
        assert float(several.float().mean()) > 0.5
        direction = torch.linalg.svd((ends - ends.mean(dim=0)).flatten(0, 1), full_matrices=False)[2][:1]
        along = []
        for target in (10.0, -10.0):
            R = LeastSquares(direction, torch.tensor([target]))
            sam = opteq.SAM(regularizer=R, max_steps=140, polish=100, eta=0.5)
            leaning = opteq.Equilibrium(problem, sam, on_failure="ignore").solve(tested)
            found = plain.solve(tested, leaning.state)  # plain steps alone: where they end is an equilibrium
            assert float(found.converged.float().mean()) > 0.95
            along.append((found.features @ direction.T)[:, 0])
    higher, lower = (along[0] - along[1] > 0.1)[several], (along[0] - along[1] < -0.1)[several]
    assert float(higher.float().mean()) > 0.6
    assert float(lower.float().mean()) < 0.1
