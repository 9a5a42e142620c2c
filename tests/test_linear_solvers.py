"""Linear solvers against dense ones: batched, badly conditioned, singular, scaled to the ends of the range."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import opteq
from opteq.solvers import Status
from opteq.solvers.linear import LinearSolver
from opteq.solvers.loop import Finish

KINDS: dict[str, type[LinearSolver]] = {"cg": opteq.CG, "minres": opteq.MINRES, "gmres": opteq.GMRES}
each_solver = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
EPS = torch.finfo(torch.float64).eps
seeds = st.integers(0, 10_000)


def examples(count: int) -> settings:
    return settings(deadline=None, derandomize=True, max_examples=count)


def symmetric(values: Tensor, batch: int, seed: int) -> Tensor:
    """Matrices ``(batch, n, n)`` with these eigenvalues in random bases."""
    generator = torch.Generator().manual_seed(seed)
    n = len(values)
    basis = torch.linalg.qr(torch.randn(batch, n, n, generator=generator, dtype=torch.float64)).Q
    return (basis * values) @ basis.mT


def spread(n: int, decades: float) -> Tensor:
    return 10 ** torch.linspace(-decades, 0, n, dtype=torch.float64)


def right_sides(batch: int, n: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed + 1)
    return torch.randn(batch, n, generator=generator, dtype=torch.float64)


def apply(matrices: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda v: (matrices @ v[:, :, None])[:, :, 0]


def true_residual(matrices: Tensor, finish: Finish, rhs: Tensor) -> Tensor:
    return (apply(matrices)(finish.point) - rhs).norm(dim=1) / rhs.norm(dim=1)


def dense(matrices: Tensor, rhs: Tensor) -> Tensor:
    return torch.linalg.solve(matrices, rhs[:, :, None])[:, :, 0]


@each_solver
@examples(25)
@given(n=st.integers(1, 12), batch=st.integers(1, 4), decades=st.sampled_from([0, 1, 3, 5]), seed=seeds)
def test_positive_systems(kind: type[LinearSolver], n: int, batch: int, decades: float, seed: int) -> None:
    matrices, rhs = symmetric(spread(n, decades), batch, seed), right_sides(batch, n, seed)
    assert_solved(kind(tol=1e-10, max_steps=200), matrices, rhs, 10.0**decades)


@pytest.mark.parametrize("kind", [opteq.MINRES, opteq.GMRES])
@examples(25)
@given(n=st.integers(1, 12), batch=st.integers(1, 4), decades=st.sampled_from([0, 1, 3, 5]), seed=seeds)
def test_indefinite_systems(kind: type[LinearSolver], n: int, batch: int, decades: float, seed: int) -> None:
    signs = torch.tensor([1.0, -1.0], dtype=torch.float64).repeat(n)[:n]
    matrices, rhs = symmetric(spread(n, decades) * signs, batch, seed), right_sides(batch, n, seed)
    assert_solved(kind(tol=1e-10, max_steps=300), matrices, rhs, 10.0**decades)


@examples(25)
@given(n=st.integers(1, 12), batch=st.integers(1, 4), seed=seeds, size=st.sampled_from([0.3, 0.9]))
def test_general_systems(n: int, batch: int, seed: int, size: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    jacobian = torch.randn(batch, n, n, generator=generator, dtype=torch.float64)
    jacobian = size * jacobian / torch.linalg.matrix_norm(jacobian, 2)[:, None, None]
    matrices = torch.eye(n, dtype=torch.float64) - jacobian
    finish = assert_solved(opteq.GMRES(tol=1e-10, max_steps=100), matrices, right_sides(batch, n, seed), 20.0)
    assert int(finish.steps.max()) <= n


def assert_solved(solver: LinearSolver, matrices: Tensor, rhs: Tensor, condition: float) -> Finish:
    """Converged, to the dense answer, with the residual that is reported."""
    finish = solver.solve(apply(matrices), rhs)
    batch = len(rhs)
    assert finish.residual.shape == finish.steps.shape == finish.codes.shape == (batch,)
    assert (finish.codes == 0).all()
    assert (finish.residual <= solver.tol).all()
    assert finish.trace.shape == (int(finish.steps.max()) + 1, batch)
    # CG and GMRES tell the truth to eps cond, MINRES to eps cond^2, as its docstring says.
    rounding = 50 * EPS * (condition**2 if isinstance(solver, opteq.MINRES) else condition)
    assert ((true_residual(matrices, finish, rhs) - finish.residual).abs() <= rounding).all()
    exact = dense(matrices, rhs)
    error = (finish.point - exact).norm(dim=1) / exact.norm(dim=1)
    assert (error <= solver.tol * condition + rounding).all()
    return finish


@each_solver
def test_rows_stop_by_themselves(kind: type[LinearSolver]) -> None:
    """Samples of very different difficulty, together and alone."""
    easy, hard = symmetric(spread(8, 0), 1, 0), symmetric(spread(8, 3), 1, 1)
    matrices, rhs = torch.cat([easy, hard, easy]), right_sides(3, 8, 0)
    rhs[2] = 0
    solver = kind(tol=1e-8)
    together = solver.solve(apply(matrices), rhs)
    assert together.steps[2] == 0
    assert not together.point[2].any()
    assert together.residual[2] == 0
    assert together.steps[0] < together.steps[1]
    for i in range(3):
        one = slice(i, i + 1)
        alone = solver.solve(apply(matrices[one]), rhs[one])
        assert alone.steps.tolist() == together.steps[one].tolist()
        torch.testing.assert_close(alone.point, together.point[one], rtol=1e-9, atol=1e-12)


@each_solver
@pytest.mark.parametrize("scale", [1e-300, 1e-150, 1e-30, 1e30, 1e150, 1e300])
def test_the_scale_of_the_right_side_does_not_matter(kind: type[LinearSolver], scale: float) -> None:
    matrices, rhs = symmetric(spread(6, 1), 2, 4), right_sides(2, 6, 4)
    solver = kind(tol=1e-11)
    plain, scaled = solver.solve(apply(matrices), rhs), solver.solve(apply(matrices), rhs * scale)
    assert (scaled.codes == 0).all()
    assert scaled.steps.tolist() == plain.steps.tolist()
    torch.testing.assert_close(scaled.point / scale, plain.point, rtol=1e-9, atol=1e-12)


@each_solver
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("where", ["right side", "product"])
def test_a_bad_row_spoils_no_other(kind: type[LinearSolver], bad: float, where: str) -> None:
    matrices, rhs = symmetric(spread(6, 1), 3, 5), right_sides(3, 6, 5)
    solver = kind(tol=1e-10)
    expected = solver.solve(apply(matrices), rhs)
    if where == "right side":
        spoilt = rhs.clone()
        spoilt[1, 2] = bad
        finish = solver.solve(apply(matrices), spoilt)
    else:
        mask = torch.zeros(3, 6, dtype=torch.bool)
        mask[1, 2] = True
        finish = solver.solve(lambda v: torch.where(mask, bad, apply(matrices)(v)), rhs)
    assert finish.codes.tolist() == [0, int(Status.NON_FINITE), 0]
    # A right side that is not finite has no finite answer; of products that are not, the best finite point is kept.
    assert torch.isfinite(finish.point[1]).all() == (where == "product")
    assert torch.isnan(finish.point[1]).all() == (where == "right side")
    assert torch.equal(finish.point[[0, 2]], expected.point[[0, 2]])


@each_solver
@pytest.mark.parametrize("shape", [(0, 4), (3, 0), (0, 0)])
def test_empty_systems(kind: type[LinearSolver], shape: tuple[int, int]) -> None:
    finish = kind().solve(lambda v: 2 * v, torch.zeros(shape))
    assert finish.point.shape == shape
    assert finish.codes.tolist() == [0] * shape[0]


@each_solver
@examples(15)
@given(n=st.integers(2, 10), zeros=st.integers(1, 3), seed=seeds)
def test_singular_systems_that_have_a_solution(kind: type[LinearSolver], n: int, zeros: int, seed: int) -> None:
    values = spread(n, 1)
    values[: min(zeros, n - 1)] = 0
    if kind is not opteq.CG:
        values[-1] *= -1
    matrices = symmetric(values, 2, seed)
    rhs = apply(matrices)(right_sides(2, n, seed))
    finish = kind(tol=1e-9).solve(apply(matrices), rhs)
    assert (finish.codes == 0).all()
    assert (true_residual(matrices, finish, rhs) <= 1e-8).all()
    # From zero a Krylov method reaches the shortest solution.
    shortest = (torch.linalg.pinv(matrices, rtol=1e-9) @ rhs[:, :, None])[:, :, 0]
    torch.testing.assert_close(finish.point, shortest, rtol=1e-6, atol=1e-7)


@each_solver
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@examples(20)
@given(n=st.integers(2, 12), zeros=st.integers(1, 3), decades=st.sampled_from([0.5, 1, 2]), seed=seeds)
def test_singular_systems_without_a_solution(
    kind: type[LinearSolver], dtype: torch.dtype, n: int, zeros: int, decades: float, seed: int
) -> None:
    """Nothing is claimed: rounding must not be solved for, however small it makes a residual look."""
    values = spread(n, decades)
    values[: min(zeros, n - 1)] = 0
    if kind is not opteq.CG:
        values[-1] *= -1
    matrices, rhs = symmetric(values, 2, seed).to(dtype), right_sides(2, n, seed).to(dtype)
    finish = kind(tol=1e-10 if dtype == torch.float64 else 1e-6).solve(apply(matrices), rhs)
    assert (finish.codes != 0).all()
    assert torch.isfinite(finish.point).all()
    assert (true_residual(matrices, finish, rhs) <= 1.02).all()  # zero would give 1
    assert ((true_residual(matrices, finish, rhs) - finish.residual).abs() <= 0.02).all()


@each_solver
def test_the_zero_operator(kind: type[LinearSolver]) -> None:
    finish = kind().solve(torch.zeros_like, torch.ones(2, 3))
    assert finish.codes.tolist() == [int(Status.SINGULAR)] * 2
    assert not finish.point.any()
    assert finish.residual.tolist() == pytest.approx([1.0, 1.0])


@examples(20)
@given(n=st.integers(2, 10), seed=seeds)
def test_conjugate_gradients_notice_negative_curvature(n: int, seed: int) -> None:
    values = spread(n, 1)
    values[0] = -1.0
    matrices = torch.cat([symmetric(values, 1, seed), symmetric(values.abs(), 1, seed)])
    rhs = right_sides(2, n, seed)
    finish = opteq.CG(tol=1e-10).solve(apply(matrices), rhs)
    assert finish.codes.tolist() == [int(Status.INDEFINITE), 0]
    assert torch.isfinite(finish.point).all()
    assert (true_residual(matrices, finish, rhs)[0] - finish.residual[0]).abs() < 1e-10


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_flat_direction_of_a_convex_objective_is_no_negative_curvature(dtype: torch.dtype) -> None:
    """Entropic optimal transport in the potentials: adding a number changes nothing, and rounding has either sign."""

    class Transport(opteq.Objective):
        def __init__(self) -> None:
            super().__init__()
            self.cost = torch.nn.Parameter(torch.rand(6, 5))

        def terms(self, y: Tensor, x: Tensor) -> dict[str, Tensor]:
            mass = x / x.sum(1, keepdim=True)
            return {"soft": torch.logsumexp(y[:, :, None] - self.cost, 1).mean(1), "mass": -(mass * y).sum(1)}

    torch.manual_seed(0)
    layer, x = opteq.Equilibrium(Transport(), on_failure="ignore").to(dtype), torch.rand(99, 6, dtype=dtype) + 0.1
    for centred, status in ((False, Status.SINGULAR), (True, Status.CONVERGED)):
        solution, weights = layer.solve(x), torch.randn(99, 6, dtype=dtype)
        (solution.features * (weights - weights.mean(1, keepdim=True) if centred else weights)).sum().backward()
        assert set(solution.status) == {Status.CONVERGED}
        assert solution.backward is not None
        assert set(solution.backward.status) == {status}


def test_minres_never_rises() -> None:
    matrices, rhs = symmetric(spread(10, 3) * torch.linspace(-1, 1, 10).sign(), 3, 7), right_sides(3, 10, 7)
    trace = opteq.MINRES(tol=1e-10).solve(apply(matrices), rhs).trace
    assert (trace[1:] <= trace[:-1] * (1 + 1e-12)).all()


def test_restarts() -> None:
    """A cyclic shift: GMRES learns nothing before the last dimension, so a short memory learns nothing ever."""
    shift = torch.eye(8, dtype=torch.float64).roll(1, 0).expand(2, 8, 8)
    rhs = torch.zeros(2, 8, dtype=torch.float64)
    rhs[:, 0] = 1
    for restart, steps in ((8, 8), (20, 8)):
        finish = opteq.GMRES(restart=restart).solve(apply(shift), rhs)
        assert finish.steps.tolist() == [steps] * 2
        torch.testing.assert_close(finish.point, dense(shift, rhs))
    short = opteq.GMRES(restart=4, max_steps=40).solve(apply(shift), rhs)
    assert short.codes.tolist() == [int(Status.MAX_STEPS)] * 2
    assert short.residual.tolist() == pytest.approx([1.0, 1.0])
    # On an easy system a short memory only costs steps.
    matrices = torch.eye(8, dtype=torch.float64) - 0.5 * shift
    counts = []
    for restart in (1, 3, 8):
        finish = assert_solved(opteq.GMRES(tol=1e-10, restart=restart), matrices, right_sides(2, 8, 0), 3.0)
        counts.append(int(finish.steps.max()))
    assert counts == sorted(counts, reverse=True)


@each_solver
def test_float32(kind: type[LinearSolver]) -> None:
    matrices, rhs = symmetric(spread(12, 2), 3, 9), right_sides(3, 12, 9)
    finish = kind(tol=1e-5, max_steps=200).solve(apply(matrices.float()), rhs.float())
    assert finish.point.dtype == torch.float32
    assert (finish.codes == 0).all()
    gap = (true_residual(matrices.float(), finish, rhs.float()) - finish.residual).abs()
    assert (gap <= 10 * torch.finfo(torch.float32).eps * 100).all()
    exact = dense(matrices, rhs)
    assert ((finish.point - exact).norm(dim=1) / exact.norm(dim=1) < 2e-3).all()


@each_solver
def test_no_more_is_asked_than_the_product_can_give(kind: type[LinearSolver]) -> None:
    """``eps`` is the rounding of the product: below it a residual means nothing."""
    matrices, rhs = symmetric(spread(10, 1), 2, 3), right_sides(2, 10, 3)

    def rounded(v: Tensor) -> Tensor:
        return apply(matrices)(v).bfloat16().double()

    eps = torch.finfo(torch.bfloat16).eps
    finish = kind(tol=1e-12, max_steps=60).solve(rounded, rhs, eps=eps)
    assert (finish.codes == 0).all()
    assert (finish.residual <= eps).all()
    assert (true_residual(matrices, finish, rhs) < 10 * eps).all()


@each_solver
def test_how_often_the_host_looks_changes_no_answer(kind: type[LinearSolver]) -> None:
    matrices, rhs = symmetric(spread(8, 2), 3, 2), right_sides(3, 8, 2)
    expected = kind(tol=1e-8, check_every=1).solve(apply(matrices), rhs)
    for every in (3, 1000):
        finish = kind(tol=1e-8, max_steps=60, check_every=every).solve(apply(matrices), rhs)
        for field in ("point", "residual", "steps", "codes"):
            assert torch.equal(getattr(finish, field), getattr(expected, field))


@each_solver
def test_the_step_limit_is_told(kind: type[LinearSolver]) -> None:
    matrices, rhs = symmetric(spread(12, 3), 2, 1), right_sides(2, 12, 1)
    finish = kind(tol=1e-12, max_steps=3).solve(apply(matrices), rhs)
    assert finish.codes.tolist() == [int(Status.MAX_STEPS)] * 2
    assert finish.steps.tolist() == [3, 3]
    assert ((true_residual(matrices, finish, rhs) - finish.residual).abs() < 1e-9).all()
    assert (finish.residual <= 1 + 1e-12).all()


def test_a_layer_tells_that_its_equilibrium_is_not_isolated() -> None:
    """Every state is a fixed point of this problem's step, so no gradient exists: nothing may be made up for it."""

    class Anything(opteq.HiddenProblem):
        penalty = "identity"

        def smooth(self, y: Tensor, x: Tensor) -> Tensor:
            return -y.square().sum(1) / 2 - 0 * (y * x).sum(1)

    layer = opteq.Equilibrium(Anything())
    x = torch.ones(2, 3, requires_grad=True)
    solution = layer.solve(x, start=torch.ones(2, 3))
    with pytest.warns(opteq.ConvergenceWarning, match=r"2x SINGULAR: .* the equilibrium is not isolated"):
        solution.features.sum().backward()
    assert solution.backward is not None
    assert solution.backward.status == (Status.SINGULAR, Status.SINGULAR)
    assert x.grad is not None
    assert torch.isfinite(x.grad).all()
