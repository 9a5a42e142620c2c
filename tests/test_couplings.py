"""Heritage, diversity and the fusion, against sums written out by hand and against autograd."""

from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from opteq.couplings import (
    Coupling,
    diversity,
    heritage,
    largest_neighbours,
    products,
    products_derivative,
)
from opteq.training.optim.losses import augmented_loss

Features = tuple[Tensor, ...]

# Sides of the images of one to four branches, equal and mixed; 0 stands for vectors.
RINGS = [
    (12, 6, 12, 4),
    (4,),
    (0,),
    (2, 2),
    (4, 2),
    (0, 0),
    (4, 2, 2),
    (2, 4, 8),
    (0, 0, 0),
    (8, 4, 2, 1),
    (2, 2, 2, 2),
    (1, 4, 2, 8),
]


def ring(sides: tuple[int, ...], channels: int = 3, batch: int = 2, seed: int = 0) -> Features:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(batch, channels, side, 2 * side) if side else (batch, channels) for side in sides]
    return tuple(torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)


def at_size(z: Tensor, like: Tensor) -> Tensor:
    """P, written out: the mean over squares one way, each pixel repeated and divided by their area the other way."""
    if z.ndim == 2 or z.shape == like.shape:
        return z
    if z.shape[2] > like.shape[2]:
        return F.avg_pool2d(z, z.shape[2] // like.shape[2])
    k = like.shape[2] // z.shape[2]
    return z.repeat_interleave(k, 2).repeat_interleave(k, 3) / k**2


def energy(features: Features, weight: float, smoothing: float, with_heritage: bool = True) -> Tensor:
    """``1/2 sum (lambda D - H)`` as the sums of the paper, channel by channel, at the size of the first of a pair."""
    total = torch.zeros((), dtype=torch.float64)
    for i, z in enumerate(features):
        other = at_size(features[(i + 1) % len(features)], z)
        for a in range(z.shape[1]):
            for b in range(z.shape[1]):
                product = (z[:, a] * other[:, b]).reshape(len(z), -1).sum(1)
                if a != b:
                    size = (product.square() + smoothing**2).sqrt() if smoothing else product.abs()
                    total = total + weight * size.sum() / 2
                elif with_heritage:
                    total = total - product.sum() / 2
        if not with_heritage:
            total = total - z.square().sum() / 2
    return total


@pytest.mark.parametrize("sides", RINGS, ids=str)
@pytest.mark.parametrize(("weight", "smoothing"), [(0.0, 0.0), (0.3, 0.0), (0.3, 0.5)])
@pytest.mark.parametrize("with_heritage", [True, False])
def test_fusion_is_minus_the_gradient_of_the_energy(
    sides: tuple[int, ...], weight: float, smoothing: float, with_heritage: bool
) -> None:
    features = tuple(z.requires_grad_() for z in ring(sides))
    value = energy(features, weight, smoothing, with_heritage)
    slopes = torch.autograd.grad(value, features)
    coupling = Coupling(weight, smoothing, with_heritage)
    torch.testing.assert_close(sum(coupling.terms(features).values()).sum(), value, rtol=1e-12, atol=1e-12)
    for found, slope in zip(coupling.negative_gradient(features), slopes, strict=True):
        torch.testing.assert_close(found, -slope, rtol=1e-12, atol=1e-12)


@settings(deadline=None, max_examples=40, derandomize=True)
@given(
    sides=st.sampled_from(RINGS),
    channels=st.integers(1, 5),
    batch=st.integers(1, 3),
    weight=st.floats(0, 2),
    smoothing=st.sampled_from([0.0, 1e-3, 1.0]),
    seed=st.integers(0, 100),
)
def test_closed_forms_for_any_ring(
    sides: tuple[int, ...], channels: int, batch: int, weight: float, smoothing: float, seed: int
) -> None:
    features = tuple(z.requires_grad_() for z in ring(sides, channels, batch, seed))
    coupling = Coupling(weight, smoothing)
    value = sum(coupling.terms(features).values()).sum()
    slopes = torch.autograd.grad(value, features)
    for found, slope in zip(coupling.negative_gradient(features), slopes, strict=True):
        torch.testing.assert_close(found, -slope, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("sides", RINGS, ids=str)
@pytest.mark.parametrize(("weight", "smoothing"), [(0.0, 0.0), (0.3, 0.0), (0.3, 0.5)])
@pytest.mark.parametrize("with_heritage", [True, False])
def test_jacobian_products(sides: tuple[int, ...], weight: float, smoothing: float, with_heritage: bool) -> None:
    features, v, w = ring(sides), ring(sides, seed=1), ring(sides, seed=2)
    coupling = Coupling(weight, smoothing, with_heritage)
    expected = torch.autograd.functional.jvp(lambda *z: coupling.negative_gradient(z), features, v)[1]
    product = coupling.jacobian_at(features)
    found = product(v)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)
    there = sum((a * b).sum() for a, b in zip(found, w, strict=True))
    back = sum((a * b).sum() for a, b in zip(product(w), v, strict=True))
    torch.testing.assert_close(there, back, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("sides", RINGS, ids=str)
def test_the_derivative_by_signs_is_the_adjoint_of_that_of_products(sides: tuple[int, ...]) -> None:
    features, v = ring(sides), ring(sides, seed=1)
    generator = torch.Generator().manual_seed(3)
    matrices = tuple(torch.randn(m.shape, generator=generator, dtype=m.dtype) for m in products(features))
    with_signs, without = (Coupling(0.7).negative_gradient(features, tuple(s * m for m in matrices)) for s in (1, 0))
    turned = [a - b for a, b in zip(with_signs, without, strict=True)]  # fuse is affine in its signs
    there = sum((a * b).sum() for a, b in zip(turned, v, strict=True))
    back = sum((a * b).sum() for a, b in zip(matrices, products_derivative(features, v), strict=True))
    torch.testing.assert_close(there, -0.35 * back, rtol=1e-12, atol=1e-12)
    expected = torch.autograd.functional.jvp(lambda *z: products(z), features, v)[1]
    for one, other in zip(products_derivative(features, v), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_one_and_two_branches_have_the_forms_they_should() -> None:
    (z,) = ring((4,))
    torch.testing.assert_close(Coupling().negative_gradient((z,))[0], z, rtol=0, atol=0)
    matrix = z.flatten(2) @ z.flatten(2).mT
    signs = torch.sign(matrix) * (1 - torch.eye(3, dtype=z.dtype))
    one = z - 0.3 * (signs @ z.flatten(2)).view_as(z)
    torch.testing.assert_close(Coupling(0.3).negative_gradient((z,))[0], one, rtol=1e-12, atol=1e-12)
    first, second = ring((2, 2))
    matrix = first.flatten(2) @ second.flatten(2).mT
    signs = torch.sign(matrix) * (1 - torch.eye(3, dtype=z.dtype))
    two = second - 0.3 * (signs @ second.flatten(2)).view_as(second)
    torch.testing.assert_close(Coupling(0.3).negative_gradient((first, second))[0], two, rtol=1e-12, atol=1e-12)


def test_heritage_and_diversity_pair_by_pair() -> None:
    features = ring((4, 2, 4))
    found_h, found_d = heritage(features), diversity(features, 0.2)
    assert found_h.shape == found_d.shape == (3, 2)
    for i, matrix in enumerate(products(features)):
        other = at_size(features[(i + 1) % 3], features[i])
        expected = torch.einsum("bahw,bchw->bac", features[i], other)
        torch.testing.assert_close(matrix, expected, rtol=1e-12, atol=1e-12)
        diagonal = expected.diagonal(dim1=1, dim2=2)
        torch.testing.assert_close(found_h[i], diagonal.sum(1), rtol=1e-12, atol=1e-12)
        root = (expected.square() + 0.04).sqrt()
        off = root.sum((1, 2)) - root.diagonal(dim1=1, dim2=2).sum(1)
        torch.testing.assert_close(found_d[i], off, rtol=1e-12, atol=1e-12)


def test_smoothing_comes_from_above_within_tau_a_product() -> None:
    features = ring((2, 2, 4))
    for tau in (1e-1, 1e-4):
        excess = diversity(features, tau) - diversity(features)
        assert (excess >= 0).all()
        assert (excess <= 6 * tau).all()
    near = Coupling(0.3, 1e-9).negative_gradient(features)
    for found, limit in zip(near, Coupling(0.3).negative_gradient(features), strict=True):
        torch.testing.assert_close(found, limit, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("channels", [1, 2, 5])
def test_curvature_bound_holds_and_is_attained(channels: int) -> None:
    coupling = Coupling(0.3)
    bound = coupling.curvature_bound(channels)

    def norm(features: Features) -> float:
        product = coupling.jacobian_at(features)
        sizes = [z.numel() for z in features]
        columns = []
        for unit in torch.eye(sum(sizes), dtype=torch.float64):
            parts = tuple(p.view_as(z) for p, z in zip(unit.split(sizes), features, strict=True))
            columns.append(torch.cat([p.flatten() for p in product(parts)]))
        return float(torch.linalg.matrix_norm(torch.stack(columns), 2))

    for seed in range(5):
        assert norm(ring((2, 2, 1), channels, 1, seed)) <= bound + 1e-12
    if channels > 1:
        # Channels that point away from each other, like the corners of a simplex: every product is negative.
        corners = torch.eye(channels, dtype=torch.float64) - 1 / channels
        shape = (1, channels, 1, channels)
        assert norm((corners.view(shape),) * 3) == pytest.approx(bound, rel=1e-12)


def test_a_dead_branch_hears_heritage_only() -> None:
    first, second = ring((2, 2))
    dead = torch.zeros_like(first)
    found, _ = Coupling(0.5).negative_gradient((dead, second))
    torch.testing.assert_close(found, second, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_large_numbers_do_not_overflow(dtype: torch.dtype, smoothing: float) -> None:
    """Products beyond the largest number of the dtype still have their signs, and D is finite in float32."""
    top = {torch.float16: 1e3, torch.bfloat16: 1e15, torch.float32: 1e15}[dtype]
    features = tuple((z / z.abs().amax() * top).to(dtype) for z in ring((4, 4)))
    coupling = Coupling(0.1, smoothing)
    exact = Coupling(0.1).negative_gradient(tuple(z.double() for z in features))
    for found, wanted in zip(coupling.negative_gradient(features), exact, strict=True):
        assert found.dtype == dtype
        torch.testing.assert_close(found.double() / top, wanted / top, rtol=0.02, atol=0.02)
    assert torch.isfinite(diversity(features, smoothing)).all()
    assert all(torch.isfinite(z).all() for z in coupling.jacobian_at(features)(features))


def test_augmented_loss_is_the_energy_that_the_module_lowers() -> None:
    features = tuple(z.requires_grad_() for z in ring((4, 2)))
    loss = augmented_loss(features, 0.3)
    torch.testing.assert_close(loss, (0.3 * diversity(features) - heritage(features)).sum(0).mean())
    slopes = torch.autograd.grad(loss, features)
    for slope, fused in zip(slopes, Coupling(0.3).negative_gradient(features), strict=True):
        torch.testing.assert_close(slope, -2 * fused / len(fused))


def test_largest_neighbours() -> None:
    features = ring((4, 2, 2))
    for index, found in enumerate(largest_neighbours(features)):
        around = [at_size(features[(index + k) % 3], features[index]).flatten(2) for k in (1, 2)]
        norms = torch.cat(around, dim=1).norm(dim=2)
        torch.testing.assert_close(found.flatten(1).norm(dim=1), norms.amax(dim=1))
        torch.testing.assert_close(found.flatten(2).abs()[:, 0], found.flatten(2).abs()[:, 1])


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ([(2, 3), (2, 3, 4, 4)], "should be images"),
        ([(2, 3, 4)], "should be images"),
        ([(2, 3, 4, 4), (2, 4, 4, 4)], "the same number of channels"),
        ([(2, 3, 4, 4), (1, 3, 4, 4)], "the same batch"),
        ([(2, 3, 4, 4), (2, 3, 3, 3)], "integer multiple"),
        ([(2, 3, 4, 4), (2, 3, 2, 4)], "integer multiple"),
    ],
)
def test_features_that_do_not_fit(shapes: list[tuple[int, ...]], message: str) -> None:
    features = tuple(torch.ones(shape) for shape in shapes)
    for work in (Coupling(0.1).negative_gradient, heritage, diversity):
        with pytest.raises(ValueError, match=message):
            work(features)


def test_errors_name_the_option() -> None:
    with pytest.raises(ValueError, match=re.escape("diversity should be at least 0 and finite; got -0.1")):
        Coupling(-0.1)
    with pytest.raises(ValueError, match=re.escape("smoothing should be at least 0 and finite; got inf")):
        Coupling(0.1, float("inf"))
    with pytest.raises(TypeError, match="heritage should be True or False; got 1"):
        Coupling(0.1, 0.1, 1)
    with pytest.raises(TypeError, match=r"Coupling\.smoothing should be a number of at least 0; got '1'"):
        Coupling(0.1, "1")
    with pytest.raises(ValueError, match=re.escape("smoothing should be at least 0 and finite; got -1")):
        diversity((torch.ones(1, 2),), smoothing=-1)
    with pytest.raises(TypeError, match="features should be a tuple with one tensor per branch; got Tensor"):
        heritage(torch.ones(2, 3))
    with pytest.raises(TypeError, match="features should be a tuple"):
        heritage(())
