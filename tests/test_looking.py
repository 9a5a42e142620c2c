"""Solves that decide in Python on a CPU take the steps, and give the answers, of those that decide in tensors."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import opteq
from opteq._room import Room
from opteq.solvers import Status
from opteq.solvers.base import Session
from opteq.solvers.linear import CG
from opteq.solvers.linear.looking import LookingConjugateGradients, usable_lengths
from opteq.solvers.looking import LookingAnderson
from opteq.solvers.loop import drive
from opteq.solvers.refined import RefinedRun

BATCH, SIZE = 6, (3, 4, 5)


class Exact:
    """A map a sample on pictures, without rough images."""

    error = None
    room: Room | None = None

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        self.function = function
        self.evaluated = 0

    def exact(self, z: Tensor, rows: Tensor | None = None) -> tuple[Tensor, ...]:
        rows = torch.arange(BATCH) if rows is None else rows
        self.evaluated += len(rows)
        return z, self.function(z, rows)

    def near(self, known: tuple[Tensor, ...], z: Tensor) -> tuple[Tensor, Tensor]:
        raise NotImplementedError


def contraction(dtype: torch.dtype, rate: float = 0.95) -> Callable[[Tensor, Tensor], Tensor]:
    """Another map for every sample, of sizes from a hundredth to a hundred."""
    torch.manual_seed(0)
    width = math.prod(SIZE)
    matrices = torch.linalg.qr(torch.randn(BATCH, width, width, dtype=torch.float64))[0]
    matrices = (matrices * torch.linspace(-0.3, rate, width, dtype=torch.float64)) @ matrices.mT
    shift = torch.randn(BATCH, width, 1, dtype=torch.float64) * torch.logspace(-2, 2, BATCH)[:, None, None]
    matrices, shift = matrices.to(dtype), shift.to(dtype)

    def apply(z: Tensor, rows: Tensor) -> Tensor:
        inside = matrices[rows] @ z.reshape(len(z), -1, 1) + shift[rows]
        return (inside + 0.02 * inside.sin()).reshape(z.shape)

    return apply


def both(
    function: Callable[[Tensor, Tensor], Tensor],
    solver: opteq.Anderson,
    start: Tensor,
    damping: float | Tensor,
    monkeypatch: pytest.MonkeyPatch,
) -> tuple[Session, Session]:
    """A solve in Python and one in tensors, both at their end."""
    found = []
    for kind in (LookingAnderson, RefinedRun):
        if kind is RefinedRun:
            monkeypatch.setattr(LookingAnderson, "suits", lambda task: False)
        refinable = Exact(function)
        session = solver.open_refined(refinable, refinable.exact(start), damping)
        assert isinstance(session.run, kind)
        drive(session.run)
        found.append(session)
    monkeypatch.undo()
    return found[0], found[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("memory", [1, 2, 5])
@pytest.mark.parametrize("max_steps", [1, 2, 4, 50])
@torch.no_grad()
def test_anderson_takes_the_same_steps(
    max_steps: int, memory: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    solver = opteq.Anderson(tol=1e-4, max_steps=max_steps, memory=memory)
    looked, plain = both(contraction(dtype), solver, torch.zeros(BATCH, *SIZE, dtype=dtype), 1.0, monkeypatch)
    one, other = looked.outcome(), plain.outcome()
    assert one.steps.tolist() == other.steps.tolist()
    assert one.codes.tolist() == other.codes.tolist()
    torch.testing.assert_close(one.state, other.state, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(one.residual, other.residual, rtol=0.05, atol=1e-6)
    torch.testing.assert_close(one.trace, other.trace, rtol=0.05, atol=1e-6)
    assert one.known is not None
    assert torch.equal(one.known[0], one.state)  # type: ignore[arg-type]


@pytest.mark.parametrize("damping", [0.7, torch.linspace(0.4, 1.0, BATCH)], ids=["one", "each its own"])
@torch.no_grad()
def test_anderson_is_damped_alike(damping: float | Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    start = torch.randn(BATCH, *SIZE, dtype=torch.float64)
    looked, plain = both(contraction(torch.float64), opteq.Anderson(tol=1e-4), start, damping, monkeypatch)
    one, other = looked.outcome(), plain.outcome()
    assert one.steps.tolist() == other.steps.tolist()
    torch.testing.assert_close(one.state, other.state, rtol=1e-3, atol=1e-3)


@torch.no_grad()
def test_refused_proposals_are_taken_back_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """A map with kinks, on which extrapolation overshoots."""

    def kinked(z: Tensor, rows: Tensor) -> Tensor:
        scale = torch.linspace(0.5, 4.0, BATCH)[rows][:, None, None, None]
        return torch.where(z > 1, 1 - 0.9 * (z - 1), 0.98 * z) + 0.2 * scale * torch.linspace(-1, 1, 5) + 0.1

    solver = opteq.Anderson(tol=1e-5, max_steps=25)
    looked, plain = both(kinked, solver, torch.full((BATCH, *SIZE), 3.0), 1.0, monkeypatch)
    one, other = looked.outcome(), plain.outcome()
    torch.testing.assert_close(one.trace[:8], other.trace[:8], rtol=0.05, atol=1e-5)
    assert one.trace.diff(dim=0).amax() > 0  # some steps led further away
    image = kinked(one.state, torch.arange(BATCH))  # type: ignore[arg-type]
    norms = (image - one.state).flatten(1).norm(dim=1) / image.flatten(1).norm(dim=1)
    torch.testing.assert_close(one.residual, norms.double(), rtol=1e-3, atol=1e-6)


@torch.no_grad()
def test_a_row_that_is_not_finite_ends_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    well = contraction(torch.float32)

    def spoiled(z: Tensor, rows: Tensor) -> Tensor:
        image = well(z, rows)
        image[rows == 2] = torch.nan
        image[(rows == 4) & (z.flatten(1).norm(dim=1) > 1)] = torch.inf
        return image

    looked, plain = both(spoiled, opteq.Anderson(tol=1e-4), torch.zeros(BATCH, *SIZE), 1.0, monkeypatch)
    one, other = looked.outcome(), plain.outcome()
    assert one.codes.tolist() == other.codes.tolist()
    assert one.codes[2] == int(Status.NON_FINITE)
    assert one.steps.tolist() == other.steps.tolist()
    assert torch.isfinite(one.state).all()  # type: ignore[arg-type]
    assert (one.codes[torch.tensor([0, 1, 3, 5])] == int(Status.CONVERGED)).all()


@torch.no_grad()
def test_finished_rows_are_not_evaluated_again() -> None:
    refinable = Exact(contraction(torch.float32))
    session = opteq.Anderson(tol=1e-4).open_refined(refinable, refinable.exact(torch.zeros(BATCH, *SIZE)))
    drive(session.run)
    assert refinable.evaluated == BATCH + int(session.outcome().steps.sum())


@torch.no_grad()
def test_very_small_and_very_large_states_are_left_to_tensors() -> None:
    for size in (1e-12, 1e12):
        refinable = Exact(lambda z, rows: 0.5 * z + size)  # noqa: B023
        session = opteq.Anderson().open_refined(refinable, refinable.exact(torch.zeros(BATCH, *SIZE)))
        assert isinstance(session.run, RefinedRun)


# Conjugate gradients.


def system(least: float, most: float, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """S of every row, with eigenvalues of I - S in between, and right sides of sizes from 1e-8 to 1e8."""
    torch.manual_seed(1)
    bases = torch.linalg.qr(torch.randn(BATCH, 30, 30, dtype=torch.float64))[0]
    values = 1 - torch.linspace(least, most, 30, dtype=torch.float64)
    rhs = torch.randn(BATCH, 30, dtype=torch.float64) * torch.logspace(-8, 8, BATCH)[:, None]
    return ((bases * values) @ bases.mT).to(dtype), rhs.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("max_steps", [1, 3, 60])
@pytest.mark.parametrize(
    ("least", "most"), [(0.1, 1.0), (0.01, 3.0), (-0.5, 1.0), (-1.0, -0.1)], ids=["fine", "hard", "mixed", "negative"]
)
@torch.no_grad()
def test_conjugate_gradients_take_the_same_steps(least: float, most: float, max_steps: int, dtype: torch.dtype) -> None:
    S, rhs = system(least, most, dtype)

    def product(rows: Tensor) -> Tensor:
        return (S @ rows[:, :, None])[:, :, 0]

    linear = CG(tol=1e-4, max_steps=max_steps)
    session = linear.open_refined(lambda rows, _: product(rows), None, 0.0, rhs, 0.0)
    assert isinstance(session.run, LookingConjugateGradients)
    drive(session.run)
    one, other = session.finish(), linear.solve(lambda rows: rows - product(rows), rhs)
    assert one.codes.tolist() == other.codes.tolist()
    assert one.steps.tolist() == other.steps.tolist()
    assert isinstance(one.point, Tensor)
    size = rhs.norm(dim=1, keepdim=True)
    torch.testing.assert_close(one.point / size, other.point / size, rtol=1e-2, atol=1e-3)
    torch.testing.assert_close(one.residual, other.residual, rtol=0.1, atol=1e-5)
    torch.testing.assert_close(one.trace, other.trace, rtol=0.1, atol=1e-5)


@torch.no_grad()
def test_a_right_side_of_zeros_has_an_answer_of_zeros() -> None:
    S, rhs = system(0.1, 1.0)
    rhs[1] = 0
    session = CG(tol=1e-4).open_refined(lambda rows, _: (S @ rows[:, :, None])[:, :, 0], None, 0.0, rhs, 0.0)
    assert isinstance(session.run, LookingConjugateGradients)
    drive(session.run)
    finish = session.finish()
    assert (finish.codes == int(Status.CONVERGED)).all()
    assert finish.steps[1] == 0
    assert not finish.point[1].any()  # type: ignore[call-overload]


@torch.no_grad()
def test_a_singular_system_is_noticed() -> None:
    S, rhs = system(0.0, 1.0)
    session = CG(tol=1e-7, max_steps=500).open_refined(
        lambda rows, _: (S @ rows[:, :, None])[:, :, 0], None, 0.0, rhs, 0.0
    )
    assert isinstance(session.run, LookingConjugateGradients)
    drive(session.run)
    codes = session.finish().codes.tolist()
    assert int(Status.CONVERGED) not in codes


@torch.no_grad()
def test_a_product_that_is_not_finite_ends_its_row() -> None:
    S, rhs = system(0.1, 1.0)
    S[3] = torch.nan
    session = CG(tol=1e-4).open_refined(lambda rows, _: (S @ rows[:, :, None])[:, :, 0], None, 0.0, rhs, 0.0)
    drive(session.run)
    finish = session.finish()
    assert finish.codes[3] == int(Status.NON_FINITE)
    assert (finish.codes[torch.tensor([0, 1, 2, 4, 5])] == int(Status.CONVERGED)).all()
    assert torch.isfinite(finish.point).all()  # type: ignore[arg-type]


def test_right_sides_that_want_care_are_left_to_tensors() -> None:
    rhs = torch.randn(3, 4)
    assert usable_lengths(rhs) is not None
    torch.testing.assert_close(usable_lengths(rhs * 0), torch.ones(3, 1))
    for spoiled in (1e-20, 1e20, math.nan):
        other = rhs.clone()
        other[1] = spoiled
        assert usable_lengths(other) is None
