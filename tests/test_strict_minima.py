"""Strict minima of a batch, decided with few Lanczos steps, against dense eigenvalues."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import opteq
from opteq import operators as op
from opteq.diagnostics import minimum
from opteq.diagnostics.extremes import outer_bounds
from opteq.diagnostics.strict import certified_minima, strict_minima
from opteq.penalties import ELU, FromActivation
from opteq.solvers import Solver
from opteq.solvers.linear.lanczos import Lanczos, tridiagonal
from opteq.states import blocks
from oracles import dense_jacobian

WIDTH = 300


def network(size: float, activation: str = "tanh", dtype: torch.dtype = torch.float32) -> opteq.MOptEq:
    """Three branches of 100 units whose feedback may be indefinite."""
    torch.manual_seed(0)
    branches = [opteq.Branch(op.Dense(40, WIDTH // 3), nn.Linear(5, WIDTH // 3)) for _ in range(3)]
    for branch in branches:
        branch.W.weight.data.mul_(size / branch.W.norm())
    return opteq.MOptEq(branches, activation=activation).to(dtype)


def count_products(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The rows of every product that is made."""
    seen: list[int] = []
    plain = minimum.curvature_product

    def counted(hidden: opteq.problems.HiddenProblem, state: opteq.states.State) -> object:
        product = plain(hidden, state)
        return lambda rows: (seen.append(len(rows)), product(rows))[1]

    monkeypatch.setattr(minimum, "curvature_product", counted)
    return seen


