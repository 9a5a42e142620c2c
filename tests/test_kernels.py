"""Kernels: closed forms against autograd and against loops, gamma, the interval of curvatures, errors."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from opteq import kernels
from opteq import operators as op
from opteq.kernels.gaussian import DIP, GaussianSimilarity, response

DENSE = {
    "linear": kernels.Linear(),
    "quadratic": kernels.Polynomial(2),
    "cubic": kernels.Polynomial(3),
    "sigmoid": kernels.Sigmoid(),
    "gaussian": kernels.Gaussian(0.4),
    "auto": kernels.Gaussian(),
    "learned": kernels.Gaussian(0.4, learn_gamma=True),
}
PICTURES = {
    "linear": kernels.Linear(),
    "sigmoid": kernels.Sigmoid(),
    "whole": kernels.Gaussian(0.1),
    "patches": kernels.Gaussian(0.3, patch=2, split=3),
    "auto": kernels.Gaussian(patch=2, split=3),
    "projected": kernels.Gaussian(0.3, patch=2, split=2, hidden=5),
    "pixels": kernels.Gaussian(patch=1, split=6, hidden=3),
}
BOTH = [("dense", name) for name in DENSE] + [("pictures", name) for name in PICTURES]


def bound(kind: str, name: str) -> tuple[kernels.Similarity, Tensor, Tensor]:
    """A similarity, a state and a direction."""
    torch.manual_seed(0)
    kernel = (DENSE if kind == "dense" else PICTURES)[name].double()
    W = (op.Dense(5, 6, bound=0.9) if kind == "dense" else op.Conv2d(4, 6, 3, bound=0.9)).double()
    state = (3, 5) if kind == "dense" else (3, 4, 4, 6)
    output = (3, 6) if kind == "dense" else (3, 6, 4, 6)
    c = torch.randn(output if kernel.input_space == "output" else state, dtype=torch.float64)
    y, v = torch.randn(2, *state, dtype=torch.float64)
    return kernel.bind(W.prepare(), c), y, v


@pytest.mark.parametrize(("kind", "name"), BOTH)
def test_closed_forms_agree_with_autograd(kind: str, name: str) -> None:
    similarity, y, v = bound(kind, name)
    slope = kernels.Similarity.gradient(similarity, y)
    torch.testing.assert_close(similarity.gradient(y), slope, rtol=1e-11, atol=1e-12)
    product = kernels.Similarity.hessian_at(similarity, y)(v)
    torch.testing.assert_close(similarity.hessian_at(y)(v), product, rtol=1e-11, atol=1e-12)
    gradient, value = similarity.gradient_and_value(y)
    torch.testing.assert_close(gradient, slope, rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(value, similarity.value(y))
    torch.testing.assert_close(sum(similarity.terms(y).values()), value)
    assert value.shape == (3,)


@pytest.mark.parametrize("name", ["linear", "quadratic", "cubic", "sigmoid"])
@torch.no_grad()
def test_inner_product_kernels_in_plain_arithmetic(name: str) -> None:
    similarity, y, _ = bound("dense", name)
    W = torch.stack([similarity.W(e) for e in torch.eye(5, dtype=torch.float64)], dim=1)
    shape = {"linear": lambda t: t, "quadratic": lambda t: t**2, "cubic": lambda t: t**3, "sigmoid": math.tanh}[name]
    for b in range(3):
        expected = float((W @ y[b]) @ (W @ y[b])) / 2 + shape(float(similarity.c[b] @ y[b]))
        assert float(similarity.value(y)[b]) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("projected", [False, True])
@torch.no_grad()
def test_patch_gaussian_is_the_sum_over_patches(projected: bool) -> None:
    """Equation 16 of the paper, by loops over samples, channel groups, rows and columns."""
    kernel = kernels.Gaussian(0.3, patch=2, split=3, hidden=5 if projected else None).double()
    torch.manual_seed(1)
    W = op.Conv2d(4, 6, 3, bound=0.9).double()
    c, y = torch.randn(2, 6, 4, 6, dtype=torch.float64), torch.randn(2, 4, 4, 6, dtype=torch.float64)
    similarity = kernel.bind(W.prepare(), c)
    r = c - W(y)
    matrix = torch.eye(12, dtype=torch.float64) if kernel.projection is None else kernel.projection.prepare().weight
    for b in range(2):
        total = 0.0
        for group in range(2):
            for row in range(2):
                for column in range(3):
                    patch = r[b, 3 * group : 3 * group + 3, 2 * row : 2 * row + 2, 2 * column : 2 * column + 2]
                    weight = math.exp(-0.3 * float((matrix @ patch.reshape(-1)).square().sum()))
                    assert float(similarity.weights(y)[b, group, row, column]) == pytest.approx(weight, rel=1e-12)
                    total += weight / 0.6
        assert float(similarity.value(y)[b]) == pytest.approx(total, rel=1e-12)


@settings(deadline=None, max_examples=20, derandomize=True)
@given(groups=st.integers(1, 3), split=st.integers(1, 3), patch=st.integers(1, 3), hidden=st.integers(1, 6))
def test_views_are_adjoint(groups: int, split: int, patch: int, hidden: int) -> None:
    kernel = kernels.Gaussian(1.0, patch=patch, split=split, hidden=hidden).double()
    c = torch.randn(2, groups * split, 2 * patch, 3 * patch, dtype=torch.float64)
    view = kernel.bind(op.Identity().prepare(), c).view
    q = torch.randn_like(view(c))
    torch.testing.assert_close((view(c) * q).sum(), (c * view.adjoint(q)).sum(), rtol=1e-12, atol=1e-12)


def test_whole_and_one_patch_are_the_same() -> None:
    torch.manual_seed(0)
    c, y = torch.randn(2, 2, 4, 3, 3, dtype=torch.float64)
    W = op.Identity().prepare()
    whole = kernels.Gaussian(0.1).bind(W, c)
    one = kernels.Gaussian(0.1, patch=3, split=4).bind(W, c)
    torch.testing.assert_close(whole.value(y), one.value(y))
    torch.testing.assert_close(whole.gradient(y), one.gradient(y))
    assert whole.grid == one.grid == (1, 1, 1)


# Gamma


def similarity_of(kernel: kernels.Gaussian, c: Tensor) -> GaussianSimilarity:
    return kernel.bind(op.Identity().prepare(), c)


@torch.no_grad()
def test_automatic_gamma_is_a_fifth_of_the_smallest_distance_a_sample() -> None:
    kernel = kernels.Gaussian(patch=2, split=2, hidden=5).double()
    c = torch.randn(3, 4, 4, 4, dtype=torch.float64)
    c[1] *= 100
    similarity = similarity_of(kernel, c)
    for b in range(3):
        sizes = [
            float(kernel.projection(c[b, g : g + 2, i : i + 2, j : j + 2].reshape(-1)).square().sum())
            for g in (0, 2)
            for i in (0, 2)
            for j in (0, 2)
        ]
        assert float(similarity.gamma[b]) == pytest.approx(0.2 / min(sizes), rel=1e-12)
    weights = similarity.weights(torch.zeros_like(c)).flatten(1).amax(dim=1)
    torch.testing.assert_close(weights, torch.full_like(weights, math.exp(-0.2)))


def test_automatic_gamma_is_frozen_and_detached() -> None:
    c = torch.randn(2, 6, dtype=torch.float64, requires_grad=True)
    similarity = similarity_of(kernels.Gaussian(), c)
    assert not similarity.gamma.requires_grad
    before = similarity.gamma.clone()
    similarity.gradient(torch.randn_like(c))
    assert torch.equal(similarity.gamma, before)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_an_empty_patch_or_input_leaves_everything_finite(dtype: torch.dtype) -> None:
    c = torch.randn(2, 2, 4, 4).to(dtype)
    c[0, :, :2, :2] = 0
    c[1] = 0
    similarity = similarity_of(kernels.Gaussian(patch=2, split=2), c)
    y = torch.full_like(c, 0.1)
    for result in (similarity.value(y), similarity.gradient(y), similarity.hessian_at(y)(c)):
        assert torch.isfinite(result).all()
    assert similarity.gradient(y).dtype == similarity.hessian_at(y)(c).dtype == dtype
    assert similarity.value(y).dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


def test_learned_gamma_is_a_positive_parameter() -> None:
    kernel = kernels.Gaussian(0.7, learn_gamma=True)
    assert [name for name, _ in kernel.named_parameters()] == ["log_gamma"]
    assert float(kernel.gamma.detach()) == pytest.approx(0.7)
    with torch.no_grad():
        kernel.log_gamma.fill_(-30.0)
    assert 0 < float(kernel.gamma.detach()) < 1e-12
    assert "learned" in repr(kernel)
    assert kernels.Gaussian().gamma == "auto"
    assert kernels.Gaussian(2).gamma == 2.0
    assert list(kernels.Gaussian(2.0).state_dict()) == []


def test_projection_is_bounded_by_one() -> None:
    kernel = kernels.Gaussian(patch=2, split=8, hidden=64)
    assert isinstance(kernel.projection, op.Dense)
    assert (kernel.projection.in_features, kernel.projection.out_features) == (32, 64)
    assert kernel.projection.bound == 1.0
    assert kernels.Gaussian(patch=2, split=8).projection is None
    assert kernels.Gaussian(patch=2, split=8, hidden=3, bound=None).projection.bound is None


# Curvature and response


@settings(deadline=None, max_examples=40, derandomize=True)
@given(seed=st.integers(0, 10**6), scale=st.floats(0.0, 4.0), gamma=st.floats(0.01, 10.0))
def test_gaussian_curvature_stays_in_its_interval(seed: int, scale: float, gamma: float) -> None:
    torch.manual_seed(seed)
    W = op.Dense(4, 3).double()
    c = scale * torch.randn(1, 3, dtype=torch.float64)
    similarity = kernels.Gaussian(gamma).bind(W.prepare(), c)
    y = torch.randn(1, 4, dtype=torch.float64)
    hessian = torch.cat([similarity.hessian_at(y)(e[None]) for e in torch.eye(4, dtype=torch.float64)])
    spectrum = torch.linalg.eigvalsh(hessian)
    square = torch.linalg.matrix_norm(W.weight.detach(), 2) ** 2
    low, high = kernels.Gaussian.curvature
    assert low * square - 1e-12 <= spectrum.min()
    assert spectrum.max() <= high * square + 1e-12


@torch.no_grad()
def test_both_ends_of_the_interval_are_reached() -> None:
    W = op.Identity().prepare()
    one = torch.ones(1, 1, dtype=torch.float64)
    at_rest = kernels.Gaussian(0.7).bind(W, 0 * one)
    assert float(at_rest.hessian_at(0 * one)(one)) == pytest.approx(-1)
    far = kernels.Gaussian(0.7).bind(W, math.sqrt(1.5 / 0.7) * one)
    assert float(far.hessian_at(0 * one)(one)) == pytest.approx(DIP)
    assert pytest.approx(0.446260, abs=1e-6) == DIP


@pytest.mark.parametrize("norm", [0.05, 0.4, 0.7, 0.8, 0.9, 1.0, 1.3, 1.48])
def test_response_is_the_largest_there_is(norm: float) -> None:
    """Random search over A with eigenvalues at the ends and N of low rank never exceeds it, and comes close."""
    generator = torch.Generator().manual_seed(0)
    trials, n = 20_000, 2
    A0, N0 = torch.randn(2, trials, n, n, generator=generator, dtype=torch.float64)
    Q = torch.linalg.qr(A0)[0]
    ends = 1 - (1 + DIP) * (torch.rand(trials, n, generator=generator) < 0.5).double()
    A = Q @ torch.diag_embed(ends) @ Q.mT
    left, values, right = torch.linalg.svd(N0)
    rank_one = torch.rand(trials, 1, generator=generator) < 0.5
    values = norm * values / values[:, :1] * torch.where(rank_one, torch.tensor([1.0, 0.0]), 1.0)
    N = left @ torch.diag_embed(values) @ right
    moved = torch.linalg.solve(torch.eye(n, dtype=torch.float64) + N.mT @ A @ N, N.mT @ A)
    found = float(torch.linalg.matrix_norm(moved, 2).max())
    assert found <= response(norm) * (1 + 1e-12)
    assert found >= 0.999 * response(norm)
    assert response(norm) < norm / (1 - DIP * norm**2)


def test_response_ends_where_convexity_does() -> None:
    assert response(1.0001 * math.sqrt(1 / DIP)) == math.inf
    assert response(0.0) == 0.0


# Errors


@pytest.mark.parametrize(
    ("build", "error", "message"),
    [
        (lambda: kernels.Polynomial(1), ValueError, "1 is opteq.kernels.Linear.*at least 2; got 1"),
        (lambda: kernels.Polynomial(2.0), TypeError, "whole number; got 2.0"),
        (lambda: kernels.Polynomial(True), TypeError, "whole number"),
        (lambda: kernels.Gaussian(0.0), ValueError, "gamma .*should be a positive finite number; got 0.0"),
        (lambda: kernels.Gaussian(-1.0), ValueError, "gamma .*should be a positive finite number; got -1.0"),
        (lambda: kernels.Gaussian(math.nan), ValueError, "positive finite number; got nan"),
        (lambda: kernels.Gaussian("automatic"), ValueError, "unknown .*gamma 'automatic'; did you mean 'auto'"),
        (lambda: kernels.Gaussian(True), TypeError, "'auto', 'median'.* should be a positive number; got True"),
        (lambda: kernels.Gaussian(learn_gamma=True), ValueError, "needs a number to begin from"),
        (lambda: kernels.Gaussian(patch=2), ValueError, "go together.*got patch=2, split=None"),
        (lambda: kernels.Gaussian(split=2), ValueError, "go together"),
        (lambda: kernels.Gaussian(hidden=4), ValueError, "needs patch and split; got hidden=4 alone"),
        (lambda: kernels.Gaussian(patch=0, split=2), ValueError, "patch should be at least 1; got 0"),
        (lambda: kernels.Gaussian(patch=2, split=2, hidden=0), ValueError, "should be at least 1; got 0"),
        (lambda: kernels.Gaussian(patch=2, split=2, hidden=3, bound=-1.0), ValueError, "bound .* should be a positive"),
    ],
)
def test_wrong_options(build, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        build()


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((2, 6, 4, 4), "the 6 channels of the image cannot be split into groups of split=4.*W's output"),
        ((2, 8, 5, 4), "the 5 x 4 pixels of the image cannot be cut into squares of patch=2: that image is W's output"),
        ((2, 8), "cuts images.*have shape \\(2, 8\\); leave patch and split out"),
    ],
)
def test_inputs_that_cannot_be_cut(shape: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        similarity_of(kernels.Gaussian(patch=2, split=4), torch.zeros(shape))


def test_the_median_rule_gives_half_of_the_patches_more_weight() -> None:
    torch.manual_seed(0)
    kernel = kernels.Gaussian("median", patch=2, split=2)
    c = torch.randn(3, 4, 6, 6)
    c[:, :, :2, :2] = 0  # an empty patch, which makes gamma huge by the other rule
    weights = kernel.bind(op.Conv2d(2, 4, 1).prepare(), c).weights(torch.zeros(3, 2, 6, 6))
    edge = torch.exp(torch.tensor(-0.2))
    assert bool(((weights >= edge - 1e-6).flatten(1).float().mean(dim=1) >= 0.5).all())
    assert bool(((weights < edge).flatten(1).float().mean(dim=1) >= 0.4).all())
    least = kernels.Gaussian("auto", patch=2, split=2).bind(op.Conv2d(2, 4, 1).prepare(), c)
    assert float(least.weights(torch.zeros(3, 2, 6, 6)).detach().median()) < 1e-3
