"""Extreme eigenvalues against dense ones, and how often the bounds hold."""

from __future__ import annotations

import pytest
import torch

from opteq.diagnostics.extremes import extreme_eigenvalues, missing_share
from opteq.diagnostics.minimum import below
from opteq.solvers.linear.lanczos import Lanczos, largest_curvature, largest_magnitude, tridiagonal


def matrices(count: int, n: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    made = torch.randn(count, n, n, generator=generator, dtype=torch.float64)
    return (made + made.mT) / 2


def product(matrix):
    return lambda rows: (matrix @ rows[:, :, None])[:, :, 0]


@pytest.mark.parametrize("n", [1, 2, 5, 25])
def test_as_many_steps_as_dimensions_are_exact(n):
    matrix = matrices(8, n)
    found = extreme_eigenvalues(product(matrix), torch.zeros(8, n, dtype=torch.float64), direction=True)
    exact = torch.linalg.eigvalsh(matrix)
    assert torch.allclose(found.smallest, exact[:, 0], atol=1e-10)
    assert torch.allclose(found.largest, exact[:, -1], atol=1e-10)
    assert torch.equal(found.upper, found.largest)
    quotient = (found.direction * product(matrix)(found.direction)).sum(1)
    assert torch.allclose(quotient, exact[:, 0], atol=1e-9)


def test_bounds_hold_for_large_matrices():
    matrix = matrices(60, 120, seed=1)
    found = extreme_eigenvalues(product(matrix), torch.zeros(60, 120, dtype=torch.float64), steps=25, failure=1e-3)
    exact = torch.linalg.eigvalsh(matrix)
    assert (found.smallest >= exact[:, 0] - 1e-9).all()
    assert (found.largest <= exact[:, -1] + 1e-9).all()
    assert (found.lower <= exact[:, 0]).all()
    assert (found.upper >= exact[:, -1]).all()
    assert (found.upper <= 1.3 * exact[:, -1]).all()


def test_invariant_subspaces_add_no_eigenvalue():
    # The identity, and a projection: one and two steps see all there is; zero is no eigenvalue of the first.
    n = 12
    direction = torch.nn.functional.normalize(torch.randn(n, generator=torch.Generator().manual_seed(3)), dim=0)
    both = torch.stack([3 * torch.eye(n), 5 * torch.outer(direction, direction) - torch.eye(n)]).double()
    found = extreme_eigenvalues(product(both), torch.zeros(2, n, dtype=torch.float64))
    assert torch.allclose(found.smallest, torch.tensor([3.0, -1.0]).double())
    assert torch.allclose(found.largest, torch.tensor([3.0, 4.0]).double())


def test_rows_that_are_not_finite_spoil_no_other():
    matrix = matrices(3, 6)
    matrix[1] = torch.nan
    found = extreme_eigenvalues(product(matrix), torch.zeros(3, 6, dtype=torch.float64))
    assert found.smallest[1].isnan()
    assert torch.allclose(found.smallest[2], torch.linalg.eigvalsh(matrix[2])[0])


def test_largest_magnitude_is_close():
    matrix = matrices(20, 60, seed=2)
    estimate = largest_magnitude(product(matrix), torch.zeros(20, 60, dtype=torch.float64), steps=20)
    exact = torch.linalg.eigvalsh(matrix).abs().amax(dim=1)
    assert (estimate <= 1.02 * exact).all()
    assert (estimate >= 0.8 * exact).all()
    zero = largest_magnitude(torch.zeros_like, torch.zeros(2, 7))
    assert (zero < 1e-20).all()


def test_the_share_that_is_missed_follows_the_formula():
    share = missing_share(1600, 30, 1e-3)
    assert 1.648 * 1600**0.5 * torch.exp(torch.tensor(-(share**0.5) * 59)) == pytest.approx(1e-3, rel=1e-4)
    assert missing_share(10, 10, 1e-3) == 0


def test_pivots_count_eigenvalues_below_a_level():
    matrix = matrices(20, 9, seed=4)
    diagonal, beside = Lanczos(torch.zeros(20, 9, dtype=torch.float64), kept=9).run(product(matrix), 9)
    least = torch.linalg.eigvalsh(matrix)[:, 0]
    assert below(diagonal, beside, least + 1e-9).all()
    assert not below(diagonal, beside, least - 1e-9).any()


@pytest.mark.parametrize("kept", [0, 12])
def test_steps_can_be_continued(kept):
    matrix = matrices(3, 12, seed=5)
    matrix[1] = torch.eye(12)  # ends after one step
    like = torch.zeros(3, 12, dtype=torch.float64)
    whole = Lanczos(like, kept=kept).run(product(matrix), 9)
    stages = Lanczos(like, kept=kept)
    stages.run(product(matrix), 4)
    found = stages.run(product(matrix), 9)
    assert found[1].shape == (3, 8)
    for one, other in zip(found, whole, strict=True):
        assert torch.equal(one, other)
    small, mark = tridiagonal(*found)
    assert not mark.any()
    spectrum = torch.linalg.eigvalsh(matrix)
    ritz = torch.linalg.eigvalsh(small)
    assert (ritz[:, 0] >= spectrum[:, 0] - 1e-9).all()
    assert (ritz[:, -1] <= spectrum[:, -1] + 1e-9).all()
    assert torch.allclose(ritz[1], torch.ones(9, dtype=torch.float64))


def test_the_largest_curvature_of_a_map_of_states():
    matrix = matrices(3, 7, seed=2)
    matrix[1] *= torch.nan

    def moved(state):
        image = product(matrix)(torch.cat([part.flatten(1) for part in state], dim=1))
        return image[:, :4].reshape(3, 2, 2), image[:, 4:]

    start = torch.zeros(3, 2, 2, dtype=torch.float64), torch.zeros(3, 3, dtype=torch.float64)
    found = largest_curvature(moved, start)
    exact = torch.linalg.eigvalsh(matrix[[0, 2]]).abs().amax(dim=1)
    torch.testing.assert_close(found[[0, 2]], exact, rtol=1e-2, atol=0)
    assert found[1] == 1
