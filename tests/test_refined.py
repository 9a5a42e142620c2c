"""Solves by rough products between full ones: answers, residuals and gradients are those of the plain path."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

import opteq
from opteq import operators as op
from opteq._fast import fast_paths
from opteq.gradients.forward import find_without_tape
from opteq.operators import coarse
from opteq.operators.recalled import by_weight, recalled
from opteq.penalties import ElementwisePenalty, Penalty
from opteq.problems.expansion import Expansion
from opteq.solvers import Status
from opteq.solvers.linear import CG, GMRES, MINRES
from opteq.solvers.loop import drive


@pytest.fixture(autouse=True)
def tiles(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every processor can compute in bfloat16; here it is made to, whether that is fast or not."""
    monkeypatch.setattr(coarse, "_multiplies_tiles", lambda: True)
    return


def problem(
    activation: str | Penalty = "relu", mu: float = 1.0, channels: int = 16, dtype: torch.dtype = torch.float32
) -> opteq.OptEq:
    torch.manual_seed(0)
    W = op.Conv2d(channels, 24, 3, bound=0.9)
    return opteq.OptEq(W, U=nn.Conv2d(3, 24, 3, padding=1), activation=activation, mu=mu).to(dtype)


def pictures(batch: int = 3, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(batch, 3, 6, 5, generator=torch.Generator().manual_seed(1), dtype=dtype)


def expansion_of(made: opteq.OptEq, x: Tensor) -> Expansion:
    with torch.no_grad():
        found = made(x).expansion()
    assert found is not None
    return found


def lengths(rows: Tensor) -> Tensor:
    return rows.double().flatten(1).norm(dim=1)


# Products.


def test_coarse_products_are_off_by_thousandths() -> None:
    made = problem()
    linear = made.W.prepare()
    rough = coarse.coarse_map(linear)
    assert rough is not None
    v, u = torch.randn(2, 16, 6, 6), torch.randn(2, 24, 6, 6)
    for near, true in ((rough(v), linear(v)), (rough.adjoint(u), linear.adjoint(u))):
        assert near.dtype == torch.bfloat16
        assert 0 < (near - true).norm() < rough.error * true.norm()


def test_few_channels_double_precision_and_other_maps_have_no_coarse_products() -> None:
    assert coarse.coarse_map(problem(channels=8).W.prepare()) is None
    assert coarse.coarse_map(problem(dtype=torch.float64).W.prepare()) is None
    assert coarse.coarse_map(op.Dense(16, 24).prepare()) is None
    with fast_paths(fused=False):
        assert coarse.coarse_map(problem().W.prepare()) is None


def test_a_processor_without_tiles_has_no_coarse_products(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    assert coarse.coarse_map(problem().W.prepare()) is None
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA")
    monkeypatch.delattr(torch.cpu, "_is_amx_tile_supported", raising=False)
    assert coarse.coarse_map(problem().W.prepare()) is None


def test_a_recalled_product_has_the_derivatives_of_the_product() -> None:
    linear = problem(dtype=torch.float64).W.prepare()
    linear.weight = linear.weight.detach().requires_grad_()
    v = torch.randn(2, 16, 5, 5, dtype=torch.float64, requires_grad=True)
    c = torch.randn(2, 24, 5, 5, dtype=torch.float64, requires_grad=True)
    g = torch.randn(2, 24, 5, 5, dtype=torch.float64)
    value = (linear(v) + c).detach()
    inputs = (v, linear.weight, c)
    true = torch.autograd.grad(linear(v) + c, inputs, g)
    found = torch.autograd.grad(recalled(linear, v, c, value), inputs, g)
    for one, other in zip(found, true, strict=True):
        torch.testing.assert_close(one, other)
    torch.testing.assert_close(by_weight(linear, v.detach(), g), true[1])


# The expansion.


@pytest.mark.parametrize("activation", ["relu", "tanh", "leaky_relu"])
@pytest.mark.parametrize("mu", [1.0, 1.5])
@torch.no_grad()
def test_near_images_are_off_by_thousandths_of_the_distance(activation: str, mu: float) -> None:
    made, x = problem(activation, mu), pictures()
    expansion = expansion_of(made, x)
    known = expansion.exact(torch.randn(3, 16, 6, 5))
    assert expansion.error is not None
    for distance in (1.0, 1e-2, 1e-4):
        z = known[0] + distance * torch.randn_like(known[0])
        near, move = expansion.near(known, z)
        torch.testing.assert_close(move, z - known[0])
        off = lengths(near - expansion.exact(z)[-1])
        assert (off < expansion.error * lengths(move)).all()


@torch.no_grad()
def test_the_difference_of_a_relu_needs_no_more_digits_than_the_move_has() -> None:
    made, x = problem(), pictures()
    expansion = expansion_of(made, x)
    t = torch.randn(3, 24, 6, 5)
    for size in (2.0, 1e-2, 1e-5):
        move = (size * torch.randn_like(t)).bfloat16()
        known = (t, t, *expansion._noted(t), t)
        found = expansion._difference(known, move).double()
        true = (t.double() + move.double()).relu() - t.double().relu()
        assert ((found - true).abs() <= 2.0**-7 * move.double().abs()).all()
        off = (t < 0) & (t + move.float() < 0)
        assert (found[off & (t < -1e-3)] == 0).all()


@torch.no_grad()
def test_the_beginning_is_the_evaluation_at_zero() -> None:
    expansion = expansion_of(problem(mu=1.2), pictures())
    begin = expansion.begin()
    for one, other in zip(begin, expansion.exact(torch.zeros_like(begin[0])), strict=True):
        torch.testing.assert_close(one, other)


@torch.no_grad()
def test_onward_is_one_more_step() -> None:
    expansion = expansion_of(problem(mu=1.2), pictures())
    known = expansion.exact(0.1 * torch.randn(3, 16, 6, 5))
    onward = expansion.onward(known)
    true = expansion.exact(known[-1])
    for place in (0, 1, -1):
        assert (lengths(onward[place] - true[place]) < 0.01 * lengths(known[-1] - known[0])).all()


def test_there_is_no_expansion_where_it_does_not_belong() -> None:
    made, x = problem(), pictures()
    assert made(x).expansion() is not None
    with fast_paths(fused=False):
        assert made(x).expansion() is None
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert made(x).expansion() is None
    wild = opteq.OptEq(op.Conv2d(16, 24, 3), U=nn.Conv2d(3, 24, 3, padding=1))  # no bound: a merit is needed
    assert wild(x).expansion() is None
    seen: list[object] = []

    def look(one: Tensor) -> Tensor:
        seen.append(made(one[None]).expansion())
        return one

    torch.func.vmap(look)(x)
    assert seen == [None]


# The solve.


@pytest.mark.parametrize("max_steps", [1, 2, 3, 50])
@pytest.mark.parametrize("solver", [opteq.Anderson, opteq.Picard, opteq.Broyden])
@torch.no_grad()
def test_the_residual_of_what_is_returned_is_measured(solver: type[opteq.solvers.Solver], max_steps: int) -> None:
    expansion = expansion_of(problem(), pictures())
    session = solver(tol=1e-5, max_steps=max_steps).open_refined(expansion, expansion.begin())
    drive(session.run)
    outcome = session.outcome()
    assert isinstance(outcome.state, Tensor)
    image = expansion.exact(outcome.state)[-1]
    true = lengths(image - outcome.state) / lengths(image)
    torch.testing.assert_close(outcome.residual, true, rtol=1e-3, atol=1e-8)
    assert ((outcome.codes == int(Status.CONVERGED)) == (true <= 1e-5)).all()
    assert outcome.known is not None
    torch.testing.assert_close(outcome.known[0], outcome.state)
    torch.testing.assert_close(outcome.known[-1], image)


@torch.no_grad()
def test_most_evaluations_are_rough() -> None:
    expansion = expansion_of(problem(), pictures())
    exact, counted = expansion.exact, []

    def counting(z: Tensor, rows: Tensor | None = None) -> tuple[Tensor, ...]:
        counted.append(len(z))
        return exact(z, rows)

    expansion.exact = counting  # type: ignore[method-assign]
    session = opteq.Anderson(tol=1e-5).open_refined(expansion, expansion.begin())
    drive(session.run)
    steps = session.outcome().steps
    assert sum(counted) < 0.7 * float(steps.sum())


@torch.no_grad()
def test_samples_do_not_depend_on_each_other() -> None:
    made, x = problem(), pictures(4) * torch.tensor([0.1, 1.0, 3.0, 10.0])[:, None, None, None]
    solver = opteq.Anderson(tol=1e-5)
    state, outcome = find_without_tape(made(x), solver, None)
    assert outcome.known is not None
    for i in range(4):
        alone, single = find_without_tape(made(x[i : i + 1]), solver, None)
        assert int(single.steps) == int(outcome.steps[i])
        torch.testing.assert_close(alone[0], state[i], rtol=1e-4, atol=1e-6)


def test_a_solver_with_a_process_of_its_own_is_left_alone() -> None:
    assert opteq.Anderson().refines
    assert not opteq.SAM(regularizer=opteq.regularizers.Ridge()).refines


@torch.no_grad()
def test_a_picture_of_nan_spoils_no_other() -> None:
    made, x = problem(), pictures()
    x[1, 0, 0, 0] = torch.nan
    layer = opteq.Equilibrium(made, on_failure="ignore")
    solution = layer.solve(x)
    assert solution.status[1] == Status.NON_FINITE
    assert torch.isfinite(solution.state).all()  # type: ignore[arg-type]
    torch.testing.assert_close(solution.features[0], layer(x[:1])[0], rtol=1e-3, atol=1e-5)  # type: ignore[index]


# The gradient.


def gradients_of(
    made: opteq.OptEq, x: Tensor, fused: bool, of_state: bool, tol: float
) -> tuple[list[Tensor], opteq.Solution]:
    layer = opteq.Equilibrium(made, opteq.Anderson(tol=tol), opteq.Implicit(tol=tol))
    x = x.clone().requires_grad_()
    with fast_paths(fused=fused):
        solution = layer.solve(x)
        answer = solution.state if of_state else solution.features
        assert isinstance(answer, Tensor)
        loss = (answer * torch.linspace(-1, 1, answer.numel(), dtype=answer.dtype).view_as(answer)).sum()
        found = torch.autograd.grad(loss, [x, *made.parameters()])
    return list(found), solution


@pytest.mark.parametrize("of_state", [False, True], ids=["features", "state"])
@pytest.mark.parametrize(("activation", "mu"), [("relu", 1.0), ("relu", 1.3), ("tanh", 1.0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gradients_are_those_of_the_plain_path(activation: str, mu: float, of_state: bool, dtype: torch.dtype) -> None:
    made, x = problem(activation, mu, dtype=dtype), pictures(dtype=dtype)
    tol, close = (1e-6, 2e-4) if dtype == torch.float32 else (1e-11, 1e-8)
    fast, solution = gradients_of(made, x, True, of_state, tol)
    slow, plain = gradients_of(made, x, False, of_state, tol)
    assert solution.report.converged.all()
    for one, other in zip(
        [*fast, solution.features, solution.state], [*slow, plain.features, plain.state], strict=True
    ):
        assert (one - other).norm() <= close * other.norm()  # type: ignore[union-attr, operator]


@pytest.mark.parametrize("linear", [CG, MINRES, GMRES])
def test_every_linear_solver_can_be_used(linear: type[CG]) -> None:
    made, x = problem(), pictures()
    layer = opteq.Equilibrium(made, opteq.Anderson(tol=1e-6), opteq.Implicit(linear=linear(tol=1e-6)))
    layer(x).square().sum().backward()
    found = made.W.weight.grad.clone()  # type: ignore[union-attr]
    made.zero_grad()
    with fast_paths(fused=False):
        layer(x).square().sum().backward()
    assert (found - made.W.weight.grad).norm() < 2e-4 * found.norm()  # type: ignore[union-attr]


@pytest.mark.parametrize("max_steps", [1, 2, 50])
@torch.no_grad()
def test_the_residual_of_the_adjoint_is_measured(max_steps: int) -> None:
    from opteq.gradients.feature_system import FeatureSystem

    expansion = expansion_of(problem(), pictures())
    known = expansion.exact(0.1 * torch.randn(3, 16, 6, 5))
    system = FeatureSystem(expansion, known, CG(tol=1e-5, max_steps=max_steps))
    g = torch.randn(3, 16, 6, 5) * torch.tensor([1e-8, 1.0, 1e8])[:, None, None, None]
    slope = expansion.slope(known)
    u, carried, report = system._solve(expansion, known, g, slope)
    assert carried is not None
    true = lengths(g - u + expansion.product(slope, u)[0]) / lengths(g)
    torch.testing.assert_close(report.residual, true, rtol=1e-2, atol=3e-7)
    assert (report.converged == (true <= 1e-5)).all()
    torch.testing.assert_close(
        carried / lengths(u)[:, None, None, None], expansion.W(u) / lengths(u)[:, None, None, None]
    )


def test_a_second_derivative_is_refused() -> None:
    made, x = problem(), pictures().requires_grad_()
    (first,) = torch.autograd.grad(opteq.Equilibrium(made)(x).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="can't be differentiated again"):
        first.square().sum().backward()


def test_nothing_wants_a_gradient() -> None:
    made = problem().requires_grad_(False)
    solution = opteq.Equilibrium(made).solve(pictures())
    assert not solution.features.requires_grad  # type: ignore[union-attr]
    assert not solution.state.requires_grad  # type: ignore[union-attr]


def test_only_the_input_wants_a_gradient() -> None:
    made, x = problem().requires_grad_(False), pictures()
    layer = opteq.Equilibrium(made, opteq.Anderson(tol=1e-6))
    found = []
    for fused in (True, False):
        own = x.clone().requires_grad_()
        with fast_paths(fused=fused):
            layer(own).square().sum().backward()
        assert own.grad is not None
        found.append(own.grad)
    assert (found[0] - found[1]).norm() < 2e-4 * found[1].norm()


class Leaky(ElementwisePenalty):
    """A leaky rectifier whose slope is a tensor that somebody else trains."""

    name, bounded, lipschitz = "leaky", False, 1.0

    def __init__(self, slope: Tensor) -> None:
        self.slope = slope

    def prox(self, t: Tensor) -> Tensor:
        return torch.where(t > 0, t, self.slope * t)

    def derivative(self, t: Tensor) -> Tensor:
        return torch.where(t > 0, torch.ones_like(t), self.slope)

    def _antiderivative(self, t: Tensor) -> Tensor:
        return t * self.prox(t) / 2

    def _value(self, y: Tensor) -> Tensor:
        return (1 / self.slope - 1) / 2 * y.clamp(max=0).square()


def test_a_parameter_inside_the_penalty_gets_its_gradient() -> None:
    slope = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    made, x = problem(Leaky(slope), dtype=torch.float64), pictures(dtype=torch.float64)
    layer = opteq.Equilibrium(made, opteq.Anderson(tol=1e-12))
    (found,) = torch.autograd.grad(layer(x).sin().sum(), slope)
    with torch.no_grad():
        above, below = (
            opteq.Equilibrium(problem(Leaky(slope + move), dtype=torch.float64), layer.solver)(x).sin().sum()
            for move in (1e-5, -1e-5)
        )
    torch.testing.assert_close(found, (above - below) / 2e-5, rtol=1e-6, atol=1e-8)


def test_a_start_is_used() -> None:
    layer = opteq.Equilibrium(problem(), opteq.Anderson(tol=1e-5))
    first = layer.solve(pictures())
    again = layer.solve(pictures(), start=first.state)
    assert int(again.report.steps.max()) < int(first.report.steps.max())


@pytest.mark.parametrize(
    "change", [torch.relu_, lambda y: y.mul_(2.0), lambda y: y.add_(1.0)], ids=["relu", "mul", "add"]
)
def test_features_may_be_changed_in_place(change: Callable[[Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    layer = opteq.Equilibrium(opteq.OptEq(op.Conv2d(4, 6, 3, bound=0.9), nn.Conv2d(4, 6, 3, padding=1)))
    x = torch.randn(2, 4, 5, 5)
    inputs = list(layer.parameters())
    changed = torch.autograd.grad(change(layer(x)).square().sum(), inputs)
    copied = torch.autograd.grad(change(layer(x).clone()).square().sum(), inputs)
    for one, other in zip(changed, copied, strict=True):
        assert torch.equal(one, other)
