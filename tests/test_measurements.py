"""Blur, mask and downsampling: exact adjoints, norms that hold, and objects of other libraries."""

from __future__ import annotations

import pytest
import torch

from opteq import operators as op
from opteq.models.restoration.measurement import check_measurement, prepare_measurement

CASES = {
    "blur": lambda: op.Blur(1.2),
    "blur-skew": lambda: op.Blur(torch.randn(3, 5, generator=torch.Generator().manual_seed(0))),
    "blur-circular": lambda: op.Blur(torch.randn(3, 5, generator=torch.Generator().manual_seed(0)), "circular"),
    "blur-valid": lambda: op.Blur(torch.randn(3, 5, generator=torch.Generator().manual_seed(0)), "valid"),
    "mask": lambda: op.Mask((torch.rand(12, 8, generator=torch.Generator().manual_seed(0)) > 0.5).float()),
    "mean-2": lambda: op.Downsample(2),
    "mean-4": lambda: op.Downsample(4),
    "odd-2": lambda: op.Downsample(2, op.gaussian_kernel(1.0, 7)),
    "even-2": lambda: op.Downsample(2, torch.rand(4, 6, generator=torch.Generator().manual_seed(0))),
}


@pytest.mark.parametrize("name", CASES)
def test_adjoints_are_exact_and_norms_hold(name):
    A = CASES[name]().double()
    generator = torch.Generator().manual_seed(1)
    v = torch.randn(2, 2, 12, 8, generator=generator, dtype=torch.float64)
    image = A(v)
    u = torch.randn(image.shape, generator=generator, dtype=torch.float64)
    assert A.adjoint(u).shape == v.shape
    assert torch.allclose((image * u).sum(), (v * A.adjoint(u)).sum(), rtol=1e-12)
    basis = torch.eye(96, dtype=torch.float64).reshape(96, 1, 12, 8)
    norm = torch.linalg.matrix_norm(A(basis).flatten(1), 2)
    assert norm <= A.norm() * (1 + 1e-9)
    assert A.norm() <= 1.3 * norm


def test_downsampling_by_means_is_average_pooling():
    v = torch.randn(1, 3, 8, 12)
    assert torch.allclose(op.Downsample(4)(v), torch.nn.functional.avg_pool2d(v, 4), atol=1e-6)


class Physics:
    """An object as deepinv has them."""

    def A(self, y):
        return 3 * y[..., ::2]

    def A_adjoint(self, u):
        out = u.new_zeros(*u.shape[:-1], 2 * u.shape[-1])
        out[..., ::2] = 3 * u
        return out


def test_objects_of_other_libraries_measure():
    x = torch.randn(2, 1, 4, 4)
    measured = prepare_measurement(check_measurement(Physics()), x)
    assert measured(measured.adjoint(x)).shape == x.shape
    assert 3 <= float(measured.most) <= 3.2
    with pytest.raises(TypeError, match="A_adjoint"):
        check_measurement("blur")


def test_wrong_options_are_named():
    with pytest.raises(ValueError, match="odd sizes"):
        op.Blur(torch.ones(2, 2))
    with pytest.raises(ValueError, match="boundary"):
        op.Blur(1.0, "reflect")
    with pytest.raises(ValueError, match="multiples of 2"):
        op.Downsample(2)(torch.zeros(1, 1, 3, 4))
    with pytest.raises(ValueError, match="kernel"):
        op.Downsample(4, torch.ones(2, 2))
