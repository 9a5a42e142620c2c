"""Chains of convolutions: adjoints, the composed kernel, and norms that hold."""

from __future__ import annotations

import math

import pytest
import torch

from opteq.operators.chain import ConvChain, largest_response, response_powers


@pytest.mark.parametrize("channels", [(1, 4, 8, 12), (3, 5), (2, 3, 4)])
def test_adjoint_is_exact_and_the_composed_kernel_acts_the_same(channels):
    torch.manual_seed(0)
    A = ConvChain(channels, kernel_size=3).double()
    v, u = torch.randn(2, channels[0], 9, 8).double(), torch.randn(2, channels[-1], 9, 8).double()
    with torch.no_grad():
        assert torch.allclose((A(v) * u).sum(), (v * A.adjoint(u)).sum(), rtol=1e-12)
        kernel = A.prepare().composed_kernel()
        one = torch.nn.functional.conv2d(v, kernel, padding=tuple(s // 2 for s in kernel.shape[2:]))
    assert torch.allclose(one, A(v), atol=1e-12)


@pytest.mark.parametrize("channels", [(1, 4, 8, 12), (2, 3, 4)])
def test_norm_is_above_the_dense_one_and_close_to_it(channels):
    torch.manual_seed(1)
    A = ConvChain(channels, kernel_size=3, bound=0.7).double()
    for weight in A.weights:
        weight.data.mul_(3)
    size = 12
    basis = torch.eye(channels[0] * size * size).double().reshape(-1, channels[0], size, size)
    with torch.no_grad():
        dense = torch.linalg.matrix_norm(A(basis).flatten(1), 2)
        assert dense <= A.norm() <= 0.7 * (1 + 1e-4)
    assert dense > 0.55


def exact_norm(A: ConvChain) -> float:
    """The largest response over a fine grid of frequencies, of the weights as they act, in float64."""
    kernel, *rest = (weight.detach().double() for weight in A.prepare().weights)
    spectrum = torch.fft.fft2(kernel, s=(256, 256)).permute(2, 3, 0, 1)
    for weight in rest:
        spectrum = torch.fft.fft2(weight.double(), s=(256, 256)).permute(2, 3, 0, 1) @ spectrum
    return float(torch.linalg.matrix_norm(spectrum, 2).max())


@pytest.mark.parametrize("channels", [(1, 3, 4), (2, 3, 4)])
@pytest.mark.parametrize("size", [1e-30, 1e-10, 1e20, 1e30])
@pytest.mark.parametrize("bound", [None, 0.9])
def test_norms_of_weights_of_any_size(channels, size, bound):
    A = ConvChain(channels, kernel_size=3, bound=bound)
    for weight in A.weights:
        weight.data.mul_(size if bound else size**0.5)
    exact = 0.9 if bound and size > 1 else exact_norm(A)
    assert exact <= A.norm() * (1 + 1e-6) <= 1.06 * exact


@pytest.mark.parametrize("channels", [(1, 3, 4), (2, 3, 4)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_norms_in_low_precision(channels, dtype):
    for bound in (None, 0.9):
        A = ConvChain(channels, kernel_size=3, bound=bound).to(dtype)
        A.weights[1].data.mul_(3)
        exact = exact_norm(A)
        assert exact <= A.norm() <= 1.06 * exact
        assert bound is None or exact <= bound
        with torch.autocast("cpu"):
            assert exact == exact_norm(A) <= A.norm()
            powers = torch.ones(3, 10)
            assert largest_response(powers, torch.full((1, 3), 1.003), torch.ones(3, 1, 1, 1)) >= 3.009


def test_weighted_suprema_hold_between_frequencies_of_the_grid():
    torch.manual_seed(2)
    kernel = torch.randn(5, 1, 13, 13).double()
    weights = torch.rand(3, 5).double()
    bound = largest_response(response_powers(kernel), weights, kernel)
    fine = (weights @ response_powers(kernel, 1024)).amax(dim=1)
    assert (fine <= bound).all()
    assert (bound <= 1.06 * fine).all()
    assert (bound >= largest_response(response_powers(kernel, 512), weights, kernel, 512) * 0.9).all()


def test_constant_images_give_zero_inside():
    A = ConvChain((1, 2, 3), kernel_size=3)
    out = A(torch.ones(1, 1, 12, 12))[..., 2:-2, 2:-2]
    assert out.abs().max() < 1e-5


def test_bounds_carry_gradients_and_bad_options_are_named():
    A = ConvChain((1, 2, 3), kernel_size=3, bound=0.5)
    A.weights[0].data.mul_(9)
    A(torch.randn(1, 1, 6, 6)).square().sum().backward()
    assert all(math.isfinite(float(w.grad.sum())) for w in A.weights)
    with pytest.raises(ValueError, match="odd"):
        ConvChain((1, 2), kernel_size=4)
    with pytest.raises(ValueError, match="channels"):
        ConvChain((1,))