@pytest.mark.parametrize(
    ("activation", "size", "dtype"), [("tanh", 1.36, torch.float32), ("relu", 1.61, torch.float64)]
)
def test_no_claim_is_wrong_and_none_is_lost(activation: str, size: float, dtype: torch.dtype) -> None:
    """States from flat to saturated have largest eigenvalues on both sides of 1; they need not be equilibria."""
    problem = network(size, activation, dtype)
    spread = torch.logspace(-2, 1, 16)[:, None]
    generator = torch.Generator().manual_seed(1)
    state = tuple((spread * torch.randn(16, WIDTH // 3, generator=generator)).to(dtype) for _ in range(3))
    x = torch.randn(16, 5, generator=generator).to(dtype) * spread.to(dtype)
    found = certified_minima(problem, x, state, torch.ones(16, dtype=torch.bool))
    whole = strict_minima(problem(x), state, 60)
    largest, same = [], network(size, activation, torch.float64)
    for row in range(16):
        at = tuple(part[row : row + 1].double() for part in state)
        jacobian = dense_jacobian(same(x[row : row + 1].double()).step, at, vectorize=True)
        largest.append(float(torch.linalg.eigvals(jacobian).real.max()))
    exact = torch.tensor(largest)
    assert found is not None
    assert whole is not None
    assert bool((exact[found] < 1).all())
    assert bool(found[whole[0]].all())  # what 60 steps certify
    assert int(found.sum()) > 3
    assert int((~found).sum()) > 3
    assert bool(found[exact < 0.95].all())


def test_easy_samples_take_few_steps_and_samples_without_need_none(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = network(0.3)
    x = torch.randn(6, 5)
    state = opteq.Equilibrium(problem).solve(x).state
    seen = count_products(monkeypatch)
    assert certified_minima(problem, x, state, torch.zeros(6, dtype=torch.bool)).tolist() == [False] * 6
    assert not seen
    none = certified_minima(problem, x[:0], tuple(part[:0] for part in blocks(state)), torch.ones(0, dtype=torch.bool))
    assert none.tolist() == []
    among = torch.tensor([True, False, True, True, False, True])
    assert torch.equal(certified_minima(problem, x, state, among), among)
    assert seen == [4] * 16
    del seen[:]
    # A sample that takes more steps keeps no other.
    x[1], hard = 0.0, network(1.25)
    flat = tuple(torch.where(torch.arange(6)[:, None] == 1, 0.0, 9.0 * part.sign()) for part in blocks(state))
    x[0] = torch.nan
    certified_minima(hard, 100 * x, flat, torch.ones(6, dtype=torch.bool))
    assert seen[:16] == [6] * 16
    assert set(seen[16:]) == {2}  # that one, and the one that is not finite


def test_without_feedback_the_first_step_finds_an_invariant_subspace() -> None:
    problem = network(1.5, "relu")
    x = torch.randn(2, 5)
    for branch in problem.branch_list():
        branch.U.weight.data.zero_()
        branch.U.bias.data.fill_(-1.0)
    state = opteq.Equilibrium(problem).solve(x).state
    assert all(bool((part == 0).all()) for part in blocks(state))
    assert certified_minima(problem, x, state, torch.ones(2, dtype=torch.bool)).tolist() == [True, True]


def test_ritz_values_stay_in_the_spectrum_and_bounds_hold_where_orthogonality_is_lost() -> None:
    """Eigenvalues far outside are found in a few steps, and found again."""
    generator = torch.Generator().manual_seed(2)
    basis = torch.linalg.qr(torch.randn(400, 400, generator=generator, dtype=torch.float64))[0]
    values = torch.cat([torch.linspace(0.05, 1.0, 396), torch.tensor([1.5, 3.0, 30.0, 100.0])]).double()
    matrix = (basis * values @ basis.mT).float()
    lanczos = Lanczos(torch.zeros(1, 400))
    rounding = 100 * torch.finfo(torch.float32).eps * 100
    for steps in (16, 24, 36, 64):
        values = torch.linalg.eigvalsh(tridiagonal(*lanczos.run(lambda rows: rows @ matrix, steps))[0])[0]
        smallest, largest = values[0], values[-1]
        assert float(largest) == pytest.approx(100, abs=rounding)
        assert float(smallest) > 0.05 - rounding
        assert float(outer_bounds(smallest, largest, 400, steps, 2e-3)[0]) < 0.05
    assert float(smallest) == pytest.approx(0.05, rel=0.02)


class Term(opteq.Objective):
    """``1/2 (y - x)^2 + term(y)``, whose term has a kink that autograd does not tell of."""

    curvature = 2.0

    def __init__(self, term: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.term = term

    def terms(self, y: torch.Tensor, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"data": (y - x).square().sum(1) / 2, "term": self.term(y).sum(1)}


def unit(activation: opteq.penalties.Penalty, feedback: float) -> opteq.OptEq:
    """``f(y) + y^2/2 - feedback y^2/2 - x y`` of one unit."""
    problem = opteq.OptEq(op.Dense(1, 1), activation=activation)
    problem.W.weight.data.fill_(feedback**0.5)
    return problem


KINKED: dict[str, tuple[opteq.problems.Problem, Callable[[torch.Tensor], torch.Tensor]]] = {
    # The problem, and its objective at x = 0 by hand for y >= 0, which falls from 0 on.
    "own": (unit(FromActivation(torch.relu, 1.0), 1.5), lambda y: -y.square() / 4),
    "elu": (unit(ELU(0.5), 1.5), lambda y: -y.square() / 4),
    "abs": (Term(lambda y: -y.abs()), lambda y: y.square() / 2 - y),
    "square": (Term(lambda y: -torch.relu(y).square()), lambda y: -y.square() / 2),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", KINKED)
def test_no_kink_is_certified_where_nothing_tells_of_it(name: str, dtype: torch.dtype) -> None:
    """The objective falls on one side, and the derivative at the kink itself is that of the other side, or neither."""
    problem, beside = KINKED[name]
    assert float(beside(torch.tensor(1e-3))) < 0  # as at 0
    x = torch.zeros(2, 1, dtype=dtype)
    state = torch.zeros_like(x)
    hidden = problem.to(dtype)(x)
    assert torch.equal(hidden.step(state), state)
    assert strict_minima(hidden, state)[0].tolist() == [False, False]
    assert certified_minima(problem, x, state, torch.ones(2, dtype=torch.bool)).tolist() == [False, False]
    x = x - 1  # a minimum on the other side
    state = problem(x).start()
    for _ in range(200):
        state = problem(x).step(state)
    assert strict_minima(problem(x), state)[0].tolist() == [True, True]


def test_a_kink_at_zero_is_found_in_float16_and_on_any_default_device() -> None:
    """Numbers as small as the moves beside entries of 0 would vanish in float16."""
    problem, zeros = unit(opteq.penalties.ReLU(), 1.5).half(), torch.zeros(2, 1, dtype=torch.float16)
    with torch.device("meta"):  # random numbers are drawn where the state is
        assert strict_minima(problem(zeros), zeros)[0].tolist() == [False, False]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("activation", ["tanh", "elu", "softplus", "softsign", "sigmoid", "identity"])
def test_what_bends_without_a_kink_is_certified(activation: str, dtype: torch.dtype) -> None:
    problem, x = network(0.6, activation, dtype), torch.randn(4, 5).to(dtype)
    x[0] = 0
    state = opteq.Equilibrium(problem, opteq.Anderson(tol=1e-6)).solve(x).state
    assert strict_minima(problem(x), state)[0].all()
    soft = Term(lambda y: -0.4 * torch.log1p(y.square()) + y.exp())
    state = opteq.Equilibrium(soft, opteq.Anderson(tol=1e-6)).solve(x).state
    assert strict_minima(soft(x), state)[0].all()


class Memory(opteq.HiddenProblem):
    """A modern Hopfield network: saddles lie between the patterns that it remembers."""

    penalty = "identity"

    def __init__(self, beta: float) -> None:
        super().__init__()
        self.beta, self.patterns = beta, torch.nn.Parameter(torch.randn(8, 6))

    def start(self, x: Tensor) -> Tensor:
        return x

    def smooth(self, y: Tensor, x: Tensor) -> Tensor:
        return -(self.beta * y @ self.patterns.mT).logsumexp(1) / self.beta


@pytest.mark.parametrize("beta", [1.0, 2.0])
@pytest.mark.parametrize(
    "solver", [opteq.Anderson(), opteq.FISTA(), opteq.Picard()], ids=lambda one: type(one).__name__
)
def test_a_memory_recalls_and_never_rests_on_a_saddle(beta: float, solver: Solver) -> None:
    torch.manual_seed(1)
    problem, x = Memory(beta), 2 * torch.randn(64, 6)
    solution = opteq.Equilibrium(problem, solver, on_failure="raise").solve(x)

    def energy(y: Tensor) -> Tensor:
        return 0.5 * y.square().sum() - (beta * problem.patterns.detach() @ y).logsumexp(0) / beta

    hidden = problem(x)
    image, merit = hidden.step_and_merit(x)
    torch.testing.assert_close(merit, torch.stack([energy(y) for y in x]))
    torch.testing.assert_close(image, hidden.step(x))
    assert (hidden.step_and_merit(image)[1] <= merit).all()
    assert problem.has_concave_smooth()
    for y in solution.state.detach():
        assert torch.func.grad(energy)(y).norm() < 3e-4 * y.norm()
        assert torch.linalg.eigvalsh(torch.autograd.functional.hessian(energy, y))[0] > 0
